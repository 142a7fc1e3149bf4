"""Settings of every training: epochs, learning rate, optimizer, device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from otad.checks import check_choice, check_count, require
from otad.errors import InputError
from otad.nets.orthogonal import orthogonal_weights
from otad.training.orthogonal_muon import OrthogonalMuon

ORTHOGONAL = "orthogonal_muon"
MAX_SEED = 2**64 - 1  # the largest seed of a torch.Generator
_STEP_AT = (0.5, 0.75)  # shares of the training after which "step" divides the rate by ten
_UNDECAYED = ("pos_embed", "cls_token")  # parameters without weight decay


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the training loop, described in `otad.training.TrainConfig`.

    Each kind of training adds its own."""

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay_on: str = "all"
    schedule: str = "cosine"
    warmup: float = 0.0
    gradient_clip: float = 0.0
    ema: float = 0.0
    mixed_precision: bool = False
    whole_batches: bool = False
    seed: int = 0
    device: str = "cpu"
    log_every: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "log_every"):
            check_count(getattr(self, name), name)
        check_seed(self.seed)
        check_choice(self.optimizer, "optimizer", ("sgd", "adamw", ORTHOGONAL))
        check_choice(self.decay_on, "decay_on", ("all", "matrices"))
        check_choice(self.schedule, "schedule", ("cosine", "constant", "step"))
        self.check_ranges(0.0, math.inf, "weight_decay", "gradient_clip")
        self.check_ranges(1e-12, math.inf, "learning_rate")
        self.check_ranges(0.0, 1.0, "momentum", "ema")
        self.check_ranges(0.0, self.epochs, "warmup")
        fits = not self.nesterov or (self.optimizer == "sgd" and self.momentum > 0)
        got = f"True for {self.optimizer!r} with momentum {self.momentum}"
        require(fits, "nesterov", "False unless for 'sgd' with momentum", got)
        try:
            torch.device(self.device)
        except RuntimeError as error:
            expected = "a device such as 'cpu'"
            raise InputError(f"device: expected {expected}, got {self.device!r}") from error

    def check_ranges(self, least: float, bound: float, *names: str) -> None:
        """Refuse settings that are not at least `least` and below `bound`."""
        for name in names:
            check_range(getattr(self, name), name, least, bound)

    @property
    def captures_steps(self) -> bool:
        """Whether training steps are captured as a CUDA graph."""
        return False

    def rate_at(self, epoch: float) -> float:
        """Return the learning rate after `epoch` epochs, which may be a fraction."""
        if epoch < self.warmup:
            return self.learning_rate * epoch / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        share = (epoch - self.warmup) / (self.epochs - self.warmup)
        if self.schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * 0.1 ** sum(share >= drop for drop in _STEP_AT)

    def make_optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of all parameters of a network, trained or not."""
        matrices = orthogonal_weights(net)
        needed = [ORTHOGONAL] if matrices else ["sgd", "adamw"]
        expected = f"{' or '.join(map(repr, needed))} for a {type(net).__name__}"
        require(self.optimizer in needed, "optimizer", expected, repr(self.optimizer))
        # A fused kernel runs over contiguous memory. For a parameter that is a view, such as some
        # columns of a matrix, it would change the numbers in between.
        dense = all(
            weight.stride() == torch.empty_like(weight, device="meta").stride()
            for weight in net.parameters()
        )
        fused = dense and torch.device(self.device).type in ("cpu", "cuda")
        common: dict[str, Any] = {"weight_decay": self.weight_decay, "fused": fused}
        groups = self.parameter_groups(net)
        common["lr"] = self.learning_rate
        if self.captures_steps:  # a CUDA graph reads the rate from a tensor
            common["lr"] = torch.tensor(self.learning_rate, device=self.device)
        if self.optimizer == "sgd":
            common |= {"momentum": self.momentum, "nesterov": self.nesterov}
            return torch.optim.SGD(groups, **common)
        common |= {"betas": (self.momentum, 0.999), "capturable": self.captures_steps}
        if not matrices:
            return torch.optim.AdamW(groups, **common)
        apart = {*map(id, matrices)}
        for group in groups:
            group["params"] = [one for one in group["params"] if id(one) not in apart]
        return OrthogonalMuon(groups, matrices, **common)

    def parameter_groups(self, net: nn.Module) -> list[dict[str, Any]]:
        """Return one group of parameters, or two if `decay_on` is "matrices".

        Biases, scales of normalization, position embeddings and class tokens are not decayed
        then."""
        if self.decay_on == "all":
            return [{"params": list(net.parameters())}]
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in net.named_parameters():
            is_matrix = parameter.dim() > 1 and name.rpartition(".")[2] not in _UNDECAYED
            parts[is_matrix].append(parameter)
        return [{"params": parts[True]}, {"params": parts[False], "weight_decay": 0.0}]


def check_seed(seed: int) -> int:
    return check_count(seed, "seed", least=0, most=MAX_SEED)


def check_range(value: object, name: str, least: float, bound: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    expected = f"a number of at least {least:g} and below {bound:g}"
    require(number and least <= value < bound, name, expected, repr(value))  # type: ignore[operator]


def check_share(value: object, name: str) -> None:
    share = isinstance(value, int | float) and 0 <= value <= 1
    require(share, name, "a number from 0 to 1", repr(value))
