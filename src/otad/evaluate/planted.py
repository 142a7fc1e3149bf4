"""Planted weaknesses: copies of the model with adversarial examples that attacks must find.

Where answers rest on neighbors, K copies of a training pair at the example and K of another class
nearby decide the answers there. In a global map with levels u~_i and modulus M, whose gradient is
M-Lipschitz whatever the levels are, the image of x_p is z~_p if that pair's level is at least

    u~_j + <z~_j, x_p - x_j> + |z~_p - z~_j|^2 / (2M)       for all other j,

so a pair is planted by raising its own level to that. Two pairs at distance D = x_p - x_q can both
be interpolated if <z~_p - z~_q, D> >= |z~_p - z~_q|^2 / M: the features have to part along D, and
the less they do, the larger is the M that is needed. Other levels stay; they fit a larger M too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.attacks.adaptive import Straight
from otad.baselines import Knn
from otad.cip.whole_bank.potential import BankPotential
from otad.evaluate.flags import FlagContext, NotRunError, check
from otad.evaluate.suite import defended_of
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD

PLANTS = 8  # examples that get one
BANK = 2000  # points of the original bank that remain
DISTANCE = 0.5  # of eps: where an adversarial example is put
CANDIDATES = 16  # features of other classes to choose from
ROOM = 1.5  # times the least M
ROUNDS = 4  # of raising the two levels over each other
NO_PLANT = "no weakness could be planted at this eps"
NAME = "planted adversarial example is found"


class Planted(NamedTuple):
    """A model, examples (n,*), their right answers (n,), inputs (n,*) near them made wrong, and the
    training inputs of its bank, where those of the original are known."""

    model: nn.Module
    examples: Tensor
    answers: Tensor
    aims: Tensor
    train_x: Tensor | None


@check(
    NAME,
    "In a copy of the model, pairs are added to the bank so that an input at half the eps is "
    "answered wrongly by construction. Attacks that miss it would miss a real one too.",
    "Add attacks that move towards bank points of other classes (straight, soft_knn, region, "
    "keys). The worst case of this evaluation is too optimistic.",
)
def planted_example(context: FlagContext) -> tuple[bool, str]:
    """The attacks of the evaluation on models with plants."""
    defended = defended_of(context.model)
    if defended is None:
        raise NotRunError("the model has no bank to plant one in")
    if context.is_regression or not context.attacks or context.threat.eps == 0:
        raise NotRunError("it takes a classifier, an attack and an eps above 0")
    x, y = context.sample(PLANTS)
    adaptive_first = sorted(context.attacks, key=lambda one: one.family != "adaptive")
    total = missed = 0
    for model, examples, answers, aims, train_x in plant(context, defended, x, y):
        with torch.no_grad():
            right, wrong = (model(one).argmax(1) == answers for one in (examples, aims))
        hidden = right & ~wrong
        total += int(hidden.sum())
        x, y = examples[hidden], answers[hidden]
        for attack in adaptive_first:
            if not len(x):
                break
            if isinstance(attack, Straight) and attack.train_x is not None:
                attack = replace(attack, train_x=train_x)
            result = attack(model, x, y, context.threat, generator=context.generator(NAME))
            x, y = x[~result.broken], y[~result.broken]
        missed += len(x)
    if not total:
        raise NotRunError(NO_PLANT)
    return not missed, f"{missed} of {total} were missed" if missed else f"all {total} were found"


def plant(context: FlagContext, defended: OTAD, x: Tensor, y: Tensor) -> Iterator[Planted]:
    """Models with a part of the bank and new pairs for some examples of x (B,*) with answers y."""
    generator = context.generator("plants")  # other draws than those of the attacks
    half = context.threat.with_eps(DISTANCE * context.threat.eps)
    aims = half.surface(x, generator)
    chosen = torch.randperm(len(defended.bank_inputs), generator=generator)[:BANK].sort().values
    chosen = chosen.to(defended.bank_inputs.device)
    if context.model is defended and not defended.answerer.rests_on_neighbors:
        yield from plant_in_map(defended, chosen, x, y, half, context.train_x)
    else:
        yield plant_neighbors(context, defended, chosen, x, y, aims)


@torch.no_grad()
def plant_neighbors(
    context: FlagContext, defended: OTAD, chosen: Tensor, x: Tensor, y: Tensor, aims: Tensor
) -> Planted:
    """For each example as many new points as there are neighbors at the example itself, with the
    feature of a bank point that is answered y, and as many at its aim, with a feature that is
    answered otherwise."""
    backbone, labels = defended.backbone, defended.bank_labels[chosen]
    features = defended.bank_features[chosen]
    answers = backbone.head(features.to(backbone.head.weight)).argmax(1).to(labels.device)
    agreed = answers == labels  # points whose feature and label say the same
    copies = max(defended.n_searched, getattr(context.model, "n_neighbors", 0))
    places: list[Tensor] = []
    sources: list[int] = []
    for example, aim, label in zip(x, aims, y.tolist(), strict=True):
        for place, wanted in ((example, answers == label), (aim, answers != label)):
            for source in (wanted & agreed).nonzero()[:1, 0].tolist():
                places.append(place)
                sources += [source] * copies
    if not places:
        raise NotRunError(NO_PLANT)
    new = torch.stack(places)
    embedded, keys = backbone.embed(new).repeat_interleave(copies, 0), defended.bank_keys
    bank = planted_bank(
        _joined(defended.bank_inputs[chosen], embedded),
        torch.cat([features, features[sources]]),
        torch.cat([labels, labels[sources]]),
    )
    if keys is not None:
        keys = _joined(keys[chosen], defended.query_keys(new).repeat_interleave(copies, 0))
    planted = defended.replace(bank=bank, keys=keys, scope="local", resident=True)
    model = context.model
    seen = type(model)(planted, model.n_neighbors) if isinstance(model, Knn) else planted
    inputs = _inputs(context.train_x, chosen, new.repeat_interleave(copies, 0))
    return Planted(ready(seen, x), x, y, aims, inputs)


def plant_in_map(
    defended: OTAD, chosen: Tensor, x: Tensor, y: Tensor, half: LpBall, train_x: Tensor | None
) -> Iterator[Planted]:
    """For each example x (B,*) a model of the `chosen` bank points and two pairs: one at the
    example that says y (B,), and one that says otherwise at an input within `half`, where the ball
    lets the features part most. Examples one by one: plants would contradict each other."""
    used = chosen[~defended.whole_bank.potential.levels[chosen].isnan()]
    features = defended.bank_features[used]
    with torch.no_grad():
        answers = defended.backbone.head(features.to(x)).argmax(1).to(features.device)
        own = defended.solve(defended.backbone.embed(x)).solution.image
    for row, label in enumerate(y.tolist()):
        one = slice(row, row + 1)
        wrong = features[(answers != label).nonzero()[:CANDIDATES, 0]].to(own)
        if len(wrong):
            model, aim = _plant_one(defended, used, x[one], own[one], wrong, half)
            inputs = _inputs(train_x, used, torch.cat([x[one], aim]))
            yield Planted(model, x[one], y[one], aim, inputs)


@torch.no_grad()
def _plant_one(
    defended: OTAD, used: Tensor, x: Tensor, own: Tensor, wrong: Tensor, half: LpBall
) -> tuple[nn.Module, Tensor]:
    """With the feature `own` (1,d) at x (1,*), and that of `wrong` (n,d) with the least M."""
    backbone, bend = defended.backbone, defended.strong_convexity
    turns = wrong - own
    centers = x.expand(len(wrong), *x.shape[1:])
    with torch.enable_grad():  # to where the embedding is furthest along the turns (n,d)
        at = centers.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad((backbone.embed(at) * turns).sum(), at)
    moved = half.project(centers + half.eps * half.steepest(slope), centers)
    steps = backbone.embed(moved) - backbone.embed(x)
    parts = (turns - bend * steps).double()
    products = (parts * steps).sum(1)
    need = torch.where(products > 0, parts.square().sum(1) / products, torch.inf)
    best = int(need.argmin())
    aim = moved[best : best + 1]
    modulus = defended.smoothness - bend
    if bool(need[best].isfinite()):  # elsewhere the plant does not hold, as its model will show
        modulus = max(modulus, ROOM * float(need[best]))
    labels = defended.bank_labels[used]
    planted = planted_bank(
        _joined(defended.bank_inputs[used], backbone.embed(torch.cat([x, aim]))),
        _joined(defended.bank_features[used], torch.cat([own, wrong[best : best + 1]])),
        torch.cat([labels, labels[:1].expand(2)]),  # the map does not read them
    )
    levels = _raised(planted, defended.whole_bank.potential.levels[used], bend, modulus)
    potential = BankPotential(levels, bend + modulus, bend, used.new_empty(0), 0, 0.0)
    count = min(defended.n_neighbors, len(planted))
    how = {"potential": potential, "n_neighbors": count, "search": "torch", "resident": True}
    return ready(defended.replace(bank=planted, **how), x), aim


def _raised(bank: FeatureBank, known: Tensor, bend: float, modulus: float) -> Tensor:
    """The levels (N,) of a bank whose first points have `known` ones: those of the new points are
    raised over these and over each other."""
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


def planted_bank(inputs: Tensor, features: Tensor, labels: Tensor) -> FeatureBank:
    """That of a float64 model in float32, the finest that a bank is stored in."""
    if inputs.dtype == torch.float64:
        inputs, features = inputs.float(), features.float()
    return FeatureBank(inputs, features, labels, "planted", verify=False)


def ready(model: nn.Module, x: Tensor) -> nn.Module:
    return (model.double() if x.dtype == torch.float64 else model).eval()


def _joined(points: Tensor, new: Tensor) -> Tensor:
    return torch.cat([points, new.to(points)])


def _inputs(train_x: Tensor | None, chosen: Tensor, new: Tensor) -> Tensor | None:
    """The training inputs of a planted bank."""
    return None if train_x is None else _joined(train_x[chosen.to(train_x.device)].to(new), new)
