"""Bound in float32, confirm in float64: which rows have the largest <query, row> + offset.

A matrix product in float32 gives an upper bound of every score; the rows of the largest bounds are
the shortlist. The caller computes their scores in float64: a result above the ceiling of all other
rows is proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32_ROUNDOFF = 2.0**-24
# What the user's setting lets a matrix product round its inputs to; float32 otherwise.
MATMUL_ROUNDOFF = {"tf32": 2.0**-11, "high": 2.0**-11, "bf16": 2.0**-8, "medium": 2.0**-8}
SECTION = 1024  # columns summed in one product: short sums keep the error bound tight


@dataclass(frozen=True, eq=False)
class Shortlist:
    """`indices` (b,T) of the rows of the largest upper `bounds` (b,T), largest first; `floor` (b,):
    the first scores at least that; `ceiling` (b,): no row outside the shortlist scores more."""

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
    """The `size` rows with the largest bounds of <query, row> + offset, for queries (b,d).

    `blocks` yields (start, rows (n,d)) over all N rows, in `dtype`: float64 where float32 leaves
    the order open. `norms` (N,) are at least |row| and `offsets` (N,) may be -inf, both in float64.
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
    """Largest error of a product whose sums have so many terms, relative to |query| |row|: twice
    the textbook bound, as tensor cores truncate, and 8 roundoffs that settings allow for inputs."""
    if dtype == torch.float64:
        return 2 * (terms + 16) * 2.0**-53
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    setting = setting or torch.get_float32_matmul_precision()  # before torch 2.9
    rounded = MATMUL_ROUNDOFF.get(setting, FLOAT32_ROUNDOFF)
    return 2 * (terms + 8) * FLOAT32_ROUNDOFF + 8 * rounded


def squared_distances(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """|x_i - y_j|^2 (n,m) of float32 rows by a matrix product, and its largest error (n,m)."""
    sums = one.norm(dim=1).square()[:, None] + two.norm(dim=1).square()
    # Sums of d terms, the rounding of the rows themselves, and lengths: all of them generously.
    error = 4 * (one.shape[1] + 8) * FLOAT32_ROUNDOFF * sums
    return torch.addmm(sums, one, two.mT, alpha=-2), error


def add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """base (b,n), overwritten, + left (b,d) right (n,d)^T, in sections of columns."""
    for start in range(0, left.shape[1], SECTION):
        columns = slice(start, start + SECTION)
        base.addmm_(left[:, columns], right[:, columns].T)  # in place, so autocast does not apply
    return base


def row_norms(rows: Tensor) -> Tensor:
    """|row| (n,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
