"""The slow twin: eqs. (2) and (3) as the paper prints them, one conic program per row.

It shares nothing with the exact solver but the contract: no shift, no Gram matrix, no dual.
Potentials come from a plain closure, the least smoothness from a linear program (HiGHS), the
answer from K quadratic constraints in R^d (CVXPY and Clarabel). Made to be compared with.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_choice
from otad.cip.judge import kkt_residual
from otad.cip.protocols import RowProblem
from otad.cip.reference_potentials import Array, bend, find_potentials, squares
from otad.cip.solution import CipSolution, Status
from otad.errors import MissingExtraError, SolverError

Answer = tuple[Array, float, Array]  # image (d,), value, multipliers (K,)

_ACCURACIES = (1e-10, 1e-8)  # the second where Clarabel gets stuck before the first
_SUPPORTS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # multipliers it may mean by zero


@dataclass(frozen=True)
class CvxpyCip:
    """Solves a `CipProblem` or `BankProblem` row by row; contract and options as in `ExactCip`.

    The answer carries no gradient. `potentials` (B,K) may be given, with the `smoothness` and
    `strong_convexity` (B,) they are feasible for; otherwise the canonical ones are found, for the
    least smoothness where the one asked for is too small.
    """

    mode: str = "consistent"
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        check_choice(self.mode, "mode", ("consistent", "paper"))
        check_choice(self.on_failure, "on_failure", ("raise", "abstain", "fallback"))

    def __call__(
        self,
        problem: RowProblem,
        *,
        potentials: Tensor | None = None,
        smoothness: Tensor | None = None,
        strong_convexity: Tensor | None = None,
    ) -> CipSolution:
        asked = (problem.smoothness, problem.strong_convexity)
        found = (
            asked[0] if smoothness is None else smoothness,
            asked[1] if strong_convexity is None else strong_convexity,
        )
        rows = []
        for i in range(problem.shape[0]):
            at = slice(i, i + 1)
            parts = (problem.query[at], problem.anchors_of(at), problem.images_of(at))
            query, anchors, images = (t[0].detach().double().cpu().numpy() for t in parts)
            given = None if potentials is None else potentials[i].double().cpu().numpy()
            curvatures = ([float(t[i]) for t in pair] for pair in (asked, found))
            rows.append(self._row(query, anchors, images, given, *curvatures))
        return self._solution(problem, rows)

    def _solution(self, problem: RowProblem, rows: list[tuple[Any, ...]]) -> CipSolution:
        query = problem.query
        kinds = (query.dtype,) * 4 + (torch.float64,) * 2 + (torch.int64,)
        columns = [
            torch.as_tensor(np.stack(column)).to(query.device, kind)
            for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        ]
        image, value, multipliers, levels, high, low, status = columns
        solution = CipSolution(
            image=image,
            value=value,
            multipliers=multipliers,
            potentials=levels,
            smoothness=high,
            strong_convexity=low,
            residual=torch.zeros_like(high),
            status=status,
            active=torch.ones_like(levels, dtype=torch.bool),
            mode=self.mode,
        )
        return replace(solution, residual=kkt_residual(problem, solution))

    def _row(
        self,
        query: Array,
        anchors: Array,
        images: Array,
        levels: Array | None,
        asked: list[float],
        found: list[float],
    ) -> tuple[Any, ...]:
        """Image, value, multipliers, potentials, smoothness, strong convexity and status."""
        high, low = found
        status = Status.SOLVED
        if levels is None:
            levels, high, status = find_potentials(anchors, images, high, low)
        if not status.failed:
            used = asked if self.mode == "paper" else (high, low)
            answer = _Quadratics(anchors - query, images, levels, *used).solve()
            if answer is not None:
                return *answer, levels, high, low, int(status)
            status = Status.UNSOLVED
        if self.on_failure == "raise":
            raise SolverError(f"a row has no solution: {status.name}")
        multipliers = np.full(len(anchors), np.nan)
        if self.on_failure == "fallback":
            multipliers = np.eye(len(anchors))[np.square(anchors - query).sum(1).argmin()]
        image = multipliers @ (images - asked[1] * (anchors - query))
        return image, np.nan, multipliers, levels * np.nan, np.nan, np.nan, int(status)


@dataclass(frozen=True)
class _Quadratics:
    """The K lower bounds on v in eq. (3), as functions of z'; offsets are x_i - x'."""

    offsets: Array
    images: Array
    levels: Array
    high: float
    low: float

    def at(self, point: Array) -> Array:
        """The bounds (K,) at one z'."""
        gaps = self.images - point
        return np.asarray(self.bounds(squares(gaps), (gaps * self.offsets).sum(1)))

    def bounds(self, square_z: Any, inner: Any) -> Any:
        """The same from |z_i - z'|^2 and <z_i - z', x_i - x'>, (K,) each."""
        plane = self.levels - (self.images * self.offsets).sum(1)
        return plane + bend(square_z, inner, squares(self.offsets), self.high, self.low)

    def solve(self) -> Answer | None:
        """z' (d,), v and the multipliers (K,), or None where Clarabel gets stuck."""
        try:
            import cvxpy as cp
        except ImportError as error:
            raise MissingExtraError("cvxpy", "reference") from error
        count, dim = self.images.shape
        value, point = cp.Variable(), cp.Variable((1, dim))
        gaps = self.images - np.ones((count, 1)) @ point
        inner = cp.sum(cp.multiply(gaps, self.offsets), axis=1)
        constraint = value >= self.bounds(cp.sum_squares(gaps, axis=1), inner)
        program = cp.Problem(cp.Minimize(value), [constraint])
        for accuracy in _ACCURACIES:
            options = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), accuracy)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of reduced accuracy: see _polish
                try:
                    program.solve(solver=cp.CLARABEL, **options)
                except cp.SolverError:
                    continue
            if program.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
                return self._polish(point.value[0], np.asarray(constraint.dual_value))
        return None

    def _polish(self, point: Array, multipliers: Array) -> Answer:
        """The answer with the smallest duality gap on any likely support of the multipliers.

        An interior point method that ends with a gap of 1e-10 is still 1e-5 from z'. All K bounds
        have the same Hessian, so on the right support ONE Newton step from there is exact.
        """
        span, height = self.high - self.low, self.at(point)
        slope = (point - self.images + self.low * self.offsets) / span
        candidates = [multipliers]
        for least in _SUPPORTS:
            keep = multipliers > least
            kept, ones = slope[keep], np.ones((keep.sum(), 1))
            system = np.block([[span * kept @ kept.T, ones], [ones.T, np.zeros((1, 1))]])
            newton = np.linalg.lstsq(system, np.append(height[keep], 1.0), rcond=1e-12)[0]
            candidates.append(np.zeros_like(multipliers))
            candidates[-1][keep] = newton[:-1]
        return min(map(self._imply, candidates), key=lambda graded: graded[0])[1]

    def _imply(self, multipliers: Array) -> tuple[float, Answer]:
        """The duality gap of some multipliers, and the answer that goes with them."""
        weights = multipliers.clip(0.0) / multipliers.clip(0.0).sum()
        image = weights @ (self.images - self.low * self.offsets)
        height = self.at(image)
        return float(height.max() - weights @ height), (image, float(height.max()), weights)
