"""The map of one potential through a whole bank, by column generation.

With the levels of a `BankPotential`, s_i = u~_i - <z~_i, x_i> + |z~_i|^2 / (2M), the potential's
gradient at a query x' is z' = sum_i lambda_i z~_i + l x', where lambda maximizes over the simplex
of all N points

    sum_i lambda_i (s_i + <z~_i, x'>) - |sum_i lambda_i z~_i|^2 / (2M).

Few points have weight. So the maximum is taken over a few, each of all N is priced by its slope
there, g_i = s_i + <z~_i, x' - z~'/M>, those of the largest slope come in, those without weight go,
until no slope exceeds that of the weights: max_i g_i - sum_i lambda_i g_i bounds how far the value
is from the maximum. The value rises each time and there are finitely many sets, so it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import check_shape, check_tensor
from otad.cip.bank_potential import BankPotential, Pairs, potential_lines
from otad.cip.implicit import ImplicitMap, assemble
from otad.cip.problem import BankProblem
from otad.cip.simplex import SimplexOptimum, maximize_on_simplex
from otad.cip.solution import CipSolution, Status
from otad.errors import InputError

ENTRANTS = 6  # points that come in at a time
MAX_ROUNDS = 200
GAP = 1e-12  # relative to the size of the terms
NOISE = 1e-14  # relative error of products in float64
PRICED_AT_ONCE = 2**26  # numbers of a block of slopes


@dataclass(frozen=True, eq=False)
class WholeBankSolution:
    """`solution` as of a local solver, for the bank points `indices` (B,W) that were in it last.

    `gap` (B,): how far the value may be from the maximum, so |z' - exact|^2 <= 2 M gap. `rounds`
    (B,): how often all points were priced.
    """

    solution: CipSolution
    indices: Tensor
    gap: Tensor
    rounds: Tensor


class WholeBank:
    """Queries (B,d) -> images (B,d) of one L-Lipschitz map through the pairs of a bank (N,d).

    The map is the gradient of an l-strongly convex, L-smooth function on all of R^d: continuous,
    and equal to z_i at every bank point that was not left out. Differentiable in the query.
    """

    def __init__(self, inputs: Tensor, features: Tensor, potential: BankPotential) -> None:
        self.pairs = Pairs(inputs, features, potential.strong_convexity)
        check_tensor(potential.levels, "levels", "N", dtypes=(torch.float64,), finite=False)
        check_shape(potential.levels, "levels", (len(inputs),), "with one level per bank point")
        self.potential = potential
        self.pairs.kept[potential.left_out] = False
        if bool(potential.levels[self.pairs.kept].isnan().any()):
            raise InputError("levels: expected a number for every point not left out, got NaN")
        self.lines = potential_lines(self.pairs, potential)  # s_i (N,), -inf where left out

    def __call__(self, query: Tensor) -> WholeBankSolution:
        check_tensor(query, "query", "B,d")
        width = self.pairs.inputs.shape[1]
        check_shape(query, "query", (len(query), width), "like the bank")
        with torch.no_grad():
            search = _Search(self, query.detach().double() - self.pairs.center)
            search.run()
        return self._solution(query, search)

    def _solution(self, query: Tensor, search: _Search) -> WholeBankSolution:
        potential, indices = self.potential, search.indices
        high, low = potential.smoothness, potential.strong_convexity
        problem = BankProblem(query, self.pairs.inputs, self.pairs.features, indices, high, low)
        rows = query.new_ones(len(query), dtype=torch.float64)
        weight = search.weights.to(query.dtype)
        value = self._value(query, search).to(query.dtype)
        if query.requires_grad and torch.is_grad_enabled():
            image, value, weight = ImplicitMap.apply(  # type: ignore[no-untyped-call]
                query, problem, weight, value, search.sensitivity, low * rows, None
            )
        else:
            image = assemble(problem, weight, low * rows, None)
        scale = search.scale
        status = torch.where(search.gap <= GAP * scale, int(Status.SOLVED), int(Status.UNSOLVED))
        solution = CipSolution(
            image=image,
            value=value,
            multipliers=weight,
            potentials=potential.levels[indices].to(query.dtype),
            smoothness=high * rows,
            strong_convexity=low * rows,
            residual=search.gap.clamp_min(0) / scale,
            status=status,
            active=search.active,
            mode="consistent",
        )
        return WholeBankSolution(solution, indices, search.gap, search.rounds)

    def _value(self, query: Tensor, search: _Search) -> Tensor:
        """h(x') on the scale of the levels."""
        points = query.detach().double() - self.pairs.center
        tilt = points @ self.pairs.image_center
        bend = self.pairs.bend / 2 * query.detach().double().square().sum(1)
        return search.value + tilt + bend


class _Search:
    """The rounds for a batch of centered queries (B,d) in float64."""

    def __init__(self, bank: WholeBank, points: Tensor) -> None:
        self.bank, self.points = bank, points
        self.modulus = bank.potential.modulus
        count = len(points)
        pairs = bank.pairs
        longest = pairs.image_squares.max().sqrt()
        reach = points.norm(dim=1) + pairs.squares.max().sqrt() + longest / self.modulus
        self.scale = longest * reach + float(bank.lines[pairs.kept].abs().max())
        self.gap = points.new_full((count,), torch.inf)
        self.rounds = torch.zeros(count, dtype=torch.int64, device=points.device)
        single = -pairs.image_squares / (2 * self.modulus)
        self.indices = self._price(points, single, ENTRANTS)[1]
        self.active = bank.pairs.kept[self.indices]
        width = self.indices.shape[1]
        self.weights = points.new_zeros(count, width)
        self.sensitivity = points.new_zeros(count, width, width)
        self.images, self.value = torch.zeros_like(points), points.new_zeros(count)
        self._solve(torch.arange(count, device=points.device))

    def run(self) -> None:
        todo = torch.arange(len(self.points), device=self.points.device)
        for _ in range(MAX_ROUNDS):
            images = self.images[todo]
            asked = self.points[todo] - images / self.modulus
            slopes, entrants = self._price(asked, None, ENTRANTS)
            own = self._slopes(todo, asked)
            mean = (self.weights[todo] * own).sum(1)
            self.gap[todo] = slopes[:, 0] - mean
            self.rounds[todo] += 1
            open_ = self.gap[todo] > GAP * self.scale[todo]
            todo, entrants = todo[open_], entrants[open_]
            if not len(todo):
                return
            before = self.value[todo]
            self._admit(todo, entrants)
            self._solve(todo)
            risen = self.value[todo] > before
            todo = todo[risen]  # no further rise: as exact as float64 allows
            if not len(todo):
                return

    def _price(self, asked: Tensor, extra: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The largest s_i + <z~_i, asked> (+ extra_i) over the bank, and where (B,count)."""
        bank = self.bank
        lines = bank.lines if extra is None else bank.lines + extra
        count = min(count, len(lines))
        best = asked.new_full((len(asked), count), -torch.inf)
        place = torch.zeros(len(asked), count, dtype=torch.int64, device=asked.device)
        for rows in torch.arange(len(asked), device=asked.device).split(
            max(1, PRICED_AT_ONCE // len(lines))
        ):
            for block in bank.pairs.blocks():
                slopes = torch.addmm(lines[block], asked[rows], bank.pairs.read(block)[1].mT)
                top, where = slopes.topk(min(count, slopes.shape[1]), dim=1)
                merged = torch.cat([best[rows], top], dim=1)
                places = torch.cat([place[rows], where + block.start], dim=1)
                kept = merged.topk(count, dim=1)
                best[rows], place[rows] = kept.values, places.gather(1, kept.indices)
        return best, place

    def _slopes(self, rows: Tensor, asked: Tensor) -> Tensor:
        """g_i of the points that are in (b,W)."""
        images = self._read(rows)
        products = (images @ asked[:, :, None])[:, :, 0]
        lines = self.bank.lines[self.indices[rows]]
        return (lines + products).masked_fill(~self.active[rows], 0.0)

    def _read(self, rows: Tensor) -> Tensor:
        """z~ of the points that are in (b,W,d)."""
        indices = self.indices[rows]
        _, images = self.bank.pairs.read(indices.flatten())
        return images.view(*indices.shape, -1)

    def _admit(self, rows: Tensor, entrants: Tensor) -> None:
        """Points without weight make room for the entrants; more room is made where it takes it."""
        held = self.weights[rows] > 0
        need = int(held.sum(1).max()) + entrants.shape[1]
        if need > self.indices.shape[1]:
            self._widen(need)
            held = self.weights[rows] > 0
        order = held.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        indices = self.indices[rows].gather(1, order)
        active = held.gather(1, order)
        fresh = ~(entrants[:, :, None] == indices[:, None]).logical_and(active[:, None]).any(2)
        fresh &= self.bank.pairs.kept[entrants]
        start = active.sum(1, keepdim=True)
        places = start + torch.arange(entrants.shape[1], device=rows.device)
        self.indices[rows] = indices.scatter(1, places, entrants)
        self.active[rows] = active.scatter(1, places, fresh)

    def _widen(self, width: int) -> None:
        more = width - self.indices.shape[1]
        pad = torch.nn.functional.pad
        self.indices, self.active = (pad(part, (0, more)) for part in (self.indices, self.active))
        self.weights = pad(self.weights, (0, more))
        self.sensitivity = pad(self.sensitivity, (0, more, 0, more))

    def _solve(self, rows: Tensor) -> None:
        """The maximum over the points that are in, for some rows."""
        images = self._read(rows)
        active = self.active[rows]
        products = (images @ self.points[rows][:, :, None])[:, :, 0]
        lines = (self.bank.lines[self.indices[rows]] + products).masked_fill(~active, 0.0)
        gram = images @ images.mT
        best: SimplexOptimum = maximize_on_simplex(
            gram.permute(1, 2, 0).contiguous(),
            (self.modulus * lines).mT.contiguous(),
            active.mT.contiguous(),
            NOISE,
        )
        weights = best.weights.mT
        mixed = (weights[:, None] @ images)[:, 0]
        value = (weights * lines).sum(1) - mixed.square().sum(1) / (2 * self.modulus)
        self.weights[rows], self.images[rows], self.value[rows] = weights, mixed, value
        self.sensitivity[rows] = (best.sensitivity * self.modulus).permute(2, 0, 1)
