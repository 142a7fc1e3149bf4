"""Eq. (2) as the paper prints it, for one row in NumPy: potentials and the least smoothness.

The independent half of `otad.cip.reference` for the difference constraints: a plain longest-path
closure in the paper's own (L, l) form, and a linear program for HiGHS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otad.cip.solution import Status
from otad.errors import SolverError

Array = NDArray[np.float64]

_ROUNDING = 1e-11  # cycles and 1/(L - l) up to this, beside their largest term, count as zero


def bend(square_z: Any, inner: Any, square_x: Array, high: float, low: float) -> Any:
    """The last term of eqs. (2) and (3), of two differences z and x."""
    return (square_z / high + low * square_x - 2 * low / high * inner) / (2 * (1 - low / high))


def squares(vectors: Array) -> Array:
    return np.asarray(np.square(vectors).sum(-1))


def find_potentials(
    anchors: Array, images: Array, high: float, low: float
) -> tuple[Array, float, Status]:
    """Canonical potentials (K,), mean zero, with the smoothness and the status they come with."""
    levels, cycle = canonical_potentials(difference_bounds(anchors, images, high, low))
    if cycle <= _ROUNDING:
        return levels, high, Status.SOLVED
    high = least_smoothness_by_lp(anchors, images, low)
    if high == np.inf:
        return levels, high, Status.INFEASIBLE
    levels, _ = canonical_potentials(difference_bounds(anchors, images, high, low))
    return levels, high, Status.RAISED


def difference_bounds(anchors: Array, images: Array, high: float, low: float) -> Array:
    """w (K,K) of eq. (2): u_i - u_j >= w_ij."""
    dx, dz = anchors[:, None] - anchors, images[:, None] - images
    curved = bend(squares(dz), (dz * dx).sum(-1), squares(dx), high, low)
    return np.asarray((images * dx).sum(-1) + curved)


def canonical_potentials(bounds: Array) -> tuple[Array, float]:
    """Potentials (K,), mean zero, and the worst cycle beside the largest bound.

    They are the mean of the columns less the mean of the rows, halved, of the longest paths; and
    feasible unless the cycle is positive.
    """
    longest = bounds.copy()
    for k in range(len(longest)):
        longest = np.maximum(longest, longest[:, [k]] + longest[[k]])
    cycle = longest.diagonal().max() / max(np.abs(bounds).max(), np.finfo(float).tiny)
    levels = (longest.mean(1) - longest.mean(0)) / 2
    return levels - levels.mean(), float(cycle)


def least_smoothness_by_lp(anchors: Array, images: Array, low: float) -> float:
    """The least L by HiGHS: maximize 1/(L - l) over eq. (2), which is linear in it and in u:

    u_i - u_j >= <z_j, dx> + l/2 |dx|^2 + |dz - l dx|^2 / (2 (L - l)).
    """
    from scipy.optimize import linprog  # slow to import, and needed for the twin alone

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
