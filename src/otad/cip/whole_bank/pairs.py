"""A bank of pairs (x_i, z_i) in the coordinates that one potential for all of it is found in."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_shape, check_tensor
from otad.io.mapped_rows import gathered

BLOCK_BYTES = 2**28
SAMPLE = 65  # points of a bank that tell where its middle is


class Pairs:
    """Centered x and z~ = z - l x in float64, read by blocks; `kept` (N,) take part.

    The bank may be stored in any precision and anywhere; what is read, and all of size N that is
    kept here, lies on `device` (default: that of the bank).
    """

    def __init__(
        self,
        inputs: Tensor,
        features: Tensor,
        strong_convexity: float,
        device: torch.device | None = None,
    ) -> None:
        check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES)
        check_tensor(features, "features", "N,d", dtypes=STORAGE_DTYPES)
        check_shape(features, "features", tuple(inputs.shape), "like the inputs")
        check_alike(features, "features", inputs, "inputs")
        self.inputs, self.features, self.bend = inputs, features, strong_convexity
        self.device = inputs.device if device is None else device
        self.center = _mean(inputs).to(self.device)
        self.image_center = _mean(features).to(self.device) - strong_convexity * self.center
        self.kept = torch.ones(len(inputs), dtype=torch.bool, device=self.device)
        sizes = [
            (points.square().sum(1), images.square().sum(1), (points * images).sum(1))
            for points, images in (self.read(rows) for rows in self.blocks())
        ]
        self.squares, self.image_squares, self.products = (
            torch.cat(parts) for parts in zip(*sizes, strict=True)
        )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def dim(self) -> int:
        return self.inputs.shape[1]

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Centered x and z~ (n,d) of some points."""
        points = self._stored(self.inputs, rows)
        images = self._stored(self.features, rows) - self.bend * points
        return points - self.center, images - self.image_center

    def images(self, rows: Tensor | slice) -> Tensor:
        """Centered z~ (n,d) alone."""
        if self.bend == 0:
            return self._stored(self.features, rows) - self.image_center
        return self.read(rows)[1]

    def blocks(self, width: int | None = None) -> Iterator[slice]:
        """Runs of `width` points; by default as many as fit in memory with their square."""
        if width is None:
            width = max(1, math.isqrt(BLOCK_BYTES // 8))
            width = min(width, max(1, BLOCK_BYTES // (16 * self.dim)))
        for start in range(0, len(self), width):
            yield slice(start, min(start + width, len(self)))

    def offsets(self) -> Tensor:
        """u - u~ (N,) up to a constant, see `offsets_at`."""
        return torch.cat([self.offsets_at(self.read(rows)[0]) for rows in self.blocks()])

    def offsets_at(self, points: Tensor) -> Tensor:
        """The same at centered points (n,d): the tilt that centering z~ took away, and (l/2) |x|^2
        less that of the center."""
        return points @ self.image_center + self.bend * half_squares(points, self.center)

    def _stored(self, part: Tensor, rows: Tensor | slice) -> Tensor:
        if isinstance(rows, Tensor):
            rows = rows.to(part.device)
        return part[rows].to(self.device).double()


def half_squares(points: Tensor, center: Tensor) -> Tensor:
    """|x|^2 / 2 - |center|^2 / 2 (n,) of points x - center (n,d): far from the origin the square of
    the center would drown all else."""
    return (points * (points + 2 * center)).sum(1) / 2


def middle_of(points: Tensor, device: torch.device | None = None) -> Tensor:
    """(d,) the median of some points of a bank (N,d), wherever that is kept, coordinate by
    coordinate: unlike the mean, no single point that is far off moves it."""
    count = len(points)
    chosen = torch.linspace(0, count - 1, min(SAMPLE, count), dtype=torch.float64).long()
    return gathered(points, chosen, device).median(0).values


def _mean(points: Tensor) -> Tensor:
    return points.mean(0, dtype=torch.float64)
