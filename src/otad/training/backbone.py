"""Training a backbone by the paper's Algorithm 1, loss + alpha * transport energy:

    min over theta of  mean_i [ loss(head(z_i), y_i)  +  alpha * sum_k |R_k(x_i^(k-1))|^2 ]

which brings the map x_i -> z_i close to optimal transport of the training points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_choice
from otad.errors import InputError
from otad.nets.base import Backbone
from otad.training.acceleration import compiled, precision
from otad.training.augmentation import Augmentation, mix_some
from otad.training.losses import LOSSES, pair_excess
from otad.training.supervised import (
    METRICS,
    InputConfig,
    Report,
    Split,
    SupervisedTraining,
    TrainResult,
    to_inputs,
)

_SCORED_ROWS = 1024  # at a time
_AUGMENTED_ROWS = 4096


@dataclass(frozen=True)
class TrainConfig(InputConfig):
    """Settings of one training of a backbone; the defaults of the optimizer are the paper's.

    The objective of a batch is mean loss + `energy_weight` * mean energy (the paper's alpha, for
    means instead of sums). Settings beside those of `LoopConfig` and `InputConfig`:

    - `loss`: a name of `LOSSES`: "fit" for cross-entropy or squared error, with `label_smoothing`;
      "margin" for margins (o_y - o_j) / |w_y - w_j| of at least `target_margin`.
    - `pair_weight`: of the penalty for pairs of a batch that contradict a convex potential of
      smoothness `pair_smoothness` (`pair_excess`).
    - `mixing`: share of batches in which images and labels are mixed in pairs, by mixup or CutMix.
    - `compiled`: run the net under torch.compile, which takes a minute and needs a compiler.
    """

    loss: str = "fit"
    energy_weight: float = 0.0
    label_smoothing: float = 0.0
    target_margin: float = 1.0
    pair_weight: float = 0.0
    pair_smoothness: float = 2.0
    mixing: float = 0.0
    compiled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.loss, "loss", tuple(LOSSES))
        self.check_ranges(0.0, math.inf, "energy_weight", "pair_weight")
        self.check_ranges(1e-12, math.inf, "target_margin", "pair_smoothness")
        self.check_ranges(0.0, 1.0, "label_smoothing")
        if not isinstance(self.mixing, int | float) or not 0 <= self.mixing <= 1:
            raise InputError(f"mixing: expected a number from 0 to 1, got {self.mixing!r}")


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

    `data` is a `Split`, or (train_x, train_y) or (train_x, train_y, val_x, val_y), and is moved to
    the device as a whole. Inputs may be bytes, 0 to 255 over the bounds of the net. `augment` is
    your own augmentation in place of `config.augment`; it gets several batches at once.

    With a `checkpoint_dir` the run is saved there after every epoch, or every `save_seconds`. A
    call with the same initial net, data and config resumes a killed run and ends with the same
    weights bit for bit. With `max_seconds` a run stops in time, after at least one epoch, with a
    result that is not `finished`, and resumes in the same way. `progress` is called with each
    `EpochRecord`; True draws a bar.
    """
    run = BackboneTraining(
        net,
        data,
        config,
        augment=augment,
        checkpoint_dir=checkpoint_dir,
        save_seconds=save_seconds,
        max_seconds=max_seconds,
    )
    return run.fit(progress)


class BackboneTraining(SupervisedTraining[Backbone]):
    config: TrainConfig

    def __init__(self, net: Backbone, data: Any, config: TrainConfig, **options: Any) -> None:
        if config.mixing > 0 and (net.task != "classification" or len(net.input_shape) != 3):
            raise InputError(
                f"mixing: expected 0 unless images (C,H,W) are classified, got {config.mixing} for "
                f"{net.task} of shape {net.input_shape}"
            )
        self.metric = METRICS[net.task]
        self.loss = LOSSES[config.loss](net.task, config)
        self.forward = self._forward
        super().__init__(net, data, config, **options)

    def check_targets(self, net: Backbone, y: Tensor, rows: int, name: str) -> None:
        net.check_targets(y, rows, name)

    def prepare(self) -> None:
        if self.config.compiled:
            self.forward = compiled(self._forward)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embedded inputs and features (B,d), outputs, energies (B,)."""
        net = self.weights.net
        embedded = net.embed(x)
        features, energies = net.transport(embedded)
        return embedded, features, net.head(features), energies

    def batches(
        self, row_batches: Sequence[Tensor], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, ...]]:
        x, y, net = self.data["train_x"], self.data["train_y"], self.weights.net
        mixing = self.config.mixing
        at_once = max(1, _AUGMENTED_ROWS // self.config.batch_size)  # few launches for many images
        for start in range(0, len(row_batches), at_once):
            some = row_batches[start : start + at_once]
            rows, sizes = torch.cat(list(some)), [len(part) for part in some]
            inputs, targets = to_inputs(x[rows], net), y[rows]
            if self.augment is not None:
                inputs = self.augment(inputs, generator)
            for batch in zip(inputs.split(sizes), targets.split(sizes), strict=True):
                if mixing > 0:
                    batch = mix_some(*batch, net.n_outputs, generator, probability=mixing)
                yield batch

    def step(self, *batch: Tensor, first: bool) -> Tensor:
        """One gradient step; the batch means of loss, energy and score (3,)."""
        (x, y), net, config = batch, self.weights.net, self.config
        with precision(self.device, mixed=config.mixed_precision):
            passed = self.forward(x)
        embedded, features, outputs, energies = (part.to(net.mean.dtype) for part in passed)
        loss, energy = self.loss(outputs, y, net.head), energies.mean()
        objective = loss + config.energy_weight * energy if config.energy_weight > 0 else loss
        if config.pair_weight > 0:
            excess = pair_excess(embedded, features, config.pair_smoothness)
            objective = objective + config.pair_weight * excess
        self.backward(objective)
        self.update(first=first)
        score = _scores(outputs.detach(), y).mean()
        return torch.stack([loss.detach(), energy.detach(), score])

    def validate(self) -> float | None:
        data, net = self.data, self.weights.best
        if "val_x" not in data:
            return None
        net.eval()
        parts = (data[name].split(_SCORED_ROWS) for name in ("val_x", "val_y"))
        with torch.no_grad(), precision(self.device, mixed=self.config.mixed_precision):
            sums = [
                _scores(net(to_inputs(rows, net)), targets).sum()
                for rows, targets in zip(*parts, strict=True)
            ]
        return float(torch.stack(sums).double().sum()) / len(data["val_y"])


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per row, whether the label is right (that with the largest share for mixed images), or the
    squared error of a value."""
    if outputs.dim() == 2:
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (outputs.argmax(1) == labels).float()
    return (outputs - targets).square()
