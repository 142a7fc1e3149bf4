"""What every training run has: weights and optimizer, data on the device, a checkpoint, epochs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Generic

import torch
from torch import Tensor

from otad.errors import InputError
from otad.transport.augment import Augmentation
from otad.transport.average import AnyNet, Averaged
from otad.transport.history import EpochRecord, Report, reporting
from otad.transport.policies import choose_augmentation, describe_augmentation
from otad.transport.recipe import TrainConfig, present_device
from otad.transport.resume import CHECKPOINT_NAME, resume, run_identity, save
from otad.transport.weight_decay import decay_groups

_log = logging.getLogger("otad")


@dataclass(frozen=True)
class Limits:
    """When a run saves itself and when it stops, which changes nothing in what it learns.

    After an epoch it is saved if the last time is `save_seconds` ago, and always at the end. It
    stops early, after one epoch at least, when another one as long would end `max_seconds` after
    the run began.
    """

    save_seconds: float = 0.0
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.save_seconds >= 0:
            raise InputError(f"save_seconds: expected a number from 0, got {self.save_seconds!r}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InputError(f"max_seconds: expected a positive number, got {self.max_seconds!r}")


class Session(Generic[AnyNet]):
    """A run on checked data, taken up from `checkpoint_dir` where it was left.

    The net is moved to the device; `history` holds the records of the epochs done.
    """

    def __init__(
        self,
        net: AnyNet,
        data: Mapping[str, Tensor],
        config: TrainConfig,
        *,
        augment: Augmentation | None,
        checkpoint_dir: str | Path | None,
        limits: Limits,
    ) -> None:
        self.started = monotonic()
        self.config, self.limits = config, limits
        if checkpoint_dir is None and limits.max_seconds is not None:
            raise InputError(
                "max_seconds: expected with a checkpoint_dir to go on from, got "
                f"{limits.max_seconds} without"
            )
        self.augment = choose_augmentation(config.augment, augment, net)
        device = present_device(config.device)
        self.path = None if checkpoint_dir is None else Path(checkpoint_dir) / CHECKPOINT_NAME
        self.identity: dict[str, Any] = {}
        if self.path is not None:
            self.identity = run_identity(net, data, config, describe_augmentation(augment))
        self.run = Averaged(net, config.ema).to(device)
        self.optimizer = config.make_optimizer(decay_groups(net, config))
        self.history: list[EpochRecord] = []
        if self.path is not None and self.path.exists():
            self.history = resume(self.path, self.identity, self.run, self.optimizer)
        self.data = {name: tensor.to(device) for name, tensor in data.items()}

    def run_epochs(self, run_epoch: Callable[[int], EpochRecord], progress: Report | bool) -> None:
        """All epochs still to do, as far as the limits let it; the net then has what remains."""
        now = saved_at = monotonic()
        epochs = self.config.epochs
        with reporting(progress, epochs, len(self.history)) as report:
            for epoch in range(len(self.history) + 1, epochs + 1):
                began = now
                record = run_epoch(epoch)
                self.history.append(record)
                now = monotonic()
                is_last = epoch == epochs or self._is_out_of_time(now, now - began)
                if is_last or now - saved_at >= self.limits.save_seconds:
                    self._save()
                    saved_at = now = monotonic()
                if is_last or epoch % self.config.log_every == 0:
                    _log.info("%s", record)
                report(record)
                if is_last:
                    break
        self.run.net.load_state_dict(self.run.best.state_dict())
        self.run.net.eval()

    def step(self, loss: Tensor, *, first: bool) -> None:
        """Follow the gradient of the loss; `first` for the first step of all."""
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.gradient_clip > 0:
            parameters = self.run.net.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, self.config.gradient_clip)
        self.optimizer.step()
        self.run.update(first=first)

    def set_rate(self, epoch: float) -> None:
        """The learning rate after so many epochs, fractions included."""
        rate = self.config.rate_at(epoch)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def precision(self) -> torch.autocast:
        """Within it, layers compute as the config says."""
        device = torch.device(self.config.device).type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.mixed_precision)

    def refuse_divergence(self, loss: float, epoch: int) -> None:
        """A loss or weights that are no numbers any more."""
        total = torch.stack([weight.detach().sum() for weight in self.run.net.parameters()]).sum()
        if not math.isfinite(loss + float(total)):
            raise InputError(
                "learning_rate: expected one at which training converges, got "
                f"{self.config.learning_rate}, which made loss or weights infinite in epoch {epoch}"
            )

    def _save(self) -> None:
        if self.path is not None:
            save(self.path, self.identity, self.run, self.optimizer, self.history)

    def _is_out_of_time(self, now: float, lap: float) -> bool:
        limit = self.limits.max_seconds
        return limit is not None and now + lap > self.started + limit
