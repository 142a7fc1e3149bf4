"""The inner products of the neighbors of a batch, which are all that the solver needs.

Small arrays are in float64 with the batch axis last, (K,K,B), so that rows are long and
contiguous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from otad.cip.execution import can_compile, full_precision, problem_blocks, run_parts
from otad.cip.local.read_compiled import Array, compiled_products
from otad.cip.local.stream_triton import can_stream, streamed_products
from otad.cip.protocols import RowProblem

NOISE = {torch.float32: 2e-7, torch.float64: 1e-13}  # the relative rounding error of a product


@dataclass(frozen=True)
class Gram:
    """Inner products of offsets a_i = x_i - x' and centered images c_i = z_i - z_1.

    - `cross` (K,K,B): <c_i, a_j>
    - `images` (K,K,B): <c_i, c_j>
    - `tilt` (K,B): <z_1, a_i>
    - `squared_distance` (K,B): |a_i|^2
    - `center` (B,): |z_1|
    - `offsets` (K,K,B): <a_i, a_j>, or None if every strong convexity is 0
    - `noise`: the relative rounding error of all of them"""

    cross: Tensor
    images: Tensor
    tilt: Tensor
    squared_distance: Tensor
    center: Tensor
    offsets: Tensor | None
    noise: float

    def changed(self, by: Callable[[Tensor], Tensor]) -> Gram:
        parts = vars(self).items()
        changed: dict[str, Any] = {k: by(v) for k, v in parts if isinstance(v, Tensor)}
        return replace(self, **changed)

    def columns(self, rows: Tensor) -> Gram:
        return self.changed(lambda part: part[..., rows])

    @property
    def is_finite(self) -> Tensor:
        """Whether no product overflowed (B,)."""
        sums = self.cross.sum(0).sum(0) + self.images.sum(0).sum(0) + self.tilt.sum(0) + self.center
        return (sums + self.squared_distance.sum(0)).isfinite()

    def sizes(self, strong_convexity: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest |a_i| and |c_i| + |l a_i| (B,), terms that the shift may cancel."""
        squares = torch.stack((self.squared_distance, diagonal(self.images)))
        offset, image = (squares * active).amax(1).sqrt()
        return offset, image + strong_convexity.abs() * offset

    def potential_shift(self, strong_convexity: Tensor) -> Tensor:
        """Return u_i - u~_i (K,B), the change of h(x_i) by the shift and by centering images."""
        return strong_convexity / 2 * self.squared_distance + self.tilt

    def shifted(self, strong_convexity: Tensor) -> tuple[Tensor, Tensor]:
        """Return `cross` and `images` after the shift z~_i = z_i - l a_i, which makes l = 0."""
        if self.offsets is None:
            return self.cross, self.images
        low = strong_convexity
        cross = self.cross - low * self.offsets
        images = self.images - low * (self.cross + self.cross.transpose(0, 1))
        return cross, images + low.square() * self.offsets


@dataclass(frozen=True)
class Products:
    """The inner products of a batch as they are computed, with the batch before the neighbors.

    `values` (S,B,2K or K,2K) belong to the stack a_1..a_K, z_1, c_2..c_K, and `squares` (S,B,K) are
    |a_i|^2. Both have to be summed over their S parts. The K rows of the a_i are computed only
    `with_offsets`. If compiled code has found them, `arrays` are both of them without parts."""

    values: Tensor
    squares: Tensor
    with_offsets: bool
    arrays: tuple[Array, Array] | None = None

    @property
    def count(self) -> int:
        return self.squares.shape[2]

    @property
    def noise(self) -> float:
        return NOISE[self.values.dtype]

    def rows(self, rows: Tensor) -> Products:
        return Products(self.values[:, rows], self.squares[:, rows], self.with_offsets)

    def gram(self) -> Gram:
        count = self.count
        products = _sum_in_double(self.values.permute(0, 2, 3, 1))
        squares = _sum_in_double(self.squares.mT)
        # The last K rows belong to z_1, c_2..c_K: z_1 is in the place of c_1, which is 0.
        lower = products[-count:]
        tilt, center = lower[0, :count].clone(), lower[0, count].sqrt()
        lower[0] = 0.0
        lower[:, count] = 0.0
        cross, images = lower[:, :count], lower[:, count:]
        offsets = products[:count, :count] if self.with_offsets else None
        return Gram(cross, images, tilt, squares, center, offsets, self.noise)


def products_of(problem: RowProblem, chunk: int | None, *, with_offsets: bool) -> Products:
    """Return the inner products, by one pass over the neighbors.

    `with_offsets` is needed if some strong convexity is not 0."""
    if can_stream(problem):
        return Products(*streamed_products(problem, with_offsets=with_offsets), with_offsets)
    if can_compile(problem.query):
        arrays = compiled_products(problem, chunk, with_offsets=with_offsets)
        values, squares = (torch.from_numpy(array[None]) for array in arrays)
        return Products(values, squares, with_offsets, arrays)
    (batch, count, _), query = problem.shape, problem.query.detach()
    values = query.new_empty((1, batch, 2 * count if with_offsets else count, 2 * count))
    squares = query.new_empty((1, batch, count))

    def work(rows: slice) -> None:
        points, pair = query[rows], (problem.anchors_of(rows), problem.images_of(rows))
        anchors, images = (part.to(query.dtype) for part in pair)
        offsets, first = anchors - points[:, None], images[:, :1]
        stack = torch.cat((offsets, first, images[:, 1:] - first), 1)
        torch.matmul(stack if with_offsets else stack[:, count:], stack.mT, out=values[0, rows])
        torch.linalg.vector_norm(offsets, dim=2, out=squares[0, rows])

    with full_precision(query.device):
        run_parts(problem_blocks(problem, chunk), work, query.device)
    return Products(values, squares.square_(), with_offsets)


def _sum_in_double(parts: Tensor) -> Tensor:
    """Return the sum over the first axis, contiguous and in new memory."""
    total = torch.empty(parts.shape[1:], dtype=torch.float64, device=parts.device)
    return total.copy_(parts[0]) if len(parts) == 1 else torch.sum(parts, 0, out=total)


def diagonal(matrix: Tensor) -> Tensor:
    """Return the diagonals (K,B) of matrices (K,K,B)."""
    return matrix.diagonal(dim1=0, dim2=1).mT
