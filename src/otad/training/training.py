"""Training by the paper's Algorithm 1, loss + alpha * transport energy:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

which draws the map x_i -> z_i towards optimal transport of the training points.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from otad.errors import InputError
from otad.nets.base import Backbone
from otad.training.augment import Augmentation
from otad.training.compiling import compiled
from otad.training.cuda_graph import Step
from otad.training.epochs import Saving, means_over_rows
from otad.training.history import METRICS, EpochRecord, Report, TrainResult
from otad.training.mixing import mix_some
from otad.training.objectives import OBJECTIVES, Objective
from otad.training.pair_penalty import pair_excess
from otad.training.randomness import epoch_batches, epoch_seed, own_randomness
from otad.training.recipe import TrainConfig
from otad.training.session import Session
from otad.training.train_split import Split, check_kept, parts_of, refuse_one_class, to_inputs

_SCORING_ROWS = 1024
_AUGMENTED_ROWS = 4096


@torch.inference_mode(False)  # gradients, whatever mode the caller is in
def train(
    net: Backbone,
    data: Split | Sequence[Tensor],
    config: TrainConfig,
    *,
    augment: Augmentation | None = None,
    checkpoint_dir: str | Path | None = None,
    save_seconds: float = 0.0,
    max_seconds: float | None = None,
    progress: Report | bool = False,
) -> TrainResult:
    """Train `net` in place, leaving it on `config.device` in evaluation mode.

    `data` is a `Split`, or (train_x, train_y) or (train_x, train_y, val_x, val_y); all of it is
    kept on the device. Inputs may be bytes, 0 to 255 over the bounds of the net. `augment` is an
    augmentation of your own, for `config.augment` "none"; it meets several batches at once.

    With a `checkpoint_dir` every epoch is saved there, or one in `save_seconds`, and a call with
    the same net as at the start, data and config goes on where a killed one stopped, to the very
    same weights. So does one that was out of time: rather than run beyond `max_seconds` it ends
    early, after an epoch at least, with a result that is not `finished`. `progress` is called with
    each `EpochRecord`; True draws a bar.
    """
    tensors = _check_data(net, data, config)
    objective = OBJECTIVES[config.loss](net.task, config)
    saving = Saving(checkpoint_dir, save_seconds, max_seconds)
    session = Session(net, tensors, config, saving, augment)
    passing = _passing(net)
    if config.compiled and len(session.history) < config.epochs:
        passing = compiled(passing)
    trainer = _Trainer(session, passing, objective)
    step = session.recorded(trainer.step)
    return session.run_epochs(
        lambda epoch: _run_epoch(trainer, step, epoch), progress, METRICS[net.task]
    )


class _Passed(NamedTuple):
    """A batch on its way through the net: embedded inputs and features (B,d), outputs, energies."""

    embedded: Tensor
    features: Tensor
    outputs: Tensor
    energies: Tensor


def _passing(net: Backbone) -> Callable[[Tensor], _Passed]:
    def passed(x: Tensor) -> _Passed:
        embedded = net.embed(x)
        features, energies = net.transport(embedded)
        return _Passed(embedded, features, net.head(features), energies)

    return passed


@dataclass
class _Trainer:
    session: Session[Backbone]
    passing: Callable[[Tensor], _Passed]
    objective: Objective

    def batches(self, epoch: int) -> Iterator[tuple[float, Tensor, Tensor]]:
        """Share of the epoch, inputs and targets of each batch, on the device from the start: the
        host hurries ahead with its orders and asks nothing back."""
        data, config = self.session.data, self.session.config
        x, y, net = data["train_x"], data["train_y"], self.session.run.net
        batches = epoch_batches(len(x), config, epoch, x.device)
        generator = torch.Generator(x.device).manual_seed(epoch_seed(config.seed, epoch))
        at_once = max(1, _AUGMENTED_ROWS // config.batch_size)  # few orders for many images
        for start in range(0, len(batches), at_once):
            some = batches[start : start + at_once]
            rows, sizes = torch.cat(some), [len(part) for part in some]
            inputs, targets = to_inputs(x[rows], net), y[rows]
            if self.session.augment is not None:
                inputs = self.session.augment(inputs, generator)
            parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
            for number, (images, labels) in enumerate(parts, start):
                batch = images, labels
                if config.mixing > 0:
                    batch = mix_some(*batch, net.n_outputs, generator, probability=config.mixing)
                yield (number + 0.5) / len(batches), *batch

    def step(self, x: Tensor, y: Tensor, *, first: bool) -> Tensor:
        """One gradient step; the batch means of loss, energy and score, (3,)."""
        net, config = self.session.run.net, self.session.config
        with self.session.precision():
            passed = self.passing(x)
        embedded, features, outputs, energies = (part.to(net.mean.dtype) for part in passed)
        loss, energy = self.objective(outputs, y, net.head), energies.mean()
        whole = loss + config.energy_weight * energy if config.energy_weight > 0 else loss
        if config.pair_weight > 0:
            excess = pair_excess(embedded, features, config.pair_smoothness)
            whole = whole + config.pair_weight * excess
        self.session.step(whole, first=first)
        score = _scores(outputs.detach(), y).mean()
        return torch.stack([loss.detach(), energy.detach(), score])

    def validate(self) -> float | None:
        data, net = self.session.data, self.session.run.best
        if "val_x" not in data:
            return None
        net.eval()
        parts = (data[name].split(_SCORING_ROWS) for name in ("val_x", "val_y"))
        with torch.no_grad(), self.session.precision():
            sums = [
                _scores(net(to_inputs(rows, net)), targets).sum()
                for rows, targets in zip(*parts, strict=True)
            ]
        return float(torch.stack(sums).double().sum()) / len(data["val_y"])


def _run_epoch(trainer: _Trainer, step: Step, epoch: int) -> EpochRecord:
    started = time.perf_counter()
    session = trainer.session
    session.run.net.train()
    sizes: list[int] = []
    means: list[Tensor] = []  # on the device: reading a value in every step would stall a GPU
    with own_randomness(session.data["train_x"].device, epoch_seed(session.config.seed, epoch)):
        for share, x, y in trainer.batches(epoch):
            session.set_rate(epoch - 1 + share)
            means.append(step(x, y, first=epoch == 1 and not means))
            sizes.append(len(x))
    loss, energy, train_score = means_over_rows(means, sizes)
    session.refuse_divergence(loss + energy, epoch)
    val_score = trainer.validate()
    return EpochRecord(epoch, loss, energy, train_score, val_score, time.perf_counter() - started)


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per row, 1 or 0 for right or wrong (as the largest share of a mixed row goes), or the squared
    error of a value."""
    if outputs.dim() == 2:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels).float()
    return (outputs - targets).square()


def _check_data(
    net: Backbone, data: Split | Sequence[Tensor], config: TrainConfig
) -> dict[str, Tensor]:
    """All parts, fit for the net."""
    parts = parts_of(data)
    for kind in ("train", "val")[: len(parts) // 2]:
        inputs = check_kept(net, parts[f"{kind}_x"], f"{kind}_x")
        net.check_targets(parts[f"{kind}_y"], len(inputs), f"{kind}_y")
    if net.task == "classification":
        refuse_one_class(parts["train_y"])
    if config.mixing > 0 and (net.task != "classification" or len(net.input_shape) != 3):
        raise InputError(
            f"mixing: expected 0 unless images (C,H,W) are classified, got {config.mixing} for "
            f"{net.task} of shape {net.input_shape}"
        )
    return parts
