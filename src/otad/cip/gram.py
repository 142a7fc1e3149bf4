"""All that the solver needs of a batch: the inner products of its neighbors.

Only here (and when the answer is assembled) is anything of size d touched. The small arrays that
follow carry the batch axis LAST, (K,K,B), so that elementwise work runs over long contiguous
rows, and are float64 whatever the data is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip.problem import CipProblem, RowProblem, blocks

_BLOCK_BYTES = {"cpu": 2**22, "cuda": 2**29}  # one cache-sized or one GPU-filling block


@dataclass(frozen=True)
class Gram:
    """Inner products of offsets a_i = x_i - x' and centered images c_i = z_i - z_1.

    `offsets` (K,K,B) <a_i, a_j>, `cross` (K,K,B) <c_i, a_j>, `images` (K,K,B) <c_i, c_j>,
    `tilt` (K,B) <z_1, a_i>, `center` (B,) |z_1|; `noise` is the relative rounding error of all.
    """

    offsets: Tensor
    cross: Tensor
    images: Tensor
    tilt: Tensor
    center: Tensor
    noise: float

    @property
    def count(self) -> int:
        return self.tilt.shape[0]

    @property
    def squared_distance(self) -> Tensor:
        """|x_i - x'|^2 (K,B)."""
        return self.offsets.diagonal(dim1=0, dim2=1).mT

    @property
    def is_finite(self) -> Tensor:
        """Whether no product overflowed (B,)."""
        sums = self.offsets.sum((0, 1)) + self.images.sum((0, 1)) + self.tilt.sum(0)
        return (sums + self.cross.sum((0, 1)) + self.center).isfinite()

    def zeroed(self, rows: Tensor) -> Gram:
        """The same with all products of the rows marked (B,) set to zero."""
        parts = (self.offsets, self.cross, self.images, self.tilt, self.center)
        return Gram(*(part.masked_fill(rows, 0.0) for part in parts), noise=self.noise)

    def shift_of_levels(self, strong_convexity: Tensor) -> Tensor:
        """u_i - u~_i (K,B): what the shift by l and the centering of images take off h(x_i)."""
        return strong_convexity / 2 * self.squared_distance + self.tilt

    def columns(self, rows: Tensor) -> Gram:
        """The products of some rows of the batch."""
        return Gram(
            self.offsets[..., rows],
            self.cross[..., rows],
            self.images[..., rows],
            self.tilt[..., rows],
            self.center[rows],
            self.noise,
        )

    def shifted(self, strong_convexity: Tensor) -> ShiftedGram:
        """The products after the shift z~_i = z_i - l a_i that makes l = 0."""
        if not bool(strong_convexity.any()):
            return ShiftedGram(self.cross, self.images)
        low = strong_convexity
        cross = self.cross - low * self.offsets
        images = self.images - low * (self.cross + self.cross.transpose(0, 1))
        return ShiftedGram(cross, images + low.square() * self.offsets)


@dataclass(frozen=True)
class ShiftedGram:
    """`cross` (K,K,B) <c~_i, a_j> and `images` (K,K,B) <c~_i, c~_j> of the shifted images."""

    cross: Tensor
    images: Tensor

    @property
    def self_cross(self) -> Tensor:
        """<c~_i, a_i> (K,B)."""
        return self.cross.diagonal(dim1=0, dim2=1).mT

    @property
    def image_square(self) -> Tensor:
        """|c~_i|^2 (K,B)."""
        return self.images.diagonal(dim1=0, dim2=1).mT

    def difference_bounds(self) -> tuple[Tensor, Tensor]:
        """(s, t), each (K,K,B), such that eq. (2) reads u~_i - u~_j >= s_ij + t_ij / M."""
        rise = self.cross.transpose(0, 1) - self.self_cross[None]
        square = self.image_square
        bend = (square[:, None] + square[None]) / 2 - self.images
        return rise, bend.clamp_min(0.0)


def rows_per_block(problem: RowProblem, chunk: int | None) -> int:
    """`chunk`, or as many rows as fill the default working memory of the device."""
    if chunk is not None:
        return chunk
    _, count, dim = problem.shape
    budget = _BLOCK_BYTES.get(problem.query.device.type, 2**26)
    return max(1, budget // (2 * count * dim * problem.query.element_size()))


def gram_of(problem: RowProblem, chunk: int | None) -> Gram:
    """One pass over the neighbors of the whole batch, in blocks of rows."""
    batch, count, _ = problem.shape
    query = problem.query
    size = (2 * count, 2 * count, batch)
    products = torch.empty(size, dtype=torch.float64, device=query.device)
    with full_precision(query.device):
        for rows, part in blocks(problem, rows_per_block(problem, chunk)):
            stack = _stack(part)
            products[..., rows] = torch.bmm(stack, stack.mT).permute(1, 2, 0)
    # Row K of the stack holds z_1 itself, as c_1 = 0 needs no place.
    center = products[count, count].sqrt()
    tilt = products[count, :count].clone()
    products[count] = 0.0
    products[:, count] = 0.0
    return Gram(
        offsets=products[:count, :count],
        cross=products[count:, :count],
        images=products[count:, count:],
        tilt=tilt,
        center=center,
        noise=2e-7 if query.dtype == torch.float32 else 1e-13,
    )


def _stack(problem: CipProblem) -> Tensor:
    """Rows a_1..a_K, z_1, c_2..c_K of every query: (B,2K,d)."""
    batch, count, dim = problem.shape
    # Column-major on the CPU, where batched products of row-major stacks are several times slower.
    by_column = problem.query.device.type == "cpu"
    shape = (batch, dim, 2 * count) if by_column else (batch, 2 * count, dim)
    stack = problem.query.new_empty(shape)
    stack = stack.mT if by_column else stack
    torch.sub(problem.anchors, problem.query.detach()[:, None], out=stack[:, :count])
    stack[:, count] = problem.images[:, 0]
    torch.sub(problem.images[:, 1:], problem.images[:, :1], out=stack[:, count + 1 :])
    return stack


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Float32 products in float32: no autocast and no TF32, whatever the caller has set."""
    setting = torch.get_float32_matmul_precision()
    if setting != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if setting != "highest":
            torch.set_float32_matmul_precision(setting)
