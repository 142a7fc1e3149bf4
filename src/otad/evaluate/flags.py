"""Flags: checks whether the figures of an evaluation can be trusted.

A check is a function of a `FlagContext` that returns whether it passes and what it found. It raises
`NotRunError` where it does not apply. The decorator `check` gives it a name, a meaning and advice.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from otad.attacks import Attack, LpBall
from otad.attacks.stand_in import Map, agreement, is_trusted
from otad.attacks.target import (
    DRAWS,
    answers,
    gain_of,
    is_randomized,
    seeded,
    value_and_gradient,
)
from otad.evaluate.identity import generator_for
from otad.evaluate.records import FAIL, NOT_RUN, PASS, AttackRecord, CertificateRecord, Flag
from otad.evaluate.suite import defended_of
from otad.model.otad import OTAD
from otad.nets import only_normalizes
from otad.nets.features import keys_of
from otad.threat import per_row

SAMPLE = 64  # examples a check uses
ZERO_SHARE = 0.5  # of the rows may be without a gradient
AGREEING_SHARE = 0.9  # of the rows must agree: some are always near a kink
STABLE_SHARE = 0.95  # of the mean answers of a randomized model must repeat
REPEAT = 1e-4  # of the largest output: what rounding in another order may change
STEP = {torch.float64: 1e-5, torch.float32: 1e-3}
AGREEMENT = {torch.float64: 1e-3, torch.float32: 5e-2}
DIFFERENCES = "gradients agree with finite differences"
CHANGES = "random noise changes the neighbors"
HIDDEN = "gradients hold at the scale of the threat"


@dataclass(frozen=True, eq=False)
class FlagContext:
    """A model, examples x (n,*) with answers y (n,), and what the attacks did to them. `right` (n,)
    marks the examples answered right without attack (in regression all); `train_x` has the training
    inputs, if given."""

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: LpBall
    right: Tensor
    attacks: tuple[Attack, ...] = ()
    records: tuple[AttackRecord, ...] = ()
    certificate: CertificateRecord | None = None
    seed: int = 0
    train_x: Tensor | None = None
    certificate_within_bounds: CertificateRecord | None = None

    @property
    def is_regression(self) -> bool:
        return self.y.is_floating_point()

    def generator(self, flag: str) -> torch.Generator:
        return generator_for(self.seed, "flag", flag)

    def sample(self, count: int = SAMPLE) -> tuple[Tensor, Tensor]:
        """Return at most `count` random examples that are right without attack, with answers."""
        rows = self.right.nonzero()[:, 0]
        if not len(rows):
            raise NotRunError("no example is right without attack")
        chosen = torch.randperm(len(rows), generator=self.generator("sample"))[:count]
        places = rows[chosen].sort().values.to(self.x.device)
        return self.x[places], self.y[places]


class NotRunError(Exception):
    """The reason why a check was not run. This is not a good sign, but an open question."""


Question = Callable[[FlagContext], tuple[bool, str]]
Check = Callable[[FlagContext], Flag]
CHECKS: dict[Check, Callable[[nn.Module], bool]] = {}  # with the models to which each applies


def check(
    name: str,
    meaning: str,
    advice: str,
    applies: Callable[[nn.Module], bool] = lambda model: True,
) -> Callable[[Question], Check]:
    """Register a check for the models to which it `applies`, by default for all."""

    def decorated(function: Question) -> Check:
        @functools.wraps(function)
        def checked(context: FlagContext) -> Flag:
            try:
                with seeded(context.model, context.generator(name)):
                    is_well, found = function(context)
            except NotRunError as reason:
                unknown = "This check gives no information. Do not read it as PASS."
                return Flag(name, NOT_RUN, str(reason), meaning, unknown)
            verdict, todo = (PASS, "Nothing to do.") if is_well else (FAIL, advice)
            return Flag(name, verdict, found, meaning, todo)

        CHECKS[checked] = applies
        return checked

    return decorated


def remark_flag(attack: str, remarks: Iterable[str]) -> Flag:
    """Return what an attack, such as AutoAttack, remarked about the model as a flag."""
    return Flag(
        f"{attack} has remarks on the model",
        FAIL,
        " ".join(remarks),
        "The attack warns that its own result may be too optimistic. Zero gradients are expected "
        "where one bank point has all the weight.",
        "Do not rely on this attack alone: compare it with the attacks on the neighbors. The worst "
        "case over all attacks counts.",
    )


@check(
    "gradients are there",
    "Where the gradient is zero or NaN, attacks that follow it fail. A zero gradient is correct if "
    "one bank point has all the weight; otherwise the model hides its gradient. NaN is an error.",
    "Rely on attacks on the neighbors, black-box attacks and certificates, not on PGD, APGD or "
    "AutoAttack alone.",
)
def gradient_share(context: FlagContext) -> tuple[bool, str]:
    x, y = context.sample()
    value, gradient = value_and_gradient(lambda at: gain_of(context.model(at), y), x)
    lost = ~gradient.flatten(1).isfinite().all(1)
    blind = (gradient.flatten(1) == 0).all(1) | lost
    lost &= value.isfinite()
    share = float(blind.double().mean())
    found = f"zero or NaN on {share:.0%} of {len(x)} examples"
    if isinstance(context.model, OTAD) and bool(blind.any()):
        single = (_weighted(context.model, x[blind]) >= 0).sum(1) == 1
        found += f"; {int(single.sum())} of these {int(blind.sum())} rest on a single bank point"
    if bool(lost.any()):
        found += f"; NaN or infinite on {int(lost.sum())} that are answered"
    return share <= ZERO_SHARE and not bool(lost.any()), found


def fixed_draws(model: nn.Module) -> Map:
    """Return a model, or a randomized model with the same draws in every call."""
    if not is_randomized(model):
        return model

    def function(x: Tensor) -> Tensor:
        with seeded(model, torch.Generator().manual_seed(0)):
            return model(x)  # type: ignore[no-any-return]

    return function


def maps_of(model: nn.Module) -> dict[str, Map]:
    """Return the functions that gradient attacks differentiate: the embedding and the metric of a
    model with a bank, unless inputs are only normalized; the answers of any other model."""
    defended = defended_of(model)
    if defended is None:
        return {"answers": fixed_draws(model)}
    maps: dict[str, Map] = {}
    if not only_normalizes(defended.backbone):
        maps["embedding"] = defended.backbone.embed
    if defended.metric is not None:
        maps["keys"] = partial(keys_of, metric=defended.metric)
    return maps


@check(
    HIDDEN,
    "Attacks follow the gradient of the answers, or that of the embedding and the metric towards "
    "other neighbors. Steps of the size of the threat should change them as the gradient predicts. "
    "If they do not, the gradient is useless, for example because the model rounds or saturates.",
    "The attacks keys, soft_knn and metric use smoothed differences instead. Give keys and "
    "soft_knn a differentiable copy (`stand_in`) if you have one. Do not trust other attacks that "
    "follow the gradient.",
    applies=lambda model: bool(maps_of(model)),
)
def hidden_gradient(context: FlagContext) -> tuple[bool, str]:
    x, _ = context.sample()
    if context.threat.eps == 0:
        raise NotRunError("the check needs an eps above 0")
    found, is_well = [], True
    for name, function in maps_of(context.model).items():
        agrees = agreement(function, x, context.threat)
        found.append(f"{name}: {int(agrees.sum())} of {len(agrees)} examples")
        is_well = is_well and is_trusted(agrees)
    declared = "straight-through " if is_straight_through(context.model) else ""
    return is_well, f"the {declared}gradient predicts the change of " + ", ".join(found)


def is_straight_through(model: nn.Module) -> bool:
    """Return whether a model declares that its gradient leaves out a part of it (BPDA)."""
    return bool(getattr(model, "straight_through", False))


@check(
    DIFFERENCES,
    "The gradient that attacks follow must be the derivative of the answers. Only inputs whose "
    "neighbors are the same at both ends of the difference are compared.",
    "Look for detached tensors, rounding or a replaced gradient. Until it is repaired, do not "
    "trust attacks that follow the gradient.",
)
def finite_differences(context: FlagContext) -> tuple[bool, str]:
    """The directional derivative of the margin against (f(x + h v) - f(x - h v)) / 2h."""
    x, y = context.sample()
    if is_straight_through(context.model):
        raise NotRunError(
            "the model declares a straight-through gradient (BPDA), which is no derivative; "
            "attacks without gradients show what it misses"
        )
    model, dtype = _in_double(context.model, x)
    answer = fixed_draws(model)
    y = y.to(dtype) if y.is_floating_point() else y
    step = STEP[dtype]
    direction = torch.randn(x.shape, generator=context.generator(DIFFERENCES)).to(x.device, dtype)
    direction /= per_row(direction.flatten(1).norm(dim=1), x)
    center = x.to(dtype)
    if context.threat.bounds is not None:  # both ends have to be legal inputs
        low, high = context.threat.bounds
        center = center.clamp(low + step, high - step)
    ends = center - step * direction, center + step * direction
    with torch.no_grad():
        low_value, high_value = (gain_of(answer(end), y) for end in ends)
    difference = (high_value - low_value) / (2 * step)
    _, gradient = value_and_gradient(lambda at: gain_of(answer(at), y), center)
    slope = (gradient * direction).flatten(1).sum(1)
    same = _same_neighbors(model, *ends) & difference.isfinite()
    size = difference.abs() + slope.abs()
    noise = 8 * torch.finfo(dtype).eps * high_value.abs() / step
    agree = ((difference - slope).abs() <= AGREEMENT[dtype] * size + noise) & slope.isfinite()
    if not bool(same.any()):
        raise NotRunError("neighbors change within every difference")
    share = float(agree[same].double().mean())
    precision = str(dtype).removeprefix("torch.")
    found = f"{share:.0%} of {int(same.sum())} examples agree, in {precision}"
    return share >= AGREEING_SHARE, found


@check(
    "batch size does not matter",
    "If answers depend on the rest of the batch, the model is not a function of its input, and "
    "neither attacks nor certificates apply to it.",
    "Look for statistics over the batch, and call model.eval(). On a GPU, set "
    "torch.backends.cudnn.allow_tf32 to False: rounding to TF32 can be the cause.",
)
@torch.no_grad()
def batch_independence(context: FlagContext) -> tuple[bool, str]:
    x, _ = context.sample()
    if is_randomized(context.model):
        raise NotRunError("the model draws new random numbers for every batch")

    def alone(function: Map) -> list[Tensor]:
        return [function(x), torch.cat([function(one) for one in x.split(1)])]

    return _same_answers(context, alone, f"1 and {len(x)} at a time")


@check(
    "the model is not randomized",
    "If answers change from call to call, a single wrong answer does not show that an input is "
    "adversarial, and a single right answer does not show that it is not.",
    "Attack the mean answer over many draws: let the model declare `randomized = True`.",
    applies=lambda model: not is_randomized(model),
)
@torch.no_grad()
def randomness(context: FlagContext) -> tuple[bool, str]:
    x, y = context.sample()

    def passes(function: Map) -> list[Tensor]:
        with torch.enable_grad():
            differentiated = function(x.clone().requires_grad_()).detach()
        return [function(x), differentiated, function(x)]

    is_well, found = _same_answers(context, passes, "passes, one of them with a gradient")
    if not context.is_regression and (lost := int((context.model(x).argmax(1) != y).sum())):
        return False, f"{found}; {lost} were right before the attacks and are wrong now"
    return is_well, found


@check(
    "answers of the randomized model repeat",
    f"The model declares that it is randomized. Its answer is the mean of its outputs over {DRAWS} "
    "draws, attacks follow the mean gradient, and an attack succeeds only if the answer is wrong "
    "over new draws. A user who asks once can get another answer.",
    "The answers depend on the draws: read the figures as estimates, and compare several seeds.",
    applies=is_randomized,
)
@torch.no_grad()
def repeated_answers(context: FlagContext) -> tuple[bool, str]:
    x, _ = context.sample()
    if context.is_regression:
        raise NotRunError("only class labels are compared")
    first, second = (answers(context.model, x).argmax(1) for _ in range(2))
    once = context.model(x).argmax(1)
    same = int((first == second).sum())
    found = f"{same} of {len(x)} mean answers are the same over new draws, and "
    found += f"{int((first == once).sum())} are the same in a single draw"
    return same >= STABLE_SHARE * len(x), found


@check(
    CHANGES,
    "For information. If random noise of size eps changes the neighbors, attacks must be able to "
    "change them too, and the gradient at fixed neighbors does not show them how. A global map is "
    "continuous, but its gradient only depends on the points that have weight now.",
    "",
)
def neighbor_changes(context: FlagContext) -> tuple[bool, str]:
    """How often random noise of size eps changes the neighbors, or the points with weight."""
    if defended_of(context.model) is None:
        raise NotRunError("the model has no neighbors")
    x, _ = context.sample()
    moved = context.threat.surface(x, context.generator(CHANGES))
    share = 1 - float(_same_neighbors(context.model, x, moved).double().mean())
    found = f"for {share:.0%} of {len(x)} examples, at eps {context.threat.eps:g}"
    if _has_global_map(context.model):
        found += "; here the neighbors are the points with weight"
    if share == 0 and context.threat.eps > 0:
        found += "; attacks may change them all the same, as they choose the direction"
    return True, found


def _same_answers(
    context: FlagContext, ways: Callable[[Map], list[Tensor]], what: str
) -> tuple[bool, str]:
    """Return whether several `ways` to call a function give the same rows (n,*). The function is
    the model, and also its embedding and keys: they can change although the neighbors of the
    sample do not."""
    found, is_well = [], True
    for name, function in ({"answers": context.model} | maps_of(context.model)).items():
        first, *others = ways(function)
        allowed = REPEAT * float(first.abs().nan_to_num(0.0).max())
        changed = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        for other in others:  # abstentions agree
            far = ~first.isclose(other, rtol=0, atol=allowed, equal_nan=True)
            changed |= far.flatten(1).any(1) if first.dim() > 1 else far
            if name == "answers" and first.dim() == 2:
                changed |= first.argmax(1) != other.argmax(1)
        if name == "answers" or bool(changed.any()):
            found.append(f"{int(changed.sum())} of {len(first)} {name} differ between {what}")
        is_well = is_well and not bool(changed.any())
    return is_well, "; ".join(found)


def _in_double(model: nn.Module, x: Tensor) -> tuple[nn.Module, torch.dtype]:
    """Return a copy of the model in float64, or the model itself if there can be none."""
    defended = defended_of(model)
    if defended is not None and not defended.resident:
        return model, x.dtype  # a copy would read the whole bank into memory
    try:
        twin = copy.deepcopy(model).double()
        with torch.no_grad():
            twin(x[:1].double())
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it has a fixed precision
        return model, x.dtype
    return twin, torch.float64


def _has_global_map(model: nn.Module) -> bool:
    return isinstance(model, OTAD) and not model.answerer.rests_on_neighbors


@torch.no_grad()
def _same_neighbors(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """Return whether two inputs (B,*) have the same neighbors, or in a global map the same points
    with weight; True for models without a bank."""
    defended, both = defended_of(model), torch.cat([first, second])
    if defended is None:
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    if _has_global_map(model):
        sets = _weighted(defended, both)
    else:
        sets = defended.neighbors(defended.query_keys(both)).indices
    before, after = sets.sort(1).values.chunk(2)
    return (before == after).all(1)


@torch.no_grad()
def _weighted(model: OTAD, x: Tensor) -> Tensor:
    """Return the bank points with weight (B,W), and -1 where a row has fewer."""
    trace = model.trace(x)
    return trace.neighbors.indices.masked_fill(trace.solution.multipliers <= 0, -1)
