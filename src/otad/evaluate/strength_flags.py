"""Flags about the attacks: a stronger attacker must never do worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from otad.attacks import Attack, LpBall
from otad.evaluate.flag_context import Scene, not_run
from otad.evaluate.records import FAIL, PASS, Flag
from otad.evaluate.suite import defended_of, make_attack

ALLOWED_SHARE = 0.01  # of the examples may be broken by black-box attacks alone
ALLOWED_ROWS = 2  # two runs differ by a few rows by chance
ALLOWED_ERROR = 0.95  # of the mean error, in regression
STEPS = (10, 20, 40)
RESTARTS = (1, 4)
SCALES = (0.5, 1.0, 2.0)
FAR = 10.0  # times eps: large, where inputs have no bounds

Variant = Callable[[Any, float], tuple[Attack, LpBall]]
"""An attack (a dataclass) and a setting -> the attack with it, and the ball to run it in."""

MASKED = (
    "Look for what hides the gradient or the neighbors from the white-box attacks, and add an "
    "adaptive attack that goes around it. Until then the worst case is too optimistic."
)


def white_box_is_strongest(scene: Scene) -> Flag:
    """Rows that fell to black-box attacks while white-box ones of the same eps had failed."""
    name = "white-box at least as strong as black-box"
    meaning = (
        "Whoever knows the model can do all that whoever does not can. Examples that only "
        "attacks without its inside break are a sign of masked gradients."
    )
    if scene.task != "classification":
        return not_run(name, "nothing is broken in a regression", meaning)
    knowing, blind = ("white-box", "adaptive"), ("black-box", "random")
    families = {record.family for record in scene.records}
    if not families & {*knowing} or not families & {*blind}:
        return not_run(name, "it takes attacks of both kinds", meaning)
    worst, at, spared = 0, scene.threat.eps, 0
    for eps, group in itertools.groupby(scene.records, key=lambda record: record.eps):
        records = list(group)
        tried = {row for one in records if one.family in knowing for row in one.attacked}
        seen = {row for one in records if one.family in knowing for row in one.broken}
        unseen = {row for one in records if one.family in blind for row in one.broken} - seen
        spared += len(unseen - tried)
        if len(unseen & tried) > worst:
            worst, at = len(unseen & tried), eps
    found = f"at eps {at:g}, {worst} of {len(scene.x)} examples fell to black-box attacks alone"
    if spared:
        found += f"; {spared} times the white-box attacks were spared an example broken before"
    verdict = FAIL if worst > ALLOWED_SHARE * len(scene.x) else PASS
    return Flag(name, verdict, found, meaning, MASKED if verdict == FAIL else "Nothing to do.")


def more_steps(scene: Scene) -> Flag:
    """The same attack with 10, 20 and 40 steps."""
    return _never_weaker(
        scene,
        "more steps never help the defense",
        "steps",
        STEPS,
        lambda attack, steps: (replace(attack, steps=int(steps)), scene.threat),
    )


def more_restarts(scene: Scene) -> Flag:
    """The same attack from 1 and from 4 random starts."""
    return _never_weaker(
        scene,
        "more restarts never help the defense",
        "restarts",
        RESTARTS,
        lambda attack, count: (replace(attack, restarts=int(count)), scene.threat),
        names=("pgd",),
    )


def more_eps(scene: Scene) -> Flag:
    """The same attack at half, once and twice the eps of the threat."""
    return _never_weaker(
        scene,
        "more eps never helps the defense",
        "times eps",
        SCALES,
        lambda attack, scale: (attack, scene.threat.with_eps(scale * scene.threat.eps)),
    )


def large_eps(scene: Scene) -> Flag:
    """The attacks of the evaluation with a ball that covers a good share of all inputs."""
    name = "a large eps drives accuracy to chance"
    meaning = (
        "Within a ball as large as half the box of inputs nearly every input can be turned into "
        "one of another class. Attacks that cannot do so are broken or blind."
    )
    if scene.task != "classification":
        return not_run(name, "a regression has no level of chance", meaning)
    attacks = [one for one in scene.attacks if one.family in ("adaptive", "white-box")]
    if not attacks:
        return not_run(name, "there is no white-box or adaptive attack", meaning)
    x, y = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    ball = scene.threat.with_eps(_large(scene.threat, scene.x))
    with torch.no_grad():
        chance = len(x) / scene.model(x[:1]).shape[1]
    total, used = len(x), 0
    for attack in attacks:
        result = attack(scene.model, x, y, ball, generator=scene.generator(name))
        x, y, used = x[~result.broken], y[~result.broken], used + 1
        if len(x) <= chance:
            break
    found = (
        f"at eps {ball.eps:.3g}, {len(x)} of {total} examples withstand "
        f"{used} attack{'s' if used > 1 else ''}; chance would be {chance:.3g}"
    )
    if len(x) <= chance:
        return Flag(name, PASS, found, meaning, "Nothing to do.")
    advice = "See why the attacks get nowhere even when nearly everything is allowed. " + MASKED
    return Flag(name, FAIL, found, meaning, advice)


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


def _never_weaker(
    scene: Scene,
    name: str,
    unit: str,
    settings: Sequence[float],
    variant: Variant,
    names: Sequence[str] = ("pgd", "soft_knn"),
) -> Flag:
    """Ever stronger variants of some attacks on a sample: none may break clearly fewer rows."""
    meaning = (
        "An attacker with more means can do all that one with less can. Attacks that get weaker "
        "are not tuned to this model, and what they leave standing says little."
    )
    x, y = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    told, fell = [], False
    for attack in _iterated(scene, names):
        results = []
        for setting in settings:
            stronger, ball = variant(attack, setting)
            results.append(stronger(scene.model, x, y, ball, generator=scene.generator(name)))
        if scene.task == "regression":
            strengths = _mean_errors([result.gain for result in results])
        else:
            strengths = [float(result.broken.sum()) for result in results]
        fell = fell or _falls(strengths, scene.task)
        shown = ", ".join(
            f"{value:.3g} at {one:g}" for one, value in zip(settings, strengths, strict=True)
        )
        told.append(f"{attack.name}: {shown} {unit}")
    what = "mean error" if scene.task == "regression" else f"broken of {len(x)} examples"
    found = f"{what}, " + "; ".join(told)
    if not fell:
        return Flag(name, PASS, found, meaning, "Nothing to do.")
    advice = "Try other step sizes and losses, and an attack that suits the model. " + MASKED
    return Flag(name, FAIL, found, meaning, advice)


def _mean_errors(errors: Sequence[Tensor]) -> list[float]:
    """Of each variant, with an abstention as bad as the largest error of all: an infinite mean
    would hide the other rows."""
    every = torch.cat(list(errors)).double()
    told = every[every.isfinite()]
    largest = float(told.max()) if len(told) else 1.0
    return [float(one.double().clamp_max(largest).mean()) for one in errors]


def _iterated(scene: Scene, names: Sequence[str]) -> list[Attack]:
    """Attacks with steps, cheap ones of their kind."""
    made = [make_attack("pgd", scene.model, steps=STEPS[1])]
    if "soft_knn" in names and defended_of(scene.model) is not None:
        options: dict[str, Any] = {"temperatures": (0.1,), "targets": 1, "steps": STEPS[1]}
        made.append(make_attack("soft_knn", scene.model, **options))
    return made


def _falls(strengths: Sequence[float], task: str) -> bool:
    """Whether a later one is weaker than an earlier one by more than chance."""
    pairs = itertools.pairwise(itertools.accumulate(strengths, max))
    reached = [before for before, _ in pairs]
    if task == "regression":
        return any(
            now < ALLOWED_ERROR * best for best, now in zip(reached, strengths[1:], strict=True)
        )
    return any(now < best - ALLOWED_ROWS for best, now in zip(reached, strengths[1:], strict=True))
