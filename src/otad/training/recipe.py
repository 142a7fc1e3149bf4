"""How a backbone is trained: the settings, the learning rate of each step, the optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.training.objectives import OBJECTIVES
from otad.training.policies import AUGMENTATIONS

MOST_SEED = 2**64 - 1  # what the generators of torch take
_STEP_AT = (0.5, 0.75)  # shares of the training after which "step" divides the rate by ten


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run; the optimizer's defaults are the paper's.

    The objective per batch is mean loss + `energy_weight` * mean energy (the paper's alpha, for
    means instead of sums). `momentum` is AdamW's first beta. `warmup` epochs raise the rate
    linearly from zero; then "cosine" lowers it to zero, "step" divides it by ten after 1/2 and 3/4.
    Every `log_every` epochs one line goes to the `otad` logger. What else a net may need:

    - `decay_on`: weight decay on "all" parameters, or on the "matrices" of layers alone.
    - `gradient_clip`: gradients of all parameters together are no longer; 0 for any length.
    - `loss`: a name of `OBJECTIVES`; `label_smoothing` is the share of a label that all classes
      divide, `target_margin` what the loss "margin" wants of (o_y - o_j) / |w_y - w_j|.
    - `pair_weight`: of what the pairs of a batch violate a convex potential of `pair_smoothness`
      by (`pair_excess`), added to the objective.
    - `augment`: a name of `AUGMENTATIONS`; `mixing` is the share of batches whose images and
      labels are mixed in pairs, by mixup or CutMix.
    - `ema`: decay of a running average of all weights, which is what remains; 0 for none.
    - `mixed_precision` computes in bfloat16 all but energies, losses and weights; scores too.
    - `compiled`: the net is fused by torch.compile, which takes a minute and needs a compiler.
    - `replayed`: a GPU records a step of AdamW once and then replays it whole, which spares the
      host its orders; with `whole_batches`. Elsewhere steps are taken as they come.
    - `whole_batches` leaves rows that fill no batch to other epochs.
    """

    epochs: int = 30
    batch_size: int = 128
    learning_rate: float = 0.05
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_on: str = "all"
    schedule: str = "cosine"
    warmup: float = 0.0
    gradient_clip: float = 0.0
    loss: str = "fit"
    energy_weight: float = 0.0
    label_smoothing: float = 0.0
    target_margin: float = 1.0
    pair_weight: float = 0.0
    pair_smoothness: float = 2.0
    augment: str = "none"
    mixing: float = 0.0
    ema: float = 0.0
    mixed_precision: bool = False
    compiled: bool = False
    replayed: bool = False
    whole_batches: bool = False
    seed: int = 0
    device: str = "cpu"
    log_every: int = 1

    losses: ClassVar[tuple[str, ...]] = tuple(OBJECTIVES)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "log_every"):
            check_count(getattr(self, name), name)
        check_seed(self.seed)
        check_choice(self.optimizer, "optimizer", ("sgd", "adamw"))
        check_choice(self.decay_on, "decay_on", ("all", "matrices"))
        check_choice(self.schedule, "schedule", ("cosine", "constant", "step"))
        check_choice(self.loss, "loss", self.losses)
        check_choice(self.augment, "augment", tuple(AUGMENTATIONS))
        for name in ("weight_decay", "energy_weight", "gradient_clip", "pair_weight"):
            check_range(getattr(self, name), name, 0.0, math.inf)
        for name in ("learning_rate", "target_margin", "pair_smoothness"):
            check_range(getattr(self, name), name, 1e-12, math.inf)
        for name in ("momentum", "label_smoothing", "ema"):
            check_range(getattr(self, name), name, 0.0, 1.0)
        if not isinstance(self.mixing, int | float) or not 0 <= self.mixing <= 1:
            raise InputError(f"mixing: expected a number from 0 to 1, got {self.mixing!r}")
        check_range(self.warmup, "warmup", 0.0, self.epochs)
        _check_device(self.device)
        if self.replayed and (self.optimizer != "adamw" or not self.whole_batches):
            raise InputError(
                "replayed: expected with optimizer 'adamw' and whole_batches alone, got "
                f"{self.optimizer!r} and whole_batches={self.whole_batches}"
            )

    @property
    def records_steps(self) -> bool:
        """Whether steps are recorded and replayed, which only a GPU can."""
        return self.replayed and torch.device(self.device).type == "cuda"

    def refuse_changed(self, names: Iterable[str], reason: str) -> None:
        """Settings that mean nothing in a training must be as they come."""
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in names and value != setting.default:
                raise InputError(
                    f"{setting.name}: expected {setting.default!r}, as {reason}, got {value!r}"
                )

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

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """On parameters, or on groups of them with settings of their own."""
        groups: list[Any] = list(parameters)
        fused = torch.device(self.device).type in ("cpu", "cuda") and _have_no_gaps(groups)
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                groups,
                lr=self.learning_rate,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                fused=fused,
            )
        rate: float | Tensor = self.learning_rate
        if self.records_steps:  # a record reads the rate from where it lies
            rate = torch.tensor(rate, device=self.device)
        return torch.optim.AdamW(
            groups,
            lr=rate,
            betas=(self.momentum, 0.999),
            weight_decay=self.weight_decay,
            capturable=self.records_steps,
            fused=fused,
        )


def _have_no_gaps(groups: list[Any]) -> bool:
    """Whether one kernel may go through all weights by address. It may not where one lies among
    other numbers, as columns cut out of a matrix do: it would change those."""
    parts = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    weights = itertools.chain.from_iterable(parts)
    return all(one.stride() == torch.empty_like(one, device="meta").stride() for one in weights)


def check_seed(seed: int) -> int:
    if check_count(seed, "seed", least=0) > MOST_SEED:
        raise InputError(f"seed: expected an integer of at most {MOST_SEED}, got {seed}")
    return seed


def check_range(value: object, name: str, least: float, bound: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < bound:
        raise InputError(
            f"{name}: expected a number of at least {least:g} and below {bound:g}, got {value!r}"
        )


def _check_device(name: str) -> None:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device: expected a device such as 'cpu', got {name!r}") from error


def present_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device: expected one that is present, got {name!r} without CUDA")
    return device
