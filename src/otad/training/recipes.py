"""From plain settings to a trained backbone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_choice, require
from otad.data import Standardizer
from otad.data.dataset import usual_statistics
from otad.errors import InputError
from otad.nets import Backbone, ResNet, fc_resnet, lifted_net, vision_transformer
from otad.nets.inputs import Sizes
from otad.training.backbone import TrainConfig, train
from otad.training.loop import reporting
from otad.training.supervised import METRICS, EpochRecord, Progress, TrainResult

BACKBONES: dict[str, Callable[..., Backbone]] = {
    "fc_resnet": fc_resnet,
    "lifted": lifted_net,
    "resnet": ResNet,
    "vit": vision_transformer,
}

RECIPES: dict[str, dict[str, Any]] = {
    # The paper's, for fully connected nets.
    "fc": {"energy_weight": 0.01},
    # The paper's ViT (7 blocks, 12 heads, width 384, 64 patches) on CIFAR-10 from scratch: a
    # transformer starts without knowledge of images, so augmentation decides: see
    # docs/how_to/vision.md.
    "vit_cifar10": {
        "epochs": 200, "batch_size": 128, "optimizer": "adamw", "learning_rate": 1e-3, "warmup": 10,
        "weight_decay": 0.05, "decay_on": "matrices", "gradient_clip": 1.0, "label_smoothing": 0.1,
        "augment": "strong", "mixing": 0.5, "ema": 0.999, "mixed_precision": True,
        "whole_batches": True,
    },
}  # fmt: skip


MOST_WIDTH, LEAST_WIDTH = 1024, 64


def usual_width(input_shape: Sizes, rows: int) -> int:
    """Of the blocks of an fc_resnet: that of the inputs, but at most the rows of training, or 64 if
    they are fewer, and at most 1024. A block of width h has 2 d h weights for inputs of d numbers,
    so the rows of a small data set cannot tell a wider one apart."""
    return min(math.prod(input_shape), max(LEAST_WIDTH, rows), MOST_WIDTH)


def recipe(name: str, **changes: Any) -> TrainConfig:
    """The settings of that name with some changed, such as `energy_weight`, `seed`, `device`."""
    known = RECIPES[check_choice(name, "recipe", tuple(RECIPES))]
    try:
        return TrainConfig(**known | changes)
    except TypeError as error:
        raise InputError(f"changes: expected settings of TrainConfig, got: {error}") from error


def make_backbone(
    kind: str, shape: Sizes, n_outputs: int, *, inputs: Standardizer | None = None, **options: Any
) -> Backbone:
    """A fresh net of a kind of `BACKBONES` for inputs of this shape, which it standardizes by
    `inputs`, if any; `options` are those of the kind, such as `seed`, `task`, `bounds`, `blocks`.
    """
    make = BACKBONES[check_choice(kind, "kind", tuple(BACKBONES))]
    if inputs is not None:
        options |= {"mean": inputs.mean, "std": inputs.std}
    try:
        return make(shape, n_outputs, **options)
    except TypeError as error:
        raise InputError(f"options: expected those of {kind!r}, got: {error}") from error


@torch.inference_mode(False)  # weights made in that mode could not be trained
def fit_backbone(
    data: Sequence[Tensor],
    config: TrainConfig,
    *,
    kind: str = "fc_resnet",
    task: str = "classification",
    n_outputs: int = 1,
    bounds: Sequence[float] | None = None,
    inputs: Standardizer | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress = None,
    **saving: Any,
) -> tuple[Backbone, TrainResult]:
    """Make a net for the data (train_x, train_y) or (train_x, train_y, val_x, val_y) and train it.

    Inputs are standardized inside the net, by default by the statistics of each feature, or of each
    channel of images, in train_x. Targets of a regression are standardized for the training; then
    the head takes over their units, in which the records are too. `options` give the size of the
    net; the rest is as in `make_backbone` and `train`."""
    require(len(data) in (2, 4), "data", "two or four tensors", len(data))
    train_x, parts, units = data[0], list(data), None
    if inputs is None:
        inputs = Standardizer.fit(train_x, usual_statistics(train_x))
    about: dict[str, Any] = {"inputs": inputs, "seed": config.seed, "task": task, "bounds": bounds}
    net = make_backbone(kind, train_x.shape[1:], n_outputs, **about, **options or {})
    net.to(train_x.dtype)
    for name in ("mean", "std"):  # made in the default dtype
        getattr(net, name).copy_(getattr(inputs, name))
    if task == "regression":
        units = Standardizer.fit(data[1])
        parts[1::2] = [units(targets).to(train_x.dtype) for targets in parts[1::2]]

    def in_units(record: EpochRecord) -> EpochRecord:
        if units is None:
            return record
        square, values = float(units.std) ** 2, vars(record)
        names = [name for name in ("loss", "train_score", "val_score") if values[name] is not None]
        return replace(record, **{name: square * values[name] for name in names})

    shown = partial(EpochRecord.text, metric=METRICS[net.task])
    with reporting(progress, config.epochs, 0, "training", shown) as report:
        saving["progress"] = lambda record: report(in_units(record))
        result = train(net, parts, config, **saving)
        result = replace(result, history=tuple(map(in_units, result.history)))
        report(result.final)  # also where all epochs are from a checkpoint
    if units is not None:
        net.head.take_units(float(units.mean), float(units.std))
    return net, result
