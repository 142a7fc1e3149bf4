"""The pairs (x_i, z_i) of a bank in the coordinates of the global map's potential."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_shape, check_tensor
from otad.cip.execution import blocks
from otad.io.mapped_rows import gathered, spread_rows

BLOCK_BYTES = 2**28
SAMPLE = 65  # points from which the middle of a bank is estimated


def check_bank(inputs: Tensor, features: Tensor) -> None:
    check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES)
    check_tensor(features, "features", "N,d", dtypes=STORAGE_DTYPES)
    check_shape(features, "features", tuple(inputs.shape), "like the inputs")
    check_alike(features, "features", inputs, "inputs")


class Pairs:
    """Centered x and z~ = z - l x in float64, read by blocks from a bank.

    The bank may have any precision and be on any device. What is read is on `device`, by default
    the bank's. `included` (N,) marks the points that are not left out."""

    def __init__(
        self, inputs: Tensor, features: Tensor, low: float, device: torch.device | None = None
    ) -> None:
        check_bank(inputs, features)
        self.inputs, self.features, self.strong_convexity = inputs, features, low
        self.device = device or inputs.device
        self.center, image_center = (
            part.mean(0, dtype=torch.float64).to(self.device) for part in (inputs, features)
        )
        self.image_center = image_center - low * self.center
        self.included = torch.ones(len(inputs), dtype=torch.bool, device=self.device)
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
        """Return centered x and z~ (n,d) of some points."""
        points = self._stored(self.inputs, rows)
        images = self._stored(self.features, rows) - self.strong_convexity * points
        return points - self.center, images.sub_(self.image_center)

    def images(self, rows: Tensor | slice) -> Tensor:
        """Return centered z~ (n,d) of some points."""
        if self.strong_convexity == 0:
            images = self._stored(self.features, rows)
            if isinstance(rows, Tensor):  # a copy; the CPU takes long to get new memory
                return images.sub_(self.image_center)
            return images - self.image_center
        return self.read(rows)[1]

    def lines_alone(self, lines: Tensor, modulus: float) -> Tensor:
        """Return s_i - |z~_i|^2 / (2M) (N,), with which a price is f of the point's full weight."""
        return lines - self.image_squares / (2 * modulus)

    def blocks(self, width: int | None = None) -> list[slice]:
        """Return blocks of `width` points, by default as many as fit in memory with all pairs."""
        fitting = max(1, min(math.isqrt(BLOCK_BYTES // 8), BLOCK_BYTES // (16 * self.dim)))
        return blocks(len(self), width or fitting)

    def offsets(self) -> Tensor:
        """Return u - u~ (N,) up to a constant, see `offsets_at`."""
        return torch.cat([self.offsets_at(self.read(rows)[0]) for rows in self.blocks()])

    def offsets_at(self, points: Tensor) -> Tensor:
        """Return u - u~ at centered points (n,d): the tilt by the centered z~, and (l/2) |x|^2."""
        tilt = points @ self.image_center
        return tilt + self.strong_convexity * half_squares(points, self.center)

    def _stored(self, part: Tensor, rows: Tensor | slice) -> Tensor:
        if isinstance(rows, Tensor):
            return part.index_select(0, rows.to(part.device)).to(self.device).double()
        return part[rows].to(self.device).double()


def half_squares(points: Tensor, center: Tensor) -> Tensor:
    """Return (|x|^2 - |center|^2) / 2 (n,) of points x - center (n,d), also exact far from 0."""
    return (points * (points + 2 * center)).sum(1) / 2


def middle_of(points: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the coordinate-wise median (d,) of a sample of a bank (N,d), in memory or a file."""
    count = len(points)
    chosen = spread_rows(count, SAMPLE)
    return gathered(points, chosen, device).median(0).values
