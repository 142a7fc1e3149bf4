"""Where an attack takes its gradient from: the model itself, or something that stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.attacks.base import Loss, Target
from otad.checks import check_evaluation, check_shape


class Answer(NamedTuple):
    """`outputs`: what the attacked model says. `value` (n,), `gradient` (n,*): what to climb."""

    outputs: Tensor
    value: Tensor
    gradient: Tensor


Ask = Callable[[Tensor, Tensor], Answer]
"""Inputs (n,*), and the examples they belong to (n,) int64 -> Answer."""


def exact(target: Target, loss: Loss) -> Ask:
    """The attacked model's own gradient."""

    def ask(moved: Tensor, rows: Tensor) -> Answer:
        outputs, gradient = target.gradient(moved, loss, rows)
        return Answer(outputs, loss(outputs, target.targets(rows)), gradient)

    return ask


def through_substitute(target: Target, loss: Loss, substitute: nn.Module) -> Ask:
    """Climb the substitute's loss at the same input; the attacked model only gives its answers."""
    check_evaluation(substitute, "substitute")

    def ask(moved: Tensor, rows: Tensor) -> Answer:
        outputs, y = target(moved, rows), target.targets(rows)

        def climbed(inputs: Tensor) -> Tensor:
            return loss(_alike(substitute(inputs), "substitute", outputs), y)

        return Answer(outputs, *value_and_gradient(climbed, moved))

    return ask


def straight_through(target: Target, loss: Loss, network: nn.Module) -> Ask:
    """Forward by the attacked model f, backward by the network g (BPDA, Athalye et al. 2018).

    The gradient is J_g(x)^T dl/do at o = f(x): the loss is seen where the defense really is, and
    only the Jacobian of the defense is approximated.
    """
    check_evaluation(network, "network")

    def ask(moved: Tensor, rows: Tensor) -> Answer:
        outputs, y = target(moved, rows), target.targets(rows)

        def climbed(inputs: Tensor) -> Tensor:
            passed = _alike(network(inputs), "network", outputs)
            return loss(outputs + (passed - passed.detach()), y)

        return Answer(outputs, *value_and_gradient(climbed, moved))

    return ask


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Values (n,) of a function of each row, and its gradient (n,*), 0 where it has none."""
    moved = x.detach().requires_grad_()
    with torch.enable_grad():
        value = function(moved)
        total = value.sum()
    if not total.requires_grad:
        return value, torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(total, moved, allow_unused=True, materialize_grads=True)
    return value.detach(), gradient.nan_to_num(0.0, 0.0, 0.0)


def _alike(found: Tensor, name: str, outputs: Tensor) -> Tensor:
    check_shape(found, name, tuple(outputs.shape), "of outputs like the attacked model's")
    return found
