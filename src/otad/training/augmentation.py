"""Random changes of training images, for whole batches on the device where they are.

An augmentation is a function of images (B,C,H,W) in [0, 1] and of a generator, which is on the CPU
or on their device. It returns images of the same shape. Augmentations are frozen dataclasses, so
that `repr` describes them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_choice, check_count, require
from otad.nets.inputs import InputNet
from otad.training.config import check_range, check_share

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
_LEVELS = 256


# Operations on images (B,C,H,W) with an amount (B,) for each image; 0 changes nothing.
def sharpness(x: Tensor, amount: Tensor) -> Tensor:
    """Move away from the image smoothed over 3 x 3 pixels. The border is unchanged."""
    if min(x.shape[2:]) < 3:
        return x  # such an image is all border
    smooth = x.clone()
    inner = smooth[:, :, 1:-1, 1:-1]
    # The pixel itself has the weight 5/13, each of its neighbors 1/13.
    inner.mul_(4).add_(functional.avg_pool2d(x, 3, stride=1), alpha=9).div_(13)
    return _blend(smooth, x, amount)


def posterize(x: Tensor, amount: Tensor) -> Tensor:
    """Keep the leading 8 - round(6 |amount|) of 8 bits."""
    lost = 2 ** _per_image((6 * amount.abs()).round(), x)
    coarse = ((x * (_LEVELS - 1)).round() / lost).floor() * lost / (_LEVELS - 1)
    return torch.where(lost > 1, coarse, x)


def autocontrast(x: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel to all of [0, 1] where the amount is not 0."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = (x - low) / (high - low).clamp_min(1e-12)
    return torch.where((_per_image(amount, x) != 0) & (high > low), stretched, x)


def equalize(x: Tensor, amount: Tensor) -> Tensor:
    """Level the histogram of each channel over 256 values where the amount is not 0."""
    values = (x * (_LEVELS - 1)).round().long().flatten(2)  # (B,C,H*W)
    counts = values.new_zeros(*values.shape[:2], _LEVELS)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // (_LEVELS - 1)
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp_min(1)).clamp_max(_LEVELS - 1)
    level = (table.gather(2, values) / (_LEVELS - 1)).to(x.dtype).view_as(x)
    changed = (_per_image(amount, x) != 0) & (step[..., None] > 0)
    return torch.where(changed, level, x)


def rotate(x: Tensor, amount: Tensor) -> Tensor:
    """Turn counterclockwise about the center by 135 degrees times the amount."""
    angle = amount * math.radians(135)
    return _resample(x, angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def _resample(
    x: Tensor,
    *matrix: Tensor | int,
    across: Tensor | int = 0,
    down: Tensor | int = 0,
    outside: float = 0.5,
) -> Tensor:
    """Return the image with pixel p taken from ((xx, xy), (yx, yy)) p - (across, down).

    Positions are relative to the center. Interpolation is bilinear, and the image is gray outside
    its border, or has the value `outside` there."""
    height, width = x.shape[2:]
    places = (torch.arange(n, dtype=x.dtype, device=x.device) - (n - 1) / 2 for n in x.shape[2:])
    py, px = torch.meshgrid(*places, indexing="ij")
    xx, xy, yx, yy, across, down = (
        value[:, None, None] if isinstance(value, Tensor) else value
        for value in (*matrix, across, down)
    )
    at_x, at_y = xx * px + xy * py - across, yx * px + yy * py - down
    shape = (len(x), height, width)
    grid = torch.stack([(at_x / (width / 2)).expand(shape), (at_y / (height / 2)).expand(shape)], 3)
    sampled = functional.grid_sample(x - outside, grid, align_corners=False) + outside
    return sampled.clamp(0.0, 1.0)


def _per_image(amount: Tensor, x: Tensor) -> Tensor:
    return amount.to(x)[:, None, None, None]


def _blend(dull: Tensor, x: Tensor, amount: Tensor) -> Tensor:
    return (x + _per_image(amount, x) * (x - dull)).clamp(0.0, 1.0)


def _gray(x: Tensor) -> Tensor:
    """Return (B,1,H,W): the luminance of three channels, or the mean of any other number."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    return 0.299 * red + 0.587 * green + 0.114 * blue  # type: ignore[no-any-return]


IMAGE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # These move away from black, mean gray or the gray image, or towards it by a negative amount.
    "brightness": lambda x, amount: _blend(torch.zeros_like(x), x, amount),
    "contrast": lambda x, amount: _blend(_gray(x).mean((1, 2, 3), keepdim=True), x, amount),
    "saturation": lambda x, amount: _blend(_gray(x), x, amount),
    "sharpness": sharpness,
    "posterize": posterize,
    # Invert pixels that are brighter than 1 - |amount|.
    "solarize": lambda x, amount: torch.where(x > 1 - _per_image(amount.abs(), x), 1 - x, x),
    "autocontrast": autocontrast,
    "equalize": equalize,
    "rotate": rotate,
    # Shears move rows or columns by the amount times their distance from the center. Translations
    # move the image by the amount times its side.
    "shear_x": lambda x, amount: _resample(x, 1, amount, 0, 1),
    "shear_y": lambda x, amount: _resample(x, 1, 0, amount, 1),
    "translate_x": lambda x, amount: _resample(x, 1, 0, 0, 1, across=amount * x.shape[3]),
    "translate_y": lambda x, amount: _resample(x, 1, 0, 0, 1, down=amount * x.shape[2]),
}
TRIVIAL_OPS = ("identity", *IMAGE_OPS)


@dataclass(frozen=True)
class Compose:
    """Several augmentations, one after another."""

    steps: tuple[Augmentation, ...]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        for step in self.steps:
            x = step(x, generator)
        return x


@dataclass(frozen=True)
class RandomCrop:
    """Pads by `padding` zeros on each side and cuts out the original size at a random place."""

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
    """Mirrors images left and right with this probability."""

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_share(self.probability, "probability")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        chosen = _uniform((len(x), 1, 1, 1), x, generator) < self.probability
        return torch.where(chosen, x.flip(3), x)


@dataclass(frozen=True)
class RandomAffine:
    """Turns, scales and shifts images by small random amounts. They are black outside.

    The amounts are uniform: up to `degrees` both ways, a factor of up to 1 +- `scale`, and up to
    `shift` pixels along each axis."""

    degrees: float = 4.0
    scale: float = 0.05
    shift: float = 0.5

    def __post_init__(self) -> None:
        check_range(self.degrees, "degrees", 0.0, 180.0)
        check_range(self.scale, "scale", 0.0, 1.0)
        check_range(self.shift, "shift", 0.0, math.inf)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        turn, grow, across, down = 2 * _uniform((4, len(x)), x, generator) - 1
        angle, size = math.radians(self.degrees) * turn, 1 + self.scale * grow
        cos, sin = angle.cos() / size, angle.sin() / size
        moved = {"across": self.shift * across, "down": self.shift * down}
        return _resample(x, cos, -sin, sin, cos, **moved, outside=0.0)


@dataclass(frozen=True)
class Cutout:
    """Puts a gray square with sides of `size` pixels around a random pixel."""

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
    """Applies one operation to each image, by an amount uniform in [-strength, strength].

    The operations share the images of a batch evenly. At strength 1 the ranges are those of the
    wide TrivialAugment: rotations by 135 degrees, shears by 1, translations by the whole side, and
    2 of 8 bits."""

    strength: float = 1.0
    ops: tuple[str, ...] = TRIVIAL_OPS

    def __post_init__(self) -> None:
        check_share(self.strength, "strength")
        require(self.ops, "ops", "at least one", "none")
        for name in self.ops:
            check_choice(name, "ops", TRIVIAL_OPS)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        names = list(self.ops)
        host_rng(generator).shuffle(names)  # because the first operations may get one image more
        amount = self.strength * (2 * _uniform((len(x),), x, generator) - 1)
        # The host knows the sizes of these groups, so nothing is read back from a GPU.
        order = torch.randperm(len(x), generator=generator, device=generator.device)
        changed = x.clone()
        groups = order.to(x.device).tensor_split(len(names))
        for name, rows in zip(names, groups, strict=True):
            if name != "identity" and len(rows):
                changed[rows] = IMAGE_OPS[name](x[rows], amount[rows])
        return changed


def mixup(x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return s x + (1 - s) x' with s uniform in (0, 1), and labels mixed in the same way.

    Labels (B,) become shares (B,classes). The partner x' of an image is at the mirrored place of
    the batch, whose order is random."""
    share = host_rng(generator).betavariate(1.0, 1.0)
    return share * x + (1 - share) * x.flip(0), _label_shares(y, classes, share, x)


def cutmix(x: Tensor, y: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Replace a box of each image by the pixels of its partner, and mix the labels by area.

    The box has about 1 - s of the area, with s uniform in (0, 1). Labels (B,) become shares
    (B,classes)."""
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


MIXINGS = {"both": (mixup, cutmix), "mixup": (mixup,), "cutmix": (cutmix,)}


def mix_some(
    x: Tensor,
    y: Tensor,
    classes: int,
    generator: torch.Generator,
    *,
    probability: float,
    by: str = "both",
) -> tuple[Tensor, Tensor]:
    """Apply mixup or CutMix with this probability; labels become shares in any case."""
    rng = host_rng(generator)
    if rng.random() >= probability:
        return x, _label_shares(y, classes, 1.0, x)
    return rng.choice(MIXINGS[by])(x, y, classes, generator)


def host_rng(generator: torch.Generator) -> random.Random:
    """Return random numbers for the host from a generator that may be on a GPU.

    Reading a number from a GPU would stall it, so its state is the seed. The generator advances."""
    rng = random.Random(generator.get_state().numpy().tobytes())
    torch.rand(1, generator=generator, device=generator.device)
    return rng


def _label_shares(y: Tensor, classes: int, own: float, like: Tensor) -> Tensor:
    shares = (y[:, None] == torch.arange(classes, device=y.device)).to(like.dtype)
    return own * shares + (1 - own) * shares.flip(0)


def _uniform(shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device, dtype=x.dtype).to(x)


def _integers(bound: int, shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(bound, shape, generator=generator, device=generator.device)
    return drawn.to(x.device)


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "affine": RandomAffine(),
    "light": Compose((RandomCrop(4), RandomFlip())),
    "strong": Compose((RandomCrop(4), RandomFlip(), TrivialAugment(0.5), Cutout(8))),
}
"""Augmentations by name, for images of about 32 x 32 pixels; "affine" is for digits and other
drawings on black, "strong" is for transformers."""


def choose_augmentation(name: str, own: Augmentation | None, net: InputNet) -> Augmentation | None:
    """Return the augmentation of that name for a network on images, or the user's for "none"."""
    if name == "none":
        return own
    require(own is None, "augment", "a name or an augmentation", f"{name!r} and {own!r}")
    images = len(net.input_shape) == 3 and net.bounds == (0.0, 1.0)
    got = f"{name!r} for shape {net.input_shape} within {net.bounds}"
    require(images, "augment", "'none' unless for images (C,H,W) within (0, 1)", got)
    return AUGMENTATIONS[name]
