"""Two images in one, and their labels alike: mixup and CutMix of a whole batch.

The partner of an image is the one as far from the end of the batch as it is from the start; in a
batch drawn at random that is a random one. Only the host draws, so a GPU is never asked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.errors import InputError
from otad.training.host_rng import dice


def mixup(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """s x + (1 - s) x' with a partner x' in the batch and s ~ Beta(alpha, alpha), and the labels
    (B,) mixed alike as shares (B,classes)."""
    share = dice(generator).betavariate(_check_alpha(alpha), alpha)
    return share * x + (1 - share) * x.flip(0), _shares(y, classes, share, x)


def cutmix(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A box of a partner's pixels, near 1 - s of the area, s ~ Beta(alpha, alpha), and labels (B,)
    mixed by the area that remains, as shares (B,classes)."""
    drawn = dice(generator)
    scale = (1 - drawn.betavariate(_check_alpha(alpha), alpha)) ** 0.5
    box = []
    for side in x.shape[2:]:
        center, half = drawn.randrange(side), round(side * scale) / 2
        box.append(slice(max(0, round(center - half)), min(side, round(center + half))))
    rows, columns = box
    mixed = x.clone()
    mixed[:, :, rows, columns] = x.flip(0)[:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, _shares(y, classes, 1 - area / math.prod(x.shape[2:]), x)


def mix_some(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, probability: float
) -> tuple[Tensor, Tensor]:
    """The batch mixed with this probability, by either way; else as it is, its labels as shares."""
    drawn = dice(generator)
    if drawn.random() >= probability:
        return x, _shares(y, classes, 1.0, x)
    return drawn.choice((mixup, cutmix))(x, y, classes, generator)


def _shares(y: Tensor, classes: int, own: float, like: Tensor) -> Tensor:
    shares = (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)
    return own * shares + (1 - own) * shares.flip(0)


def _check_alpha(alpha: float) -> float:
    if not 0 < alpha < math.inf:
        raise InputError(f"alpha: expected a positive finite number, got {alpha!r}")
    return alpha
