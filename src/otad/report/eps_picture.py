"""What a change of size eps looks like on these data: examples moved by an attack and at random."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.report import plots
from otad.report.examples import ReportContext, outputs_of, spread
from otad.report.page import Block, Picture, Pictures
from otad.report.plots import pixels_uri, plot_uri

N_SHOWN, N_BARS = 3, 6


def eps_blocks(context: ReportContext) -> list[Block]:
    """Show a few examples, and the same examples changed by the headline eps; nothing if they are
    not known."""
    evaluation, x = context.evaluation, context.x
    if x is None or evaluation.headline_eps == 0:
        return []
    ball = context.ball(x.shape[1:])
    rows, aims = torch.arange(min(N_SHOWN, len(x))), None
    if context.adversarial is not None and len(context.adversarial.rows):
        found, clean = context.adversarial, x.cpu()[context.adversarial.rows.cpu()]
        chosen = spread(ball.distance(found.inputs.cpu(), clean), ball.eps, N_SHOWN)
        rows, aims = found.rows.cpu()[chosen], found.inputs.cpu()[chosen]
    before = x.cpu()[rows]
    is_image = x.dim() == 4 and x.shape[1] in (1, 3)
    moved: list[tuple[str, Tensor]] = []
    if aims is not None:  # the way an attack went, as far as eps
        length = ball.distance(aims, before).clamp_min(1e-30).view(-1, *[1] * (before.dim() - 1))
        away = before + (aims - before) * (ball.eps / length).to(before)
        moved.append(("attacked", ball.project(away, before)))
    generator = torch.Generator().manual_seed(evaluation.seed)
    for _ in range(2 if is_image else 1):
        moved.append(("random", ball.surface(before, generator)))
    note = f"What {ball.norm} {ball.eps:g} looks like: {len(before)} examples, each changed that "
    note += "much by an attack and at random" if aims is not None else "much at random"
    return [
        _images(context, before, moved, note) if is_image else _bars(context, before, moved, note)
    ]


def _images(
    context: ReportContext, before: Tensor, moved: list[tuple[str, Tensor]], note: str
) -> Pictures:
    bounds = context.evaluation.threat.get("bounds") or torch.aminmax(before)
    low, high = map(float, bounds)
    columns = [("example", before), *moved]
    cells = []
    for _, inputs in columns:
        captions = [""] * len(inputs)
        if context.model is not None:
            answers = outputs_of(context.model, inputs)
            captions = [f"answer: {context.name_of(one)}" for one in answers]
        uris = [pixels_uri(one, (low, high)) for one in inputs]
        cells.append(list(zip(uris, captions, strict=True)))
    rows = [list(row) for row in zip(*cells, strict=True)]
    return Pictures([name for name, _ in columns], rows, f"{note}, as far as pixels allow it.")


def _bars(
    context: ReportContext, before: Tensor, moved: list[tuple[str, Tensor]], note: str
) -> Picture:
    ball = context.ball(before.shape[1:])
    unit = 1 if ball.scale is None else ball.scale
    names = context.feature_names or [f"feature {k}" for k in range(before[0].numel())]
    changes = {name: ((inputs - before) / unit).flatten(1) for name, inputs in moved}
    named = ball.unit_name or "the unit of each feature"
    measured = "" if ball.scale is None else f", in {named}"
    figure = plots.change_bars(changes, [str(name) for name in names], N_BARS)
    alt = "bars: the change of the features that move most, by an attack and at random"
    return Picture(
        plot_uri(figure), alt, f"{note}{measured}. Shown are the features that move most."
    )
