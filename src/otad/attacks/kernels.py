"""The Triton kernel of `otad.attacks.projection`."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def project_kernel(
    moved, x, numbers, nearest, dim,
    norm: constexpr, bounded: constexpr, fillings: constexpr, halvings: constexpr,
    width: constexpr,
):  # fmt: skip
    """Compute the nearest points of balls, with one program per row, as `LpBall.project` does.

    Where not even x itself is in its ball, because it is outside the bounds, they are NaN."""
    row = tl.program_id(0).to(tl.int64) * dim
    column = tl.arange(0, width)
    real = column < dim
    center = tl.load(x + row + column, mask=real, other=0.0)
    step = tl.load(moved + row + column, mask=real, other=0.0) - center
    eps = tl.load(numbers)
    low = tl.load(numbers + 1).to(tl.float32)
    high = tl.load(numbers + 2).to(tl.float32)
    radius = eps.to(tl.float32)
    if norm == "linf":
        step = tl.minimum(tl.maximum(step, -radius), radius)
    else:
        relative = step / radius
        squares = relative * relative
        share = 1 / tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), 1.0)
        if bounded:
            room = tl.maximum(tl.where(step < 0, center - low, high - center), 0.0)
            part = tl.minimum(room / radius, 1.0)
            size = tl.abs(step)
            for _ in tl.static_range(fillings):
                at_bound = size * share >= room
                left = 1 - tl.sum(tl.where(at_bound & real, part * part, 0.0), axis=0)
                free = tl.sum(tl.where(at_bound, 0.0, squares), axis=0)
                filled = tl.sqrt(tl.maximum(left, 0.0) / tl.maximum(free, 1e-30))
                share = tl.maximum(share, tl.minimum(filled, 1.0))
            size = tl.minimum(size * share, room)
            step = tl.where(step < 0, -size, size)
        else:
            step = step * share
    result, off = reached(center, step, real, low, high, norm, bounded)
    shrink = tl.load(numbers + 3).to(tl.float32)
    most = tl.load(numbers + 4)
    for _ in range(halvings):
        if off > most:
            step = step * (1 - shrink)
            result, off = reached(center, step, real, low, high, norm, bounded)
        shrink = shrink * 2
    result = tl.where(off > most, float("nan"), result)
    tl.store(nearest + row + column, result, mask=real)


@triton.jit
def reached(x, step, real, low, high, norm: constexpr, bounded: constexpr):
    """Return x + step within the bounds, rounded towards x, and its distance from x (squared).

    Only the `real` columns count, because the others may be outside the bounds."""
    moved = x + step
    too_far = (tl.abs(moved - x) > tl.abs(step)) & (moved != 0)
    # The neighbor of a floating-point number towards 0 has the next lower bits.
    bits = moved.to(tl.int32, bitcast=True)
    inward = tl.where((moved > x) == (moved > 0), bits - 1, bits + 1)
    moved = tl.where(too_far, inward.to(tl.float32, bitcast=True), moved)
    if bounded:
        moved = tl.minimum(tl.maximum(moved, low), high)
    gap = tl.where(real, moved.to(tl.float64) - x.to(tl.float64), 0.0)
    return moved, tl.max(tl.abs(gap), axis=0) if norm == "linf" else tl.sum(gap * gap, axis=0)
