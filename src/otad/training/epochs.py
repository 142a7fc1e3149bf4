"""Epoch after epoch of any training: told of, saved now and then, and stopped in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from otad.errors import InputError
from otad.training.history import reporting
from otad.training.precision import precision
from otad.training.recipe import TrainConfig

AnyRecord = TypeVar("AnyRecord")
_log = logging.getLogger("otad")


@dataclass(frozen=True)
class Saving:
    """Where and when a run saves itself and when it stops, which changes nothing in what it learns.

    After an epoch it is saved in `folder` if the last time is `save_seconds` ago, and always at the
    end. It stops early, after one epoch at least, when another one as long would end `max_seconds`
    after the run began.
    """

    folder: str | Path | None = None
    save_seconds: float = 0.0
    max_seconds: float | None = None
    started: float = field(default_factory=lambda: monotonic(), init=False)

    def __post_init__(self) -> None:
        if not self.save_seconds >= 0:
            raise InputError(f"save_seconds: expected a number from 0, got {self.save_seconds!r}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InputError(f"max_seconds: expected a positive number, got {self.max_seconds!r}")
        if self.folder is None and self.max_seconds is not None:
            raise InputError(
                "max_seconds: expected with a checkpoint_dir to go on from, got "
                f"{self.max_seconds} without"
            )

    def path(self, name: str) -> Path | None:
        """The file of that name, if anything is saved at all."""
        return None if self.folder is None else Path(self.folder) / name

    def is_out_of_time(self, now: float, lap: float) -> bool:
        """Whether another epoch of so many seconds would end too late."""
        return self.max_seconds is not None and now + lap > self.started + self.max_seconds


def run_epochs(
    run_epoch: Callable[[int], AnyRecord],
    history: list[AnyRecord],
    config: TrainConfig,
    saving: Saving,
    save: Callable[[], None],
    progress: Callable[[AnyRecord], None] | bool,
    label: str = "training",
) -> None:
    """All epochs beyond those of the history, which grows, as far as the time reaches."""
    now = saved_at = monotonic()
    with (
        precision(config.device, mixed=False),  # whatever that of the caller is
        reporting(progress, config.epochs, len(history), label) as report,
    ):
        for epoch in range(len(history) + 1, config.epochs + 1):
            began = now
            record = run_epoch(epoch)
            history.append(record)
            now = monotonic()
            is_last = epoch == config.epochs or saving.is_out_of_time(now, now - began)
            if is_last or now - saved_at >= saving.save_seconds:
                save()
                saved_at = now = monotonic()
            if is_last or epoch % config.log_every == 0:
                _log.info("%s", record)
            report(record)
            if is_last:
                break


def means_over_rows(means: Sequence[Tensor], sizes: Sequence[int]) -> list[float]:
    """Means over all rows, from those (m,) of each batch and the rows it has."""
    rows = torch.tensor(sizes, dtype=torch.float64)
    totals = rows @ torch.stack(list(means)).cpu().double()
    return [float(mean) for mean in totals / rows.sum()]
