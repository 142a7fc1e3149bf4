"""The global map, the gradient of one potential through a whole bank, by column generation.

Let s_i = u~_i - <z~_i, x_i> + |z~_i|^2 / (2M) with the levels of a `BankPotential`. The gradient of
the potential at a query x' is z' = sum_i lambda_i z~_i + l x', where lambda maximizes over the
simplex of all N points

    f(lambda) = sum_i lambda_i (s_i + <z~_i, x'>) - |sum_i lambda_i z~_i|^2 / (2M).

Only a few points have weight. So the maximum is taken over a few points. Then all N points are
priced by their slope there, g_i = s_i + <z~_i, x' - z~'/M>. Points of the largest slope are added,
and points without weight are dropped, until no slope exceeds the mean slope of the weights. The gap
max_i g_i - sum_i lambda_i g_i bounds how far the value is from the maximum. The value rises in each
round, so this ends.

Relative to the z~' of given weights, f(lambda) = |z~'|^2 / (2M) + sum_i lambda_i g_i
- |sum_i lambda_i (z~_i - z~')|^2 / (2M). So the numbers of a round are as small as what is left to
gain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.checks import check_choice, check_shape, check_tensor, require
from otad.cip.execution import full_precision, matmul, run_parts
from otad.cip.local.feature import feature
from otad.cip.local.simplex_qp import maximize_on_simplex
from otad.cip.problem import BankProblem
from otad.cip.solution import CipSolution, Status
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import BankPotential, potential_lines
from otad.cip.whole_bank.pricing import GATHERED_AT_ONCE, IndexPrices, LikelyPrices, Prices
from otad.short_repr import short_repr

PRICING = ("exact", "faiss")
Pricing = Prices | IndexPrices | LikelyPrices
PRICING_WIDTH = 192  # coordinates of a bank point that bound its price, see `search.projection`
CACHED_NUMBERS = 2**18  # of images that are used at a time on the CPU
GAP = 1e-12  # the largest gap at the end, relative to the size of its terms
NOISE = 1e-14  # the relative error of products in float64


@dataclass(frozen=True, eq=False)
class WholeBankSolution:
    """What the global map returns.

    `solution` is like the solution of a local solver, for the bank points `indices` (B,W) with
    weight, most weight first. Rows with fewer than W points repeat their first one with weight 0,
    and it is not `active`. `gap` (B,) bounds how far the value is from the maximum over all bank
    points, so that |z' - exact|^2 <= M gap. `rounds` (B,) is how often all points were priced."""

    solution: CipSolution
    indices: Tensor
    gap: Tensor
    rounds: Tensor
    __repr__ = short_repr


class WholeBank:
    """Maps queries (B,d) to images (B,d) by one L-Lipschitz map through the pairs of a bank (N,d).

    The map is the gradient of an l-strongly convex, L-smooth function on all of R^d. It is
    continuous, differentiable in the query, and equal to z_i at every bank point that was not left
    out. The bank may be on another device than the queries. `pricing` says how the points of the
    largest slope are found: by all products ("exact"), or first by an index of FAISS ("faiss"). The
    last round and the gap are exact in both cases."""

    def __init__(
        self, inputs: Tensor, features: Tensor, potential: BankPotential, *, pricing: str = "exact"
    ) -> None:
        self.pricing = check_choice(pricing, "pricing", PRICING)
        check_tensor(potential.levels, "levels", "N", dtypes=(torch.float64,), finite=False)
        self.inputs, self.features, self.potential = inputs, features, potential
        self._likely: LikelyPrices | None = None
        self._place(inputs.device)

    def __call__(self, query: Tensor) -> WholeBankSolution:
        check_tensor(query, "query", "B,d")
        check_shape(query, "query", (len(query), self.inputs.shape[1]), "like the bank")
        if self._pairs.device != query.device:
            self._place(query.device)
        sensitive = query.requires_grad and torch.is_grad_enabled()
        with torch.no_grad():
            points, modulus = query.detach().double() - self._pairs.center, self.potential.modulus
            stages = self._stages(points)
            bank = self._pairs, self._lines, modulus
            search = ColumnGeneration(*bank, points, stages[0], sensitive=sensitive)
            for prices in stages:
                search.run(prices)
            value = search.mean + search.images.square().sum(1) / (2 * modulus)
            value = value + self._pairs.offsets_at(points)  # on the scale of the levels
        potential, indices = self.potential, search.indices
        curvature = potential.smoothness, potential.strong_convexity
        problem = BankProblem(query, self.inputs, self.features, indices, *curvature)
        highs, lows = problem.smoothness, problem.strong_convexity
        parts = search.weights.to(query.dtype), value.to(query.dtype), search.sensitivity
        image, value, weight = feature(
            problem, *parts, lows if problem.has_strong_convexity else None
        )
        levels = potential.levels[indices.to(potential.levels.device)].to(query)
        residual = search.gap.clamp_min(0) / search.scale
        status = torch.where(search.closed, int(Status.SOLVED), int(Status.UNSOLVED))
        graded = residual, status, search.active, "consistent"
        solution = CipSolution(image, value, weight, levels, highs, lows, *graded)
        return WholeBankSolution(solution, indices, search.gap, search.rounds)

    def _stages(self, points: Tensor) -> list[Pricing]:
        """Return how points are priced for queries (B,d), one way after the other."""
        if self.pricing == "faiss" or not self._exact.projection.prepare(points):
            return self._prices
        if self._likely is None:
            alone = self._pairs.lines_alone(self._lines, self.potential.modulus)
            self._likely = LikelyPrices(self._exact, self._lines, alone)
        return [self._likely, *self._prices]

    def _place(self, device: torch.device) -> None:
        """Prepare what queries on a device need from the bank."""
        potential = self.potential
        self._pairs = pairs = Pairs(self.inputs, self.features, potential.strong_convexity, device)
        check_shape(potential.levels, "levels", (len(pairs),), "with one level per bank point")
        pairs.included[potential.left_out.to(device)] = False
        self._lines = lines = potential_lines(pairs, potential)
        require(not lines.isnan().any(), "levels", "a number for every point not left out", "NaN")
        self._exact = Prices(pairs, PRICING_WIDTH)
        self._likely = None
        self._prices: list[Pricing] = [self._exact]
        if self.pricing == "faiss":
            self._prices.insert(0, IndexPrices(pairs, lines))


class ColumnGeneration:
    """The weights of centered queries (B,d) in float64, from single points to the optimum.

    The points `indices` (B,W) have `weights` where they are `active`. `images` (B,d) are z~',
    `sensitivity` (B,W,W) is d weights / d lines, and has shape (B,0,0) unless `sensitive`. `gap`
    (B,) is the gap of the last round, and `scale` (B,) is the size of its terms.
    """

    def __init__(
        self,
        pairs: Pairs,
        lines: Tensor,
        modulus: float,
        points: Tensor,
        first: Pricing,
        *,
        sensitive: bool = False,
    ) -> None:
        self.pairs, self.lines, self.modulus, self.points = pairs, lines, modulus, points
        self.sensitive = sensitive
        count = len(points)
        longest = pairs.image_squares.max().sqrt()
        reach = points.norm(dim=1) + pairs.squares.max().sqrt() + longest / modulus
        self.scale = longest * reach + lines[pairs.included].abs().max()
        self.gap = points.new_full((count,), torch.inf)
        self.mean = torch.zeros_like(self.gap)
        self.rounds = torch.zeros(count, dtype=torch.int64, device=points.device)
        entrants = first.best(points, pairs.lines_alone(lines, modulus), first.count)
        self.indices = entrants[:, :1].clone()
        self.active = torch.ones_like(self.indices, dtype=torch.bool)
        self.weights = points.new_ones(count, 1)
        self.sensitivity = points.new_zeros(count, *((1, 1) if sensitive else (0, 0)))
        self.images = pairs.images(self.indices[:, 0])
        self._add(torch.arange(count, device=points.device), entrants)

    @property
    def closed(self) -> Tensor:
        """Whether nothing is left to gain in each row (B,)."""
        return torch.le(self.gap, GAP * self.scale)

    def run(self, pricing: Pricing) -> None:
        """Run rounds until no row gets better any more."""
        todo = torch.arange(len(self.points), device=self.points.device)
        for _ in range(pricing.most_rounds):
            at = self.points[todo] - self.images[todo] / self.modulus
            current = self.indices[todo]
            entrants = pricing.entrants(at, self.lines, pricing.count, self.mean[todo], current)
            self.rounds[todo] += isinstance(pricing, Prices)
            improved = self._add(todo, entrants)
            stuck = (~improved & ~self.closed[todo]).nonzero()[:, 0]
            if len(stuck):  # many images may be affinely dependent although a few are not
                improved[stuck] = self._add(todo[stuck], entrants[stuck], alone=True)
            todo = todo[improved]
            if not len(todo):
                return

    def _add(self, rows: Tensor, entrants: Tensor, *, alone: bool = False) -> Tensor:
        """Maximize over current points and entrants, or with `alone` the best entrant only.

        Which rows have improved (b,) is returned."""
        current = self.indices[rows]
        # Entrants are fresh if they are included, are not current points, and are not repeated.
        inside = (entrants[:, :, None] == current[:, None]).any(2)
        again = (entrants[:, :, None] == entrants[:, None]).tril(-1).any(2)
        fresh = self.pairs.included[entrants] & ~inside & ~again
        indices = torch.cat([current, entrants], dim=1)
        usable = torch.cat([self.active[rows], fresh], dim=1)
        # The points that count come first, and rows with most of them, so that parts are narrow.
        order = usable.sum(1).argsort(descending=True)
        columns = usable[order].byte().argsort(dim=1, descending=True, stable=True)
        rows, *points = (x[order] for x in (rows, indices, usable))
        indices, usable = (x.gather(1, columns) for x in points)
        kind = "cuda" if self.points.is_cuda else "cpu"
        widest = int(usable[0].sum())
        at_once = max(1, GATHERED_AT_ONCE[kind] // (widest * self.pairs.dim))
        parts = list(zip(*(x.split(at_once) for x in (rows, indices, usable)), strict=True))
        device = self.points.device
        with full_precision(device):
            found = run_parts(parts, partial(self._solve, alone=alone), device)
        improved = []
        for (part, _, _), (gap, mean, better) in zip(parts, found, strict=True):
            self.gap[part], self.mean[part] = gap, mean
            improved.append(torch.zeros_like(gap, dtype=torch.bool))
            if better is not None:
                improved[-1][better.rows] = True
                self._store(part[better.rows], better)
        return torch.cat(improved)[order.argsort()]

    def _solve(
        self, part: tuple[Tensor, Tensor, Tensor], *, alone: bool
    ) -> tuple[Tensor, Tensor, _Better | None]:
        """Return gap and mean slope (b,) of the current weights, and better weights if any."""
        rows, indices, active = part
        widest = int(active.sum(1).max())
        indices, active = indices[:, :widest], active[:, :widest]
        current = pad(self.active[rows], (0, widest))[:, :widest]  # current points are the first
        gains, mean, grams = self._products(rows, indices, active)
        gap = gains.masked_fill(~active, -torch.inf).amax(1)
        left = (gap > GAP * self.scale[rows]).nonzero()[:, 0]
        if len(left) == 0:
            return gap, mean, None
        if alone:
            active = current | active & (gains == gap[:, None])
        gains = gains.masked_fill(~active, 0.0)  # the gain of a point left out is -inf
        indices, active, gains, current = (x[left] for x in (indices, active, gains, current))
        guess = current | active & (gains > 0)
        gram = grams.permute(1, 2, 0).contiguous()
        slope, included, first = (x.mT.contiguous() for x in (self.modulus * gains, active, guess))
        parts = gram, slope, included, NOISE, first
        best = maximize_on_simplex(*parts, sensitive=self.sensitive)
        weights = best.weights.mT
        pulls = (grams @ weights[:, :, None])[:, :, 0]  # the products of all offsets with the step
        rise = (weights * gains).sum(1) - (weights * pulls).sum(1) / (2 * self.modulus)
        # The last gaps are below the rounding error of the value. So the gap among these points
        # decides whether the weights are better.
        gains = gains - pulls / self.modulus
        rest = gains.masked_fill(~active, -torch.inf).amax(1) - (weights * gains).sum(1)
        keep = ((rest < gap[left] / 2) & best.solved).nonzero()[:, 0]
        left, indices, weights, rise = (x[keep] for x in (left, indices, weights, rise))
        step = self._step(rows[left], indices, weights)
        sensitivity = (best.sensitivity * self.modulus).permute(2, 0, 1)[keep]
        return gap, mean, _Better(left, indices, weights, sensitivity, step, rise)

    def _products(
        self, rows: Tensor, indices: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the slopes of bank points (b,W) exceed the mean slope by, and that mean (b,).

        The current points are the first ones. The third result are the products (n,W,W) of
        z~_i - z~' in the rows whose gap is open."""
        found, grams = [], []
        width = min(indices.shape[1], self.weights.shape[1])
        for part, some, usable in self._cached(rows, indices, active):
            images = self.pairs.images(some.flatten()).view(*some.shape, -1)
            at = self.points[part] - self.images[part] / self.modulus
            slopes = self.lines[some] + matmul(images, at[:, :, None])[:, :, 0]
            mean = (self.weights[part, :width] * slopes[:, :width]).sum(1, keepdim=True)
            gains = slopes - mean
            found.append((gains, mean[:, 0]))
            gap = gains.masked_fill(~usable, -torch.inf).amax(1)
            left = (gap > GAP * self.scale[part]).nonzero()[:, 0]
            if len(left) < len(part):
                images, part = images[left], part[left]
            offsets = images.sub_(self.images[part, None])
            grams.append(_gram(offsets))
        gains, mean = (torch.cat(parts) for parts in zip(*found, strict=True))
        return gains, mean, torch.cat(grams)

    def _step(self, rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return the change (b,d) of z~' by new weights (b,W)."""
        width = int((weights > 0).sum(1).max()) if len(weights) else 0
        weights, order = weights.topk(width, dim=1)
        steps = [self.points[:0]]
        for part, some, weight in self._cached(rows, indices.gather(1, order), weights):
            images = self.pairs.images(some.flatten()).view(*some.shape, -1)
            steps.append(matmul(weight[:, None], images.sub_(self.images[part, None]))[:, 0])
        return torch.cat(steps)

    def _cached(self, rows: Tensor, indices: Tensor, *others: Tensor) -> Iterator[Sequence[Tensor]]:
        """Split rows, so that on the CPU the images of their bank points (b,W) fit in its cache."""
        numbers = max(1, indices.shape[1]) * self.pairs.dim
        at_once = max(1, len(rows) if rows.is_cuda else CACHED_NUMBERS // numbers)
        return zip(*(part.split(at_once) for part in (rows, indices, *others)), strict=True)

    def _store(self, rows: Tensor, better: _Better) -> None:
        """Make the points with weight the current ones, most weight first."""
        if not len(rows):
            return
        old = self.images[rows]
        new = old + better.step
        squares = old.square().sum(1) - new.square().sum(1)
        self.images[rows] = new
        self.mean[rows] += better.rise + squares / (2 * self.modulus)
        more = int((better.weights > 0).sum(1).max()) - self.indices.shape[1]
        if more > 0:
            self.indices = torch.cat([self.indices, self.indices[:, :1].expand(-1, more)], dim=1)
            self.weights, self.active = pad(self.weights, (0, more)), pad(self.active, (0, more))
            if self.sensitive:
                self.sensitivity = pad(self.sensitivity, (0, more, 0, more))
        width = min(self.indices.shape[1], better.weights.shape[1])
        order = better.weights.argsort(dim=1, descending=True)[:, :width]
        weights = better.weights.gather(1, order)
        indices = better.indices.gather(1, order)
        self.indices[rows] = indices[:, :1]
        self.weights[rows], self.active[rows] = 0, False
        self.weights[rows, :width], self.active[rows, :width] = weights, weights > 0
        self.indices[rows, :width] = torch.where(weights > 0, indices, indices[:, :1])
        if not self.sensitive:
            return
        across = order[:, :, None].expand(-1, -1, better.sensitivity.shape[2])
        along = order[:, None].expand(-1, width, -1)
        sensitivity = better.sensitivity.gather(1, across).gather(2, along)
        self.sensitivity[rows] = 0
        self.sensitivity[rows, :width, :width] = sensitivity


def _gram(offsets: Tensor) -> Tensor:
    """Return the products (b,W,W) of rows (b,W,d).

    NumPy computes only half of a product with its own transpose, which takes longer for few rows.
    So on the CPU the rows are multiplied in two parts."""
    if offsets.is_cuda:
        return matmul(offsets, offsets.mT)
    grams = offsets.new_empty(*offsets.shape[:2], offsets.shape[1])
    half = (offsets.shape[1] + 1) // 2
    for rows in (slice(half), slice(half, None)):
        matmul(offsets[:, rows], offsets.mT, grams[:, rows])
    return grams


class _Better(NamedTuple):
    """Better weights for some rows (n,), with the change `step` (n,d) of z~' and `rise` (n,)."""

    rows: Tensor
    indices: Tensor
    weights: Tensor
    sensitivity: Tensor
    step: Tensor
    rise: Tensor
