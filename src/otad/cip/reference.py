"""The slow twin: eqs. (2) and (3) as the paper prints them, one conic program per row.

Nothing is shared with the exact solver: no shift, no Gram matrix, no dual. Potentials come from a
plain longest-path closure, the least smoothness from a linear program (HiGHS), the answer from
K quadratic constraints in R^d (CVXPY and Clarabel). It is here to check and to be compared with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

from otad.checks import check_choice
from otad.cip.judge import kkt_residual
from otad.cip.rows import RowProblem
from otad.cip.solution import CipSolution, Status
from otad.errors import MissingExtraError, SolverError

Array = NDArray[np.float64]

_CYCLE_TOLERANCE = 1e-11  # a cycle this small beside its largest term is rounding
_ACCURACY = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}


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
            query, anchors, images = (
                t.detach().cpu().double().numpy()[0]
                for t in (problem.query[at], problem.anchors_of(at), problem.images_of(at))
            )
            high, low = (float(t[i]) for t in found)
            if potentials is None:
                levels, high, status = _find_potentials(anchors, images, high, low)
            else:
                levels, status = potentials[i].cpu().double().numpy(), Status.SOLVED
            curvature = (high, low)
            if self.mode == "paper":
                curvature = (float(asked[0][i]), float(asked[1][i]))
            row = None
            if not status.failed:
                row = solve_row(query, anchors, images, levels, *curvature)
                status = Status.UNSOLVED if row is None else status
            if row is None:
                row = self._failure(query, anchors, images, float(asked[1][i]), status, i)
                levels, high, low = np.full(len(anchors), np.nan), np.nan, np.nan
            rows.append((*row, levels, high, low, int(status)))
        return self._solution(problem, rows)

    def _failure(
        self, query: Array, anchors: Array, images: Array, low: float, status: Status, row: int
    ) -> tuple[Array, float, Array]:
        """NaN, or the answer of the nearest neighbor alone."""
        if self.on_failure == "raise":
            raise SolverError(f"row {row} has no solution ({status.name})")
        nearest = int(np.square(anchors - query).sum(1).argmin())
        if self.on_failure == "fallback":
            alone = images[nearest] - low * (anchors[nearest] - query)
            return alone, np.nan, np.eye(len(anchors))[nearest]
        return np.full_like(query, np.nan), np.nan, np.full(len(anchors), np.nan)

    def _solution(self, problem: RowProblem, rows: list[tuple[Any, ...]]) -> CipSolution:
        query = problem.query
        columns = [torch.as_tensor(np.stack(c), device=query.device) for c in zip(*rows, strict=True)]
        image, value, multipliers, potentials, smoothness, strong_convexity, status = columns
        ungraded = CipSolution(
            image=image.to(query.dtype),
            value=value.to(query.dtype),
            multipliers=multipliers.to(query.dtype),
            potentials=potentials.to(query.dtype),
            smoothness=smoothness,
            strong_convexity=strong_convexity,
            residual=torch.zeros_like(smoothness),
            status=status,
            active=torch.ones_like(multipliers, dtype=torch.bool),
            mode=self.mode,
        )
        return replace(ungraded, residual=kkt_residual(problem, ungraded))


def solve_row(
    query: Array, anchors: Array, images: Array, levels: Array, high: float, low: float
) -> tuple[Array, float, Array] | None:
    """Eq. (3) with smoothness `high` and strong convexity `low`: z' (d,), v, multipliers (K,)."""
    try:
        import cvxpy as cp
    except ImportError as error:
        raise MissingExtraError("cvxpy", "reference") from error
    value, point = cp.Variable(), cp.Variable(len(query))
    bounds = [
        value >= u + z @ (query - x) + _bend(z - point, x - query, high, low, cp.sum_squares)
        for x, z, u in zip(anchors, images, levels, strict=True)
    ]
    program = cp.Problem(cp.Minimize(value), bounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of reduced accuracy: the residual tells it
        try:
            program.solve(solver=cp.CLARABEL, **_ACCURACY)
        except cp.SolverError:
            return None
    if program.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        return None
    multipliers = np.array([np.asarray(bound.dual_value).item() for bound in bounds])
    return np.asarray(point.value), float(value.value), multipliers


def _square(vector: Array) -> Any:
    return vector @ vector


def _bend(
    z: Any, x: Array, high: float, low: float, square: Callable[[Any], Any] = _square
) -> Any:
    """What curvature adds to the linear bound of eqs. (2) and (3), for differences z and x."""
    both = square(z) / high + low * (x @ x) - 2 * low / high * (z @ x)
    return both / (2 * (1 - low / high))


def _find_potentials(
    anchors: Array, images: Array, high: float, low: float
) -> tuple[Array, float, Status]:
    """Canonical potentials (K,), mean zero, with the smoothness and the status they come with."""
    status = Status.SOLVED
    levels, excess = canonical_potentials(bounds_on_differences(anchors, images, high, low))
    if excess > _CYCLE_TOLERANCE:
        high, status = least_smoothness_by_lp(anchors, images, low), Status.RAISED
        if high == np.inf:
            return levels, high, Status.INFEASIBLE
        levels, _ = canonical_potentials(bounds_on_differences(anchors, images, high, low))
    return levels, high, status


def bounds_on_differences(anchors: Array, images: Array, high: float, low: float) -> Array:
    """w (K,K) of eq. (2): u_i - u_j >= w_ij."""
    pairs = list(zip(anchors, images, strict=True))
    return np.array(
        [
            [zj @ (xi - xj) + _bend(zi - zj, xi - xj, high, low) for xj, zj in pairs]
            for xi, zi in pairs
        ]
    )


def canonical_potentials(bounds: Array) -> tuple[Array, float]:
    """Middle of the mean column and minus the mean row of the longest paths; the worst cycle.

    The latter is relative to the largest bound: potentials exist unless it is positive.
    """
    longest = bounds.copy()
    for k in range(len(longest)):
        longest = np.maximum(longest, longest[:, [k]] + longest[[k]])
    excess = longest.diagonal().max() / max(np.abs(bounds).max(), np.finfo(float).tiny)
    levels = (longest.mean(1) - longest.mean(0)) / 2
    return levels - levels.mean(), float(excess)


def least_smoothness_by_lp(anchors: Array, images: Array, low: float) -> float:
    """Maximize 1/(L - l) over eq. (2), linear in u and in it; l if unbounded, inf if not positive.

    Eq. (2) reads u_i - u_j >= <z_j, dx> + l/2 |dx|^2 + |dz - l dx|^2 / (2 (L - l)).
    """
    count = len(anchors)
    i, j = np.nonzero(~np.eye(count, dtype=bool))
    dx, dz = anchors[i] - anchors[j], images[i] - images[j]
    rise = (images[j] * dx).sum(1) + low / 2 * np.square(dx).sum(1)
    bend = np.square(dz - low * dx).sum(1) / 2
    if not bend.any():
        return low
    unit = np.square(bend).mean() ** 0.5, max(np.abs(rise).max(), np.finfo(float).tiny)
    unit_bend, unit_rise = unit
    system = np.zeros((len(i), count + 1))
    system[np.arange(len(i)), i], system[np.arange(len(i)), j] = -1.0, 1.0
    system[:, count] = bend / unit_bend
    answer = linprog(
        -np.eye(count + 1)[count],
        A_ub=system,
        b_ub=-rise / unit_rise,
        bounds=[(0, 0)] + [(None, None)] * (count - 1) + [(0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if answer.status == 2 or (answer.status == 0 and answer.x[count] < 1e-9):
        return np.inf
    if answer.status != 0:
        raise SolverError(f"HiGHS: {answer.message}")
    return float(low + unit_bend / (answer.x[count] * unit_rise))
