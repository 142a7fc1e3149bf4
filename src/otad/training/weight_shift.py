"""Weights moved against the training for the length of one step, as an adversary moves inputs: what
stays right meanwhile is learned less by heart (adversarial weight perturbation, arXiv:2004.05884).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from otad.errors import InputError

Shifts = list[tuple[Tensor, Tensor]]
"""Weights, each with what is added to it."""


def steepest_shifts(loss: Tensor, net: nn.Module, share: float) -> Shifts:
    """Each matrix or kernel in training by that share of its length, along its gradient of `loss`;
    norms and biases stay."""
    weights = [one for one in net.parameters() if one.requires_grad and one.dim() > 1]
    if not weights:
        raise InputError(
            f"weight_share: expected 0 for a net that trains no matrix or kernel, got {share}"
        )
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    shifts: Shifts = []
    for weight, gradient in zip(weights, gradients, strict=True):
        stretch = weight.detach().norm() / gradient.norm().clamp_min(1e-20)
        shifts.append((weight, share * stretch * gradient))
    return shifts


@contextmanager
def shifted(shifts: Shifts) -> Iterator[None]:
    """Within it the weights are moved; afterwards they are what they were, to the last bit."""
    before = [(weight, weight.detach().clone()) for weight, _ in shifts]
    with torch.no_grad():
        for weight, shift in shifts:
            weight.add_(shift)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, kept in before:
                weight.copy_(kept)
