"""What a gradient attack climbs: a loss, and the network whose gradient it follows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks.base import Evaluated, Loss, Target, margin
from otad.checks import check_choice, check_evaluation, check_shape, require

Objective = Callable[[Tensor, Tensor], Evaluated]
"""Inputs (n,*), and the examples they belong to (n,) int64 -> what is climbed there."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """- log softmax(logits)_y. Flat in floating point where the model is very sure."""
    return F.cross_entropy(logits, y, reduction="none")


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce and Hein 2020): the margin over the gap between the largest
    and the third largest logit, which scaling and shifting the logits does not change."""
    require(logits.shape[1] >= 3, "loss: dlr", "at least 3 classes", logits.shape[1])
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "dlr": dlr, "margin": margin}
check_loss = partial(check_choice, choices=tuple(LOSSES))


def loss_for(name: str, y: Tensor) -> Loss:
    """The loss of that name for labels y, the squared error for values y."""
    if y.is_floating_point():
        return lambda values, y: (values - y).square()
    return LOSSES[check_loss(name, "loss")]


def asking(target: Target, climbed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Objective:
    """Climb a function (n,) of inputs (n,*), their examples and the attacked model's outputs."""

    def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
        outputs = target(moved, rows)
        found = target.differentiate(lambda x: climbed(x, rows, outputs), moved, rows)
        return Evaluated(outputs, *found)

    return evaluate


def substitute_gradient(
    target: Target, loss: Loss, network: nn.Module, *, straight_through: bool = False
) -> Objective:
    """Climb the loss of a network g in place of the attacked model f, which only answers; with
    `straight_through` the loss is taken at the outputs o = f(x) and only the Jacobian is that of g:
    J_g(x)^T dl/do (BPDA, Athalye et al. 2018)."""
    name = "network" if straight_through else "substitute"
    check_evaluation(network, name)

    def climbed(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
        passed = network(inputs)
        check_shape(passed, name, tuple(outputs.shape), "like the attacked model's outputs")
        if straight_through:
            passed = outputs + (passed - passed.detach())
        return loss(passed, target.targets(rows))

    return asking(target, climbed)
