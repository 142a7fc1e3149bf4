"""Recipes for training, and functions that make and train a backbone from plain settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from otad.checks import check_choice, require
from otad.data import Standardizer
from otad.data.dataset import usual_statistics
from otad.errors import InputError
from otad.nets import Backbone, ResNet, fc_resnet, lifted_net, vision_transformer
from otad.nets.inputs import Sizes
from otad.nets.linf_dist import LinfDistNet
from otad.nets.orthogonal import OrthogonalNet
from otad.nets.soc import SOCNet
from otad.training.backbone import train
from otad.training.backbone_config import TrainConfig
from otad.training.loop import Reporter, reporting
from otad.training.supervised import METRICS, EpochRecord, Progress, TrainResult

BACKBONES: dict[str, Callable[..., Backbone]] = {
    "fc_resnet": fc_resnet,
    "lifted": lifted_net,
    "linf_dist": LinfDistNet,
    "orthogonal": OrthogonalNet,
    "resnet": ResNet,
    "soc": SOCNet,
    "vit": vision_transformer,
}

GIVEN = ("input_shape", "n_outputs", "options")  # no options of a kind by name
COMMON = ("task", "bounds", "mean", "std")  # options of every kind

RECIPES: dict[str, dict[str, Any]] = {
    # The paper's recipe for fully connected networks.
    "fc": {"energy_weight": 0.01},
    # For the paper's ViT (7 blocks, 12 heads, width 384, 64 patches) on CIFAR-10 from scratch. A
    # transformer knows nothing about images at first, so augmentation matters most: see
    # docs/how_to/vision.md.
    "vit_cifar10": {
        "epochs": 200, "batch_size": 128, "optimizer": "adamw", "learning_rate": 1e-3, "warmup": 10,
        "weight_decay": 0.05, "decay_on": "matrices", "gradient_clip": 1.0, "label_smoothing": 0.1,
        "augment": "strong", "mixing": 0.5, "ema": 0.999, "mixed_precision": True,
        "whole_batches": True,
    },
    # For orthogonal networks, trained for certified radii of `target_margin`.
    "orthogonal": {
        "epochs": 60, "optimizer": "orthogonal_muon", "learning_rate": 5e-4, "warmup": 0.5,
        "weight_decay": 0.0, "loss": "soft_margin", "target_margin": 0.5,
        "margin_temperature": 0.15,
    },
}  # fmt: skip
"""Settings of `TrainConfig` by name: see `recipe`."""

MOST_WIDTH, LEAST_WIDTH = 1024, 64


def usual_width(input_shape: Sizes, rows: int) -> int:
    """Return the usual width of the blocks of an fc_resnet.

    It is the size of the inputs, but at most the number of training rows (or 64 if there are
    fewer), and at most 1024. A block of width h has 2 d h weights for inputs of d numbers, which a
    small data set cannot determine if h is large."""
    return min(math.prod(input_shape), max(LEAST_WIDTH, rows), MOST_WIDTH)


def recipe(name: str, **changes: Any) -> TrainConfig:
    """Return the settings of a recipe, with some of them changed.

    Parameters
    ----------
    name : str
        A name of `RECIPES`: "fc" for fully connected networks, "vit_cifar10" for vision
        transformers on small images, "orthogonal" for orthogonal networks.
    **changes
        Other settings of `TrainConfig`, such as `energy_weight`, `seed` or `device`.

    Returns
    -------
    TrainConfig

    Raises
    ------
    InputError
        If there is no such recipe or no such setting.

    Examples
    --------
    >>> from otad.training import recipe
    >>> recipe("fc", epochs=5).energy_weight
    0.01
    """
    known = RECIPES[check_choice(name, "recipe", tuple(RECIPES))]
    try:
        return TrainConfig(**known | changes)
    except TypeError as error:
        raise InputError(f"changes: expected settings of TrainConfig, got: {error}") from error


def make_backbone(
    kind: str, shape: Sizes, n_outputs: int, *, inputs: Standardizer | None = None, **options: Any
) -> Backbone:
    """Make a new backbone from plain settings.

    Parameters
    ----------
    kind : str
        "fc_resnet", "lifted", "linf_dist", "orthogonal", "resnet", "soc" or "vit".
    shape : sequence of int
        The shape of one input.
    n_outputs : int
        The number of classes, or 1 for regression.
    inputs : Standardizer or None
        The mean and the standard deviation by which the network standardizes its inputs.
    **options
        Options of the kind, such as `seed`, `task`, `bounds` or `blocks`.

    Returns
    -------
    Backbone

    Raises
    ------
    InputError
        If there is no such kind or no such option.

    Examples
    --------
    >>> from otad.training import make_backbone
    >>> net = make_backbone("fc_resnet", (4,), 3, blocks=2, seed=1)
    >>> len(net.blocks), net.n_outputs
    (2, 3)
    """
    make = BACKBONES[check_choice(kind, "kind", tuple(BACKBONES))]
    named = [name for name in signature(make).parameters if name not in GIVEN]
    unknown = ", ".join(name for name in options if name not in (*named, *COMMON))
    require(not unknown, "options", f"those of {kind!r}, which are {', '.join(named)}", unknown)
    if inputs is not None:
        options |= {"mean": inputs.mean, "std": inputs.std}
    try:
        return make(shape, n_outputs, **options)
    except TypeError as error:
        raise InputError(f"options: expected those of {kind!r}, got: {error}") from error


@torch.inference_mode(False)  # weights made in inference mode cannot be trained
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
    """Make a backbone for the data and train it.

    The network standardizes its inputs, by default by the statistics of each feature, or of each
    channel of images, in train_x. An orthogonal network takes them as they are, so that margins are
    lengths of inputs. In regression the targets are standardized for the training.
    Afterwards the head gives values in the units of the targets, and so do the records.

    Parameters
    ----------
    data : sequence of Tensor
        (train_x, train_y) or (train_x, train_y, val_x, val_y).
    config : TrainConfig
        The settings of the training, with the seed of the weights.
    kind, task, n_outputs, bounds, inputs
        As in `make_backbone`.
    options : mapping or None
        The size of the network, such as `{"blocks": 5}`.
    progress, **saving
        As in `train`, such as `checkpoint_dir`.

    Returns
    -------
    (Backbone, TrainResult)
        The trained network, and a record of every epoch.

    Examples
    --------
    >>> import torch
    >>> from otad.training import fit_backbone, recipe
    >>> x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0.5).long()
    >>> net, result = fit_backbone((x, y), recipe("fc", epochs=2, batch_size=10), n_outputs=2)
    >>> type(net).__name__, result.finished
    ('FCResNet', True)
    """
    require(len(data) in (2, 4), "data", "two or four tensors", len(data))
    train_x, parts, units = data[0], list(data), None
    if inputs is None and kind == "orthogonal":
        inputs = Standardizer(train_x.new_zeros(()), train_x.new_ones(()))
    elif inputs is None:
        inputs = Standardizer.fit(train_x, usual_statistics(train_x))
    about: dict[str, Any] = {"inputs": inputs, "seed": config.seed, "task": task, "bounds": bounds}
    net = make_backbone(kind, train_x.shape[1:], n_outputs, **about, **options or {})
    net.to(train_x.dtype)
    for name in ("mean", "std"):  # again in the dtype of the data
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
        saving["progress"] = Reporter(lambda record: report(in_units(record)), report.move)
        result = train(net, parts, config, **saving)
        result = replace(result, history=tuple(map(in_units, result.history)))
        report(result.final)  # even if all epochs come from a checkpoint
    if units is not None:
        net.head.take_units(float(units.mean), float(units.std))
    return net, result
