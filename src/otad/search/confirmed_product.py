"""Finds the rows with the largest <query, row> + offset: bounded in float32, confirmed in float64.

A matrix product in float32 gives an upper bound of every score, and the rows of the largest bounds
are the shortlist. The caller computes their scores in float64. A score above the ceiling of all
other rows is proved to be the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32_ROUNDOFF = 2.0**-24
# The precision to which a user's setting lets a matrix product round its inputs.
MATMUL_ROUNDOFF = {"tf32": 2.0**-11, "high": 2.0**-11, "bf16": 2.0**-8, "medium": 2.0**-8}
SECTION = 1024  # columns that are summed in one product; short sums keep the error bound tight


@dataclass(frozen=True, eq=False)
class Shortlist:
    """The rows with the largest upper bounds of their scores.

    `indices` (b,T) are the rows of the largest `bounds` (b,T), largest first. They score at least
    `floors` (b,T), and no row outside the shortlist scores more than `ceiling` (b,)."""

    indices: Tensor
    bounds: Tensor
    floors: Tensor
    ceiling: Tensor

    @property
    def close(self) -> Tensor:
        """Which rows (b,T) of the shortlist may have the largest score of these."""
        return self.bounds >= self.floors[:, :1]

    @property
    def is_complete(self) -> Tensor:
        """Whether no row outside the shortlist can have the largest score (b,)."""
        return self.ceiling < self.floors[:, 0]


def shortlist(
    queries: Tensor,
    blocks: Iterable[tuple[int, Tensor]],
    norms: Tensor,
    offsets: Tensor,
    size: int,
    products_at_once: int,
    dtype: torch.dtype = torch.float32,
) -> Shortlist:
    """Return the `size` rows with the largest bounds of <query, row> + offset, for queries (b,d).

    `blocks` yields (start, rows (n,d)) over all N rows in `dtype`, which is float64 if float32
    leaves the order open. `norms` (N,) are at least |row|, and `offsets` (N,) may be -inf; both are
    in float64.
    """
    count, size = len(norms), min(size, len(norms))
    sums = Sums(queries, norms, offsets, dtype)
    left, base, sizes = sums.left, sums.base, sums.sizes
    best = left.new_full((len(queries), size), -math.inf)
    names = torch.zeros(len(queries), size, dtype=torch.int64, device=left.device)
    space = left.new_empty(0)  # used again, because the CPU takes long to get new memory
    for start, block in blocks:
        right, rows = block.to(left.device), slice(start, start + len(block))
        at_once = max(1, products_at_once // len(block))
        for first in range(0, len(queries), at_once):
            some = slice(first, first + at_once)
            reach = sums.reach[some]
            space.resize_(len(reach), len(right))
            bounds = torch.addcmul(base[rows], reach, sizes[rows], out=space)
            found = add_product(bounds, left[some], right).topk(min(size, len(right)), dim=1)
            values, places = found.values, found.indices
            if start == 0 and len(right) >= size:
                best[some], names[some] = values, places
                continue
            merged = torch.cat([best[some], values], dim=1).topk(size, dim=1)
            listed = torch.cat([names[some], places + start], dim=1)
            best[some], names[some] = merged.values, listed.gather(1, merged.indices)
    ceiling = best[:, -1] if size < count else torch.full_like(best[:, 0], -math.inf)
    return sums.listed(names, best, ceiling)


class Sums:
    """What is added to products <query, row> in `dtype` to get upper bounds of scores.

    For queries (b,d) these are `base` (N,) + `reach` (b,1) * `sizes` (N,)."""

    def __init__(self, queries: Tensor, norms: Tensor, offsets: Tensor, dtype: torch.dtype) -> None:
        dim, device = queries.shape[1], queries.device
        self.error = product_error(min(SECTION, dim) + dim // SECTION + 2, dtype, device)
        self.lengths, self.norms = row_norms(queries), norms
        self.left, self.reach = queries.to(dtype), (self.lengths * self.error).to(dtype)[:, None]
        self.offset_errors = self.error * offsets.abs().nan_to_num(posinf=0.0)
        self.sizes, self.base = (
            part.to(device, dtype) for part in (norms, offsets + self.offset_errors)
        )

    def part(self, rows: slice) -> Sums:
        """Return what belongs to some of the queries."""
        some = copy(self)
        some.lengths, some.left, some.reach = self.lengths[rows], self.left[rows], self.reach[rows]
        return some

    def listed(self, names: Tensor, bounds: Tensor, ceiling: Tensor) -> Shortlist:
        """Return the shortlist of rows (b,T) with their bounds, largest first."""
        rows, device = names.to(self.norms.device), bounds.device
        errors = self.error * self.lengths[:, None] * self.norms[rows].to(device)
        errors += self.offset_errors[rows].to(device)
        best = bounds.double()
        return Shortlist(names, best, best - 2 * errors, ceiling.double())


def product_error(terms: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest error of a product with sums of so many terms, relative to |query| |row|.

    It is twice the textbook bound, because tensor cores truncate, plus 8 roundoffs that the
    settings allow for inputs."""
    if dtype == torch.float64:
        return 2 * (terms + 16) * 2.0**-53
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    setting = setting or torch.get_float32_matmul_precision()  # in torch before 2.9
    rounded = MATMUL_ROUNDOFF.get(setting, FLOAT32_ROUNDOFF)
    return 2 * (terms + 8) * FLOAT32_ROUNDOFF + 8 * rounded


def squared_distances(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return |x_i - y_j|^2 (n,m) of float32 rows by a matrix product, and its error bound (n,m)."""
    sums = one.norm(dim=1).square()[:, None] + two.norm(dim=1).square()
    # A generous bound for sums of d terms, for the rounding of the rows, and for their lengths.
    error = 4 * (one.shape[1] + 8) * FLOAT32_ROUNDOFF * sums
    return torch.addmm(sums, one, two.mT, alpha=-2), error


def add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return base (b,n) + left (b,d) right (n,d)^T, in sections of columns; base is overwritten."""
    for start in range(0, left.shape[1], SECTION):
        columns = slice(start, start + SECTION)
        base.addmm_(left[:, columns], right[:, columns].T)  # in place, so autocast does not apply
    return base


def row_norms(rows: Tensor) -> Tensor:
    """Return the norms |row| (n,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
