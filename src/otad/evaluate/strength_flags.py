"""Checks of the attacks: a stronger attacker must never do worse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from otad.attacks import LpBall
from otad.evaluate.flags import Check, FlagContext, NotRunError, check
from otad.evaluate.suite import defended_of, make_attack

ALLOWED_SHARE = 0.01  # of the examples may be broken by black-box attacks alone
ALLOWED_ROWS = 2  # two runs differ by a few rows by chance
ALLOWED_ERROR = 0.95  # of the mean error, in regression
STEPS = 20  # of the attacks that are varied
FAR = 10.0  # times eps: large, where inputs have no bounds
KNOWING, BLIND = ("white-box", "adaptive"), ("black-box", "random")
LARGE_EPS = "a large eps drives accuracy to chance"
MASKED = (
    "Look for what hides the gradient or the neighbors from the white-box attacks, and add an "
    "adaptive attack that goes around it. Until then the worst case is too optimistic."
)


@check(
    "white-box at least as strong as black-box",
    "An attacker who knows the model can do all that one without this knowledge can. Examples "
    "that only black-box attacks break are a sign of masked gradients.",
    MASKED,
)
def white_box_is_strongest(context: FlagContext) -> tuple[bool, str]:
    """Rows that fell to black-box attacks while white-box ones of the same eps had failed."""
    if context.is_regression:
        raise NotRunError("nothing is broken in a regression")
    families = {record.family for record in context.records}
    if not families & {*KNOWING} or not families & {*BLIND}:
        raise NotRunError("it takes attacks of both kinds")
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


def _never_weaker(what: str, unit: str, settings: Sequence[float], soft: bool) -> Check:
    """Ever stronger variants of PGD (and the `soft` k-NN attack) on a sample of the examples: none
    may break clearly fewer rows. `unit`: the attack's setting that is varied, or the eps."""
    name = f"more {what} the defense"

    def never_weaker(context: FlagContext) -> tuple[bool, str]:
        x, y = context.sample()
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

    return check(
        name,
        "An attacker with more means can do all that one with less can. Attacks that get weaker "
        "are not tuned to this model, and the rows they do not break say little.",
        "Try other step sizes and losses, and an attack that suits the model. " + MASKED,
    )(never_weaker)


more_steps = _never_weaker("steps never help", "steps", (10, 20, 40), soft=True)
more_restarts = _never_weaker("restarts never help", "restarts", (1, 4), soft=False)
more_eps = _never_weaker("eps never helps", "times eps", (0.5, 1.0, 2.0), soft=True)


@check(
    LARGE_EPS,
    "Within a ball as large as half the box of inputs nearly every input can be turned into "
    "one of another class. Attacks that cannot do so are broken or blind.",
    "See why the attacks get nowhere even when nearly everything is allowed. " + MASKED,
)
def large_eps(context: FlagContext) -> tuple[bool, str]:
    """The attacks of the evaluation with a ball that covers a good share of all inputs."""
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
    """Half the box of inputs in the measure of the ball; without bounds, the spread of x."""
    if threat.bounds is None:
        center = x.mean(0, keepdim=True).expand_as(x)
        return max(FAR * threat.eps, float(replace(threat, mutable=None).distance(x, center).max()))
    half = (threat.bounds[1] - threat.bounds[0]) / 2
    corner = torch.zeros_like(x[:1]) + half
    if threat.mutable is not None:
        corner = corner * threat.mutable.to(corner)
    return max(2 * threat.eps, float(threat.distance(corner, torch.zeros_like(corner))))
