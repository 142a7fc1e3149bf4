"""What a gradient attack maximizes: a loss, and the network whose gradient it follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks.target import Evaluated, Loss, Target, answers, margin
from otad.checks import check_choice, check_evaluation, check_shape, require

Objective = Callable[[Tensor, Tensor], Evaluated]
"""Maps inputs (n,*), and the examples (n,) int64 they belong to, to values and gradients."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return -log softmax(logits)_y (B,). Its gradient vanishes where the model is very sure."""
    return F.cross_entropy(logits, y, reduction="none")


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Return the difference of logits ratio (B,) of Croce and Hein (2020).

    It is the margin divided by the gap between the largest and the third largest logit. Scaling and
    shifting the logits does not change it."""
    require(logits.shape[1] >= 3, "loss: dlr", "at least 3 classes", logits.shape[1])
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "dlr": dlr, "margin": margin}
check_loss = partial(check_choice, choices=tuple(LOSSES))


def squared_error(values: Tensor, y: Tensor) -> Tensor:
    return (values - y).square()


def loss_for(name: str, y: Tensor) -> Loss:
    """Return the loss of that name for labels y, or the squared error for values y."""
    if y.is_floating_point():
        return squared_error
    return LOSSES[check_loss(name, "loss")]


def objective_of(target: Target, loss: Loss, substitute: nn.Module | None) -> Objective:
    """Return the objective of a loss of the model itself, or of a `substitute` in its place."""
    if substitute is None:
        return lambda moved, rows: target.evaluate(moved, loss, rows)
    return substitute_gradient(target, loss, substitute)


def wrong_classes(logits: Tensor, y: Tensor) -> Tensor:
    """Return all classes but y (B,), those with the highest logits first: (B,C-1)."""
    return logits.scatter(1, y[:, None], -math.inf).argsort(1, descending=True)[:, :-1]


def towards(target: Target, classes: Tensor, substitute: nn.Module | None) -> Objective:
    """Return the objective logits_c - logits_y, where c is the class of each example in `classes`
    (B,)."""

    if substitute is None:
        return lambda moved, rows: target.evaluate(moved, lead, rows, classes[rows])

    def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
        loss = partial(lead, aims=classes[rows])
        return substitute_gradient(target, loss, substitute)(moved, rows)

    return evaluate


def lead(logits: Tensor, y: Tensor, aims: Tensor) -> Tensor:
    """Return by how much the logits of the classes `aims` (B,) exceed those of y (B,)."""
    aimed, own = (logits.gather(1, one[:, None])[:, 0] for one in (aims, y))
    return aimed - own


def asking(target: Target, climbed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """Return the objective of a function (n,) of inputs (n,*), their examples and outputs.

    The attacked model gives the outputs, without a gradient."""

    def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
        outputs = target(moved, rows)
        found = target.differentiate(lambda x: climbed(x, rows, outputs), moved, rows)
        return Evaluated(outputs, *found)

    return evaluate


def substitute_gradient(
    target: Target, loss: Loss, network: nn.Module, *, straight_through: bool = False
) -> Objective:
    """Return the objective whose gradient is that of a network g in place of the model f.

    The attacked model f gives answers only. With `straight_through` the loss l is taken at its
    outputs o = f(x) and the Jacobian at g, so the gradient is J_g(x)^T dl/do (BPDA, Athalye et al.
    2018)."""
    name = "network" if straight_through else "substitute"
    check_evaluation(network, name)

    def climbed(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
        passed = answers(network, inputs)
        check_shape(passed, name, tuple(outputs.shape), "like the attacked model's outputs")
        if straight_through:
            passed = outputs + (passed - passed.detach())
        return loss(passed, target.targets(rows))

    return asking(target, climbed)
