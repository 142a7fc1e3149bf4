"""Checks of the attacks: they find planted weaknesses, and stronger attacks are never weaker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from otad.attacks import LpBall
from otad.attacks.adaptive import Straight
from otad.attacks.target import value_and_gradient
from otad.baselines import Knn
from otad.cip.whole_bank.potential import BankPotential
from otad.evaluate.flags import Check, FlagContext, NotRunError, check
from otad.evaluate.suite import defended_of, make_attack
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD

PLANTS = 8  # examples that get one
REMAINING = 2000  # points of the original bank that remain
DISTANCE = 0.5  # of eps: where an adversarial example is put
CANDIDATES = 16  # features of other classes to choose from
M_FACTOR = 1.5  # times the least M
ROUNDS = 4  # of raising the two levels over each other
NO_PLANT = "no weakness could be planted at this eps"
PLANTED = "planted adversarial example is found"
ALLOWED_SHARE = 0.01  # of the examples may be broken by black-box attacks alone
ALLOWED_ROWS = 2  # two runs differ by a few rows by chance
ALLOWED_ERROR = 0.95  # of the mean error, in regression
STEPS = 20  # of the attacks whose strength is varied
FAR = 10.0  # times eps: large, where inputs have no bounds
KNOWING, BLIND = ("white-box", "adaptive"), ("black-box", "random")
LARGE_EPS = "a large eps drives accuracy to chance"
MASKED = (
    "Find out what hides the gradient or the neighbors from the white-box attacks, and add an "
    "attack that avoids it. Until then the worst case is too optimistic."
)


class Planted(NamedTuple):
    """A model, examples (n,*) with answers (n,), inputs (n,*) near them that it answers wrongly,
    and the training inputs of its bank, if they are known."""

    model: nn.Module
    examples: Tensor
    answers: Tensor
    aims: Tensor
    train_x: Tensor | None


@check(
    PLANTED,
    "A copy of the model gets additional bank points, so that an input at distance eps / 2 is "
    "answered wrongly by construction. Attacks that miss it would miss a real weakness too.",
    "Add attacks that move towards bank points of other classes (straight, soft_knn, region, "
    "keys). Until then the worst case is too optimistic.",
)
def planted_example(context: FlagContext) -> tuple[bool, str]:
    defended = defended_of(context.model)
    if defended is None:
        raise NotRunError("the model has no bank to plant one in")
    if context.is_regression or not context.attacks or context.threat.eps == 0:
        raise NotRunError("the check needs a classifier, an attack and an eps above 0")
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
            result = attack(model, x, y, context.threat, generator=context.generator(PLANTED))
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
    chosen = torch.randperm(len(defended.bank_inputs), generator=generator)[:REMAINING]
    chosen = chosen.sort().values.to(defended.bank_inputs.device)
    if context.model is defended and not defended.answerer.rests_on_neighbors:
        yield from plant_in_map(defended, chosen, x, y, half, context.train_x)
    else:
        yield plant_neighbors(context, defended, chosen, x, y, aims)


@torch.no_grad()
def plant_neighbors(
    context: FlagContext, defended: OTAD, chosen: Tensor, x: Tensor, y: Tensor, aims: Tensor
) -> Planted:
    """As many new points as there are neighbors at each example, with the feature of a bank point
    that is answered y, and as many at its aim, with a feature that is answered otherwise."""
    model, labels, features = context.model, defended.bank_labels[chosen], defended.bank_features
    head, keys = defended.backbone.head, defended.bank_keys
    answers = head(features[chosen].to(head.weight)).argmax(1).to(labels.device)
    agreed = answers == labels  # points whose feature and label say the same
    copies = max(defended.n_searched, getattr(model, "n_neighbors", 0))
    places: list[Tensor] = []
    sources: list[int] = []
    for example, aim, label in zip(x, aims, y.tolist(), strict=True):
        for place, wanted in ((example, answers == label), (aim, answers != label)):
            for source in (wanted & agreed).nonzero()[:1, 0].tolist():
                places += [place] * copies
                sources += [source] * copies
    if not places:
        raise NotRunError(NO_PLANT)
    new = torch.stack(places)
    bank = _bank(defended, chosen, new, features[chosen][sources], labels[sources])
    if keys is not None:
        keys = _joined(keys[chosen], defended.query_keys(new))
    planted = defended.replace(bank=bank, keys=keys, scope="local", resident=True)
    seen = type(model)(planted, model.n_neighbors) if isinstance(model, Knn) else planted
    return Planted(_ready(seen, x), x, y, aims, _inputs(context.train_x, chosen, new))


def plant_in_map(
    defended: OTAD, chosen: Tensor, x: Tensor, y: Tensor, half: LpBall, train_x: Tensor | None
) -> Iterator[Planted]:
    """A model for each example x (B,*), as plants would contradict each other: with a pair at the
    example that says y (B,), and one that says otherwise at an input within `half`.

    In a map with levels u~_i and modulus M, whose gradient is M-Lipschitz whatever the levels are,
    the image of x_p is z~_p if that pair's level is at least

        u~_j + <z~_j, x_p - x_j> + |z~_p - z~_j|^2 / (2M)       for all other j,

    so a pair is planted by raising its own level to that. Two pairs with D = x_p - x_q can both be
    interpolated if <z~_p - z~_q, D> >= |z~_p - z~_q|^2 / M: the features have to part along D, and
    the less they do, the larger is the M that is needed. Other levels stay; they fit it too."""
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
    """With the feature `own` (1,d) at x (1,*), and that of `wrong` (n,d) with the least M at the
    input of the ball where the embedding is furthest along the change of feature."""
    embed, bend = defended.backbone.embed, defended.strong_convexity
    turns, centers = wrong - own, x.expand(len(wrong), *x.shape[1:])
    _, slope = value_and_gradient(lambda at: (embed(at) * turns).sum(1), centers)
    moved = half.project(centers + half.eps * half.steepest(slope), centers)
    steps = embed(moved) - embed(x)
    parts = (turns - bend * steps).double()
    products = (parts * steps).sum(1)
    need = torch.where(products > 0, parts.square().sum(1) / products, torch.inf)
    best = int(need.argmin())
    aim, modulus = moved[best : best + 1], defended.smoothness - bend
    if bool(need[best].isfinite()):  # elsewhere the plant does not hold, as its model will show
        modulus = max(modulus, M_FACTOR * float(need[best]))
    labels = defended.bank_labels[used[:1]].expand(2)  # the map does not read them
    pair = torch.cat([x, aim]), torch.cat([own, wrong[best : best + 1]])
    planted = _bank(defended, used, *pair, labels)
    levels = _raised(planted, defended.whole_bank.potential.levels[used], bend, modulus)
    potential = BankPotential(levels, bend + modulus, bend, used.new_empty(0), 0, 0.0)
    count = min(defended.n_neighbors, len(planted))
    how = {"potential": potential, "n_neighbors": count, "search": "torch", "resident": True}
    return _ready(defended.replace(bank=planted, **how), x), aim


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


def _bank(
    defended: OTAD, chosen: Tensor, new: Tensor, features: Tensor, labels: Tensor
) -> FeatureBank:
    """The `chosen` points, and new inputs (n,*) with features (n,d) and labels (n,)."""
    inputs = _joined(defended.bank_inputs[chosen], defended.backbone.embed(new))
    features = _joined(defended.bank_features[chosen], features)
    labels = torch.cat([defended.bank_labels[chosen], labels])
    if inputs.dtype == torch.float64:  # float32 is the finest that a bank is stored in
        inputs, features = inputs.float(), features.float()
    return FeatureBank(inputs, features, labels, "planted", verify=False)


def _ready(model: nn.Module, x: Tensor) -> nn.Module:
    return (model.double() if x.dtype == torch.float64 else model).eval()


def _joined(points: Tensor, new: Tensor) -> Tensor:
    return torch.cat([points, new.to(points)])


def _inputs(train_x: Tensor | None, chosen: Tensor, new: Tensor) -> Tensor | None:
    return None if train_x is None else _joined(train_x[chosen.to(train_x.device)].to(new), new)


@check(
    "white-box at least as strong as black-box",
    "An attacker who knows the model can do everything that others can. Examples that only "
    "black-box attacks break are a sign of masked gradients.",
    MASKED,
)
def white_box_is_strongest(context: FlagContext) -> tuple[bool, str]:
    if context.is_regression:
        raise NotRunError("attacks break no examples of a regression")
    families = {record.family for record in context.records}
    if not families & {*KNOWING} or not families & {*BLIND}:
        raise NotRunError("the check needs attacks of both kinds")
    worst, at, skipped = 0, context.threat.eps, 0
    for eps, group in itertools.groupby(context.records, key=lambda record: record.eps):
        records = list(group)
        knowing = [one for one in records if one.family in KNOWING]
        tried = {row for one in knowing for row in one.attacked}
        seen = {row for one in knowing for row in one.broken}
        unseen = {row for one in records if one.family in BLIND for row in one.broken} - seen
        skipped += len(unseen - tried)
        if len(unseen & tried) > worst:
            worst, at = len(unseen & tried), eps
    found = f"at eps {at:g}, {worst} of {len(context.x)} examples fell to black-box attacks alone"
    if skipped:
        found += f"; {skipped} times the white-box attacks skipped an example broken before"
    return worst <= ALLOWED_SHARE * len(context.x), found


def _never_weaker(called: str, what: str, unit: str, factors: Sequence[float], soft: bool) -> Check:
    """Stronger variants of PGD (and the `soft` k-NN attack) must not break clearly fewer rows.
    `unit`: what the `factors` multiply, which is the steps, one restart or the eps. `called`: the
    name of the check in this module, by which other processes find it."""
    name = f"more {what} the defense"

    def never_weaker(context: FlagContext) -> tuple[bool, str]:
        x, y = context.sample()
        settings = [int(one * STEPS) for one in factors] if unit == "steps" else factors
        reported, is_well = [], True
        attacks: list[Any] = [make_attack("pgd", context.model, steps=STEPS)]
        if soft and defended_of(context.model) is not None:
            options: dict[str, Any] = {"temperatures": (0.1,), "targets": 1, "steps": STEPS}
            attacks.append(make_attack("soft_knn", context.model, **options))
        for attack in attacks:
            results = []
            for setting in settings:
                stronger, ball = attack, context.threat
                if unit == "times eps":
                    ball = ball.with_eps(setting * ball.eps)
                else:
                    stronger = replace(attack, **{unit: setting})
                generator = context.generator(name)
                results.append(stronger(context.model, x, y, ball, generator=generator))
            if context.is_regression:
                # An abstention counts as the largest error: an infinite mean would hide other rows.
                gains = torch.stack([result.gain for result in results]).double()
                largest = gains[gains.isfinite()].max() if bool(gains.isfinite().any()) else 1.0
                strengths = gains.clamp_max(largest).mean(1).tolist()
            else:
                strengths = [float(result.broken.sum()) for result in results]
            for best, now in zip(itertools.accumulate(strengths, max), strengths, strict=True):
                least = ALLOWED_ERROR * best if context.is_regression else best - ALLOWED_ROWS
                is_well = is_well and now >= least
            pairs = zip(settings, strengths, strict=True)
            shown = ", ".join(f"{value:.3g} at {one:g}" for one, value in pairs)
            reported.append(f"{attack.name}: {shown} {unit}")
        measure = "mean error" if context.is_regression else f"broken of {len(x)} examples"
        return is_well, f"{measure}, " + "; ".join(reported)

    never_weaker.__qualname__ = called
    return check(
        name,
        "A stronger attacker can do everything that a weaker one can. An attack that breaks fewer "
        "examples with more effort does not suit this model, and its result says little.",
        "Try other step sizes and losses, and an attack that suits the model. " + MASKED,
    )(never_weaker)


more_steps = _never_weaker("more_steps", "steps never help", "steps", (0.5, 1, 2), soft=True)
more_restarts = _never_weaker(
    "more_restarts", "restarts never help", "restarts", (1, 4), soft=False
)
more_eps = _never_weaker("more_eps", "eps never helps", "times eps", (0.5, 1.0, 2.0), soft=True)


@check(
    LARGE_EPS,
    "With an eps of half the range of inputs, an attacker can turn nearly every input into one of "
    "another class. Attacks that cannot do this do not work.",
    "Find out why the attacks fail although nearly every change is allowed. " + MASKED,
)
def large_eps(context: FlagContext) -> tuple[bool, str]:
    if context.is_regression:
        raise NotRunError("a regression has no level of chance")
    attacks = [one for one in context.attacks if one.family in KNOWING]
    if not attacks:
        raise NotRunError("there is no white-box or adaptive attack")
    x, y = context.sample()
    ball = context.threat.with_eps(_large(context.threat, context.x))
    with torch.no_grad():
        chance = len(x) / context.model(x[:1]).shape[1]
    total, used = len(x), 0
    for attack in attacks:
        result = attack(context.model, x, y, ball, generator=context.generator(LARGE_EPS))
        x, y, used = x[~result.broken], y[~result.broken], used + 1
        if len(x) <= chance:
            break
    count = f"{used} attack{'s' if used > 1 else ''}; chance would be {chance:.3g}"
    found = f"at eps {ball.eps:.3g}, {len(x)} of {total} examples withstand {count}"
    return len(x) <= chance, found


def _large(threat: LpBall, x: Tensor) -> float:
    """Return half the range of inputs in the units of the ball; without bounds, the spread of x."""
    threat = replace(threat, groups=None)
    if threat.bounds is None:
        center = x.mean(0, keepdim=True).expand_as(x)
        return max(FAR * threat.eps, float(replace(threat, mutable=None).distance(x, center).max()))
    half = (threat.bounds[1] - threat.bounds[0]) / 2
    corner = torch.zeros_like(x[:1]) + half
    if threat.mutable is not None:
        corner = corner * threat.mutable.to(corner)
    return max(2 * threat.eps, float(threat.distance(corner, torch.zeros_like(corner))))
