"""The rounds of column generation for a batch of queries: see `otad.cip.whole_bank.map`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.cip.execution import run_parts
from otad.cip.local.simplex_qp import maximize_on_simplex
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.pricing import GATHERED_AT_ONCE, Prices

ENTRANTS = 16  # points that are added at a time
MAX_ROUNDS = 200
GAP = 1e-12  # relative to the size of the terms
NOISE = 1e-14  # relative error of products in float64


class Pricing(Protocol):
    """Finds the entrants: (b,count) bank points, and which of them may have the largest price."""

    def best(self, queries: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]: ...


class ColumnGeneration:
    """The weights of centered queries (B,d) in float64, from single points to the optimum.

    `indices` (B,W) have `weights`, those that are `active`; `images` (B,d) are z~', `sensitivity`
    (B,W,W) is d weights / d lines; `gap` (B,) is that of the last round over all points, infinite
    before it, `scale` (B,) the size of its terms.
    """

    def __init__(
        self, pairs: Pairs, lines: Tensor, modulus: float, points: Tensor, first: Pricing
    ) -> None:
        self.pairs, self.lines, self.modulus, self.points = pairs, lines, modulus, points
        count = len(points)
        longest = pairs.image_squares.max().sqrt()
        reach = points.norm(dim=1) + pairs.squares.max().sqrt() + longest / modulus
        self.scale = longest * reach + lines[pairs.included].abs().max()
        self.gap = points.new_full((count,), torch.inf)
        self.mean = torch.zeros_like(self.gap)
        self.rounds = torch.zeros(count, dtype=torch.int64, device=points.device)
        single = -pairs.image_squares / (2 * modulus)
        entrants, _ = first.best(points, lines + single, ENTRANTS)
        self.indices = entrants[:, :1].clone()
        self.active = torch.ones_like(self.indices, dtype=torch.bool)
        self.weights = points.new_ones(count, 1)
        self.sensitivity = points.new_zeros(count, 1, 1)
        self.images = pairs.images(self.indices[:, 0])
        self._add(torch.arange(count, device=points.device), entrants)

    @property
    def closed(self) -> Tensor:
        """Whether nothing is left to gain (B,)."""
        return torch.le(self.gap, GAP * self.scale)

    @property
    def value(self) -> Tensor:
        """f of the weights (B,)."""
        return self.mean + self.images.square().sum(1) / (2 * self.modulus)

    def run(self, pricing: Pricing) -> None:
        """Rounds until no row gets better any more."""
        todo = torch.arange(len(self.points), device=self.points.device)
        for _ in range(MAX_ROUNDS):
            at = self.points[todo] - self.images[todo] / self.modulus
            entrants, _ = pricing.best(at, self.lines, ENTRANTS)
            self.rounds[todo] += isinstance(pricing, Prices)
            improved = self._add(todo, entrants)
            stuck = (~improved & ~self.closed[todo]).nonzero()[:, 0]
            if len(stuck):  # many images may be affinely dependent where those of a few are not
                improved[stuck] = self._add(todo[stuck], entrants[stuck], alone=True)
            todo = todo[improved]
            if not len(todo):
                return

    def _add(self, rows: Tensor, entrants: Tensor, *, alone: bool = False) -> Tensor:
        """The maximum over current points and entrants, or the best entrant `alone`; which rows
        have improved (b,)."""
        width = self.indices.shape[1] + entrants.shape[1]
        kind = "cuda" if self.points.is_cuda else "cpu"
        at_once = max(1, GATHERED_AT_ONCE[kind] // (width * self.pairs.dim))
        parts = list(zip(rows.split(at_once), entrants.split(at_once), strict=True))
        found = run_parts(parts, partial(self._solve, alone=alone), self.points.device)
        improved = []
        for (part, _), (gap, mean, better) in zip(parts, found, strict=True):
            self.gap[part], self.mean[part] = gap, mean
            improved.append(torch.zeros_like(gap, dtype=torch.bool))
            if better is not None:
                improved[-1][better.rows] = True
                self._store(part[better.rows], better)
        return torch.cat(improved)

    def _solve(
        self, part: tuple[Tensor, Tensor], *, alone: bool
    ) -> tuple[Tensor, Tensor, _Better | None]:
        """Gap and mean slope (b,) of the current weights, and better weights if there are any."""
        rows, entrants = part
        current = self.indices[rows]
        indices = torch.cat([current, entrants], dim=1)
        active = torch.cat([self.active[rows], self._fresh(current, entrants)], dim=1)
        images = self.pairs.images(indices.flatten()).view(*indices.shape, -1)
        at = self.points[rows] - self.images[rows] / self.modulus
        slopes = self.lines[indices] + (images @ at[:, :, None])[:, :, 0]
        mean = (self.weights[rows] * slopes[:, : current.shape[1]]).sum(1)
        gains = slopes - mean[:, None]
        gap = gains.masked_fill(~active, -torch.inf).amax(1)
        if alone:
            active[:, current.shape[1] :] &= gains[:, current.shape[1] :] == gap[:, None]
        gains = gains.masked_fill(~active, 0.0)  # of a point left out it is -inf
        left = (gap > GAP * self.scale[rows]).nonzero()[:, 0]
        if len(left) == 0:
            return gap, mean, None
        if len(left) < len(rows):
            indices, active, images = indices[left], active[left], images[left]
            gains = gains[left]
        guess = active & (gains > 0)  # and those that have weight
        guess[:, : current.shape[1]] |= self.active[rows[left]]
        offsets = images.sub_(self.images[rows[left], None])
        best = maximize_on_simplex(
            (offsets @ offsets.mT).permute(1, 2, 0).contiguous(),
            (self.modulus * gains).mT.contiguous(),
            active.mT.contiguous(),
            NOISE,
            guess.mT.contiguous(),
        )
        weights = best.weights.mT
        step = (weights[:, None] @ offsets)[:, 0]
        rise = (weights * gains).sum(1) - step.square().sum(1) / (2 * self.modulus)
        # The last gaps are smaller than a rounding error of the value: so it is the gap among these
        # points that decides whether the weights are better.
        gains = gains - (offsets @ step[:, :, None])[:, :, 0] / self.modulus
        rest = gains.masked_fill(~active, -torch.inf).amax(1) - (weights * gains).sum(1)
        keep = ((rest < gap[left] / 2) & best.solved).nonzero()[:, 0]
        sensitivity = (best.sensitivity * self.modulus).permute(2, 0, 1)
        found = (left, indices, weights, sensitivity, step, rise)
        return gap, mean, _Better(*(each[keep] for each in found))

    def _fresh(self, current: Tensor, entrants: Tensor) -> Tensor:
        """Entrants (b,n) that are not current points, are included, and not repeated."""
        inside = (entrants[:, :, None] == current[:, None]).any(2)
        again = (entrants[:, :, None] == entrants[:, None]).tril(-1).any(2)
        return self.pairs.included[entrants] & ~inside & ~again

    def _store(self, rows: Tensor, better: _Better) -> None:
        """The points with weight, most of it first, are the current ones now."""
        if not len(rows):
            return
        old = self.images[rows]
        new = old + better.step
        squares = old.square().sum(1) - new.square().sum(1)
        self.images[rows] = new
        self.mean[rows] += better.rise + squares / (2 * self.modulus)
        self._widen(int((better.weights > 0).sum(1).max()))
        width = self.indices.shape[1]
        order = better.weights.argsort(dim=1, descending=True)[:, :width]
        weights = better.weights.gather(1, order)
        indices = better.indices.gather(1, order)
        self.weights[rows], self.active[rows] = weights, weights > 0
        self.indices[rows] = torch.where(weights > 0, indices, indices[:, :1])
        across = order[:, :, None].expand(-1, -1, better.sensitivity.shape[2])
        along = order[:, None].expand(-1, width, -1)
        self.sensitivity[rows] = better.sensitivity.gather(1, across).gather(2, along)

    def _widen(self, width: int) -> None:
        more = width - self.indices.shape[1]
        if more > 0:
            self.indices = torch.cat([self.indices, self.indices[:, :1].expand(-1, more)], dim=1)
            self.weights, self.active = pad(self.weights, (0, more)), pad(self.active, (0, more))
            self.sensitivity = pad(self.sensitivity, (0, more, 0, more))


@dataclass(frozen=True)
class _Better:
    """Better weights for some rows (n,) of a part: the `step` (n,d) of their z~', the `rise` (n,)
    of their value."""

    rows: Tensor
    indices: Tensor
    weights: Tensor
    sensitivity: Tensor
    step: Tensor
    rise: Tensor
