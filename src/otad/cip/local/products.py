"""The inner products of the neighbors of a batch, which are all that the solver needs.

Small arrays are in float64 with the batch axis last, (K,K,B), so that rows are long and
contiguous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.cip.execution import blocks, problem_blocks, run_parts
from otad.cip.local.stream_triton import can_stream, streamed_products
from otad.cip.protocols import RowProblem

_CACHE_BYTES = 2**20  # of one core: products of cached memory are the fastest
_SMALL_PRODUCT = 10**6  # multiplications for which OpenBLAS has kernels that copy nothing
_FEWEST_COLUMNS = 1000  # of a product, because every call takes time
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
    `with_offsets`."""

    values: Tensor
    squares: Tensor
    with_offsets: bool

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

    `with_offsets` is needed if some strong convexity is not 0. On the CPU long rows are cut into
    parts of some columns."""
    if can_stream(problem):
        return Products(*streamed_products(problem, with_offsets=with_offsets), with_offsets)
    batch, count, dim = problem.shape
    queries, height = problem.query.detach(), 2 * count if with_offsets else count
    most, width = batch, dim
    if queries.is_cpu:
        fitting = _CACHE_BYTES // (2 * count * queries.element_size())
        small = min(fitting, _SMALL_PRODUCT // (2 * count * count))
        most, width = max(1, fitting // dim), min(dim, max(_FEWEST_COLUMNS, small))
    parts = blocks(dim, width)
    values = queries.new_empty((len(parts), batch, height, 2 * count))
    squares = queries.new_empty((len(parts), batch, count))
    whole = as_array(queries), as_array(values), as_array(squares)
    free: list[Any] = []  # stacks to use again, because new memory costs as much as filling it

    @np.errstate(all="ignore")  # rows that overflow are found later
    def work(rows: slice) -> None:
        query, *out = whole[0][rows], whole[1][:, rows], whole[2][:, rows]
        pairs = problem.anchors_of(rows), problem.images_of(rows)
        anchors, images = (as_array(part.to(queries.dtype)) for part in pairs)
        size = min(most, len(query)), 2 * count, width
        stack = free.pop() if free else as_array(queries.new_empty(size))
        for at in blocks(len(query), len(stack)):
            for part, of in enumerate(parts):
                arrays = query[at, of], anchors[at, :, of], images[at, :, of]
                room = stack[: at.stop - at.start, :, : of.stop - of.start]
                fill_products(*arrays, room, out[0][part, at], out[1][part, at])
        free.append(stack)

    run_parts(problem_blocks(problem, chunk), work, queries.device)
    return Products(values, squares, with_offsets)


def as_array(tensor: Tensor) -> Any:
    """Return a tensor on the CPU as an array of NumPy, and other tensors as they are.

    Small operations and batches of small products take much less time in NumPy than in torch, and
    its products have full precision."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def fill_products(
    query: Any, anchors: Any, images: Any, stack: Any, values: Any, squares: Any
) -> None:
    """Compute `values` and `squares` of `Products` for arrays (B,d) and (B,K,d) in one dtype.

    The `stack` (B,2K,d) is working memory."""
    library: Any = torch if isinstance(query, Tensor) else np
    count, first = anchors.shape[1], stack.shape[1] - values.shape[1]
    library.subtract(anchors, query[:, None], out=stack[:, :count])
    stack[:, count] = images[:, 0]
    library.subtract(images[:, 1:], images[:, :1], out=stack[:, count + 1 :])
    for start in range(first, 2 * count, count):  # BLAS is slower if the result is square
        part, out = stack[:, start:][:, :count], values[:, start - first :][:, :count]
        library.matmul(part, stack.swapaxes(1, 2), out=out)
    offsets = stack[:, :count]
    if library is torch:
        squares.copy_(torch.linalg.vector_norm(offsets, dim=2).square())
    else:
        np.vecdot(offsets, offsets, out=squares)


def _sum_in_double(parts: Tensor) -> Tensor:
    """Return the sum over the first axis, contiguous and in new memory."""
    total = torch.empty(parts.shape[1:], dtype=torch.float64, device=parts.device)
    return total.copy_(parts[0]) if len(parts) == 1 else torch.sum(parts, 0, out=total)


def diagonal(matrix: Tensor) -> Tensor:
    """Return the diagonals (K,B) of matrices (K,K,B)."""
    return matrix.diagonal(dim1=0, dim2=1).mT
