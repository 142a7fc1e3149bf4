"""Finds candidates on a GPU by one matrix product, and confirms them by two kernels.

The points are in G groups. The T largest products of a query are among the products of the T groups
with the largest maxima, so two selections from short lists find them. Triton kernels then compute
the distances of these T candidates in float64, sort them, and say how far all other points are.

Matrix units multiply numbers in half precision many times as fast as others, so each number is the
sum of two halves. GPUs without them multiply in float64, or if that is slow in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.io.environment import has_triton
from otad.search.confirmed_product import FLOAT32_ROUNDOFF, product_error, row_norms

GROUP = 64  # points of a group
MOST_CANDIDATES = 64  # a kernel compares all pairs of them
MOST_COLUMNS = 2**12  # of a point; a program has a whole one in its registers
STORED_BYTES = 2**30  # the most that a converted copy of the points may take
NUMBERS_OF_PROGRAM = 2**10  # that it has in registers, if a point is no longer
EXPONENT = 7  # of the largest scaled number: far from the limits 2^-24 and 2^16 of halves
SMALLEST = 2.0**-64  # a row without larger numbers could not be scaled in float32
OFFSET_UNIT = 2.0**15  # the unit of offsets, which are squared norms
ALIGNED = 16  # halves: matrix units are slow if rows do not begin at a multiple
# Compute capabilities of GPUs whose float64 is half as fast as their float32, or faster.
FAST_IN_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def is_fast_in_double(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in FAST_IN_DOUBLE


class FullProduct:
    """Scores 2 <x, y> - |y|^2 of rows y (N,d) with norms (N,), in float32 or float64."""

    unit = 1.0

    def __init__(self, rows: Tensor, norms: Tensor, columns: int, dtype: torch.dtype) -> None:
        self.rows, self.columns, self.dtype = rows.to(dtype), columns, dtype
        self.offsets = (-norms.square()).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the scores (b,columns) of x (b,d) in this unit. Beyond the last row: -inf."""
        count = len(self.rows)
        scores = self.rows.new_empty((len(x), self.columns))
        scores[:, count:].fill_(-math.inf)
        left = x.to(self.dtype)
        torch.addmm(self.offsets, left, self.rows.T, alpha=2, out=scores[:, :count])
        return scores

    def error(self) -> float:
        """Return the largest error relative to 2 |x| |y| + |y|^2, with the largest |y|."""
        return product_error(self.rows.shape[1] + 2, self.dtype, self.rows.device)


class HalvesProduct:
    """The same scores by matrix units, which multiply numbers in half precision.

    With a power of two s, s y = h + l + r, where h is s y in half precision, l is the same of what
    h leaves, and |r_i| <= 2^-22 |s y_i| + 2^-25. So 2 s^2 <x, y> is the sum of three products of
    halves, and what is left out is smaller by 2^-20. The offset is the sum of three halves."""

    dtype = torch.float32  # of sums

    def __init__(self, rows: Tensor, norms: Tensor, columns: int, largest: float) -> None:
        (count, dim), self.scale = rows.shape, 2.0 ** (EXPONENT - math.frexp(largest)[1])
        self.unit = self.scale**-2
        high, low = halves(rows.float() * self.scale, 2)
        offsets = halves(-norms.square().to(rows.device) / (self.unit * OFFSET_UNIT), 3)
        width = -(-(3 * dim + 3) // ALIGNED) * ALIGNED
        self.right = high.new_zeros((columns, width))
        for place, part in enumerate((high, low, high)):
            self.right[:count, place * dim : (place + 1) * dim] = part
        self.right[:count, 3 * dim : 3 * dim + 3] = torch.stack(offsets, dim=1)
        self.right[count:, 3 * dim] = -math.inf

    def __call__(self, x: Tensor) -> Tensor:
        high, low = halves((x * (2 * self.scale)).float(), 2)
        units = high.new_full((len(x), self.right.shape[1] - 3 * x.shape[1]), OFFSET_UNIT)
        return multiplied(torch.cat([high, high, low, units], dim=1), self.right)

    def error(self) -> float:
        if getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
            return math.inf  # a user lets sums be in half precision
        return 2 * (self.right.shape[1] + 8) * FLOAT32_ROUNDOFF + 2.0**-18


def halves(numbers: Tensor, count: int) -> list[Tensor]:
    """Return numbers in half precision whose sum is almost the given ones, largest first."""
    parts = []
    for _ in range(count):
        parts.append(numbers.half())
        numbers = numbers - parts[-1]
    return parts


def multiplied(left: Tensor, right: Tensor) -> Tensor:
    """Return the products (b,n) of halves (b,d) and (n,d), added up in float32."""
    product: Tensor = torch.mm(left, right.T, out_dtype=torch.float32)
    return product


def multiplies_halves(device: torch.device) -> bool:
    """Return whether matrix units and torch add up products of halves in float32."""
    has_mm = torch.version.hip is None and "dtype" in torch.ops.aten.mm.overloads()
    return has_mm and torch.cuda.get_device_capability(device) >= (8, 0)


class GroupedProduct:
    """The points (N,d) of a search and their scaled copies y (N,d), with |y| (N,) in float64."""

    def __init__(self, points: Tensor, scaled: Tensor, radii: Tensor, exponent: int) -> None:
        count, dim = points.shape
        self.points, self.groups = points.contiguous(), -(-count // GROUP)
        self.product = _product_of(scaled, radii, GROUP * self.groups, is_exact=scaled is points)
        self.order = tree_order(dim).to(points.device)
        self._radius, self._exponent = float(radii.max()), exponent
        self._settings: dict[float, Tensor] = {}  # for good, because CUDA graphs read them

    @staticmethod
    def covers(points: Tensor) -> bool:
        """Return whether the kernels can be used for points (N,d), and memory suffices."""
        fits = points.dtype == torch.float32 or 4 * points.numel() <= STORED_BYTES
        return points.is_cuda and points.shape[1] <= MOST_COLUMNS and fits and has_triton()

    def holds(self, size: int) -> bool:
        """Return whether there are enough groups for a shortlist of this size."""
        return padded(size) <= min(MOST_CANDIDATES, self.groups)

    def candidates(
        self, queries: Tensor, x: Tensor, k: int, size: int, exclude: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `Candidates` of queries (b,d), which are x (b,d) in float64 when scaled."""
        from otad.search.kernels import rank_kernel, square_kernel

        (batch, dim), count, size = queries.shape, len(self.points), padded(size)
        grouped = self.product(x).view(batch, GROUP, self.groups)  # point i is in group i modulo G
        chosen = grouped.amax(1).topk(size, dim=1, sorted=False).indices
        inside = grouped.gather(2, chosen[:, None].expand(-1, GROUP, -1)).flatten(1)
        values, places = inside.topk(size, dim=1, sorted=False)
        values = values.double() * self.product.unit
        squares, indices = x.new_empty((batch, size)), places.new_empty((batch, k))
        distances, beyond = x.new_empty((batch, k)), x.new_empty(batch)
        width = len(self.order)
        at_once = min(size, max(1, NUMBERS_OF_PROGRAM // width))
        sizes = {"size": size, "width": width, "halvings": width.bit_length() - 1}
        rows = places, chosen, queries.contiguous(), self.points, self.order
        bound = row_norms(x), exclude, self._numbers(dim, x.device)
        # A fused multiplication and addition would round once, so that a sum would have other bits.
        plain = {"enable_fp_fusion": False}
        with torch.cuda.device_of(x):
            square_kernel[(batch, size // at_once)](
                *rows, squares, dim, count, self.groups, at_once=at_once, **sizes, **plain
            )
            rank_kernel[(batch,)](
                values, places, chosen, squares, *bound, indices, distances, beyond,
                count, self.groups, k=k, size=size, **plain,
            )  # fmt: skip
        return indices, distances, beyond

    def _numbers(self, dim: int, device: torch.device) -> Tensor:
        """Return what bounds the error of a product beside |x| and 1, and the scale (5,)."""
        error = self.product.error()
        if error not in self._settings:
            radius, flushed = self._radius, dim * 2.0**-120  # of numbers that float32 flushes to 0
            by_length = 2 * error * radius + flushed, error * radius**2 + flushed * (1 + radius)
            numbers = *by_length, 1e-12, 1 - 2e-12, 2.0**self._exponent
            self._settings[error] = torch.tensor(numbers, dtype=torch.float64, device=device)
        return self._settings[error]


def padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def tree_order(dim: int) -> Tensor:
    """Return where the columns of a row go, so that its sum by halves has the same additions.

    Halves of a row of `dim` numbers, the first one longer if `dim` is odd, are added until one
    number is left. Entry i of the result (2^n,) is a column, or -1 for a zero, such that adding
    halves of equal length n times makes the same additions."""
    widths = [dim]
    while widths[-1] > 1:
        widths.append((widths[-1] + 1) // 2)
    lanes = torch.arange(2 ** (len(widths) - 1))
    columns, exists = torch.zeros_like(lanes), torch.ones_like(lanes, dtype=torch.bool)
    for bit, (whole, half) in enumerate(zip(widths[-2::-1], widths[:0:-1], strict=True)):
        columns += (lanes >> bit & 1) * half
        exists &= columns < whole
    return torch.where(exists, columns, -1).int()


def _product_of(
    rows: Tensor, norms: Tensor, columns: int, *, is_exact: bool
) -> FullProduct | HalvesProduct:
    """Return the fastest product of a GPU. Its bounds are tight, except in float32."""
    device = rows.device
    if 6 * rows.numel() <= STORED_BYTES and multiplies_halves(device):
        least, most = torch.aminmax(rows)
        largest = max(-float(least), float(most))
        if largest > SMALLEST:
            return HalvesProduct(rows, norms, columns, largest)
    in_double = is_exact and 8 * rows.numel() <= STORED_BYTES and is_fast_in_double(device)
    return FullProduct(rows, norms, columns, torch.float64 if in_double else torch.float32)
