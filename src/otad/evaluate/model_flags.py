"""Checks of the model: whether its answers and its gradients can be trusted."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.attacks.base import gain_of
from otad.evaluate.flags import FlagContext, NotRunError, check
from otad.evaluate.suite import defended_of
from otad.model.otad import OTAD

ZERO_SHARE = 0.5  # of the rows may be without a gradient
AGREEING_SHARE = 0.9  # of the rows must agree: some are always near a kink
REPEAT = 1e-4  # of the largest output: what rounding in another order may change
STEP = {torch.float64: 1e-5, torch.float32: 1e-3}
AGREEMENT = {torch.float64: 1e-3, torch.float32: 5e-2}
DIFFERENCES = "gradients agree with finite differences"
CHANGES = "random noise changes the neighbors"


@check(
    "gradients are there",
    "Where the gradient is zero or NaN, gradient attacks are blind. An interpolation that "
    "rests on a single bank point has an honest zero there; a model that hides its gradient "
    "looks the same. In both cases those attacks say nothing about such rows.",
    "Do not quote the figures of PGD, APGD or AutoAttack on their own. Rely on the attacks "
    "that move the neighbors, on black-box attacks and on certificates.",
)
def gradient_share(context: FlagContext) -> tuple[bool, str]:
    """On how many rows the gradient of the margin (the error) is zero or not a number."""
    x, y = context.sample()
    gradient = _gradient(context.model, x, y).flatten(1)
    blind = (gradient == 0).all(1) | ~gradient.isfinite().all(1)
    share = float(blind.double().mean())
    found = f"zero or NaN on {share:.0%} of {len(x)} examples"
    if isinstance(context.model, OTAD) and bool(blind.any()):
        single = (_weighted(context.model, x[blind]) >= 0).sum(1) == 1
        found += f"; {int(single.sum())} of these {int(blind.sum())} rest on a single bank point"
    return share <= ZERO_SHARE, found


@check(
    DIFFERENCES,
    "The gradient that attacks follow must be that of the function they attack. Compared are "
    "only inputs whose neighbors are the same at both ends of the difference.",
    "The backward pass is not that of the forward pass: look for detached tensors, rounding, "
    "or a gradient that was replaced. Until then, do not believe attacks by gradient.",
)
def finite_differences(context: FlagContext) -> tuple[bool, str]:
    """The directional derivative of the margin against (f(x + h v) - f(x - h v)) / 2h."""
    x, y = context.sample()
    model, dtype = _in_double(context.model, x)
    y = y.to(dtype) if y.is_floating_point() else y
    step = STEP[dtype]
    direction = torch.randn(x.shape, generator=context.generator(DIFFERENCES)).to(x.device, dtype)
    direction /= direction.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))
    center = x.to(dtype)
    if context.threat.bounds is not None:  # both ends have to be legal inputs
        low, high = context.threat.bounds
        center = center.clamp(low + step, high - step)
    ends = center - step * direction, center + step * direction
    with torch.no_grad():
        low_value, high_value = (gain_of(model(end), y) for end in ends)
    difference = (high_value - low_value) / (2 * step)
    slope = (_gradient(model, center, y) * direction).flatten(1).sum(1)
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
    "A model whose answer depends on what else is in the batch is not a function of its "
    "input, and neither attacks nor certificates are about it.",
    "Put the model in evaluation mode, and look for statistics taken over the batch. GPUs "
    "round convolutions to TF32 unless torch.backends.cudnn.allow_tf32 is False, which may do.",
)
@torch.no_grad()
def batch_independence(context: FlagContext) -> tuple[bool, str]:
    """Answers one by one against answers in one batch."""
    x, _ = context.sample()
    alone = torch.cat([context.model(one) for one in x.split(1)])
    return _same_answers(context.model(x), alone, f"1 and {len(x)} at a time")


@check(
    "the model is not randomized",
    "A randomized model answers differently each time; a single answer neither shows that an "
    "input is adversarial nor that it is not.",
    "Attack the expected answer over many draws, or fix the draw and evaluate that model.",
)
@torch.no_grad()
def randomness(context: FlagContext) -> tuple[bool, str]:
    """Two passes over the same inputs."""
    x, _ = context.sample()
    return _same_answers(context.model(x), context.model(x), "two passes")


@check(
    CHANGES,
    "For information. Where even random steps of size eps change the neighbors, answers at fixed "
    "neighbors say nothing about robustness, and attacks have to move the neighbors. A global map "
    "is continuous where its points with weight change, but its gradient only sees those that have "
    "weight now.",
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
    return True, found


def _same_answers(first: Tensor, second: Tensor, what: str) -> tuple[bool, str]:
    gap = (first - second).abs().nan_to_num(0.0)  # two abstentions agree
    allowed = REPEAT * float(first.abs().nan_to_num(0.0).max())
    changed = (gap > allowed) | (first.isnan() != second.isnan())
    if first.dim() == 2:
        changed = changed.any(1) | (first.argmax(1) != second.argmax(1))
    differ = int(changed.sum())
    return differ == 0, f"{differ} of {len(first)} answers differ between {what}"


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of what attacks climb, unchanged: NaN stays NaN, zero where there is none."""
    moved = x.detach().requires_grad_()
    with torch.enable_grad():
        value = gain_of(model(moved), y).sum()
    if not value.requires_grad:
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(value, moved, allow_unused=True, materialize_grads=True)
    return gradient


def _in_double(model: nn.Module, x: Tensor) -> tuple[nn.Module, torch.dtype]:
    """A copy of the model in float64; where there can be none, the model itself."""
    defended = defended_of(model)
    if defended is not None and not defended.resident:
        return model, x.dtype  # a copy would read the whole bank into memory
    try:
        twin = copy.deepcopy(model).double()
        with torch.no_grad():
            twin(x[:1].double())
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it insists on its precision
        return model, x.dtype
    return twin, torch.float64


def _has_global_map(model: nn.Module) -> bool:
    return isinstance(model, OTAD) and not model.answerer.rests_on_neighbors


@torch.no_grad()
def _same_neighbors(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """Whether two inputs (B,*) have the same set of neighbors, or of points with weight in a global
    map; True for models without neighbors."""
    defended = defended_of(model)
    if defended is None:
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    if _has_global_map(model):
        sets = [_weighted(defended, x) for x in (first, second)]
        width = max(one.shape[1] for one in sets)
        sets = [functional.pad(one, (0, width - one.shape[1]), value=-1) for one in sets]
    else:
        sets = [defended.neighbors(defended.query_keys(x)).indices for x in (first, second)]
    return (sets[0].sort(1).values == sets[1].sort(1).values).all(1)


@torch.no_grad()
def _weighted(model: OTAD, x: Tensor) -> Tensor:
    """The bank points with weight (B,W), -1 where a row has fewer."""
    trace = model.trace(x)
    return trace.neighbors.indices.masked_fill(trace.solution.multipliers <= 0, -1)
