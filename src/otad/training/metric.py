"""Training a metric, so that the nearest keys of an input belong to inputs of its class.

An adversary may perturb the inputs, as attacks on the choice of neighbors do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_choice, check_count, check_shape, check_tensor, require
from otad.nets.base import Metric
from otad.nets.inputs import evaluating
from otad.training import metric_losses
from otad.training.acceleration import precision
from otad.training.adversary import Adversary, perturbed_weights
from otad.training.config import check_range
from otad.training.loop import Batches
from otad.training.supervised import (
    Data,
    InputConfig,
    Progress,
    SupervisedTraining,
    TrainResult,
    parts_of,
)

_ENCODED_ROWS = 1024  # rows that are encoded at a time


@dataclass(frozen=True)
class MetricConfig(InputConfig):
    """The settings of `train_metric`.

    Parameters
    ----------
    loss : str
        "neighborhood", "means" (of the classes), "triplet" (semi-hard) or "contrastive".
    margin : float or None
        The margin of the loss. If None, the usual one.
    temperature : float
        The temperature of the losses "neighborhood" and "means".
    references : str
        Among which keys neighbors are searched: those of the "batch", or a "bank" of the keys of
        all training inputs. The bank is computed before every epoch and updated in every step.
        With `bank_rows` the bank has those rows only and is fixed during an epoch.
    n_neighbors : int
        The number of votes for the score on validation data.
    adversary : Adversary or None
        Perturbs each input by ascent on the neighborhood loss, whatever the loss.
    epochs, batch_size, learning_rate, optimizer, ...
        As in `TrainConfig`, with other defaults.

    Examples
    --------
    >>> from otad.training import MetricConfig
    >>> config = MetricConfig(epochs=5, loss="means")
    >>> config.optimizer, config.margin_used
    ('adamw', 0.5)
    """

    epochs: int = 40
    batch_size: int = 512
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    whole_batches: bool = True
    loss: str = "neighborhood"
    margin: float | None = None
    temperature: float = 0.1
    references: str = "batch"
    n_neighbors: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.loss, "loss", tuple(metric_losses.LOSSES))
        check_choice(self.references, "references", ("batch", "bank"))
        check_count(self.n_neighbors, "n_neighbors")
        check_count(self.batch_size, "batch_size", least=2)
        in_batch, got = self.references == "batch", f"{self.loss!r} with {self.references!r}"
        # Steps with a bank synchronize with the GPU.
        require(in_batch or not self.cuda_graph, "cuda_graph", "references 'batch'", got)
        # The other losses have too many pairs with a whole bank.
        fits = in_batch or self.loss == "neighborhood"
        require(fits, "references", "'batch' unless for the loss 'neighborhood'", got)
        check_range(self.temperature, "temperature", 1e-12, math.inf)
        check_range(self.margin_used, "margin", 0.0, math.inf)

    @property
    def margin_used(self) -> float:
        """The margin that is used: `margin`, or the usual one of the loss."""
        return metric_losses.LOSSES[self.loss] if self.margin is None else self.margin


@torch.inference_mode(False)  # gradients work in inference mode too
def train_metric(
    metric: Metric, data: Data, config: MetricConfig, *, progress: Progress = None, **options: Any
) -> TrainResult:
    """Train a metric in place and leave it on `config.device` in evaluation mode.

    The processes of a process group share every batch, as in `train`.

    Parameters
    ----------
    metric : Metric
        The network.
    data, progress, **options
        As in `train`. Targets are class labels.
    config : MetricConfig
        The settings.
    bank_rows : Tensor (R,) or None
        The training rows, int64, that are the bank of the model that uses the metric. It needs
        `references="bank"`. Then the metric is trained on the soft vote of these points alone,
        which is the vote that answers.

    Returns
    -------
    TrainResult
        A record of every epoch. The training score is the share of inputs whose nearest reference
        belongs to their class; with an adversary, score and loss are taken at perturbed inputs and
        weights. The validation score is the accuracy of a vote among the nearest training keys. The
        energy is 0.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.training import MetricConfig, train_metric
    >>> x = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    >>> y = (x.mean((1, 2, 3)) > 0.5).long()
    >>> metric = otad.nets.CNNMetric((1, 4, 4), widths=(2, 2), key_dim=3)
    >>> result = train_metric(metric, (x, y), MetricConfig(epochs=2, batch_size=20))
    >>> len(result.history), result.final.energy
    (2, 0.0)
    """
    return MetricTraining(metric, data, config, **options).fit(progress)


@torch.no_grad()
def encode(metric: Metric, x: Tensor) -> Tensor:
    """Return the keys (N,m) of inputs (N,*input_shape), bytes or floats, in evaluation mode."""
    with evaluating(metric):
        return torch.cat([metric(metric.from_bytes(batch)) for batch in x.split(_ENCODED_ROWS)])


@torch.no_grad()
def neighbor_accuracy(
    keys: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, *, n_neighbors: int
) -> float:
    """Return the share of keys (B,m) whose nearest references (R,m) vote for their label."""
    votes = []
    for some in keys.split(_ENCODED_ROWS):
        lengths = metric_losses.squared_distances(some, references)
        nearest = lengths.topk(min(n_neighbors, len(references)), largest=False).indices
        votes.append(reference_labels[nearest].mode(1).values)
    return float((torch.cat(votes) == labels).double().mean())


def places_of(bank_rows: Tensor, labels: Tensor) -> Tensor:
    """Return the place (N,) of each training row in the bank of these rows (R,), or -1.

    The bank must have at least two points of each class, so that a point of the bank itself has a
    neighbor of its class."""
    check_tensor(bank_rows, "bank_rows", "R", dtypes=(torch.int64,))
    check_tensor(labels, "train_y", "B", dtypes=(torch.int64,))
    rows, size = bank_rows.cpu(), len(labels)
    fits = int(rows.min()) >= 0 and int(rows.max()) < size and len(rows.unique()) == len(rows)
    require(fits, "bank_rows", f"different rows from 0 to {size - 1}", rows)
    own = labels.cpu()[rows]
    least = min(int((own == label).sum()) for label in labels.unique().tolist())
    require(least > 1, "bank_rows", "at least two points of each class", least)
    places = torch.full((size,), -1)
    places[rows] = torch.arange(len(rows))
    return places


class MetricTraining(SupervisedTraining[Metric]):
    config: MetricConfig
    shares_batches = True

    def __init__(
        self,
        net: Metric,
        data: Data,
        config: MetricConfig,
        *,
        bank_rows: Tensor | None = None,
        **options: Any,
    ) -> None:
        self.loss = metric_losses.make_loss(config.loss, config.margin_used, config.temperature)
        self.bank: Tensor | None = None
        if bank_rows is not None:
            is_bank = config.references == "bank"
            require(is_bank, "references", "'bank' for bank_rows", repr(config.references))
            labels = parts_of(data)["train_y"]
            options["more"] = {"places": places_of(bank_rows, labels)}
        super().__init__(net, data, config, **options)
        self.places = self.data.get("places")
        self.members = torch.arange(self.n_rows, device=self.device)
        if self.places is not None:  # in the order of their places
            self.members = self.places.argsort()[-int(self.places.max() + 1) :]

    def check_targets(self, net: Metric, y: Tensor, rows: int, name: str) -> None:
        least = int(check_tensor(y, name, "B", dtypes=(torch.int64,)).min())
        check_shape(y, name, (rows,), "with one label per input")
        require(least >= 0, name, "labels from 0", least)

    def batches(self, row_batches: Sequence[Tensor], generator: torch.Generator) -> Batches:
        """Yield inputs, labels, rows, and the inputs from which the adversary starts."""
        data = self.data
        if self.config.references == "bank":
            self.bank = self._encode_bank(self.weights.net).float()  # as in a step
        for number, rows in enumerate(row_batches):
            x, y = self.weights.net.from_bytes(data["train_x"][rows]), data["train_y"][rows]
            if self.augment is not None:
                x = self.augment(x, generator)
            x = self.laid_out(x)
            yield x, y, rows, self.begin_attack(x, number / len(row_batches), generator)

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        """Take one gradient step and return the batch means of loss, energy (0) and score (3,)."""
        x, y, rows, start = batch  # keys are compared with those of the whole batch
        x, start = map(self.processes.share_rows, (x, start))
        perturbed, adversary = x, self.config.adversary
        if adversary is not None:
            perturbed = self._attack(adversary, x, y, rows, start)
        with perturbed_weights(
            self.weight_perturbation(lambda: self._compare(perturbed, x, y, rows)[0])
        ):
            value, (keys, clean) = self._compare(perturbed, x, y, rows)
            self.backward(value)
        self.update(first=first)
        with torch.no_grad():
            references, labels, own = self._references(clean, y, rows)
            lengths = metric_losses.squared_distances(keys, references)
            places = torch.arange(len(references), device=own.device)
            lengths.masked_fill_(own[:, None] == places, math.inf)
            nearest = lengths.min(1)
            right = (labels[nearest.indices] == y) & nearest.values.isfinite()
            if self.bank is not None and self.places is None:
                self.bank[rows] = clean
        score = right.float().mean()
        return torch.stack([value.detach(), torch.zeros_like(score), score])

    def _compare(
        self, perturbed: Tensor, x: Tensor, y: Tensor, rows: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the loss of perturbed inputs among clean ones, and the keys (B,m) of both.

        The inputs are the share of this process, and all else is that of the whole batch. A bank of
        given rows needs no keys of clean inputs."""
        metric = self.weights.net
        only_one = perturbed is x or self.places is not None
        with precision(self.device, mixed=self.config.mixed_precision):
            # In one pass, so that the statistics of a batch include both.
            inputs = perturbed if only_one else torch.cat([perturbed, x])
            found = self.processes.gather_rows(metric(inputs).float(), len(y))
            keys, clean = (found, found) if only_one else found.chunk(2)
        return self.loss(keys, y, *self._references(clean, y, rows)), (keys, clean)

    def _attack(
        self, adversary: Adversary, x: Tensor, y: Tensor, rows: Tensor, start: Tensor
    ) -> Tensor:
        """Return inputs that are perturbed to get wrong neighbors by the current metric."""
        metric, temperature = self.weights.net, self.config.temperature
        with precision(self.device, mixed=self.config.mixed_precision):
            clean = x
            if self.places is None:
                with evaluating(metric):  # with `no_grad` autocast would cache its casts
                    clean = metric(x).float().detach()
                clean = self.processes.gather_rows(clean, len(y))
            references, labels, own = self._references(clean, y, rows)
            share = self.processes.share_rows
            among = share(y), references, labels, share(own)

            def loss(keys: Tensor) -> Tensor:
                keys = keys.float()
                return metric_losses.neighborhood_loss(keys, *among, temperature=temperature)

            return adversary.attack(self.ball, metric, x, loss, start)

    def _references(self, clean: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys to search neighbors in, their labels, and the place of each row."""
        if self.bank is None:
            return clean, y, torch.arange(len(y), device=y.device)
        labels = self.data["train_y"]
        if self.places is not None:
            return self.bank, labels[self.members], self.places[rows]
        # The keys of the batch replace their copies in the bank, which have no gradients.
        return self.bank.index_copy(0, rows, clean), labels, rows

    def _encode(self, metric: Metric, x: Tensor) -> Tensor:
        """Return the keys (N,m) of inputs."""
        return self.processes.gather_rows(encode(metric, self.processes.share_rows(x)), len(x))

    def _encode_bank(self, metric: Metric) -> Tensor:
        """Return the keys of the training inputs among which neighbors are searched."""
        x = self.data["train_x"]
        return self._encode(metric, x if self.places is None else x[self.members])

    def validate(self) -> float | None:
        data, metric = self.data, self.weights.best
        if "val_x" not in data:
            return None
        held_out = self._encode(metric, data["val_x"]), data["val_y"]
        known = self._encode_bank(metric), data["train_y"][self.members]
        return neighbor_accuracy(*held_out, *known, n_neighbors=self.config.n_neighbors)
