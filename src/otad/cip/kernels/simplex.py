"""Concave quadratic maximization over the simplex for one row in a Triton kernel.

    maximize  c . w - w^T G w / 2     over  w >= 0, sum w = 1

by the pivoting of `otad.cip.local.pivoting`: one symmetric pivot of a tableau a round, each a
rank-one change of a tile. It ends whatever the data are, and leaves the inverse of the support
behind.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from otad.cip.kernels.relax import diagonal_of, entry_of, first_at, row_of, with_cross

_MOST_ROUNDS = tl.constexpr(100)  # a row beyond this is left to the general path
_REFINEMENTS = tl.constexpr(3)  # beyond the first


@triton.jit
def maximize_on_simplex(gram, linear, tolerance, count: tl.constexpr, padded: tl.constexpr):
    """Weights, d weights / d linear (a tile), and whether the optimum was reached."""
    active = tl.arange(0, padded) < count
    scale = tl.max(diagonal_of(gram, padded), axis=0)
    scale = tl.where(scale > 0, scale, 1.0)
    quadratic = gram / scale
    linear = linear / scale
    # Only differences of the linear term matter; centered, they keep their digits.
    linear = linear - tl.sum(tl.where(active, linear, 0.0), axis=0) / count
    weights, inverse, solved = pivot_to_optimum(quadratic, linear, tolerance, count, padded)
    weights = refined(quadratic, linear, weights, inverse)
    finite = tl.max(tl.where(tl.abs(weights) < float("inf"), 0, 1), axis=0) == 0
    return weights, inverse / scale, solved & finite


@triton.jit
def pivot_to_optimum(quadratic, linear, tolerance, count: tl.constexpr, padded: tl.constexpr):
    """Weights, the inverse N on their basis, and whether the rounds were enough.

    `target` is the affine optimum in the basis and the gain of entering outside it; `barrier` is
    -inf for those that may not enter; `entering` is the one that enters in the next round, or -1.
    """
    i = tl.arange(0, padded)
    active = i < count
    # The basis of the single best neighbor.
    worth = tl.where(active, linear - diagonal_of(quadratic, padded) / 2, -float("inf"))
    start = first_at(worth, tl.max(worth, axis=0), padded)
    basis = tl.where(i == start, 1.0, linear * 0)
    row = row_of(quadratic, start, padded)
    corner = entry_of(row, start, padded)
    gain = linear - row - entry_of(linear, start, padded) + corner
    tableau = quadratic - row[:, None] - row[None, :] + corner
    tableau = with_cross(tableau, start, 1 - basis, padded)
    target = gain * (1 - basis) + basis
    weights = basis
    barrier = tl.where(active & (i != start), 0.0, -float("inf"))
    floor = tolerance * (1 + tl.max(tl.where(active, tl.abs(gain), 0.0), axis=0))
    entering = start * 0 - 1
    done = start < 0
    # A loop of fixed length: compilers have failed on `while` over tiles and vectors together.
    for _ in range(_MOST_ROUNDS):
        if done == 0:
            due = entering >= 0
            point = target * basis
            # Weights that would turn negative: go towards the target until the first reaches zero.
            fall = tl.minimum(point + tolerance, 0.0)
            ratio = (weights + tolerance) / (weights + tolerance - fall)
            step = tl.min(ratio, axis=0)
            leaving = first_at(ratio, step, padded)
            blocked = (step < 1) & (due == 0)
            # Otherwise the target is the new point, and the largest gain may enter.
            reward = target + barrier
            most = tl.max(reward, axis=0)
            best = first_at(reward, most, padded)
            free = (blocked == 0) & (due == 0)
            done = free & (most <= floor)
            # No curvature along the entering direction: move until a weight vanishes, exchange.
            column = row_of(tableau, best, padded)
            flat = free & (done == 0) & (entry_of(column, best, padded) <= tolerance)

            fraction = tl.where(due, 0.0, tl.where(blocked, step, 1.0))
            weights = tl.maximum(weights + fraction * (point - weights), 0.0)
            moved, ended = moved_along(column, weights, basis, best, tolerance, padded)
            weights = tl.where(flat, moved, weights)
            pivot = tl.where(due, entering, tl.where(blocked, leaving, best))
            pivot = tl.where(flat, ended, pivot)
            entering = tl.where(flat, best, -1)
            tableau, target, basis, barrier = pivoted(
                tableau, target, basis, barrier, pivot, blocked | flat, done, padded
            )
    return weights, -tableau * basis[:, None] * basis[None, :], done


@triton.jit
def moved_along(column, weights, basis, best, tolerance, padded: tl.constexpr):
    """The weights as far as `best` can enter, and the neighbor whose weight becomes zero."""
    closed = (column > tolerance) & (basis > 0)
    reach = tl.where(closed, weights / tl.where(closed, column, 1.0), float("inf"))
    length = tl.min(reach, axis=0)
    moved = tl.maximum(weights - length * column * basis, 0.0)
    moved = tl.where(tl.arange(0, padded) == best, length, moved)
    return moved, first_at(reach, length, padded)


@triton.jit
def pivoted(tableau, target, basis, barrier, pivot, outward, done, padded: tl.constexpr):
    """Symmetric pivot: a neighbor leaves (outward) or joins the basis, unless done."""
    pivot = tl.where(done, -1, pivot)
    chosen = tl.arange(0, padded) == pivot
    column = row_of(tableau, pivot, padded)
    aim = entry_of(target, pivot, padded)
    change = 1 / tl.where(done, 1.0, entry_of(column, pivot, padded))
    factor = tl.where(outward, -change, change)
    target = tl.where(chosen, aim * factor, target - column * change * aim)
    tableau = tableau - (column * change)[:, None] * column[None, :]
    cross = tl.where(chosen, -change, column * factor)
    tableau = with_cross(tableau, pivot, cross, padded)
    basis = tl.where(chosen, tl.where(outward, 0.0, 1.0), basis)
    barrier = tl.where(chosen, tl.where(outward, 0.0, -float("inf")), barrier)
    return tableau, target, basis, barrier


@triton.jit
def refined(quadratic, linear, weights, inverse):
    """Iterative refinement removes the rounding errors of the pivots."""
    better = refined_once(quadratic, linear, weights, inverse)
    left = 0
    while (tl.max(tl.abs(better - weights), axis=0) > 1e-12) & (left < _REFINEMENTS):
        weights = better
        better = refined_once(quadratic, linear, weights, inverse)
        left += 1
    return better


@triton.jit
def refined_once(quadratic, linear, weights, inverse):
    """One step, back on the simplex."""
    gap = linear - tl.sum(quadratic * weights[None, :], axis=1)
    gap = gap - tl.sum(weights * gap, axis=0)  # the inverse ignores constants; keep them out
    better = tl.maximum(weights + tl.sum(inverse * gap[None, :], axis=1), 0.0)
    return better / tl.sum(better, axis=0)
