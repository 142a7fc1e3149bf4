"""Random changes of training images, whole batches at once on the device they live on.

An augmentation is called with images (B,C,H,W) in [0, 1] and a generator, and gives images alike.
The generator may live on the CPU or on the device of the images, where drawing does not stall a
GPU; the same seed draws other numbers there. All are frozen dataclasses: `repr` tells them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.transport.image_ops import IMAGE_OPS

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
# TrivialAugment's own; "identity" leaves an image alone.
TRIVIAL_OPS = ("identity", *(name for name in IMAGE_OPS if name != "invert"))


@dataclass(frozen=True)
class Compose:
    """One after another."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            x = step(x, generator)
        return x


@dataclass(frozen=True)
class RandomCrop:
    """Pad by `padding` zeros on each side, cut the size out again at a random place."""

    padding: int = 4

    def __post_init__(self) -> None:
        check_count(self.padding, "padding", least=0)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        padded = functional.pad(x, [self.padding] * 4)
        corners = _integers(2 * self.padding + 1, (2, len(x), 1), x, generator)
        rows, columns = (
            corner + torch.arange(side, device=x.device)
            for corner, side in zip(corners, x.shape[2:], strict=True)
        )
        image = torch.arange(len(x), device=x.device)[:, None, None]
        cut = padded.movedim(1, 3)[image, rows[:, :, None], columns[:, None, :]]
        return cut.movedim(3, 1).contiguous()


@dataclass(frozen=True)
class RandomFlip:
    """Mirror left and right with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        _check_share(self.probability, "probability")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        chosen = _uniform((len(x), 1, 1, 1), x, generator) < self.probability
        return torch.where(chosen, x.flip(3), x)


@dataclass(frozen=True)
class Cutout:
    """A gray square of `size` pixels around a random pixel; it may stick out."""

    size: int = 8

    def __post_init__(self) -> None:
        check_count(self.size, "size")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        inside = []
        for side in x.shape[2:]:
            start = _integers(side, (len(x), 1), x, generator) - self.size // 2
            place = torch.arange(side, device=x.device)
            inside.append((place >= start) & (place < start + self.size))
        hole = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return x.masked_fill(hole, 0.5)


@dataclass(frozen=True)
class TrivialAugment:
    """Each image meets one op at a random amount, `rounds` times over.

    Amounts are uniform in [-strength, strength]. At strength 1 the ranges are those of the wide
    TrivialAugment: enhancements by up to its factor, 135 degrees, shears by 1, moves by the whole
    side, 2 of 8 bits. Two rounds at 0.3 are about as strong as AutoAugment. Each op works on the
    images that drew it, so a GPU is asked once per op how many those are.
    """

    strength: float = 1.0
    rounds: int = 1
    ops: tuple[str, ...] = TRIVIAL_OPS

    def __post_init__(self) -> None:
        _check_share(self.strength, "strength")
        check_count(self.rounds, "rounds")
        if not self.ops:
            raise InputError("ops: expected at least one, got none")
        for name in self.ops:
            check_choice(name, "ops", ("identity", *IMAGE_OPS))

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        for _ in range(self.rounds):
            choice = _integers(len(self.ops), (len(x),), x, generator)
            amount = self.strength * (2 * _uniform((len(x),), x, generator) - 1)
            changed = x.clone()
            for number, name in enumerate(self.ops):
                rows = (choice == number).nonzero()[:, 0]
                if name != "identity" and len(rows):
                    changed[rows] = IMAGE_OPS[name](x[rows], amount[rows])
            x = changed
        return x


def mixup(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, alpha: float = 0.2
) -> tuple[Tensor, Tensor]:
    """s x + (1 - s) x' with a random partner x' in the batch and s ~ Beta(alpha, alpha), and the
    labels (B,) mixed alike as shares (B,classes)."""
    share = _beta(alpha, generator)
    partner = _order(len(x), x, generator)
    return share * x + (1 - share) * x[partner], _mixed(y, y[partner], classes, share, x)


def cutmix(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, alpha: float = 1.0
) -> tuple[Tensor, Tensor]:
    """A box of a random partner's pixels, near 1 - s of the area, s ~ Beta(alpha, alpha), and
    labels (B,) mixed by the area that remains, as shares (B,classes)."""
    height, width = x.shape[2:]
    scale = (1 - _beta(alpha, generator)) ** 0.5
    partner = _order(len(x), x, generator)
    box = []
    for side in (height, width):
        center = int(_integers(side, (1,), x, generator))
        half = round(side * scale) / 2
        box.append(slice(max(0, round(center - half)), min(side, round(center + half))))
    rows, columns = box
    mixed = x.clone()
    mixed[:, :, rows, columns] = x[partner][:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, _mixed(y, y[partner], classes, 1 - area / (height * width), x)


def _mixed(y: Tensor, other: Tensor, classes: int, share: float, like: Tensor) -> Tensor:
    one, two = (functional.one_hot(labels, classes).to(like.dtype) for labels in (y, other))
    return share * one + (1 - share) * two


def _beta(alpha: float, generator: torch.Generator) -> float:
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha: expected a positive finite number, got {alpha!r}")
    # torch draws from Beta by its global generator alone
    seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    return random.Random(int(seed)).betavariate(alpha, alpha)


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)


def _integers(
    bound: int, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
) -> Tensor:
    drawn = torch.randint(bound, shape, generator=generator, device=generator.device)
    return drawn.to(like.device)


def _order(rows: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randperm(rows, generator=generator, device=generator.device).to(like.device)


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name}: expected a number from 0 to 1, got {value!r}")
