"""How a backbone is trained: the settings, the learning rate of each step, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from otad.checks import check_choice, check_count
from otad.errors import InputError

_STEP_AT = (0.5, 0.75)  # shares of the training after which "step" divides the rate by ten


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run; the optimizer's defaults are the paper's.

    The objective per batch is mean loss + `energy_weight` * mean energy (the paper's alpha, for
    means instead of sums). `momentum` is AdamW's first beta. `warmup` epochs raise the rate
    linearly from zero; then "cosine" lowers it to zero, "step" divides it by ten after 1/2 and 3/4.
    Every `log_every` epochs one line goes to the `otad` logger.
    """

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.0
    energy_weight: float = 0.0
    seed: int = 0
    device: str = "cpu"
    log_every: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "log_every"):
            check_count(getattr(self, name), name)
        check_count(self.seed, "seed", least=0)
        check_choice(self.optimizer, "optimizer", ("sgd", "adamw"))
        check_choice(self.schedule, "schedule", ("cosine", "constant", "step"))
        for name in ("weight_decay", "energy_weight"):
            _check_range(getattr(self, name), name, 0.0, math.inf)
        _check_range(self.learning_rate, "learning_rate", 1e-12, math.inf)
        _check_range(self.momentum, "momentum", 0.0, 1.0)
        _check_range(self.warmup, "warmup", 0.0, self.epochs)
        _check_device(self.device)

    def rate_at(self, epoch: float) -> float:
        """Learning rate after `epoch` epochs, fractions included."""
        if epoch < self.warmup:
            return self.learning_rate * epoch / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        share = (epoch - self.warmup) / (self.epochs - self.warmup)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * 0.1 ** sum(share >= drop for drop in _STEP_AT)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        fused = torch.device(self.device).type in ("cpu", "cuda")  # one kernel for all parameters
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=self.learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                fused=fused,
            )
        return torch.optim.AdamW(
            parameters,
            lr=self.learning_rate,
            betas=(self.momentum, 0.999),
            weight_decay=self.weight_decay,
            fused=fused,
        )


def _check_range(value: object, name: str, least: float, bound: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < bound:
        raise InputError(
            f"{name}: expected a number of at least {least:g} and below {bound:g}, got {value!r}"
        )


def _check_device(name: str) -> None:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device: expected a device such as 'cpu', got {name!r}") from error
