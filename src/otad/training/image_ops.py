"""Operations on batches of images (B,C,H,W) in [0, 1], with an amount (B,) for each image.

An amount of 0 changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ImageOp = Callable[[Tensor, Tensor], Tensor]
_LEVELS = 256
_LUMINANCE = (0.299, 0.587, 0.114)


def brightness(x: Tensor, amount: Tensor) -> Tensor:
    """Away from (or towards, amount < 0) black."""
    return _blend(torch.zeros_like(x), x, amount)


def contrast(x: Tensor, amount: Tensor) -> Tensor:
    """Away from the mean gray."""
    return _blend(_gray(x).mean((1, 2, 3), keepdim=True), x, amount)


def saturation(x: Tensor, amount: Tensor) -> Tensor:
    """Away from the gray image."""
    return _blend(_gray(x), x, amount)


def sharpness(x: Tensor, amount: Tensor) -> Tensor:
    """Away from the image smoothed over 3 x 3 pixels; the border is unchanged."""
    if min(x.shape[2:]) < 3:
        return x  # nothing but border
    smooth = x.clone()
    inner = smooth[:, :, 1:-1, 1:-1]
    inner.mul_(4).add_(functional.avg_pool2d(x, 3, stride=1), alpha=9).div_(13)  # 5 of 13 itself
    return _blend(smooth, x, amount)


def posterize(x: Tensor, amount: Tensor) -> Tensor:
    """Only the leading 8 - round(6 |amount|) of 8 bits."""
    lost = 2 ** _per_image((6 * amount.abs()).round(), x)
    coarse = ((x * (_LEVELS - 1)).round() / lost).floor() * lost / (_LEVELS - 1)
    return torch.where(lost > 1, coarse, x)


def solarize(x: Tensor, amount: Tensor) -> Tensor:
    """Invert what is brighter than 1 - |amount|."""
    return torch.where(x > 1 - _per_image(amount.abs(), x), 1 - x, x)


def invert(x: Tensor, amount: Tensor) -> Tensor:
    """The negative, wherever the amount is not 0."""
    return torch.where(_per_image(amount, x) != 0, 1 - x, x)


def autocontrast(x: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel to all of [0, 1], wherever the amount is not 0."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretched = (x - low) / (high - low).clamp_min(1e-12)
    return torch.where((_per_image(amount, x) != 0) & (high > low), stretched, x)


def equalize(x: Tensor, amount: Tensor) -> Tensor:
    """Level the histogram of each channel over 256 values, wherever the amount is not 0."""
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


def shear_x(x: Tensor, amount: Tensor) -> Tensor:
    """Rows move against the center by the amount times their height above it."""
    return _resample(x, 1, amount, 0, 1)


def shear_y(x: Tensor, amount: Tensor) -> Tensor:
    return _resample(x, 1, 0, amount, 1)


def translate_x(x: Tensor, amount: Tensor) -> Tensor:
    """Move by the amount times the width."""
    return _resample(x, 1, 0, 0, 1, across=amount * x.shape[3])


def translate_y(x: Tensor, amount: Tensor) -> Tensor:
    return _resample(x, 1, 0, 0, 1, down=amount * x.shape[2])


def _resample(
    x: Tensor,
    xx: Tensor | int,
    xy: Tensor | int,
    yx: Tensor | int,
    yy: Tensor | int,
    *,
    across: Tensor | int = 0,
    down: Tensor | int = 0,
) -> Tensor:
    """The image at ((xx, xy), (yx, yy)) p - (across, down) for each pixel p from the center,
    bilinear; gray outside the image."""
    height, width = x.shape[2:]
    rows = torch.arange(height, dtype=x.dtype, device=x.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=x.dtype, device=x.device) - (width - 1) / 2
    py, px = torch.meshgrid(rows, columns, indexing="ij")
    at_x = _plane(xx) * px + _plane(xy) * py - _plane(across)
    at_y = _plane(yx) * px + _plane(yy) * py - _plane(down)
    shape = (len(x), height, width)
    grid = torch.stack([(at_x / (width / 2)).expand(shape), (at_y / (height / 2)).expand(shape)], 3)
    sampled = functional.grid_sample(x - 0.5, grid, align_corners=False) + 0.5
    return sampled.clamp(0.0, 1.0)


def _plane(value: Tensor | int) -> Tensor | int:
    return value[:, None, None] if isinstance(value, Tensor) else value


def _per_image(amount: Tensor, x: Tensor) -> Tensor:
    return amount.to(x)[:, None, None, None]


def _blend(dull: Tensor, x: Tensor, amount: Tensor) -> Tensor:
    return (x + _per_image(amount, x) * (x - dull)).clamp(0.0, 1.0)


def _gray(x: Tensor) -> Tensor:
    """(B,1,H,W): luminance of three channels, the mean of any other number."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    gray: Tensor = _LUMINANCE[0] * red + _LUMINANCE[1] * green + _LUMINANCE[2] * blue
    return gray


_OPS = (
    brightness, contrast, saturation, sharpness, posterize, solarize, invert, autocontrast,
    equalize, rotate, shear_x, shear_y, translate_x, translate_y,
)  # fmt: skip
IMAGE_OPS: dict[str, ImageOp] = {op.__name__: op for op in _OPS}
