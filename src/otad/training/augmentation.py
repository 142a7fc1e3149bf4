"""Random changes of training images, for whole batches on the device they are on.

An augmentation is a callable of images (B,C,H,W) in [0, 1] and a generator that returns images of
the same shape. The generator may be on the CPU or on the device of the images, where drawing does
not stall a GPU; the same seed draws other numbers there. Augmentations are frozen dataclasses, so
`repr` describes them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.nets.inputs import InputNet
from otad.training.image_ops import IMAGE_OPS

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
# Those of TrivialAugment; "identity" leaves an image unchanged.
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
    """Pad by `padding` zeros on each side and cut out the original size at a random place."""

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
    """A gray square of `size` pixels around a random pixel, cut off at the border."""

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
    """One op with a random amount for each image, `rounds` times; the ops share the images of a
    batch evenly.

    Amounts are uniform in [-strength, strength]. At strength 1 the ranges are those of the wide
    TrivialAugment: enhancements by up to its factor, 135 degrees, shears by 1, translations by the
    whole side, 2 of 8 bits. Two rounds at 0.3 are about as strong as AutoAugment.
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
            host_rng(generator).shuffle(names)  # the first ones get one image more
            amount = self.strength * (2 * _uniform((len(x),), x, generator) - 1)
            # Groups whose sizes the host knows, so that nothing is read back from a GPU.
            order = torch.randperm(len(x), generator=generator, device=generator.device)
            groups = order.to(x.device).tensor_split(len(names))
            changed = x.clone()
            for name, rows in zip(names, groups, strict=True):
                if name != "identity" and len(rows):
                    changed[rows] = IMAGE_OPS[name](x[rows], amount[rows])
            x = changed
        return x


def mixup(x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """s x + (1 - s) x' with s uniform in (0, 1), and the labels (B,) mixed in the same way as
    shares (B,classes).

    The partner x' of an image is at the mirrored place of the batch, which is random because
    batches are; so a GPU draws nothing.
    """
    share = host_rng(generator).betavariate(1.0, 1.0)
    return share * x + (1 - share) * x.flip(0), _label_shares(y, classes, share, x)


def cutmix(x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A box of the partner's pixels, about 1 - s of the area with s uniform in (0, 1), and the
    labels (B,) mixed by the remaining area as shares (B,classes)."""
    rng = host_rng(generator)
    scale = (1 - rng.betavariate(1.0, 1.0)) ** 0.5
    box = []
    for side in x.shape[2:]:
        center, half = rng.randrange(side), round(side * scale) / 2
        box.append(slice(max(0, round(center - half)), min(side, round(center + half))))
    rows, columns = box
    mixed = x.clone()
    mixed[:, :, rows, columns] = x.flip(0)[:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, _label_shares(y, classes, 1 - area / math.prod(x.shape[2:]), x)


def mix_some(
    x: Tensor, y: Tensor, classes: int, generator: torch.Generator, *, probability: float
) -> tuple[Tensor, Tensor]:
    """Mixup or CutMix of the batch with this probability, else the batch with labels as shares."""
    rng = host_rng(generator)
    if rng.random() >= probability:
        return x, _label_shares(y, classes, 1.0, x)
    return rng.choice((mixup, cutmix))(x, y, classes, generator)


def host_rng(generator: torch.Generator) -> random.Random:
    """A generator for the host, seeded by the state of one that may be on a GPU: reading a number
    drawn there would stall it. The generator advances, so the next call returns another one."""
    rng = random.Random(generator.get_state().numpy().tobytes())
    torch.rand(1, generator=generator, device=generator.device)
    return rng


def _label_shares(y: Tensor, classes: int, own: float, like: Tensor) -> Tensor:
    shares = (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)
    return own * shares + (1 - own) * shares.flip(0)


def _uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=like.dtype)
    return drawn.to(like.device)


def _integers(
    bound: int, shape: tuple[int, ...], like: Tensor, generator: torch.Generator
) -> Tensor:
    drawn = torch.randint(bound, shape, generator=generator, device=generator.device)
    return drawn.to(like.device)


def _check_share(value: float, name: str) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name}: expected a number from 0 to 1, got {value!r}")


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "light": Compose((RandomCrop(4), RandomFlip())),
    "strong": Compose((RandomCrop(4), RandomFlip(), TrivialAugment(0.5), Cutout(8))),
}
"""By name, for images of about 32 x 32 pixels in [0, 1]; "strong" is for small transformers."""


def choose_augmentation(name: str, own: Augmentation | None, net: InputNet) -> Augmentation | None:
    """The named augmentation or the user's own, if the inputs of the net are images."""
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
