"""Augmentations by name, and which one a training takes."""

from __future__ import annotations

from otad.errors import InputError
from otad.nets.inputs import InputNet
from otad.training.augment import (
    Augmentation,
    Compose,
    Cutout,
    RandomCrop,
    RandomFlip,
    TrivialAugment,
)

AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "light": Compose((RandomCrop(4), RandomFlip())),
    "strong": Compose((RandomCrop(4), RandomFlip(), TrivialAugment(0.5), Cutout(8))),
}
"""By name, for images of about 32 x 32 pixels in [0, 1]; "strong" is that of small transformers."""


def choose_augmentation(name: str, own: Augmentation | None, net: InputNet) -> Augmentation | None:
    """The named augmentation or a user's own, for inputs that it can change."""
    named = AUGMENTATIONS[name]
    if named is None:
        return own
    if own is not None:
        raise InputError(f"augment: expected a name or an augmentation, got {name!r} and {own!r}")
    if len(net.input_shape) != 3 or net.bounds != (0.0, 1.0):
        raise InputError(
            f"augment: expected 'none' unless inputs are images (C,H,W) within bounds (0, 1), "
            f"got {name!r} for shape {net.input_shape} within {net.bounds}"
        )
    return named
