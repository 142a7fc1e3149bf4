"""Finds the rows with the largest <query, row> + offset: bounded in float32, confirmed in float64.

A matrix product in float32 gives an upper bound of every score, and the rows of the largest bounds
are the shortlist. The caller computes their scores in float64. A score above the ceiling of all
other rows is proved to be the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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

    `indices` (b,T) are the rows of the largest `bounds` (b,T), largest first. The first row scores
    at least `floor` (b,), and no row outside the shortlist scores more than `ceiling` (b,)."""

    indices: Tensor
    bounds: Tensor
    floor: Tensor
    ceiling: Tensor


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
    count, device = len(norms), queries.device
    size = min(size, count)
    dim = queries.shape[1]
    error = product_error(min(SECTION, dim) + dim // SECTION + 2, dtype, device)
    lengths = row_norms(queries)
    left, reach = queries.to(dtype), (lengths * error).to(dtype)[:, None]
    offset_errors = error * offsets.abs().nan_to_num(posinf=0.0)
    sizes, base = (part.to(device, dtype) for part in (norms, offsets + offset_errors))
    best = left.new_full((len(queries), size), -math.inf)
    names = torch.zeros(len(queries), size, dtype=torch.int64, device=device)
    for start, block in blocks:
        right, rows = block.to(device), slice(start, start + len(block))
        at_once = max(1, products_at_once // len(block))
        for first in range(0, len(queries), at_once):
            some = slice(first, first + at_once)
            bounds = torch.addcmul(base[rows], reach[some], sizes[rows])
            found = add_product(bounds, left[some], right).topk(min(size, len(right)), dim=1)
            values, places = found.values, found.indices
            if start == 0 and len(right) >= size:
                best[some], names[some] = values, places
                continue
            merged = torch.cat([best[some], values], dim=1).topk(size, dim=1)
            listed = torch.cat([names[some], places + start], dim=1)
            best[some], names[some] = merged.values, listed.gather(1, merged.indices)
    best, top = best.double(), names[:, 0].to(norms.device)
    errors = error * lengths * norms[top].to(device) + offset_errors[top].to(device)
    ceiling = best[:, -1] if size < count else torch.full_like(lengths, -math.inf)
    return Shortlist(names, best, best[:, 0] - 2 * errors, ceiling)


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
