"""The global map: that of one potential through a whole bank, by column generation.

With the levels of a `BankPotential`, s_i = u~_i - <z~_i, x_i> + |z~_i|^2 / (2M), the potential's
gradient at a query x' is z' = sum_i lambda_i z~_i + l x', where lambda maximizes over the simplex
of all N points

    f(lambda) = sum_i lambda_i (s_i + <z~_i, x'>) - |sum_i lambda_i z~_i|^2 / (2M).

Few points have weight. So the maximum is taken over a few, each of all N is priced by its slope
there, g_i = s_i + <z~_i, x' - z~'/M>, those of the largest slope are added, those without weight
are dropped, until no slope exceeds that of the weights: max_i g_i - sum_i lambda_i g_i bounds how
far the value is from the maximum. The value rises each time and there are finitely many sets, so
this ends.

About the z~' of given weights, f(lambda) = |z~'|^2 / (2M) + sum_i lambda_i g_i - |sum_i lambda_i
(z~_i - z~')|^2 / (2M): the numbers of a round are as small as what is left to gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import check_choice, check_shape, check_tensor
from otad.cip.local.feature import DifferentiableMap, assemble
from otad.cip.problem import BankProblem
from otad.cip.solution import CipSolution, Status
from otad.cip.whole_bank.column_generation import GAP, ColumnGeneration
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import BankPotential, potential_lines
from otad.cip.whole_bank.pricing import IndexPrices, Prices
from otad.errors import InputError

__all__ = ["GAP", "WholeBank", "WholeBankSolution"]

PRICING = ("exact", "faiss")


@dataclass(frozen=True, eq=False)
class WholeBankSolution:
    """`solution` like that of a local solver, for the bank points `indices` (B,W) with weight.

    Most weight first; rows with fewer than W points repeat their first, with weight 0 and not
    `active`. `gap` (B,): how far the value may be from the maximum over all bank points, in
    float64, so |z' - exact|^2 <= M gap. `rounds` (B,): how often all points were priced.
    """

    solution: CipSolution
    indices: Tensor
    gap: Tensor
    rounds: Tensor


class WholeBank:
    """Queries (B,d) -> images (B,d) of one L-Lipschitz map through the pairs of a bank (N,d).

    The map is the gradient of an l-strongly convex, L-smooth function on all of R^d: continuous,
    and equal to z_i at every bank point that was not left out. Differentiable in the query.

    The bank may be on another device than the queries: it is read block by block where they are.
    `pricing`: how the points of the largest slope are found, by all products ("exact") or first by
    an index of FAISS ("faiss"); the last round, and the gap, are exact either way.
    """

    def __init__(
        self,
        inputs: Tensor,
        features: Tensor,
        potential: BankPotential,
        *,
        pricing: str = "exact",
    ) -> None:
        self.pricing = check_choice(pricing, "pricing", PRICING)
        check_tensor(potential.levels, "levels", "N", dtypes=(torch.float64,), finite=False)
        self.inputs, self.features, self.potential = inputs, features, potential
        self._here = self._placed(inputs.device)

    def __call__(self, query: Tensor) -> WholeBankSolution:
        check_tensor(query, "query", "B,d")
        check_shape(query, "query", (len(query), self.inputs.shape[1]), "like the bank")
        here = self._here
        if here.pairs.device != query.device:
            here = self._here = self._placed(query.device)
        with torch.no_grad():
            points = query.detach().double() - here.pairs.center
            first = here.prices if here.index is None else here.index
            search = ColumnGeneration(here.pairs, here.lines, self.potential.modulus, points, first)
            if here.index is not None:
                search.run(here.index)
            search.run(here.prices)
        return self._solution(query, here.pairs, search)

    def _placed(self, device: torch.device) -> _Placed:
        potential = self.potential
        pairs = Pairs(self.inputs, self.features, potential.strong_convexity, device)
        check_shape(potential.levels, "levels", (len(pairs),), "with one level per bank point")
        pairs.included[potential.left_out.to(device)] = False
        lines = potential_lines(pairs, potential)
        if bool(lines.isnan().any()):
            raise InputError("levels: expected a number for every point not left out, got NaN")
        index = IndexPrices(pairs, lines) if self.pricing == "faiss" else None
        return _Placed(pairs, lines, Prices(pairs), index)

    def _solution(self, query: Tensor, pairs: Pairs, search: ColumnGeneration) -> WholeBankSolution:
        potential, indices = self.potential, search.indices
        high, low = potential.smoothness, potential.strong_convexity
        problem = BankProblem(query, self.inputs, self.features, indices, high, low)
        rows = query.new_ones(len(query), dtype=torch.float64)
        weight = search.weights.to(query.dtype)
        value = _value(query, pairs, search).to(query.dtype)
        if query.requires_grad and torch.is_grad_enabled():
            image, value, weight = DifferentiableMap.apply(  # type: ignore[no-untyped-call]
                query, problem, weight, value, search.sensitivity, low * rows, low != 0, None
            )
        else:
            image = assemble(problem, weight, low * rows, low != 0)
        levels = potential.levels[indices.to(potential.levels.device)].to(query)
        solution = CipSolution(
            image=image,
            value=value,
            multipliers=weight,
            potentials=levels,
            smoothness=high * rows,
            strong_convexity=low * rows,
            residual=search.gap.clamp_min(0) / search.scale,
            status=torch.where(search.closed, int(Status.SOLVED), int(Status.UNSOLVED)),
            active=search.active,
            mode="consistent",
        )
        return WholeBankSolution(solution, indices, search.gap, search.rounds)


@dataclass(frozen=True, eq=False)
class _Placed:
    """What queries on one device need of a bank; `lines` (N,): s_i, -inf where left out."""

    pairs: Pairs
    lines: Tensor
    prices: Prices
    index: IndexPrices | None


def _value(query: Tensor, pairs: Pairs, search: ColumnGeneration) -> Tensor:
    """h(x') on the scale of the levels."""
    return search.value + pairs.offsets_at(query.detach().double() - pairs.center)
