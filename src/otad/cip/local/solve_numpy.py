"""Solves a few rows in NumPy, whose small operations cost much less than those of torch.

Potentials are found for all rows at a time, and multipliers row by row.

Rows that need more than the steps below are left to `solve_torch`: those without a potential for
the requested curvature, and those whose images are nearly affinely dependent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from operator import mul, sub
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from otad.cip.local.products import NOISE
from otad.cip.local.simplex_qp import GUESSES, REFINEMENTS
from otad.cip.problem import CipProblem
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution, Status

Array = NDArray[Any]
_TINY = float(np.finfo(float).tiny)
_REGULAR = 1e-3  # images so far from dependent that weights need no refinement
MOST_ALONE = 50  # neighbors; rows with more are faster in torch


def solve_numpy(problem: RowProblem, mode: str) -> CipSolution | None:
    """Return the solution without gradients, or None if a row is left over.

    All neighbors are used, and potentials are canonical."""
    (batch, count, _), query = problem.shape, problem.query
    if isinstance(problem, CipProblem):
        parts = [query, problem.anchors, problem.images]  # every call of torch would cost much
    else:
        bank = problem.anchors_of(slice(batch)), problem.images_of(slice(batch))
        parts = [query, *(part.to(query.dtype) for part in bank)]
    point, anchors, images = [part.numpy(force=True) for part in parts]
    high, low = problem.smoothness.tolist(), problem.strong_convexity.tolist()
    found = _solve(point, anchors, images, high, low, NOISE[query.dtype])
    if found is None:
        return None
    *solved, residual = found
    status, active = [int(Status.SOLVED)] * batch, [[True] * count] * batch
    rest = [np.array(part) for part in (high, low, residual, status, active)]
    made = *map(torch.from_numpy, (*solved, *rest)), mode
    solution = object.__new__(CipSolution)  # not called, because its checks cost as much as a step
    names = CipSolution.__dataclass_fields__
    solution.__dict__.update(zip(names, made, strict=True))
    return solution


@np.errstate(all="ignore")  # a row that overflows is left over
def _solve(
    query: Array, anchors: Array, images: Array, high: list[float], low: list[float], noise: float
) -> tuple[Array, Array, Array, Array, tuple[float, ...]] | None:
    """Return images (B,d), values (B,), multipliers (B,K), potentials (B,K) and residuals of all
    rows, or None if one is left over.

    Names are those of `Gram`, `Constraints` and `solve_torch`. Numbers of size K are in lists: one
    by one they take less time than the call of a function of NumPy."""
    (batch, count, dim), dtype, found = anchors.shape, query.dtype, []
    stack = np.empty((batch, 2 * count, dim), dtype)
    offset, spread, center = stack[:, :count], stack[:, count:], images[:, 0]
    np.subtract(anchors, query[:, None], out=offset)
    np.subtract(images, center[:, None], out=spread)
    # BLAS is slower if the result is square.
    lower = np.matmul(spread, stack.swapaxes(1, 2)).astype(float)
    cross, inner = lower[:, :, :count], lower[:, :, count:]
    squares, tilts = np.vecdot(offset, offset).tolist(), np.vecdot(offset, center[:, None]).tolist()
    centers = np.vecdot(center, center).tolist()
    moduli = [one - other for one, other in zip(high, low, strict=True)]
    norms = spreads = inner.diagonal(0, 1, 2).tolist()
    if any(low):
        shift = np.array(low)[:, None, None]
        offsets = np.matmul(offset, stack.swapaxes(1, 2))[:, :, :count].astype(float)
        inner = inner - shift * (cross + cross.swapaxes(1, 2)) + shift * shift * offsets
        norms = inner.diagonal(0, 1, 2).tolist()
        cross = cross - shift * offsets
    # Eq. (2) for u~_i - |z~_i|^2 / (2M): the longest paths from i to j, with twice as many edges in
    # each round.
    gram = inner / np.array(moduli)[:, None, None]
    edges = cross - gram
    own = edges.diagonal(0, 1, 2)
    longest = edges - own[:, :, None]
    for _ in range(count.bit_length()):
        shorter = longest
        longest = np.maximum.reduce(shorter[:, :, :, None] + shorter[:, None], 2)
        if shorter.tobytes() == longest.tobytes():
            break
    # If no path is longer, these potentials obey (2) up to rounding.
    levels = (longest.swapaxes(1, 2) - longest).dot(_means(count))
    lines, cycles = (levels - own).tolist(), longest.diagonal(0, 1, 2).tolist()
    for at, line in enumerate(lines):
        modulus, reach = moduli[at], math.sqrt(max(squares[at]))
        size = math.sqrt(centers[at]) + math.sqrt(max(spreads[at])) + abs(low[at]) * reach
        size *= reach + size / (2 * modulus)
        if not size < math.inf or max(cycles[at]) > 0:
            return None
        # Eq. (3): the multipliers.
        best = _maximize(gram[at], line, max(norms[at]) / modulus, noise)
        if best is None:
            return None
        weights, gains, peak = best
        half, bend = 0.5 / modulus, low[at] / 2
        terms = zip(levels[at].tolist(), norms[at], tilts[at], squares[at], strict=True)
        potentials = [one + half * norm + tilt + bend * square for one, norm, tilt, square in terms]
        mean = sum(potentials) / count
        gain = sum(map(mul, weights, gains))
        value = (sum(map(mul, weights, line)) + gain + peak) / 2 - mean
        gap = max(max(gains) - gain, sum(map(mul, weights, [abs(one - gain) for one in gains])))
        residual = max(gap / max(size, _TINY), abs(sum(weights) - 1))
        found.append((weights, value, [one - mean for one in potentials], residual))
    *dual, residuals = zip(*found, strict=True)
    shares, values, heights = [np.array(part, dtype) for part in dual]
    image = np.matmul(shares[:, None], images)[:, 0]
    if any(low):
        image -= np.array(low, dtype)[:, None] * np.matmul(shares[:, None], offset)[:, 0]
    return image, values, shares, heights, residuals


def _maximize(
    gram: Array, linear: list[float], scale: float, tolerance: float
) -> tuple[list[float], list[float], float] | None:
    """Maximize linear . w - w^T gram w / 2 over the simplex by the exchange of `simplex_qp`.

    Return the weights, the gains (K,), and the gradient where the gain is zero. Here H is `gram` +
    `scale`, the largest diagonal entry of `gram`."""
    posv, potrs = _lapack()
    count = len(linear)
    scale, middle = scale if scale > 0 else 1.0, sum(linear) / count
    linear = [one - middle for one in linear]
    floor = tolerance * (1 + max(map(abs, linear)) / scale)
    if not floor < math.inf:
        return None
    support: Sequence[int] = range(count)
    matrix = rows = block = gram + scale
    sides = side = np.array((linear, [1.0] * count))

    def gains_of(weight: list[float]) -> list[float]:
        found: list[float] = (sides[0] - level - np.array(weight).dot(rows)).tolist()
        return found

    for _ in range(GUESSES):
        factors, solved, failed = posv(block.T, side.T)  # columns first, as LAPACK has them
        if failed or (least := min(factors.diagonal().tolist())) <= math.sqrt(tolerance * scale):
            return None
        value, edge = solved.T.tolist()
        rate = sum(edge)
        level = (sum(value) - 1) / rate
        weight = [one - level * other for one, other in zip(value, edge, strict=True)]
        low = min(weight) < -floor
        gains = weight if low and len(weight) == count else gains_of(weight)
        if not low and max(gains) <= floor * scale:
            break
        for at, one in zip(support, weight, strict=True):
            gains[at] = one
        support = [at for at, one in enumerate(gains) if one > 0]
        rows, side = matrix.take(support, 0), sides.take(support, 1)
        block = rows.take(support, 1)
    else:
        return None
    exact = least**2 > _REGULAR * scale and min(weight) >= 0
    for _ in range(0 if exact else 1 + REFINEMENTS):  # the gains on the support are rounding errors
        step = potrs(factors, [gains[at] for at in support])[0].tolist()
        shift, before = sum(step) / rate, weight
        terms = zip(weight, step, edge, strict=True)
        weight = [max(one + other - shift * third, 0.0) for one, other, third in terms]
        total = sum(weight)
        weight = [one / total for one in weight]
        gains = gains_of(weight)
        if max(map(abs, map(sub, weight, before))) <= 1e-12:
            break
    weights, total = [0.0] * count, sum(weight)
    for at, one in zip(support, weight, strict=True):
        weights[at] = one / total
    return weights, gains, middle + level + scale


@cache
def _means(count: int) -> Array:
    return np.full(count, 0.5 / count)


@cache
def _lapack() -> tuple[Any, Any]:
    from scipy.linalg.lapack import dposv, dpotrs  # slow to import

    return dposv, dpotrs
