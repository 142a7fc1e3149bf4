"""Training on inputs with targets: the data, the settings, and the records of epochs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from otad.checks import check_choice, check_device, check_shape, check_tensor, require
from otad.io.tensor_files import fingerprint
from otad.nets.inputs import InputNet
from otad.scores import score_text
from otad.short_repr import short_repr
from otad.threat import LpBall
from otad.training.adversary import Adversary, Perturbation, steepest_perturbation
from otad.training.augmentation import AUGMENTATIONS, Augmentation, choose_augmentation
from otad.training.checkpoint import stable_repr
from otad.training.config import LoopConfig
from otad.training.loop import Saving, Training

METRICS = {"classification": "accuracy", "regression": "mse"}
Net = TypeVar("Net", bound=InputNet)
_PARTS = ("train_x", "train_y", "val_x", "val_y")


@dataclass(frozen=True)
class InputConfig(LoopConfig):
    """Settings of a training on inputs, described in `otad.training.TrainConfig`."""

    augment: str = "none"
    adversary: Adversary | None = None
    channels_last: bool = False
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.augment, "augment", tuple(AUGMENTATIONS))
        known = isinstance(self.adversary, Adversary | None)
        require(known, "adversary", "an Adversary, or None", repr(self.adversary))
        constant = self.adversary is None or self.adversary.is_constant
        for fits, needed in (
            (self.whole_batches, "with whole_batches"),
            (constant, "with an adversary without warm-up"),
        ):
            require(fits or not self.cuda_graph, "cuda_graph", f"False unless {needed}", "True")

    @property
    def captures_steps(self) -> bool:
        return self.cuda_graph and torch.device(self.device).type == "cuda"


@dataclass(frozen=True)
class EpochRecord:
    """What is recorded about one epoch of training.

    Attributes
    ----------
    epoch : int
        The number of the epoch, from 1.
    loss, energy : float
        The means of the loss and of the transport energy over the training batches.
    train_score : float
        The mean score of the training batches: the accuracy from 0 to 1, or the mean squared error
        in regression.
    val_score : float or None
        The same on the validation data after the epoch, if there are any.
    seconds : float
        The duration. It is 0 for an epoch read from a checkpoint, because files contain nothing
        that differs from run to run.

    Examples
    --------
    >>> from otad.training import EpochRecord
    >>> record = EpochRecord(epoch=1, loss=0.5, energy=0.25, train_score=0.75, val_score=None)
    >>> record.text("accuracy")
    'epoch 1: loss 0.5000, energy 0.25, train 75.00%'
    """

    epoch: int
    loss: float
    energy: float
    train_score: float
    val_score: float | None
    seconds: float = field(default=0.0, compare=False)

    def text(self, metric: str) -> str:
        """Return the record in words; `metric` ("accuracy" or "mse") names its scores."""
        scores = {"train": self.train_score, "validation": self.val_score}
        parts = [f"loss {self.loss:.4f}", f"energy {self.energy:.4g}"]
        parts += [f"{k} {score_text(metric, v)}" for k, v in scores.items() if v is not None]
        return f"epoch {self.epoch}: {', '.join(parts)}"


@dataclass(frozen=True)
class TrainResult:
    """What a training returns: a record of every epoch.

    Attributes
    ----------
    history : tuple of EpochRecord
        One record for each epoch.
    metric : str
        What the scores are: "accuracy", or "mse" in regression.
    resumed_after : int
        The last epoch that was read from a checkpoint, or 0.
    epochs : int
        The number of epochs that was asked for. A run that ran out of time has fewer records.

    Examples
    --------
    >>> from otad.training import EpochRecord, TrainResult
    >>> history = EpochRecord(1, 0.5, 0.1, 0.7, 0.6), EpochRecord(2, 0.4, 0.1, 0.8, 0.5)
    >>> result = TrainResult(history, "accuracy", resumed_after=0, epochs=2)
    >>> result.finished, result.best_epoch, result.final.loss
    (True, 1, 0.4)
    """

    history: tuple[EpochRecord, ...]
    metric: str
    resumed_after: int = field(compare=False)
    epochs: int = field(default=0, compare=False)
    __repr__ = short_repr

    @property
    def final(self) -> EpochRecord:
        """The record of the last epoch."""
        return self.history[-1]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done. If not, the same call resumes the training."""
        return len(self.history) >= self.epochs

    @property
    def best_epoch(self) -> int:
        """The epoch with the best validation score, or without any the lowest training loss."""
        sign = -1.0 if self.metric == "accuracy" else 1.0
        each = [x.loss if x.val_score is None else sign * x.val_score for x in self.history]
        return self.history[each.index(min(each))].epoch


class Split(Protocol):
    """Any object with training inputs `train_x` (N, *input_shape) and targets `train_y` (N,).

    It may also have validation data `val_x` and `val_y`. The data sets of `otad.data` are such
    objects.

    Examples
    --------
    >>> import otad
    >>> split = otad.data.load("digits")
    >>> split.train_x.shape, split.train_y.shape
    (torch.Size([1437, 1, 8, 8]), torch.Size([1437]))
    """

    @property
    def train_x(self) -> Tensor:
        """The training inputs (N, *input_shape)."""
        ...

    @property
    def train_y(self) -> Tensor:
        """The targets (N,): labels (int64), or values."""
        ...


Data = Split | Sequence[Tensor]
Progress = Callable[[EpochRecord], None] | bool | None


class SupervisedTraining(Training[Net, EpochRecord]):
    config: InputConfig
    record_type: ClassVar[type] = EpochRecord
    ball: LpBall
    """The ball within which the adversary perturbs the current batch."""
    weight_share = 0.0

    def __init__(
        self,
        net: Net,
        data: Data,
        config: InputConfig,
        augment: Augmentation | None = None,
        more: Mapping[str, Tensor] | None = None,
        **saving: Any,
    ) -> None:
        """`more` holds further tensors with one row per training example, by name."""
        expected = f"False for a {type(net).__name__}, of which no graph can be captured"
        require(net.is_capturable or not config.cuda_graph, "cuda_graph", expected, "True")
        self.metric = METRICS[getattr(net, "task", "classification")]
        parts = parts_of(data)
        for x_name, y_name in (_PARTS[:2], _PARTS[2:])[: len(parts) // 2]:
            x = parts[x_name]
            # Inputs may stay bytes, which take a quarter of the memory.
            stored = torch.uint8 if isinstance(x, Tensor) and x.dtype == torch.uint8 else None
            fits = net.bounds is not None or stored is None
            require(fits, x_name, "floats for a net without bounds", stored)
            inputs = net.check_inputs(x, x_name, dtype=stored)
            self.check_targets(net, parts[y_name], len(inputs), y_name)
        labels = parts["train_y"]
        varied = labels.is_floating_point() or bool((labels != labels[0]).any())
        only = f"only the label {int(labels[0])}"
        require(varied, "train_y", "at least two classes", only)
        parts |= more or {}
        self.augment = choose_augmentation(config.augment, augment, net)

        def identity() -> dict[str, object]:
            prints = {name: fingerprint({name: tensor}) for name, tensor in parts.items()}
            return {"augment": None if augment is None else stable_repr(augment), "data": prints}

        super().__init__(net, config, Saving(**saving), check_device(config.device), identity)
        self.data = {name: tensor.detach().to(self.device) for name, tensor in parts.items()}

    @abstractmethod
    def check_targets(self, net: Net, y: Tensor, rows: int, name: str) -> None:
        """Refuse targets (rows,) that the network cannot learn."""

    @property
    def n_rows(self) -> int:
        return len(self.data["train_x"])

    def laid_out(self, x: Tensor) -> Tensor:
        """Return inputs in the memory layout that the config asks for on a GPU."""
        # On a CPU oneDNN 3.12 writes past its memory: github.com/uxlfoundation/oneDNN/issues/6035.
        if self.config.channels_last and x.is_cuda and x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        return x

    def begin_attack(self, x: Tensor, share: float, generator: torch.Generator) -> Tensor:
        """Return the adversary's first inputs for a batch x (B,*), after a share of an epoch."""
        adversary, epoch = self.config.adversary, len(self.history) + share
        if adversary is None:
            return x
        self.ball = adversary.ball(self.weights.net, epoch)
        self.weight_share = adversary.weight_share if epoch >= adversary.weight_warmup else 0.0
        return adversary.start(self.ball, x, generator)

    def weight_perturbation(self, loss: Callable[[], Tensor]) -> Perturbation:
        """Return what the adversary adds to the weights to raise the loss of the current batch."""
        if self.weight_share == 0:
            return []
        return steepest_perturbation(loss(), self.weights.net, self.weight_share, self.processes)

    def text(self, record: EpochRecord) -> str:
        return record.text(self.metric)

    def fit(self, progress: Progress) -> TrainResult:
        self.run(progress)
        return TrainResult(tuple(self.history), self.metric, self.resumed_after, self.config.epochs)


def parts_of(data: Data) -> dict[str, Tensor]:
    """Return train_x, train_y and, if there are any, val_x and val_y, by name and unchecked."""
    given: Sequence[Tensor | None] = (
        data if isinstance(data, Sequence) else [getattr(data, name, None) for name in _PARTS]
    )
    named = zip((*_PARTS, "more"), given, strict=False)
    parts = {name: part for name, part in named if part is not None}
    expected = f"{', '.join(_PARTS[:2])} or {', '.join(_PARTS)}"
    got = ", ".join(parts) or "none of them"
    require(tuple(parts) in (_PARTS[:2], _PARTS), "data", expected, got)
    return parts


def scaled_weights(weights: Tensor, rows: int) -> Tensor:
    """Return weights (rows,) of training examples in float64, scaled to a mean of 1."""
    check_tensor(weights, "weights", "N")
    check_shape(weights, "weights", (rows,), "with one for each training example")
    least = float(weights.min())
    require(least > 0, "weights", "positive numbers (leave out rows of weight 0)", least)
    shares = weights.double() / weights.double().max()  # at most 1, so that the sum is finite
    return shares / shares.mean()
