"""Training a metric, so that an input's nearest keys are those of its class; on demand against an
adversary that moves the input, which is how a defense by neighbors is attacked."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.checks import check_shape, check_tensor
from otad.errors import InputError
from otad.nets.metric import Metric
from otad.nets.probe import evaluating
from otad.training.adversary import Adversary
from otad.training.augment import Augmentation
from otad.training.cuda_graph import Step
from otad.training.epochs import Saving, means_over_rows
from otad.training.history import EpochRecord, Report, TrainResult
from otad.training.metric_config import MetricConfig
from otad.training.metric_losses import Loss, make_loss, neighborhood_loss, squared_distances
from otad.training.randomness import epoch_batches, epoch_seed, own_randomness
from otad.training.session import Session
from otad.training.train_split import Split, parts_of, refuse_one_class
from otad.training.weight_shift import Shifts, shifted, steepest_shifts

_ENCODED_ROWS = 1024


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def train_metric(
    metric: Metric,
    data: Split | Sequence[Tensor],
    config: MetricConfig,
    *,
    augment: Augmentation | None = None,
    checkpoint_dir: str | Path | None = None,
    save_seconds: float = 0.0,
    max_seconds: float | None = None,
    progress: Report | bool = False,
) -> TrainResult:
    """Train `metric` in place, leaving it on `config.device` in evaluation mode.

    Arguments are those of `train`, with class labels and inputs as floats. A record's train score
    is the share of inputs whose nearest reference is of their class; score and loss are measured
    on what the adversary moved, if there is one, inputs and weights. Its validation score is the
    accuracy of a vote among the nearest training keys. Its energy is 0.
    """
    tensors = _check_data(metric, data)
    if config.replayed and not metric.is_recordable:
        kind = type(metric).__name__
        raise InputError(f"replayed: expected False for a {kind}, which no GPU can record")
    loss = make_loss(config.loss, config.margin_used, config.temperature)
    saving = Saving(checkpoint_dir, save_seconds, max_seconds)
    session = Session(metric, tensors, config, saving, augment)
    trainer = _Trainer(session, config, loss)
    step = session.recorded(trainer.step)
    return session.run_epochs(lambda epoch: trainer.run_epoch(epoch, step), progress, "accuracy")


@torch.no_grad()
def encode(metric: Metric, x: Tensor) -> Tensor:
    """Keys (N,m) of inputs (N,*input_shape) in evaluation mode, by batches."""
    with evaluating(metric):
        return torch.cat([metric(batch) for batch in x.split(_ENCODED_ROWS)])


@torch.no_grad()
def neighbor_accuracy(
    keys: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, *, n_neighbors: int
) -> float:
    """Share of keys (B,m) whose nearest references (R,m) vote for their label."""
    hits = []
    classes, codes = reference_labels.unique(return_inverse=True)
    for some, right in zip(keys.split(_ENCODED_ROWS), labels.split(_ENCODED_ROWS), strict=True):
        lengths = squared_distances(some, references)
        voters = codes[lengths.topk(min(n_neighbors, len(references)), largest=False).indices]
        votes = voters.new_zeros(len(some), len(classes))
        votes.scatter_add_(1, voters, torch.ones_like(voters))
        hits.append(classes[votes.argmax(1)] == right)
    return float(torch.cat(hits).double().mean())


@dataclass
class _Trainer:
    session: Session[Metric]
    config: MetricConfig
    loss: Loss
    bank: Tensor | None = None

    def run_epoch(self, epoch: int, step: Step) -> EpochRecord:
        started = time.perf_counter()
        x, config = self.session.data["train_x"], self.config
        seed = epoch_seed(config.seed, epoch)
        batches = epoch_batches(len(x), config, epoch, x.device)
        if config.references == "bank":
            self.bank = encode(self.session.run.net, x).float()  # as in a step
        generator = torch.Generator(x.device).manual_seed(seed)
        self.session.run.net.train()
        sizes: list[int] = []
        means: list[Tensor] = []  # on the device: reading one in every step would stall a GPU
        with own_randomness(x.device, seed):
            for number, rows in enumerate(batches):
                self.session.set_rate(epoch - 1 + (number + 0.5) / len(batches))
                batch = self._batch(rows, generator)
                means.append(step(*batch, first=epoch == 1 and number == 0))
                sizes.append(len(rows))
        loss, train_score = means_over_rows(means, sizes)
        self.session.refuse_divergence(loss, epoch)
        seconds = time.perf_counter() - started
        return EpochRecord(epoch, loss, 0.0, train_score, self._validate(), seconds)

    def _batch(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs, labels, rows, and where an adversary sets out from: all that is drawn is drawn
        here."""
        adversary = self.config.adversary
        x, y = self.session.data["train_x"][rows], self.session.data["train_y"][rows]
        if self.session.augment is not None:
            x = self.session.augment(x, generator)
        if self.config.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y, rows, x if adversary is None else adversary.start(x, generator)

    def step(self, x: Tensor, y: Tensor, rows: Tensor, start: Tensor, *, first: bool) -> Tensor:
        """One gradient step; the batch means of loss and score, (2,)."""
        moved, adversary, shifts = x, self.config.adversary, Shifts()
        if adversary is not None:
            moved = self._attack(adversary, x, y, rows, start)
            if adversary.weight_share > 0:
                value, _ = self._compare(moved, x, y, rows)
                shifts = steepest_shifts(value, self.session.run.net, adversary.weight_share)
        with shifted(shifts):
            value, (keys, clean) = self._compare(moved, x, y, rows)
            self.session.backward(value)
        self.session.follow(first=first)
        with torch.no_grad():
            references, labels, own = self._references(clean, y, rows)
            lengths = squared_distances(keys, references)
            lengths.scatter_(1, own[:, None], math.inf)
            nearest = lengths.min(1)
            right = (labels[nearest.indices] == y) & nearest.values.isfinite()
            if self.bank is not None:
                self.bank[rows] = clean
        return torch.stack([value.detach(), right.float().mean()])

    def _compare(
        self, moved: Tensor, x: Tensor, y: Tensor, rows: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss of inputs that may be moved among those that are not, and the keys of both."""
        metric = self.session.run.net
        with self.session.precision():
            if moved is x:
                keys = clean = metric(x).float()
            else:
                # In one pass, so that batch statistics are those of both.
                keys, clean = metric(torch.cat([moved, x])).float().chunk(2)
        return self.loss(keys, y, *self._references(clean, y, rows)), (keys, clean)

    def _attack(
        self, adversary: Adversary, x: Tensor, y: Tensor, rows: Tensor, start: Tensor
    ) -> Tensor:
        """Inputs moved to where their neighbors by the current metric are wrong."""
        metric, temperature = self.session.run.net, self.config.temperature
        with self.session.precision():
            with evaluating(metric):
                clean = metric(x).float().detach()  # not `no_grad`: autocast would keep its casts
            references, labels, own = self._references(clean, y, rows)

            def wrongness(keys: Tensor) -> Tensor:
                return neighborhood_loss(
                    keys, y, references, labels, temperature=temperature, own=own
                )

            return adversary.attack(metric, x, wrongness, start)

    def _references(self, clean: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys among which neighbors are sought, their labels, and each row's own place there."""
        if self.bank is None:
            return clean, y, torch.arange(len(y), device=y.device)
        # The batch's own keys are put in afresh: they have gradients, those of the bank do not.
        return self.bank.index_copy(0, rows, clean), self.session.data["train_y"], rows

    def _validate(self) -> float | None:
        if "val_x" not in self.session.data:
            return None
        keys = encode(self.session.run.best, self.session.data["val_x"])
        references = encode(self.session.run.best, self.session.data["train_x"])
        return neighbor_accuracy(
            keys,
            self.session.data["val_y"],
            references,
            self.session.data["train_y"],
            n_neighbors=self.config.n_neighbors,
        )


def _check_data(metric: Metric, data: Split | Sequence[Tensor]) -> dict[str, Tensor]:
    """All parts, fit for the metric."""
    parts = parts_of(data)
    for kind in ("train", "val")[: len(parts) // 2]:
        inputs = metric.check_inputs(parts[f"{kind}_x"], f"{kind}_x")
        labels = check_tensor(parts[f"{kind}_y"], f"{kind}_y", "B", dtypes=(torch.int64,))
        check_shape(labels, f"{kind}_y", (len(inputs),), "with one label per input")
        if int(labels.min()) < 0:
            raise InputError(f"{kind}_y: expected labels from 0, got {int(labels.min())}")
    refuse_one_class(parts["train_y"])
    return parts
