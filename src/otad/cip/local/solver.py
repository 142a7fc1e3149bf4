"""The exact, batched, differentiable solver of the convex integration problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.checks import check_choice, check_count
from otad.cip.local.feature import feature
from otad.cip.local.potentials import POTENTIALS
from otad.cip.local.products import Gram, Products, products_of, worst_noise
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import DualSolution, solve_torch
from otad.cip.local.solve_triton import can_solve, solve_triton
from otad.cip.problem import BankProblem
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution, Status
from otad.errors import InputError

MODES = ("consistent", "paper")
ON_FAILURE = ("raise", "abstain", "fallback")


@dataclass(frozen=True)
class ExactCip:
    """Solves a `CipProblem` or `BankProblem` exactly, all rows at once: Algorithm 2 of the paper
    from the neighbors on.

    Eq. (3) is a K-dimensional concave quadratic program whatever d is: the cost is one K x K Gram
    matrix per row and a few pivots on it. The steps may be called one after another: `products` of
    a problem, `solve` (potentials, relaxation, quadratic program), `solution` (the features).

    - `mode`: with which curvature eq. (3) is solved where potentials exist only for a larger one:
      that larger one, so that the map passes through all anchors ("consistent"), or the requested
      one, as in Algorithm 2 of the paper ("paper").
    - `climb`: steps (delta1, delta2) by which L grows and l falls until potentials exist, or None
      for the exact least L.
    - `max_smoothness`: no L above this; the neighbor on the violating cycle is left out instead.
    - `spares`: the last so many neighbors of each row are used only as substitutes for such.
    - `potential`: which feasible potentials: "canonical", or "lowest" and "highest" to measure how
      much a solution depends on the choice.
    - `on_failure`: for rows without a solution "raise" a `SolverError`, "abstain" (NaN), or return
      the feature of the nearest neighbor ("fallback"); `status` says which in every case.
    - `chunk`: rows whose neighbors are in working memory at a time; None fits the device.
    """

    mode: str = "consistent"
    climb: tuple[float, float] | None = None
    max_smoothness: float | None = None
    spares: int = 0
    potential: str = "canonical"
    on_failure: str = "raise"
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.mode, "mode", MODES)
        check_choice(self.potential, "potential", POTENTIALS)
        check_choice(self.on_failure, "on_failure", ON_FAILURE)
        check_count(self.spares, "spares", least=0)
        if self.chunk is not None:
            check_count(self.chunk, "chunk")
        if self.climb is not None and not _are_steps(self.climb):
            raise InputError(
                "climb: expected two finite steps (delta1, delta2) of at least 0, not both 0, "
                f"got {self.climb!r}"
            )
        if self.max_smoothness is not None and not 0 < self.max_smoothness < math.inf:
            raise InputError(
                f"max_smoothness: expected a positive number or None, got {self.max_smoothness!r}"
            )

    def __call__(self, problem: RowProblem) -> CipSolution:
        _, count, _ = problem.shape
        if self.spares >= count:
            raise InputError(
                f"spares: expected fewer than the {count} neighbors of a row, got {self.spares}"
            )
        if self._cap < math.inf and bool((problem.smoothness > self._cap).any()):
            raise InputError(
                "max_smoothness: expected at least the problem's smoothness "
                f"{problem.smoothness.max().item()}, got {self._cap}"
            )
        if isinstance(problem, BankProblem):
            problem = problem.fetched()
        return self.solution(problem, self.solve(problem, self.products(problem)))

    @property
    def relaxation(self) -> Relaxation:
        """How the curvature is relaxed where no potentials exist for the requested one."""
        return Relaxation(self.climb, self._cap, self.spares)

    @property
    def _cap(self) -> float:
        return math.inf if self.max_smoothness is None else self.max_smoothness

    @property
    def _lowers_convexity(self) -> bool:
        return self.climb is not None and self.climb[1] > 0

    @torch.no_grad()
    def products(self, problem: RowProblem) -> Products:
        """The inner products of all neighbors."""
        with_offsets = problem.has_strong_convexity or self._lowers_convexity
        return products_of(problem, self.chunk, with_offsets=with_offsets)

    def solve(self, problem: RowProblem, products: Products) -> DualSolution:
        """Potentials and multipliers: by one kernel on a GPU, and step by step in torch for the
        rows that the kernel leaves over, or for all."""
        high, low = problem.smoothness, problem.strong_convexity
        how = self.relaxation, self.potential, self.mode, problem.query.dtype
        sensitive = problem.query.requires_grad and torch.is_grad_enabled()
        with torch.no_grad():
            if can_solve(products):
                found, outcome = solve_triton(products, high, low, *how, sensitive=sensitive)
                if bool((outcome > 0).all()):
                    return found
                left = (outcome == 0).nonzero()[:, 0].to(high.device)
                if len(left):
                    part = products.rows(left).gram()
                    found.overwrite(left, self._solve(part, high[left], low[left]))
            else:
                gram = products.gram()
                found = self._solve(gram, high, low)
                self._retry_in_double(problem, gram, found)
            squares = products.squares.sum(0)
            return found.with_failures_marked(self.on_failure, squares, low)

    def _retry_in_double(self, problem: RowProblem, gram: Gram, found: DualSolution) -> None:
        """Solve rows again, in float64, for which perhaps only the rounding of float32 products
        ruled out the requested curvature."""
        rows = (found.status != int(Status.SOLVED)).nonzero()[:, 0]
        if len(rows) == 0 or problem.query.dtype == torch.float64:
            return
        rough = replace(gram.columns(rows), noise=worst_noise(problem.shape[2]))
        requested = problem.smoothness[rows], problem.strong_convexity[rows]
        rows = rows[self.relaxation.start(rough, *requested).feasible(rough)]
        if len(rows):
            again = problem.select(rows).in_double()
            fine = self.products(again).gram()
            found.overwrite(rows, self._solve(fine, again.smoothness, again.strong_convexity))

    def _solve(self, gram: Gram, smoothness: Tensor, strong_convexity: Tensor) -> DualSolution:
        how = self.relaxation, self.potential, self.mode
        return solve_torch(gram, smoothness, strong_convexity, *how)

    def solution(self, problem: RowProblem, found: DualSolution) -> CipSolution:
        """The features, in the problem's dtype, differentiable in the query if gradients are on."""
        query = problem.query
        weight, value = found.multipliers.to(query.dtype), found.value.to(query.dtype)
        lowered = self._lowers_convexity and self.mode == "consistent"
        how = found.map_convexity, problem.has_strong_convexity or lowered, self.chunk
        image, value, weight = feature(problem, weight, value, found.sensitivity, *how)
        return CipSolution(
            image=image,
            value=value,
            multipliers=weight,
            potentials=found.potentials.to(query.dtype),
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
            residual=found.residual,
            status=found.status,
            active=found.active,
            mode=self.mode,
        )


def _are_steps(climb: object) -> bool:
    return (
        isinstance(climb, tuple)
        and len(climb) == 2
        and all(isinstance(step, (int, float)) and 0 <= step < math.inf for step in climb)
        and sum(climb) > 0
    )
