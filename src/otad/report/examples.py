"""Some adversarial examples, seen: what changed, and the training points before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from otad.evaluate.records import Evaluation
from otad.explain import explain
from otad.model.otad import OTAD
from otad.report.adversarial import Adversarial, ball_of, finder_of, spread
from otad.report.blocks import Block, Case, Comparison, Comparisons, Section
from otad.report.cases import make_case
from otad.report.feature_changes import moved_blocks
from otad.report.model_answers import answers
from otad.report.pictures import change_uri, pixels_uri

SHOWN = 4


def examples_section(
    evaluation: Evaluation,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    adversarial: Adversarial,
    *,
    classes: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    train_x: Tensor | None = None,
) -> Section:
    """Images as cards of before, after and the change between; others by what moved most."""
    rows = adversarial.rows.cpu()
    clean, moved = x.cpu()[rows], adversarial.inputs.cpu()
    distances = ball_of(evaluation.threat, x.shape[1:]).distance(moved, clean)
    shown = spread(distances, evaluation.headline_eps, SHOWN) if len(rows) else []
    titles = [
        f"Example {int(rows[place])}: {finder_of(evaluation, int(rows[place])) or 'attacked'}, "
        f"distance {float(distances[place]):.3g}"
        for place in shown
    ]
    clean, moved, truths = clean[shown], moved[shown], y.cpu()[rows[shown]]
    blocks: list[Block] = []
    is_image = x.dim() == 4 and x.shape[1] in (1, 3)
    has_cards = is_image and evaluation.task == "classification"
    if has_cards and shown:
        names = [str(label if classes is None else classes[label]) for label in truths.tolist()]
        bounds = _bounds(evaluation, clean)
        cases = _cases(model, torch.cat((clean, moved)), names * 2, bounds, classes, train_x)
        for place, title in enumerate(titles):
            uri, factor = change_uri(clean[place], moved[place], bounds)
            note = f"what was changed, {factor:g} times as strong: red brighter, blue darker"
            if x.shape[1] == 3:
                note = f"what was changed, {factor:g} times as strong, around gray"
            before, after = cases[place], cases[place + len(shown)]
            blocks.append(Comparisons([Comparison(before, after, uri, note, title)]))
    elif shown:
        blocks += moved_blocks(
            evaluation, model, clean, moved, truths, titles, classes, feature_names
        )
    lead = "No adversarial example was found."
    if shown:
        lead = (
            f"{len(shown)} of {len(rows):,} adversarial examples, from the nearest to the furthest."
        )
        if isinstance(model, OTAD):
            lead += (
                " The answer is made of training points, and an attack that works exchanges them."
            )
            if has_cards:
                lead += (
                    " Below each input those of most weight: green of the right class, orange of "
                    "others."
                )
    return Section("examples", "Adversarial examples", lead, blocks)


def _cases(
    model: nn.Module,
    inputs: Tensor,
    truths: Sequence[str],
    bounds: tuple[float, float],
    classes: Sequence[str] | None,
    train_x: Tensor | None,
) -> list[Case]:
    if isinstance(model, OTAD):
        found = explain(model, inputs.to(model.backbone.mean), classes=classes, train_x=train_x)
        return [_by_truth(make_case(it, truth)) for it, truth in zip(found, truths, strict=True)]
    shares = answers(model, inputs).softmax(1)
    cases = []
    for image, share, truth in zip(inputs, shares, truths, strict=True):
        label = int(share.argmax())
        answer = str(label if classes is None else classes[label])
        certainty = f"{float(share[label]):.1%}"
        if bool(share.isnan().any()):
            answer, certainty = "no answer", ""
        cases.append(Case(pixels_uri(image, bounds), answer, truth, certainty, "", ()))
    return cases


def _by_truth(case: Case) -> Case:
    """With votes that agree where they are for the right class."""
    votes = [replace(vote, agrees=vote.label == case.truth) for vote in case.votes]
    return replace(case, votes=votes)


def _bounds(evaluation: Evaluation, clean: Tensor) -> tuple[float, float]:
    low, high = evaluation.threat.get("bounds") or torch.aminmax(clean)
    return float(low), float(high)
