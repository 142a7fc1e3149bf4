"""Training a metric, so that an input's nearest keys are those of its class; on demand against an
adversary that moves the input, which is how a defense by neighbors is attacked."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from otad.checks import check_shape, check_tensor
from otad.errors import InputError
from otad.nets.metric import Metric
from otad.transport.adversary import Adversary
from otad.transport.history import EpochRecord, Report, TrainResult, reporting
from otad.transport.metric_config import MetricConfig
from otad.transport.metric_losses import Loss, make_loss, neighborhood_loss, squared_distances
from otad.transport.resume import resume, run_identity, save
from otad.transport.training import (
    CHECKPOINT_NAME,
    Split,
    epoch_seed,
    own_randomness,
    parts_of,
    present_device,
    refuse_one_class,
)

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""A batch of inputs within bounds -> one alike, drawn by a generator on the training device."""

_ENCODED_ROWS = 1024
_log = logging.getLogger("otad")


def train_metric(
    metric: Metric,
    data: Split | Sequence[Tensor],
    config: MetricConfig,
    *,
    augment: Augment | None = None,
    checkpoint_dir: str | Path | None = None,
    progress: Report | bool = False,
) -> TrainResult:
    """Train `metric` in place, leaving it on `config.device` in evaluation mode.

    `data` and `checkpoint_dir` are as in `train`, with class labels; all data are kept on the
    device. A record's train score is the share of inputs, moved by the adversary if there is one,
    whose nearest reference is of their class; its validation score is the accuracy of a vote among
    the nearest training keys. Its energy is 0.
    """
    device = present_device(config.device)
    tensors = _check_data(metric, data)
    loss = make_loss(config.loss, config.margin_used, config.temperature)
    run = _Run(metric, config)
    path = None if checkpoint_dir is None else Path(checkpoint_dir) / CHECKPOINT_NAME
    identity: dict[str, Any] = {}
    if path is not None:
        identity = run_identity(run, tensors, config)  # type: ignore[arg-type]
        identity["augment"] = _describe(augment)
    run.to(device)
    optimizer = config.make_optimizer(metric.parameters())
    history: list[EpochRecord] = []
    if path is not None and path.exists():
        history = resume(path, identity, run, optimizer)  # type: ignore[arg-type]
    resumed_after = len(history)

    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    trainer = _Trainer(run, optimizer, tensors, config, loss, augment)
    with reporting(progress, config.epochs, resumed_after) as report:
        for epoch in range(resumed_after + 1, config.epochs + 1):
            record = trainer.run_epoch(epoch)
            history.append(record)
            if path is not None:
                save(path, identity, run, optimizer, history)  # type: ignore[arg-type]
            if epoch % config.log_every == 0 or epoch == config.epochs:
                _log.info("%s", record)
            report(record)
    metric.load_state_dict(run.best.state_dict())
    metric.eval()
    return TrainResult(tuple(history), "accuracy", resumed_after)


@torch.no_grad()
def encode(metric: Metric, x: Tensor) -> Tensor:
    """Keys (N,m) of inputs (N,*input_shape) in evaluation mode, by batches."""
    was_training = metric.training
    metric.eval()
    keys = torch.cat([metric(batch) for batch in x.split(_ENCODED_ROWS)])
    metric.train(was_training)
    return keys


@torch.no_grad()
def neighbor_accuracy(
    keys: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, *, n_neighbors: int
) -> float:
    """Share of keys (B,m) whose nearest references (R,m) vote for their label."""
    hits = []
    for some, right in zip(keys.split(_ENCODED_ROWS), labels.split(_ENCODED_ROWS), strict=True):
        lengths = squared_distances(some, references)
        nearest = lengths.topk(min(n_neighbors, len(references)), largest=False).indices
        votes = nn.functional.one_hot(reference_labels[nearest]).sum(1)
        hits.append(votes.argmax(1) == right)
    return float(torch.cat(hits).double().mean())


class _Run(nn.Module):
    """All weights that a checkpoint must hold: the metric and, if asked for, its running average,
    statistics of batch normalization included."""

    def __init__(self, metric: Metric, config: MetricConfig) -> None:
        super().__init__()
        self.metric = metric
        self.average: AveragedModel | None = None
        if config.ema > 0:
            update = get_ema_multi_avg_fn(config.ema)
            self.average = AveragedModel(metric, multi_avg_fn=update, use_buffers=True)

    @property
    def best(self) -> Metric:
        if self.average is None:
            return self.metric
        return cast(Metric, self.average.module)

    def config(self) -> dict[str, Any]:
        return self.metric.config()


@dataclass
class _Trainer:
    run: _Run
    optimizer: torch.optim.Optimizer
    data: Mapping[str, Tensor]
    config: MetricConfig
    loss: Loss
    augment: Augment | None
    bank: Tensor | None = None

    def run_epoch(self, epoch: int) -> EpochRecord:
        started = time.perf_counter()
        x, config = self.data["train_x"], self.config
        seed = epoch_seed(config.seed, epoch)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        batches = order.to(x.device).split(config.batch_size)
        if len(batches) > 1 and len(batches[-1]) < config.batch_size:
            batches = batches[:-1]  # too few neighbors; other rows are left out in other epochs
        if config.references == "bank":
            self.bank = encode(self.run.metric, x)
        generator = torch.Generator(x.device).manual_seed(seed)
        self.run.metric.train()
        means = []  # kept on the device: reading a value in every step would stall a GPU
        with own_randomness(x.device, seed):
            for step, rows in enumerate(batches):
                rate = config.rate_at(epoch - 1 + (step + 0.5) / len(batches))
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                means.append(self._step(rows, generator))
        loss, train_score = torch.stack(means).double().mean(0).tolist()
        self._refuse_divergence(loss, epoch)
        seconds = time.perf_counter() - started
        return EpochRecord(epoch, loss, 0.0, train_score, self._validate(), seconds)

    def _step(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """One gradient step; the batch means of loss and score, (2,)."""
        metric, config = self.run.metric, self.config
        x, y = self.data["train_x"][rows], self.data["train_y"][rows]
        if self.augment is not None:
            x = self.augment(x, generator)
        if config.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=config.mixed_precision):
            if config.adversary is None:
                keys = clean = metric(x).float()
            else:
                moved = self._attack(config.adversary, x, y, rows, generator)
                # In one pass, so that batch statistics are those of both.
                keys, clean = metric(torch.cat([moved, x])).float().chunk(2)
        references, labels, own = self._references(clean, y, rows)
        value = self.loss(keys, y, references, labels, own)
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()
        if self.run.average is not None:
            self.run.average.update_parameters(metric)
        if self.bank is not None:
            self.bank[rows] = clean.detach()
        with torch.no_grad():
            lengths = squared_distances(keys, references)
            lengths.scatter_(1, own[:, None], math.inf)
            score = (labels[lengths.argmin(1)] == y).float().mean()
        return torch.stack([value.detach(), score])

    def _attack(
        self, adversary: Adversary, x: Tensor, y: Tensor, rows: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Inputs moved to where their neighbors by the current metric are wrong."""
        metric, temperature = self.run.metric, self.config.temperature
        metric.eval()
        clean = metric(x).float().detach()  # not `no_grad`: autocast would keep its casts
        metric.train()
        references, labels, own = self._references(clean, y, rows)

        def wrongness(keys: Tensor) -> Tensor:
            return neighborhood_loss(keys, y, references, labels, temperature=temperature, own=own)

        return adversary.attack(metric, x, wrongness, generator)

    def _references(self, clean: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys among which neighbors are sought, their labels, and each row's own place there."""
        if self.bank is None:
            return clean, y, torch.arange(len(y), device=y.device)
        # The batch's own keys are put in afresh: they have gradients, those of the bank do not.
        return self.bank.index_copy(0, rows, clean), self.data["train_y"], rows

    def _validate(self) -> float | None:
        if "val_x" not in self.data:
            return None
        keys = encode(self.run.best, self.data["val_x"])
        references = encode(self.run.best, self.data["train_x"])
        return neighbor_accuracy(
            keys,
            self.data["val_y"],
            references,
            self.data["train_y"],
            n_neighbors=self.config.n_neighbors,
        )

    def _refuse_divergence(self, loss: float, epoch: int) -> None:
        total = sum(float(weight.detach().sum()) for weight in self.run.parameters())
        if not math.isfinite(loss + total):
            raise InputError(
                "learning_rate: expected one at which training converges, got "
                f"{self.config.learning_rate}, which made loss or weights infinite in epoch {epoch}"
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


def _describe(augment: Augment | None) -> str | None:
    """Enough to recognize an augmentation again: settings of a dataclass, else the name."""
    if augment is None or is_dataclass(augment):
        return None if augment is None else repr(augment)
    return f"{augment.__module__}.{getattr(augment, '__qualname__', type(augment).__qualname__)}"
