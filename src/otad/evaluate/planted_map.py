"""Weaknesses planted in the one map of a whole bank.

The gradient of the potential with levels u~_i and modulus M is M-Lipschitz whatever the levels are,
and at x_p it is z~_p if that pair's level is at least

    u~_j + <z~_j, x_p - x_j> + |z~_p - z~_j|^2 / (2M)       for all other j.

So a pair is planted by raising its own level so far. Two pairs at distance D = x_p - x_q can both
be passed through if <z~_p - z~_q, D> >= |z~_p - z~_q|^2 / M: along D the features have to part, and
the less they do, the larger is the M it takes. Other levels stay; they fit a larger M as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.cip.whole_bank.potential import BankPotential
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import Backbone

CANDIDATES = 16  # features of other classes to choose from
ROOM = 1.5  # times the least M
ROUNDS = 4  # of raising the two levels over each other


class Planted(NamedTuple):
    """A model, examples (n,*), their right answers (n,), and inputs (n,*) near them made wrong;
    `train_x`: the training inputs of its bank, where those of the original are known."""

    model: nn.Module
    examples: Tensor
    answers: Tensor
    aims: Tensor
    train_x: Tensor | None


def plant_in_map(
    defended: OTAD, chosen: Tensor, x: Tensor, y: Tensor, half: LpBall, train_x: Tensor | None
) -> Iterator[Planted]:
    """For each example x (B,*) a model of the `chosen` bank points and two pairs: one at the
    example that says y (B,), and one that says otherwise at an input within `half`, where the ball
    lets the features part most. Examples one by one: plants would contradict each other."""
    known = defended.whole_bank.potential.levels
    kept = chosen[~known[chosen].isnan()]
    features = defended.bank_features[kept]
    with torch.no_grad():
        answers = defended.backbone.head(features.to(x)).argmax(1).to(features.device)
        own = defended.solve(defended.backbone.embed(x)).solution.image
    for row, label in enumerate(y.tolist()):
        one = slice(row, row + 1)
        wrong = features[(answers != label).nonzero()[:CANDIDATES, 0]].to(own)
        if len(wrong):
            model, aim = _plant_one(defended, kept, x[one], own[one], wrong, half)
            inputs = None
            if train_x is not None:
                inputs = torch.cat([train_x[kept.to(train_x.device)].to(x), x[one], aim])
            yield Planted(model, x[one], y[one], aim, inputs)


@torch.no_grad()
def _plant_one(
    defended: OTAD, kept: Tensor, x: Tensor, own: Tensor, wrong: Tensor, half: LpBall
) -> tuple[nn.Module, Tensor]:
    """With the feature `own` (1,d) at x (1,*), and of `wrong` (n,d) the one it takes least for."""
    backbone, bend = defended.backbone, defended.strong_convexity
    turns = wrong - own
    moved = _parted(backbone, x.expand(len(wrong), *x.shape[1:]), turns, half)
    steps = backbone.embed(moved) - backbone.embed(x)
    parts = (turns - bend * steps).double()
    products = (parts * steps).sum(1)
    need = torch.where(products > 0, parts.square().sum(1) / products, torch.inf)
    best = int(need.argmin())
    aim = moved[best : best + 1]
    modulus = defended.smoothness - bend
    if bool(need[best].isfinite()):  # elsewhere the plant does not hold, as its model will show
        modulus = max(modulus, ROOM * float(need[best]))
    labels = defended.bank_labels[kept]
    inputs, features = defended.bank_inputs[kept], defended.bank_features[kept]
    planted = planted_bank(
        torch.cat([inputs, backbone.embed(x).to(inputs), backbone.embed(aim).to(inputs)]),
        torch.cat([features, own.to(features), wrong[best : best + 1].to(features)]),
        torch.cat([labels, labels[:1].expand(2)]),  # the map does not look at them
    )
    levels = _raised(planted, defended.whole_bank.potential.levels[kept], bend, modulus)
    nobody = kept.new_empty(0)
    model = defended.replace(
        bank=planted,
        n_neighbors=min(defended.n_neighbors, len(planted)),
        potential=BankPotential(levels, bend + modulus, bend, nobody, 0, 0.0),
        search="torch",
        resident=True,
    )
    return ready(model, x), aim


def planted_bank(inputs: Tensor, features: Tensor, labels: Tensor) -> FeatureBank:
    """That of a float64 model in float32, the finest a bank is kept in."""
    if inputs.dtype == torch.float64:
        inputs, features = inputs.float(), features.float()
    return FeatureBank(inputs, features, labels, "planted", verify=False)


def ready(model: nn.Module, x: Tensor) -> nn.Module:
    """To be asked for inputs like x."""
    return (model.double() if x.dtype == torch.float64 else model).eval()


def _parted(backbone: Backbone, x: Tensor, turns: Tensor, half: LpBall) -> Tensor:
    """The inputs (n,*) of the ball around x (n,*) that lie furthest along turns (n,d), embedded."""
    moved = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = (backbone.embed(moved) * turns).sum()
    (slope,) = torch.autograd.grad(value, moved)
    return half.project(x + half.eps * half.steepest(slope), x)


def _raised(bank: FeatureBank, known: Tensor, bend: float, modulus: float) -> Tensor:
    """The levels (N,) of a bank whose first points have `known` ones: the others' are raised over
    those and over each other."""
    points = bank.inputs.double()
    images = bank.features.double() - bend * points
    tilt = bend / 2 * points.square().sum(1)
    new = slice(len(known), len(bank))
    steps = points[new] @ images.T - (points * images).sum(1)
    bends = (images[new, None] - images).square().sum(2) / (2 * modulus)
    levels = torch.full_like(tilt, -torch.inf)
    levels[: len(known)] = known - tilt[: len(known)]
    for _ in range(ROUNDS):
        levels[new] = (levels + steps + bends).amax(1)
    return levels + tilt
