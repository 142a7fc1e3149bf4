"""The path of an attack: a straight line from an input to another answer, and somewhat beyond."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.attacks import L2, Attack, Pgd
from otad.attacks.adaptive import Straight
from otad.model.otad import OTAD
from otad.nets import only_normalizes

STEPS = 64  # of a path, all answered as one batch
SHARE = 0.25  # of the spread of the inputs: the radius of the first attack
LARGER = 3.0  # times that radius: the second attack
ATTACK_STEPS, AIMS = 20, 6
COARSE = 33  # places of a line that are asked for the first other answer
BEYOND, FURTHER = 1.6, 3.0  # times the way to another answer; times a way on which none was found


def line_to(model: OTAD, x: Tensor, end: Tensor, times: Tensor) -> Tensor:
    """Return points (n, *input_shape) of the line from x to its end, cut at the bounds."""
    line = x + times.view(-1, *[1] * x.dim()) * (end - x)
    bounds = model.backbone.bounds
    return line if bounds is None else line.clamp(*bounds)


def attacked(model: OTAD, x: Tensor, unit: Tensor, mutable: Tensor | None) -> tuple[Tensor, float]:
    """Return where a short attack on the answer to x leads, and how far its path is worth showing.

    The first attack climbs from x and ends at the first other answer it meets. Where it finds none,
    a second one tries straight lines to training points, if their inputs are known, and else climbs
    from a random point; both in a larger ball. In regression only the second kind runs.

    `unit` and `mutable` (*input_shape) are the units of a change in l2, and the features that can
    change, None for all. The end (*input_shape) is x itself where the model abstains. The length of
    the path is in units of the way there."""
    batch, backbone = x[None], model.backbone
    with torch.no_grad():
        outputs = model(batch)
    if not bool(outputs.isfinite().all()):
        return x, 0.0
    spread = float((backbone.std / unit).square().mean().sqrt())
    if backbone.bounds is not None:
        low, high = backbone.bounds
        spread = min(spread, (high - low) / 4 / float(unit.min()))
    ball = L2(SHARE * spread * math.sqrt(x.numel()), backbone.bounds, unit, mutable)
    lines = Straight(points=AIMS, shares=(1.0,))
    second: Attack = lines if only_normalizes(backbone) else Pgd(steps=ATTACK_STEPS)
    generator = torch.Generator().manual_seed(0)
    if backbone.task == "regression":
        return second(model, batch, outputs, ball, generator=generator).inputs[0], 1.0
    y = outputs.argmax(1)
    first = Pgd(steps=ATTACK_STEPS, random_start=False)
    result = first(model, batch, y, ball, generator=generator)
    if not bool(result.broken):
        larger = ball.with_eps(LARGER * ball.eps)
        result = second(model, batch, y, larger, generator=generator)
    # On the line, another answer may be much nearer than where the attack ended, or further away.
    end = result.inputs[0]
    line = line_to(model, x, end, torch.linspace(0, FURTHER, COARSE).to(x))
    with torch.no_grad():
        other = model(line).argmax(1) != y
    found = other.nonzero().flatten().tolist()
    return (line[found[0]], BEYOND) if found else (end, FURTHER)
