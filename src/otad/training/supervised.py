"""Training on inputs with targets: data, settings, records, and what all such trainings share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from otad.checks import check_choice, check_shape, check_tensor
from otad.errors import InputError
from otad.io.tensor_files import fingerprint
from otad.nets.inputs import InputNet
from otad.training.augmentation import AUGMENTATIONS, Augmentation, choose_augmentation
from otad.training.checkpoint import stable_repr
from otad.training.config import LoopConfig, available_device
from otad.training.loop import Saving, Training

METRICS = {"classification": "accuracy", "regression": "mse"}
AnyInputNet = TypeVar("AnyInputNet", bound=InputNet)
_PARTS = ("train_x", "train_y", "val_x", "val_y")
_WHITE = 255


@dataclass(frozen=True)
class InputConfig(LoopConfig):
    """Settings of trainings on inputs, which may be images.

    - `augment`: a name of `otad.training.augmentation.AUGMENTATIONS`.
    - `cuda_graph`: on a GPU, capture one step of AdamW on whole batches as a CUDA graph and replay
      it, so that the host launches one graph per step. Without effect on other devices.
    """

    augment: str = "none"
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.augment, "augment", tuple(AUGMENTATIONS))
        if self.cuda_graph and (self.optimizer != "adamw" or not self.whole_batches):
            raise InputError(
                "cuda_graph: expected only with optimizer 'adamw' and whole_batches, got "
                f"{self.optimizer!r} and whole_batches={self.whole_batches}"
            )

    @property
    def captures_steps(self) -> bool:
        return self.cuda_graph and torch.device(self.device).type == "cuda"


@dataclass(frozen=True)
class EpochRecord:
    """Means over the training batches of one epoch, and the score on the validation data after it.

    A score is the accuracy, or for regression the mean squared error. `seconds` is 0 for an epoch
    read from a checkpoint: files contain nothing that differs from run to run.
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
    """`metric` names the scores; `resumed_after` is the last epoch read from a checkpoint, 0 for
    none; `epochs` is the number asked for, of which a run that ran out of time has fewer."""

    history: tuple[EpochRecord, ...]
    metric: str
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)

    @property
    def final(self) -> EpochRecord:
        return self.history[-1]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done; if not, the same call resumes."""
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


class SupervisedTraining(Training[AnyInputNet, EpochRecord]):
    """A training on inputs with targets, whose tensors are all on the device."""

    record_type: ClassVar[type] = EpochRecord
    metric = "accuracy"

    def __init__(
        self,
        net: AnyInputNet,
        data: Split | Sequence[Tensor],
        config: InputConfig,
        *,
        augment: Augmentation | None,
        checkpoint_dir: str | Path | None,
        save_seconds: float,
        max_seconds: float | None,
    ) -> None:
        parts = parts_of(data)
        for kind in ("train", "val")[: len(parts) // 2]:
            inputs = check_stored(net, parts[f"{kind}_x"], f"{kind}_x")
            self.check_targets(net, parts[f"{kind}_y"], len(inputs), f"{kind}_y")
        labels = parts["train_y"]
        if not labels.is_floating_point() and bool((labels == labels[0]).all()):
            raise InputError(
                f"train_y: expected at least two classes, got only the label {int(labels[0])}"
            )
        self.augment = choose_augmentation(config.augment, augment, net)

        def identity() -> dict[str, Any]:
            return {
                "augment": None if augment is None else stable_repr(augment),
                "data": {name: fingerprint({name: tensor}) for name, tensor in parts.items()},
            }

        saving = Saving(checkpoint_dir, save_seconds, max_seconds)
        super().__init__(net, config, saving, available_device(config.device), identity)
        self.data = {name: tensor.detach().to(self.device) for name, tensor in parts.items()}

    @abstractmethod
    def check_targets(self, net: AnyInputNet, y: Tensor, rows: int, name: str) -> None:
        """Refuse targets (rows,) that the net cannot learn."""

    @property
    def n_rows(self) -> int:
        return len(self.data["train_x"])

    def record(
        self, epoch: int, means: Sequence[float], score: float | None, seconds: float
    ) -> EpochRecord:
        loss, energy, train_score = means
        return EpochRecord(epoch, loss, energy, train_score, score, seconds)

    def fit(self, progress: Report | bool) -> TrainResult:
        self.run(progress)
        return TrainResult(tuple(self.history), self.metric, self.resumed_after, self.config.epochs)


class Split(Protocol):
    """Training inputs (N,*input_shape) and targets (N,); optionally `val_x` and `val_y` too."""

    @property
    def train_x(self) -> Tensor: ...
    @property
    def train_y(self) -> Tensor: ...


def parts_of(data: Split | Sequence[Tensor]) -> dict[str, Tensor]:
    """train_x, train_y and, where given, val_x and val_y, unchecked."""
    found: dict[str, Tensor | None]
    if isinstance(data, Sequence):
        found = dict(zip((*_PARTS, "more"), data, strict=False))
    else:
        found = {name: getattr(data, name, None) for name in _PARTS}
    parts = {name: part for name, part in found.items() if part is not None}
    if tuple(parts) not in (_PARTS[:2], _PARTS):
        raise InputError(
            f"data: expected {', '.join(_PARTS[:2])} or {', '.join(_PARTS)}, "
            f"got {', '.join(parts) or type(data).__name__}"
        )
    return parts


def check_stored(net: InputNet, x: Tensor, name: str) -> Tensor:
    """Inputs of the net, as floats or as bytes in a quarter of the memory (see `to_inputs`)."""
    if not isinstance(x, Tensor) or x.dtype != torch.uint8:
        return net.check_inputs(x, name)
    if net.bounds is None:
        raise InputError(f"{name}: expected floats for a net without bounds, got uint8")
    axes = ",".join(["B", *(str(size) for size in net.input_shape)])
    levels = check_tensor(x, name, axes, dtypes=(torch.uint8,), finite=False)
    check_shape(levels, name, (len(levels), *net.input_shape), "as the net declares")
    return levels


def to_inputs(x: Tensor, net: InputNet) -> Tensor:
    """Bytes 0 to 255 spread over the bounds of the net; floats unchanged."""
    if x.dtype != torch.uint8 or net.bounds is None:
        return x
    low, high = net.bounds
    return low + (high - low) * (x.to(net.mean.dtype) / _WHITE)
