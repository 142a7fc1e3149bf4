"""Solves many rows side by side in NumPy, by the steps of `solve_numpy` on arrays.

A batch needs hundreds of small operations, which start several times faster in NumPy than in torch.
Rows that need more than these steps are left to `solve_torch`: those without a potential for the
requested curvature, and those whose images are nearly affinely dependent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.cip.local.products import Gram
from otad.cip.local.simplex_qp import GUESSES
from otad.cip.local.solve_torch import DualSolution
from otad.cip.solution import Status

Array = NDArray[Any]
_MOST_NEIGHBORS = 24  # LAPACK, which `solve_torch` calls for each row, is faster for more
_LEAST_PIVOT = 1e-4  # smaller ones lose too many digits
_sum, _max = np.add.reduce, np.maximum.reduce


def can_solve_arrays(gram: Gram) -> bool:
    return gram.tilt.is_cpu and len(gram.tilt) <= _MOST_NEIGHBORS


def solve_arrays(gram: Gram, smoothness: Tensor, convexity: Tensor) -> tuple[DualSolution, Tensor]:
    """Return the solution of a batch, and the rows (n,) that are left over.

    All neighbors are used, potentials are canonical, and there is no sensitivity."""
    with np.errstate(all="ignore"):  # rows that overflow are left over
        weights, value, potentials, residual, solved = _solve(gram, smoothness, convexity)
    parts = (torch.from_numpy(part.T.copy()) for part in (weights, value, potentials, residual))
    multipliers, values, levels, gaps = parts
    curvature = smoothness.clone(), convexity.clone(), convexity.clone()
    active = torch.ones_like(multipliers, dtype=torch.bool)
    status = torch.full_like(values, int(Status.SOLVED), dtype=torch.int64)
    none = multipliers.new_empty((len(values), 0, 0))
    found = DualSolution(multipliers, none, values, levels, *curvature, active, gaps, status)
    return found, torch.from_numpy((~solved).nonzero()[0])


def _solve(gram: Gram, smoothness: Tensor, convexity: Tensor) -> tuple[Array, ...]:
    """Return multipliers (K,B), value (B,), potentials (K,B), residual (B,), and whether each row
    was solved (B,)."""
    high, low, tilt, squares = (
        part.numpy() for part in (smoothness, convexity, gram.tilt, gram.squared_distance)
    )
    cross, images = (part.numpy() for part in gram.shifted(convexity))
    count, modulus, center = len(tilt), high - low, gram.center.numpy()
    offset, spread = np.sqrt(_max(squares)), np.sqrt(_max(_diagonal(gram.images.numpy())))
    size = center + spread + abs(low) * offset
    size *= offset + size / (2 * modulus)
    # Eq. (2) for u~_i - |z~_i|^2 / (2M): the longest paths and the potentials.
    matrix = images / modulus
    longest = cross.swapaxes(0, 1) - matrix
    own, half = _diagonal(longest).copy(), _diagonal(matrix) / 2
    longest -= own
    path = np.empty_like(longest)
    for k in range(count):
        np.maximum(longest, np.add(longest[:, k, None], longest[k], out=path), out=longest)
    solved = (_max(_diagonal(longest)) <= 0) & (size < np.inf)
    levels = (_sum(longest, 1) - _sum(longest, 0)) / (2 * count)
    potentials = levels + half + tilt + low / 2 * squares
    mean = _sum(potentials) / count
    potentials -= mean
    # Eq. (3): the multipliers.
    line = levels - own
    scale = 2 * _max(half)
    scale[~(scale > 0)] = 1.0
    matrix += scale
    middle = _sum(line) / count
    weights, gains, level = _maximize(matrix, line - middle, scale, gram.noise, solved)
    gain = _sum(weights * gains)
    value = (_sum(weights * line) + gain + level + middle + scale) / 2 - mean
    gains -= gain
    gap = np.maximum(_max(gains), _sum(weights * abs(gains)))
    residual = np.maximum(gap / np.maximum(size, np.finfo(float).tiny), abs(_sum(weights) - 1))
    return weights, value, potentials, residual, solved


def _diagonal(matrix: Array) -> Array:
    """Return the diagonals (K,B) of matrices (K,K,B) or (K,K+2,B), to read or to write."""
    found: Array = np.einsum("iib->ib", matrix[:, : len(matrix)])
    return found


def _maximize(
    matrix: Array, linear: Array, scale: Array, tolerance: float, solved: Array
) -> tuple[Array, Array, Array]:
    """Return weights (K,B), gains (K,B) and level (B,) of the exchange in `simplex_qp`.

    The `matrix` H (K,K,B) is the Gram matrix plus its largest diagonal entry, the `scale` (B,).
    Rows that are left over are marked in `solved` (B,)."""
    count = len(matrix)
    weights, gains, levels = np.zeros_like(linear), np.zeros_like(linear), np.zeros_like(scale)
    floor = tolerance * (scale + _max(abs(linear)))
    table, work = np.empty((2, count, count + 2, len(scale)))
    support, place = None, solved.nonzero()[0]
    solved[:] = False
    if len(place) < len(scale):
        matrix, linear, scale, floor = (part[..., place] for part in (matrix, linear, scale, floor))
    for _ in range(GUESSES):
        if len(place) == 0:
            break
        table = table[..., : len(place)]
        table[:, :count], table[:, count], table[:, count + 1] = matrix, linear, 1.0
        if support is not None:
            table *= support[:, None]
            table[:, :count] *= support
            _diagonal(table)[...] += (1 - support) * scale
        least, (value, edge) = _eliminate(table, work[..., : len(place)])
        rate = _sum(edge)
        level = (_sum(value) - 1) / rate
        weight = value - level * edge
        gain = linear - level - np.einsum("ijb,jb->ib", matrix, weight)
        if support is None:
            support = np.ones_like(weight)
        better = np.where(support > 0, weight, gain)
        regular = least > _LEAST_PIVOT * scale
        done = regular & (_max(np.where(support > 0, -weight * scale, gain)) <= floor)
        rows = place[done]
        weights[:, rows], gains[:, rows], levels[rows] = weight[:, done], gain[:, done], level[done]
        solved[rows] = True
        left = (regular & ~done).nonzero()[0]
        if len(left) == 1 < table.shape[2]:
            left = left.repeat(2)  # NumPy adds the numbers of a single row in another order
        kept = (place, matrix, linear, scale, floor, better)
        place, matrix, linear, scale, floor, better = (part[..., left] for part in kept)
        support = (better > 0).astype(float)
    np.maximum(weights, 0.0, out=weights)
    weights /= _sum(weights)
    return weights, gains, levels


def _eliminate(table: Array, work: Array) -> tuple[Array, Array]:
    """Solve systems (K,K+2,n) of K equations with two right sides, in place.

    Return the least pivots (n,) and the solutions (2,K,n)."""
    count = len(table)
    for k in range(count - 1):
        row, rest = table[k, k + 1 :], table[k + 1 :, k + 1 :]
        product = work[k + 1 :, k + 1 :]
        np.multiply(table[k + 1 :, k, None], np.divide(row, table[k, k], out=row), out=product)
        rest -= product
    found = table[:, count:]
    found[-1] /= table[-1, count - 1]
    for k in range(count - 1, 0, -1):
        found[:k] -= table[:k, k, None] * found[k]
    return np.minimum.reduce(_diagonal(table)), found.swapaxes(0, 1)
