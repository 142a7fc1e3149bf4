"""Eq. (2) for one row in a Triton kernel: do potentials exist, and for which curvature.

The same mathematics as `otad.cip.local.potentials` and `otad.cip.local.relax`, for the first
`count` neighbors of a row. The products come as tiles: slope_ij = <c_j, a_i>, mixed = slope +
slope^T, images <c_i, c_j>, offsets <a_i, a_j>.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from otad.cip.kernels.tile import closure, closure_with_slope, diagonal_of, largest, pairs_of

_MOST_NEWTON_STEPS = tl.constexpr(100)


@triton.jit
def shifted(slope, mixed, images, offsets, low, shifts: tl.constexpr):
    """Slope and images after the shift z~_i = z_i - l a_i that makes l = 0."""
    if shifts:
        images = images - low * mixed + low * low * offsets
        slope = slope - low * offsets
    return slope, images


@triton.jit
def constraints(
    slope,
    mixed,
    images,
    offsets,
    low,
    offset_size,
    image_size,
    noise,
    shifts: tl.constexpr,
    padded: tl.constexpr,
):
    """rise, bend of u_i - u_j >= rise_ij + bend_ij / M, and the rounding error of each."""
    slope, images = shifted(slope, mixed, images, offsets, low, shifts)
    rise = slope - diagonal_of(slope, padded)[None, :]
    square = diagonal_of(images, padded)
    bend = tl.maximum((square[:, None] + square[None, :]) / 2 - images, 0.0)
    size = image_size + tl.abs(low) * offset_size
    return rise, bend, 2 * noise * size * offset_size, 2 * noise * size * size


@triton.jit
def weights_at(rise, bend, error, flatness, count: tl.constexpr, padded: tl.constexpr):
    """Weights of the digraph: -inf beyond the neighbors in use, 0 on the diagonal."""
    i = tl.arange(0, padded)
    weights = rise + bend * flatness - error
    weights = tl.where(pairs_of(count, padded), weights, -float("inf"))
    return tl.where(i[:, None] == i[None, :], 0.0, weights)


@triton.jit
def longest_paths(
    rise, bend, rise_error, bend_error, flatness, count: tl.constexpr, padded: tl.constexpr
):
    """The closure and its worst cycle; with an allowance for rounding where it is positive."""
    weights = weights_at(rise, bend, rise_error * 0, flatness, count, padded)
    longest = closure(weights, count, padded)
    cycle = tl.max(diagonal_of(longest, padded), axis=0)
    if cycle > 0:
        error = rise_error + bend_error * tl.abs(flatness)
        longest = closure(weights_at(rise, bend, error, flatness, count, padded), count, padded)
        cycle = tl.max(diagonal_of(longest, padded), axis=0)
    return longest, cycle


@triton.jit
def climbed(
    slope,
    mixed,
    images,
    offsets,
    offset_size,
    image_size,
    noise,
    high,
    low,
    up,
    down,
    cap,
    last,
    shifts: tl.constexpr,
    count: tl.constexpr,
    padded: tl.constexpr,
):
    """The first step t with potentials for (L + t up, l - t down), and whether there is one."""
    below = last * 0
    above = tl.minimum(last, 1.0)
    probe = above
    works = last < 0
    going = last >= 0
    while going:  # doubling until a step works, then halving
        least = low - probe * down
        flatness = 1 / (tl.minimum(high + probe * up, cap) - least)
        rise, bend, rise_error, bend_error = constraints(
            slope,
            mixed,
            images,
            offsets,
            least,
            offset_size,
            image_size,
            noise,
            shifts,
            padded,
        )
        _, cycle = longest_paths(rise, bend, rise_error, bend_error, flatness, count, padded)
        fine = cycle <= 0
        stuck = (above >= last) & (fine == 0)
        grown = tl.minimum(2 * above, last)
        below = tl.where(fine, below, probe)
        above = tl.where(fine, probe, tl.where(works, above, grown))
        works = works | fine
        going = (works & (above - below > 1)) | ((works == 0) & (stuck == 0))
        probe = tl.where(works, tl.floor((below + above) / 2), above)
    return above, works


@triton.jit
def greatest_flatness(
    rise, bend, rise_error, bend_error, count: tl.constexpr, padded: tl.constexpr
):
    """The largest 1/M without a positive cycle, by Newton's method from above."""
    # Cycles of two neighbors give the first bound.
    rise2, bend2 = rise + tl.trans(rise), bend + tl.trans(bend)
    bounding = pairs_of(count, padded) & (bend2 > 2 * bend_error)
    ratio = tl.where(bounding, rise2 / tl.where(bounding, bend2, 1.0), -float("inf"))
    flatness = -largest(ratio)
    steps = 0
    going = tl.abs(flatness) < float("inf")
    while going:
        error = rise_error + bend_error * tl.abs(flatness)
        weights = weights_at(rise, bend, error, flatness, count, padded)
        gain, rate = closure_with_slope(weights, bend, count, padded)
        positive = (gain > 0) & (rate > 0)
        bound = tl.where(positive, flatness - gain / tl.where(positive, rate, 1.0), float("inf"))
        bound = tl.min(bound, axis=0)
        steps += 1
        going = (bound < flatness) & (steps < _MOST_NEWTON_STEPS)
        flatness = tl.minimum(flatness, bound)
    return flatness
