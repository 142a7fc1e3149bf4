"""What a backbone is trained for, beside a short way: its loss on a batch, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from otad.errors import InputError
from otad.nets.base import LinearHead
from otad.training.margin import margin_shortfall

Objective = Callable[[Tensor, Tensor, LinearHead], Tensor]
"""outputs (B,C) or values (B,), targets, the head they came from -> mean loss. Targets are labels
(B,), or shares of the classes (B,C) where images are mixed, or values (B,)."""


class LossSettings(Protocol):
    """The settings of a `TrainConfig` that losses have."""

    @property
    def label_smoothing(self) -> float: ...
    @property
    def target_margin(self) -> float: ...
    @property
    def mixing(self) -> float: ...


def fit(task: str, settings: LossSettings) -> Objective:
    """Cross-entropy, where `label_smoothing` gives this share of the truth to all classes alike, or
    for regression the squared error."""

    label_smoothing = settings.label_smoothing

    def cross_entropy(outputs: Tensor, targets: Tensor, _head: LinearHead) -> Tensor:
        return functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing)

    def squared_error(outputs: Tensor, targets: Tensor, _head: LinearHead) -> Tensor:
        return functional.mse_loss(outputs, targets)

    if task == "classification":
        return cross_entropy
    if label_smoothing > 0:
        raise InputError(f"label_smoothing: expected 0 for regression, got {label_smoothing}")
    return squared_error


def wide_margin(task: str, settings: LossSettings) -> Objective:
    """What the margin (o_y - o_j) / |w_y - w_j| lacks to `target_margin`."""

    def shortfall(outputs: Tensor, targets: Tensor, head: LinearHead) -> Tensor:
        return margin_shortfall(outputs, targets, head, settings.target_margin)

    if task != "classification":
        raise InputError("loss: expected 'fit' for regression, got 'margin'")
    for name, value in (("label_smoothing", settings.label_smoothing), ("mixing", settings.mixing)):
        if value > 0:
            raise InputError(f"{name}: expected 0 for the loss 'margin', got {value}")
    return shortfall


OBJECTIVES: dict[str, Callable[[str, LossSettings], Objective]] = {
    "fit": fit,
    "margin": wide_margin,
}
"""By the name of `TrainConfig.loss`: made for a task and the settings."""
