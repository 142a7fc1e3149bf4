"""An independent, slow reference: eqs. (2) and (3) as in the paper, one conic program per row.

Potentials come from longest paths in the paper's (L, l) form, the least smoothness from a linear
program (HiGHS), and the feature from K quadratic constraints in R^d (CVXPY and Clarabel)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otad.checks import check_choice
from otad.cip.judge import kkt_residual
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution, Status
from otad.errors import SolverError, import_extra

Array = NDArray[np.float64]
Optimum = tuple[Array, float, Array]  # image (d,), value, multipliers (K,)

_ACCURACIES = (1e-10, 1e-8)  # the second is used if Clarabel does not reach the first
_SUPPORTS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # multipliers up to these may be zero
_ROUNDING = 1e-11  # cycles and 1/(L - l) up to this share of their largest term count as zero


@dataclass(frozen=True)
class CvxpyCip:
    """A slow reference solver: one conic program for each row, without gradients.

    It is written independently of `ExactCip`, to check its answers, and needs the extra
    `reference`. The potentials and their curvature can be given by another solution. By default
    they are the canonical ones, for the least smoothness if the requested one is too small.

    Parameters
    ----------
    mode, on_failure : str
        As in `ExactCip`.

    Examples
    --------
    >>> import otad
    >>> reference = otad.cip.CvxpyCip(mode="paper")  # reference(problem) is a CipSolution
    >>> reference.on_failure
    'raise'
    """

    mode: str = "consistent"
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        check_choice(self.mode, "mode", ("consistent", "paper"))
        check_choice(self.on_failure, "on_failure", ("raise", "abstain", "fallback"))

    def __call__(self, problem: RowProblem, given: CipSolution | None = None) -> CipSolution:
        """Return the solution of all rows, for the potentials of a `given` solution if any."""
        query, curvature = problem.query, given or problem
        rows = []
        for i in range(problem.shape[0]):
            at = slice(i, i + 1)
            parts = [query[at], problem.anchors_of(at), problem.images_of(at)]
            parts += [] if given is None else [given.potentials[at]]
            arrays = [part[0].detach().double().cpu().numpy() for part in parts]
            pairs = ((x.smoothness[i], x.strong_convexity[i]) for x in (problem, curvature))
            rows.append(self._row(arrays, *([float(part) for part in pair] for pair in pairs)))
        kinds = (query.dtype,) * 4 + (torch.float64,) * 2 + (torch.int64,)
        image, value, multipliers, levels, high, low, status = (
            torch.as_tensor(np.stack(column)).to(query.device, kind)
            for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        )
        none, active = torch.zeros_like(high), torch.ones_like(levels, dtype=torch.bool)
        solution = CipSolution(
            image, value, multipliers, levels, high, low, none, status, active, self.mode
        )
        return replace(solution, residual=kkt_residual(problem, solution))

    def _row(
        self, arrays: list[Array], requested: list[float], used: list[float]
    ) -> tuple[Any, ...]:
        """Return image, value, multipliers, potentials, L, l and status."""
        (query, anchors, images, *given), (high, low) = arrays, used
        if given:
            levels, status = given[0], Status.SOLVED
        else:
            levels, high, status = find_potentials(anchors, images, high, low)
        if status < Status.INFEASIBLE:
            curvature = requested if self.mode == "paper" else (high, low)
            answer = _Quadratics(anchors - query, images, levels, *curvature).solve()
            if answer is not None:
                return *answer, levels, high, low, int(status)
            status = Status.UNSOLVED
        if self.on_failure == "raise":
            raise SolverError(f"a row has no solution: {status.name}")
        multipliers = np.full(len(anchors), np.nan)
        if self.on_failure == "fallback":
            multipliers = np.eye(len(anchors))[np.square(anchors - query).sum(1).argmin()]
        image = multipliers @ (images - requested[1] * (anchors - query))
        return image, np.nan, multipliers, levels * np.nan, np.nan, np.nan, int(status)


@dataclass(frozen=True)
class _Quadratics:
    """The K lower bounds on v in eq. (3) as functions of z', with the offsets x_i - x'."""

    offsets: Array
    images: Array
    levels: Array
    high: float
    low: float

    def at(self, point: Array) -> Array:
        gaps = self.images - point
        return np.asarray(self.bounds(squares(gaps), (gaps * self.offsets).sum(1)))

    def bounds(self, square_z: Any, inner: Any) -> Any:
        """Return the bounds (K,) from |z_i - z'|^2 (K,) and <z_i - z', x_i - x'> (K,)."""
        plane = self.levels - (self.images * self.offsets).sum(1)
        return plane + bend(square_z, inner, squares(self.offsets), self.high, self.low)

    def solve(self) -> Optimum | None:
        """Return z' (d,), v and the multipliers (K,), or None if Clarabel fails."""
        cp = import_extra("cvxpy", "reference")
        count, dim = self.images.shape
        value, point = cp.Variable(), cp.Variable((1, dim))
        gaps = self.images - np.ones((count, 1)) @ point
        inner = cp.sum(cp.multiply(gaps, self.offsets), axis=1)
        constraint = value >= self.bounds(cp.sum_squares(gaps, axis=1), inner)
        program = cp.Problem(cp.Minimize(value), [constraint])
        for accuracy in _ACCURACIES:
            options = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), accuracy)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # `_polish` restores the accuracy
                try:
                    program.solve(solver=cp.CLARABEL, **options)
                except cp.SolverError:
                    continue
            if program.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
                return self._polish(point.value[0], np.asarray(constraint.dual_value))
        return None

    def _polish(self, point: Array, multipliers: Array) -> Optimum:
        """Return the optimum with the smallest duality gap on any likely support.

        With a gap of 1e-10 an interior point is still about 1e-5 from z'. All K bounds have the
        same Hessian, so one Newton step on the right support of the multipliers is exact."""
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
        graded = []
        for weights in (part.clip(0.0) / part.clip(0.0).sum() for part in candidates):
            image = weights @ (self.images - self.low * self.offsets)
            height = self.at(image)
            optimum = image, float(height.max()), weights
            graded.append((float(height.max() - weights @ height), optimum))
        return min(graded, key=lambda pair: pair[0])[1]


def bend(square_z: Any, inner: Any, square_x: Array, high: float, low: float) -> Any:
    """Return the last term of eqs. (2) and (3) for two differences z and x."""
    return (square_z / high + low * square_x - 2 * low / high * inner) / (2 * (1 - low / high))


def squares(vectors: Array) -> Array:
    return np.asarray(np.square(vectors).sum(-1))


def find_potentials(
    anchors: Array, images: Array, high: float, low: float
) -> tuple[Array, float, Status]:
    """Return canonical potentials (K,) of mean zero, their smoothness and the status."""
    levels, cycle = canonical_potentials(difference_bounds(anchors, images, high, low))
    if cycle <= _ROUNDING:
        return levels, high, Status.SOLVED
    high = least_smoothness_by_lp(anchors, images, low)
    if high == np.inf:
        return levels, high, Status.INFEASIBLE
    levels, _ = canonical_potentials(difference_bounds(anchors, images, high, low))
    return levels, high, Status.RAISED


def difference_bounds(anchors: Array, images: Array, high: float, low: float) -> Array:
    """Return w (K,K) of eq. (2), u_i - u_j >= w_ij."""
    dx, dz = anchors[:, None] - anchors, images[:, None] - images
    curved = bend(squares(dz), (dz * dx).sum(-1), squares(dx), high, low)
    return np.asarray((images * dx).sum(-1) + curved)


def canonical_potentials(bounds: Array) -> tuple[Array, float]:
    """Return potentials (K,) of mean zero, and the worst cycle as a share of the largest bound.

    The cycle is at most 0 if the potentials are feasible."""
    longest = bounds.copy()
    for k in range(len(longest)):
        longest = np.maximum(longest, longest[:, [k]] + longest[[k]])
    cycle = longest.diagonal().max() / max(np.abs(bounds).max(), np.finfo(float).tiny)
    levels = (longest.mean(1) - longest.mean(0)) / 2
    return levels - levels.mean(), float(cycle)


def least_smoothness_by_lp(anchors: Array, images: Array, low: float) -> float:
    """Return the least L, by maximizing 1/(L - l) over eq. (2), which is linear in it and in u:

    u_i - u_j >= <z_j, dx> + l/2 |dx|^2 + |dz - l dx|^2 / (2 (L - l))."""
    from scipy.optimize import linprog  # slow to import

    count = len(anchors)
    i, j = np.nonzero(~np.eye(count, dtype=bool))
    dx, dz = anchors[i] - anchors[j], images[i] - images[j]
    rise = (images[j] * dx).sum(1) + low / 2 * squares(dx)
    curve = squares(dz - low * dx) / 2
    if not curve.any():
        return low
    unit_rise, unit_curve = max(np.abs(rise).max(), np.finfo(float).tiny), curve.max()
    unknowns = np.eye(count + 1)  # u, and 1/(L - l) last
    answer = linprog(
        -unknowns[count],
        A_ub=unknowns[j] - unknowns[i] + curve[:, None] / unit_curve * unknowns[count],
        b_ub=-rise / unit_rise,
        bounds=[(0, 0)] + [(None, None)] * (count - 1) + [(0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if answer.status == 2 or (answer.status == 0 and answer.x[count] <= _ROUNDING):
        return np.inf
    if answer.status != 0:
        raise SolverError(f"HiGHS: {answer.message}")
    return float(low + unit_curve / (answer.x[count] * unit_rise))
