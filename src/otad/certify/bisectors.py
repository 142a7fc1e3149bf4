"""Bisectors between bank points: from where on one is closer to the query than another.

For a query e, bank points i and j at distances d_i and d_j, and a move of the query by stretch * u,

    |e' - x_i|^2 - |e' - x_j|^2 = d_i^2 - d_j^2 - 2 <u, stretch (x_i - x_j)>,

so j stays closer than i for every |u| < b_ij = (d_i^2 - d_j^2) / (2 |stretch (x_i - x_j)|), the
distance of their bisector."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from otad.certify.half_spaces import ROUNDING, TINY
from otad.cip.whole_bank.pairs import middle_of
from otad.io.mapped_rows import block_of, gathered

BYTES = 2**29  # of working memory
FIRST_BLOCK, LARGEST_BLOCK = 32, 1024  # bank points of a query measured at once

Measure = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows (r,) of a batch, bank points (r,T) of each, the least found for each row (r,) -> a quantity
(r,T) for each of these points, which need not be exact where it exceeds the least."""


class Rivals(NamedTuple):
    """Some bank points j for each query: `indices` (B,J), `offsets` stretch (x_j - e) (B,J,d), the
    products `products` (B,J,J) of these, and `squares` (B,J) |x_j - e|^2."""

    indices: Tensor
    offsets: Tensor
    products: Tensor
    squares: Tensor


class Bisectors(NamedTuple):
    """Bank points i (r,T) against the rivals j of their queries, rounded so that leads are too
    small: `distances` (r,T,J) b_ij, -inf for j = i; `leads` (r,T,J) d_i^2 - d_j^2; `products`
    (r,T,J) <a_i, a_j> and `squares` (r,T) |a_i|^2 with a = stretch (x - e)."""

    distances: Tensor
    leads: Tensor
    products: Tensor
    squares: Tensor


class BankBisectors:
    """The bisectors between queries (B,m) in float64 and a bank (N,m), which is in memory or
    mapped. Both are keys of a metric, or embedded inputs. No bank point is closer than
    `distance_floor` (B,N)."""

    def __init__(self, queries: Tensor, points: Tensor, stretch: Tensor) -> None:
        self.queries, self.points, self.stretch = queries, points, stretch
        # From one matrix product, lowered by what rounding may have added. Taken from the middle of
        # the bank, as far from there rounding would exceed the distances.
        center = middle_of(points, queries.device).to(queries)
        centered = queries - center
        own = _squares(centered)[:, None]
        floor = queries.new_empty(len(queries), len(points))
        step = max(1, BYTES // (64 * queries.shape[1]))
        for start in range(0, len(points), step):
            block = block_of(points, start, start + step).to(queries) - center
            sizes = own + _squares(block)
            product = torch.addmm(sizes, centered, block.mT, alpha=-2)
            floor[:, start : start + step] = product.sub_(sizes, alpha=ROUNDING)
        self.distance_floor = floor.clamp_min_(0).sqrt_()

    def entry_floor(self, distance: Tensor) -> Tensor:
        """Return for each bank point (B,N) a bound on its b_ij against all j within `distance`
        (B,)."""
        # |stretch (x_i - x_j)| <= Q (d_i + d_j), Q the longest stretch: b_ij >= (d_i - d_j) / (2 Q)
        scale = (1 - ROUNDING) / (2 * self.stretch.max())
        return (self.distance_floor - (1 + ROUNDING) * distance[:, None]).mul_(scale).clamp_min_(0)

    def rivals(self, indices: Tensor) -> Rivals:
        offsets = self._offsets(slice(None), indices)
        squares = _squares(offsets)
        offsets.mul_(self.stretch)
        return Rivals(indices, offsets, offsets @ offsets.mT, squares)

    def against(self, rivals: Rivals, rows: Tensor, indices: Tensor) -> Bisectors:
        """Return the bisectors of the queries `rows` (r,) and the bank points `indices` (r,T) of
        each."""
        offsets = self._offsets(rows, indices)
        own = _squares(offsets)[:, :, None]
        offsets.mul_(self.stretch)
        squares = _squares(offsets)
        products = offsets @ rivals.offsets[rows].mT
        sizes = squares[:, :, None] + rivals.products[rows].diagonal(dim1=1, dim2=2)[:, None]
        # Too wide a gap and too small a lead are on the safe side; a copy of i never leads.
        gaps = (sizes - 2 * products).clamp_min_(0).add_(sizes, alpha=ROUNDING).sqrt_()
        others = rivals.squares[rows][:, None]
        leads = own - others - ROUNDING * (own + others)
        same = indices[:, :, None] == rivals.indices[rows][:, None]
        distances = (leads / (2 * gaps).clamp_min_(TINY)).masked_fill_(same, -torch.inf)
        return Bisectors(distances, leads, products, squares)

    def least(
        self, floor: Tensor, start: Tensor, measure: Measure, block: int = FIRST_BLOCK
    ) -> Tensor:
        """min(start, min over i of measure_i) (B,), for quantities that are at least floor_i (B,N).

        Bank points are measured in the order of their floor, in growing blocks, until no floor is
        below the least found. `block` is the size of the first one. `floor` is overwritten."""
        best = start.clone()
        rows = torch.arange(len(floor), device=floor.device)
        while len(rows):
            width = min(block, floor.shape[1])
            lowest, indices = floor[rows].topk(width, largest=False)
            unsettled = lowest[:, 0] < best[rows]
            rows, indices = rows[unsettled], indices[unsettled]
            at_once = max(1, BYTES // (24 * width * self.queries.shape[1]))
            for part, points in zip(rows.split(at_once), indices.split(at_once), strict=True):
                least = measure(part, points, best[part]).amin(1)
                best[part] = torch.minimum(best[part], least)
            floor[rows[:, None], indices] = torch.inf
            block = min(2 * block, LARGEST_BLOCK)
        return best

    def offsets(self, rows: Tensor, indices: Tensor) -> Tensor:
        """stretch (x_i - e) (r,T,m) for the queries `rows` (r,) and bank points `indices` (r,T)."""
        return self._offsets(rows, indices).mul_(self.stretch)

    def _offsets(self, rows: Tensor | slice, indices: Tensor) -> Tensor:
        """x_i - e (r,T,m)."""
        points = gathered(self.points, indices, self.queries.device).to(self.queries)
        return points.sub_(self.queries[rows][:, None])


def queries_at_once(points: int, rivals: int, dim: int) -> int:
    """Some numbers for each bank point, and the rivals twice, fit into the working memory."""
    return max(1, BYTES // (8 * (10 * points + 2 * rivals * dim)))


def _squares(vectors: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(vectors, dim=-1).square()  # without a copy
    return squares
