"""Flags about the model: whether its answers and gradients can be trusted as they are."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.attacks.base import gain_of
from otad.evaluate.flag_context import Scene, not_run
from otad.evaluate.records import FAIL, PASS, Flag
from otad.evaluate.suite import defended_of
from otad.model.otad import OTAD

ZERO_SHARE = 0.5  # of the rows may be without a gradient
AGREEING_SHARE = 0.9  # of the rows must agree: some always sit near a kink
REPEAT = 1e-4  # of the largest output: what rounding in another order may change
STEP = {torch.float64: 1e-5, torch.float32: 1e-3}
AGREEMENT = {torch.float64: 1e-3, torch.float32: 5e-2}


def gradient_share(scene: Scene) -> Flag:
    """On how many rows the gradient of the margin (the error) is zero or not a number."""
    name = "gradients are there"
    meaning = (
        "Where the gradient is zero or NaN, gradient attacks are blind. An interpolation that "
        "rests on a single bank point has an honest zero there; a model that hides its gradient "
        "looks the same. In both cases those attacks say nothing about such rows."
    )
    x, y = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    gradient = _gradient(scene.model, x, y).flatten(1)
    blind = (gradient == 0).all(1) | ~gradient.isfinite().all(1)
    share = float(blind.double().mean())
    found = f"zero or NaN on {share:.0%} of {len(x)} examples"
    if isinstance(scene.model, OTAD) and bool(blind.any()):
        single = _rests_on_one(scene.model, x[blind])
        found += f"; {int(single.sum())} of these {int(blind.sum())} rest on a single bank point"
    if share <= ZERO_SHARE:
        return Flag(name, PASS, found, meaning, "Nothing to do.")
    advice = (
        "Do not quote the figures of PGD, APGD or AutoAttack on their own. Rely on the attacks "
        "that move the neighbors, on black-box attacks and on certificates."
    )
    return Flag(name, FAIL, found, meaning, advice)


def finite_differences(scene: Scene) -> Flag:
    """The directional derivative of the margin against (f(x + h v) - f(x - h v)) / 2h."""
    name = "gradients agree with finite differences"
    meaning = (
        "The gradient the attacks follow must be that of the function they attack. Compared are "
        "only inputs whose neighbors are the same at both ends of the difference."
    )
    x, y = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    model, dtype = _in_double(scene.model, x)
    y = y.to(dtype) if y.is_floating_point() else y
    step = STEP[dtype]
    generator = scene.generator(name)
    direction = torch.randn(x.shape, generator=generator).to(x.device, dtype)
    direction /= direction.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))
    center = x.to(dtype)
    if scene.threat.bounds is not None:  # both ends have to be legal inputs
        low, high = scene.threat.bounds
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
    rows = int(same.sum())
    if not rows:
        return not_run(name, "neighbors change within every difference", meaning)
    share = float(agree[same].double().mean())
    found = f"{share:.0%} of {rows} examples agree, in {str(dtype).removeprefix('torch.')}"
    if share >= AGREEING_SHARE:
        return Flag(name, PASS, found, meaning, "Nothing to do.")
    advice = (
        "The backward pass is not that of the forward pass: look for detached tensors, rounding, "
        "or a gradient that was replaced. Attacks by gradient are not to be believed until then."
    )
    return Flag(name, FAIL, found, meaning, advice)


def batch_size(scene: Scene) -> Flag:
    """Answers one by one against answers in one batch."""
    name = "batch size does not matter"
    meaning = (
        "A model whose answer depends on what else is in the batch is not a function of its "
        "input, and neither attacks nor certificates are about it."
    )
    x, _ = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    with torch.no_grad():
        together = scene.model(x)
        alone = torch.cat([scene.model(one) for one in x.split(1)])
    advice = (
        "Put the model in evaluation mode, and look for statistics taken over the batch. GPUs "
        "round convolutions to TF32 unless torch.backends.cudnn.allow_tf32 is False, which may do."
    )
    return _same_answers(name, meaning, advice, together, alone, f"1 and {len(x)} at a time")


def randomness(scene: Scene) -> Flag:
    """Two passes over the same inputs."""
    name = "the model is not randomized"
    meaning = (
        "A randomized model answers differently each time; a single answer neither shows that an "
        "input is adversarial nor that it is not."
    )
    x, _ = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    with torch.no_grad():
        first, second = scene.model(x), scene.model(x)
    advice = "Attack the expected answer over many draws, or fix the draw and evaluate that model."
    return _same_answers(name, meaning, advice, first, second, "two passes")


def neighbor_changes(scene: Scene) -> Flag:
    """How often random noise of size eps changes the neighbors, or for one map of the whole bank
    the points with weight. For information."""
    name = "random noise changes the neighbors"
    meaning = (
        "Where even random steps of size eps change who the neighbors are, answers at fixed "
        "neighbors tell nothing about robustness; attacks have to move the neighbors."
    )
    one_map = isinstance(scene.model, OTAD) and scene.model.scope == "global"
    if one_map:
        meaning = (
            "One map for the whole bank is continuous where the points with weight change, but its "
            "gradient sees only those that have weight now. The more often noise changes them, the "
            "less gradient attacks see of what lies within eps."
        )
    if defended_of(scene.model) is None:
        return not_run(name, "the model has no neighbors", meaning)
    x, _ = scene.sample()
    if not len(x):
        return not_run(name, "no example is right unattacked", meaning)
    moved = scene.threat.surface(x, scene.generator(name))
    share = 1 - float(_same_neighbors(scene.model, x, moved).double().mean())
    found = f"for {share:.0%} of {len(x)} examples, at eps {scene.threat.eps:g}"
    if one_map:
        found += "; here the neighbors are the points with weight"
    return Flag(name, PASS, found, meaning, "For information; there is nothing to do.")


def _same_answers(
    name: str, meaning: str, advice: str, first: Tensor, second: Tensor, what: str
) -> Flag:
    gap = (first - second).abs().nan_to_num(0.0)  # two abstentions agree
    allowed = REPEAT * float(first.abs().nan_to_num(0.0).max())
    one_abstains = first.isnan() != second.isnan()
    changed = (gap > allowed) | one_abstains
    if first.dim() == 2:
        changed = changed.any(1) | (first.argmax(1) != second.argmax(1))
    found = f"{int(changed.sum())} of {len(first)} answers differ between {what}"
    if bool(changed.any()):
        return Flag(name, FAIL, found, meaning, advice)
    return Flag(name, PASS, found, meaning, "Nothing to do.")


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of what attacks climb, as it comes: NaN stays NaN, zero where there is none."""
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
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it insists on its own precision
        return model, x.dtype
    return twin, torch.float64


def _same_neighbors(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
    """Whether two inputs (B,*) have the same set of neighbors, or for one map of the whole bank the
    same points with weight; True without neighbors."""
    defended = defended_of(model)
    if defended is None:
        return torch.ones(len(first), dtype=torch.bool, device=first.device)
    with torch.no_grad():
        if model is defended and defended.scope == "global":
            sets = [_weighted(defended, x) for x in (first, second)]
            width = max(one.shape[1] for one in sets)
            sets = [functional.pad(one, (0, width - one.shape[1]), value=-1) for one in sets]
        else:
            located = (defended.query_keys(x) for x in (first, second))
            sets = [defended.neighbors(points).indices for points in located]
    return (sets[0].sort(1).values == sets[1].sort(1).values).all(1)


@torch.no_grad()
def _weighted(model: OTAD, x: Tensor) -> Tensor:
    """The bank points with weight (B,W), -1 where a row has fewer."""
    trace = model.trace(x)
    return trace.neighbors.indices.masked_fill(trace.solution.multipliers <= 0, -1)


def _rests_on_one(model: OTAD, x: Tensor) -> Tensor:
    """Rows (B,) with a single such point."""
    return (_weighted(model, x) >= 0).sum(1) == 1
