"""Settings that are known to work, by name."""

from __future__ import annotations

from typing import Any

from otad.checks import check_choice
from otad.errors import InputError
from otad.training.recipe import TrainConfig

RECIPES: dict[str, dict[str, Any]] = {
    # The paper's, for fully connected nets.
    "fc": {"energy_weight": 0.01},
    # The paper's ViT (7 blocks, 12 heads, width 384, 64 patches) on CIFAR-10 from scratch: a
    # transformer knows nothing of images at first, so augmentation decides. See docs/vision.md.
    "vit_cifar10": {
        "epochs": 200,
        "batch_size": 128,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "warmup": 10,
        "weight_decay": 0.05,
        "decay_on": "matrices",
        "gradient_clip": 1.0,
        "label_smoothing": 0.1,
        "augment": "strong",
        "mixing": 0.5,
        "ema": 0.999,
        "mixed_precision": True,
        "whole_batches": True,
    },
}


def recipe(name: str, **changes: Any) -> TrainConfig:
    """The settings of that name with some changed, such as `energy_weight`, `seed`, `device`."""
    known = RECIPES[check_choice(name, "recipe", tuple(RECIPES))]
    try:
        return TrainConfig(**known | changes)
    except TypeError as error:
        raise InputError(f"changes: expected settings of TrainConfig, got: {error}") from error
