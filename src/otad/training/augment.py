"""Random changes of training images, whole batches at once on the device they live on.

An augmentation is called with images (B,C,H,W) in [0, 1] and a generator, and gives images alike.
The generator may live on the CPU or on the device of the images, where drawing does not stall a
GPU; the same seed draws other numbers there. All are frozen dataclasses: `repr` tells them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.training.host_rng import dice
from otad.training.image_ops import IMAGE_OPS

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
    """Each image meets one op at a random amount, `rounds` times over; each op meets as many
    images of a batch as any other.

    Amounts are uniform in [-strength, strength]. At strength 1 the ranges are those of the wide
    TrivialAugment: enhancements by up to its factor, 135 degrees, shears by 1, moves by the whole
    side, 2 of 8 bits. Two rounds at 0.3 are about as strong as AutoAugment.
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
            names = list(self.ops)
            dice(generator).shuffle(names)  # some meet one image more than the others
            amount = self.strength * (2 * _uniform((len(x),), x, generator) - 1)
            # Groups of sizes the host knows: a GPU need not be asked who drew what.
            groups = _order(len(x), x, generator).tensor_split(len(names))
            changed = x.clone()
            for name, rows in zip(names, groups, strict=True):
                if name != "identity" and len(rows):
                    changed[rows] = IMAGE_OPS[name](x[rows], amount[rows])
            x = changed
        return x


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
