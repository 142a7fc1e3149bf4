"""What a training run reports: one record per epoch, shown as it comes, kept for the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from otad.progress import bars

METRICS = {"classification": "accuracy", "regression": "mse"}


@dataclass(frozen=True)
class EpochRecord:
    """Means over one epoch's training batches, and the score on the validation data after it.

    A score is the accuracy, or for regression the mean squared error. `seconds` are 0 for an epoch
    taken over from a checkpoint: files hold nothing that differs from run to run.
    """

    epoch: int
    loss: float
    energy: float
    train_score: float
    val_score: float | None
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        validation = "" if self.val_score is None else f", validation {self.val_score:.4f}"
        return (
            f"epoch {self.epoch}: loss {self.loss:.4f}, energy {self.energy:.4g}, "
            f"train {self.train_score:.4f}{validation}"
        )


@dataclass(frozen=True)
class TrainResult:
    """`metric` names the scores; `resumed_after` is the epoch a checkpoint gave, 0 for none;
    `epochs` are all that were asked for, of which a run that was out of time has fewer."""

    history: tuple[EpochRecord, ...]
    metric: str
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)

    @property
    def final(self) -> EpochRecord:
        return self.history[-1]

    @property
    def finished(self) -> bool:
        """All epochs are done; if not, the same call goes on."""
        return len(self.history) >= self.epochs

    @property
    def best_epoch(self) -> int:
        """Best validation score, or without validation data the lowest training loss."""
        sign = -1.0 if self.metric == "accuracy" else 1.0
        best = min(
            self.history,
            key=lambda record: record.loss if record.val_score is None else sign * record.val_score,
        )
        return best.epoch


Report = Callable[[EpochRecord], None]


@contextmanager
def reporting(
    progress: Callable[[Any], None] | bool, epochs: int, done: int, label: str = "training"
) -> Iterator[Callable[[Any], None]]:
    """The caller's function of a record with its `epoch`, a progress bar on stderr for True, or
    nothing for False."""
    if callable(progress):
        yield progress
    elif progress:
        with bars() as bar:
            task = bar.add_task(label, total=epochs, completed=done)
            yield lambda record: bar.update(task, description=str(record), completed=record.epoch)
    else:
        yield lambda record: None
