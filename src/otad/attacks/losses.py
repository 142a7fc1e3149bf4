"""What a gradient attack climbs: each loss is (B,) and large where the model is wrong."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from otad.attacks.base import Loss
from otad.checks import check_choice
from otad.errors import InputError


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """- log softmax(logits)_y. Flat in floating point where the model is very sure."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{c != y} logits_c - logits_y, the loss of Carlini and Wagner. Never flat."""
    own = logits.gather(1, y[:, None])[:, 0]
    return logits.scatter(1, y[:, None], -math.inf).amax(1) - own


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce and Hein 2020): the margin over the gap between the
    largest and the third largest logit. It does not change when the logits are scaled or shifted.
    """
    if logits.shape[1] < 3:
        raise InputError(f"loss: dlr expected at least 3 classes, got {logits.shape[1]}")
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def squared_error(values: Tensor, y: Tensor) -> Tensor:
    """(values - y)^2, for regression."""
    return (values - y).square()


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "dlr": dlr, "margin": margin}
"""For classification; in regression there is only the error."""


def check_loss(name: str) -> str:
    return check_choice(name, "loss", tuple(LOSSES))


def loss_for(name: str, y: Tensor) -> Loss:
    """The loss of that name for labels y, the squared error for values y."""
    return squared_error if y.is_floating_point() else LOSSES[check_loss(name)]
