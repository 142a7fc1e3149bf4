"""Solves a few rows one by one in NumPy, whose small operations cost much less than those of torch.

Rows that need more than the steps below are left to `solve_torch`: those without a potential for
the requested curvature, and those whose images are nearly affinely dependent."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otad.cip.local.products import NOISE, fill_products
from otad.cip.local.simplex_qp import GUESSES, REFINEMENTS
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution, Status

Array = NDArray[np.float64]
_TINY = float(np.finfo(float).tiny)
_sum, _min, _max = np.add.reduce, np.minimum.reduce, np.maximum.reduce  # faster than methods


def solve_numpy(problem: RowProblem, mode: str) -> CipSolution | None:
    """Return the solution without gradients, or None if a row is left over.

    All neighbors are used, and potentials are canonical."""
    (batch, count, dim), query = problem.shape, problem.query.detach()
    parts = query, problem.anchors_of(slice(batch)), problem.images_of(slice(batch))
    point, anchors, images = (part.to(query.dtype).numpy() for part in parts)
    curved, dtype = problem.has_strong_convexity, point.dtype
    sizes = (batch, 2 * count, dim), (batch, (1 + curved) * count, 2 * count), (batch, count)
    stack, values, squares = (np.empty(size, dtype) for size in sizes)
    fill_products(point, anchors, images, stack, values, squares)
    high, low = problem.smoothness.tolist(), problem.strong_convexity.tolist()
    rows = []
    with np.errstate(all="ignore"):  # a row that overflows is left over
        for row in zip(values.astype(float), squares.astype(float), high, low, strict=True):
            found = _solve_row(*row, NOISE[query.dtype])
            if found is None:
                return None
            rows.append(found)
    weights, value, potentials, residual = (np.array(part) for part in zip(*rows, strict=True))
    weights, value, potentials = (part.astype(dtype) for part in (weights, value, potentials))
    image = np.matmul(weights[:, None], images)[:, 0]
    if curved:
        shift = np.matmul(weights[:, None], stack[:, :count])[:, 0]
        image -= np.array(low, dtype)[:, None] * shift
    made = {"image": image, "value": value, "multipliers": weights, "potentials": potentials}
    made |= {"smoothness": np.array(high), "strong_convexity": np.array(low), "residual": residual}
    made["status"] = np.array([int(Status.SOLVED)] * batch)
    made["active"] = np.ones((batch, count), dtype=bool)
    return CipSolution(**{name: torch.from_numpy(part) for name, part in made.items()}, mode=mode)


def _solve_row(
    values: Array, squares: Array, high: float, low: float, noise: float
) -> tuple[Array, float, Array, float] | None:
    """Return multipliers (K,), value, potentials (K,) and residual, or None if it is left over.

    `values` and `squares` are those of `Products`, and change. The other names are those of `Gram`,
    `Constraints` and `solve_torch`."""
    count, modulus = len(squares), high - low
    lower = values[-count:]
    tilt, center = lower[0, :count].copy(), math.sqrt(lower[0, count])
    lower[0] = 0.0
    lower[:, count] = 0.0
    cross, images = lower[:, :count], lower[:, count:]
    offset, spread = math.sqrt(_max(squares)), math.sqrt(_max(images.diagonal()))
    if low:
        offsets = values[:count, :count]
        images = images - low * (cross + cross.T) + low * low * offsets
        cross = cross - low * offsets
        tilt += low / 2 * squares
    # Eq. (2): the longest paths and the potentials.
    slope, half = cross.diagonal(), images.diagonal() / 2
    longest = cross.T - slope + np.maximum(half[:, None] + half - images, 0.0) / modulus
    longest.flat[:: count + 1] = 0.0
    for reach, onward in zip(longest.T[:, :, None], longest, strict=True):
        np.maximum(longest, reach + onward, out=longest)
    size = center + spread + abs(low) * offset
    size *= offset + size / (2 * modulus)
    if _max(longest.diagonal()) > 0 or not size < math.inf:
        return None
    levels = (_sum(longest, 1) - _sum(longest, 0)) / (2 * count)
    violation = _max(longest + levels - levels[:, None], None)
    potentials = levels + tilt
    mean = _sum(potentials) / count
    # Eq. (3): the multipliers.
    line = levels - mean - slope + half / modulus
    weights = _maximize(images, modulus * line, 2 * _max(half), noise)
    if weights is None:
        return None
    pull = images @ weights
    bound = line + (weights @ pull / 2 - pull) / modulus
    value = weights @ bound
    gap = bound - value
    gaps = _max(gap), violation, weights @ abs(gap)
    residual = max(max(gaps) / max(size, _TINY), abs(_sum(weights) - 1))
    return weights, value, potentials - mean, residual


def _maximize(gram: Array, linear: Array, scale: float, tolerance: float) -> Array | None:
    """Maximize linear . w - w^T gram w / 2 over the simplex by the exchange of `simplex_qp`.

    The largest diagonal entry of `gram` is `scale`, and here H is `gram` + `scale`."""
    posv, potrs = _lapack()
    linear = linear - _sum(linear) / len(linear)
    scale = scale if scale > 0 else 1.0
    floor = tolerance * (1 + _max(abs(linear)) / scale)
    if not floor < math.inf:
        return None
    matrix, support = gram + scale, np.arange(len(linear))
    sides = np.array((linear, [1.0] * len(linear)))
    rows, block, side = matrix, matrix, sides
    for _ in range(GUESSES):
        factors, solved, failed = posv(block, side.T)
        if failed or _min(factors.diagonal()) <= math.sqrt(tolerance * scale):
            return None
        (value, edge), (mass, rate) = solved.T, _sum(solved)
        level = (mass - 1) / rate
        weight = value - level * edge
        gain = linear - level - weight @ rows
        if _min(weight) >= -floor and _max(gain) <= floor * scale:
            break
        gain[support] = weight
        support = (gain > 0).nonzero()[0]
        rows, side = matrix[support], sides[:, support]
        block = rows[:, support]
    else:
        return None
    for _ in range(1 + REFINEMENTS):  # the gains on the support are rounding errors
        step = potrs(factors, gain[support])[0]
        better = np.maximum(weight + step - _sum(step) / rate * edge, 0.0)
        better /= _sum(better)
        change, weight = _max(abs(better - weight)), better
        if change <= 1e-12:
            break
        gain = linear - level - weight @ rows
    weights = np.zeros(len(linear))
    weights[support] = weight
    return weights


@cache
def _lapack() -> tuple[Any, Any]:
    from scipy.linalg.lapack import dposv, dpotrs  # slow to import

    return dposv, dpotrs
