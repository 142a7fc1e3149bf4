"""Eq. (2) for one row in a Triton kernel: whether potentials exist, and for which curvature.

This does what `otad.cip.local.potentials` and `otad.cip.local.relax` do, for the first `count`
neighbors of a row. The products are K x K `tiles` of float64 in registers, padded to a power of
two: slope_ij = <c_j, a_i>, mixed = slope + slope^T, images <c_i, c_j>, offsets <a_i, a_j>. `sizes`
are the largest |a_i| and |c_i|. An entry of a tile has no address, so most are read by masking all
others and adding up."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

_MOST_NEWTON_STEPS = constexpr(100)
_MOST_CLIMB = constexpr(1048576.0)  # as in `otad.cip.local.relax`


@triton.jit
def row_of(tile, k, padded: constexpr):
    i = tl.arange(0, padded)
    return tl.sum(tl.where(i[:, None] == k, tile, 0.0), axis=0)


@triton.jit
def column_of(tile, k, padded: constexpr):
    """Return a column (padded,1), which threads hand to each other faster than they add it up."""
    return tl.gather(tile, tl.full((padded, 1), k, tl.int32), 1)


@triton.jit
def diagonal_of(tile, padded: constexpr):
    i = tl.arange(0, padded)
    return tl.sum(tl.where(i[:, None] == i[None, :], tile, 0.0), axis=0)


@triton.jit
def entry_of(vector, k, padded: constexpr):
    return tl.sum(tl.where(tl.arange(0, padded) == k, vector, 0.0), axis=0)


@triton.jit
def first_at(vector, value, padded: constexpr):
    """Return the first place where the vector has this value."""
    i = tl.arange(0, padded)
    return tl.min(tl.where(vector == value, i, padded), axis=0)


@triton.jit
def with_cross(tile, k, vector, padded: constexpr):
    """Return the tile with a vector as row k and as column k."""
    i = tl.arange(0, padded)
    tile = tl.where(i[:, None] == k, vector[None, :], tile)
    return tl.where(i[None, :] == k, vector[:, None], tile)


@triton.jit
def largest(tile):
    return tl.max(tl.max(tile, axis=1), axis=0)


@triton.jit
def pairs_of(count: constexpr, padded: constexpr):
    """Return where both neighbors are among the first `count`."""
    i = tl.arange(0, padded)
    return (i[:, None] < count) & (i[None, :] < count)


@triton.jit
def is_closed(weights, count: constexpr, padded: constexpr):
    """Return True only if no path is longer than the edge between its ends, by O(K^2) bounds.

    Potentials make the weights more alike. Then the longest edge into i plus the longest edge out
    of j bounds all paths of two edges; if none of them is longer, no path is."""
    i = tl.arange(0, padded)
    pairs = pairs_of(count, padded)
    known = tl.where(pairs, weights, 0.0)
    level = (tl.sum(known, axis=1) - tl.sum(known, axis=0)) / (2 * count)
    known = known - level[:, None] + level[None, :]
    edge = tl.where(pairs & (i[:, None] != i[None, :]), known, -float("inf"))
    path = tl.max(edge, axis=1)[:, None] + tl.max(edge, axis=0)[None, :]
    return largest(tl.where(pairs, path - known, -float("inf"))) <= 0


@triton.jit
def closure(weights, count: constexpr, padded: constexpr):
    """Return the longest paths D_ij from j to i, by the Floyd-Warshall algorithm."""
    longest = weights
    for k in range(count):
        path = column_of(longest, k, padded) + row_of(longest, k, padded)[None, :]
        longest = tl.maximum(longest, path)
    return longest


@triton.jit
def closure_with_slope(weights, bend, count: constexpr, padded: constexpr):
    """Return value and slope of the longest closed walk through each neighbor."""
    i = tl.arange(0, padded)
    longest = weights
    slope = tl.where(i[:, None] == i[None, :], 0.0, bend)
    for k in range(count):
        path = column_of(longest, k, padded) + row_of(longest, k, padded)[None, :]
        rate = column_of(slope, k, padded) + row_of(slope, k, padded)[None, :]
        longer = path > longest
        longest = tl.where(longer, path, longest)
        slope = tl.where(longer, rate, slope)
    return diagonal_of(longest, padded), diagonal_of(slope, padded)


@triton.jit
def shifted(tiles, low, shifts: constexpr):
    """Return slope and images after the shift z~_i = z_i - l a_i, which makes l = 0."""
    slope, mixed, images, offsets = tiles
    if shifts:
        images = images - low * mixed + low * low * offsets
        slope = slope - low * offsets
    return slope, images


@triton.jit
def constraints(tiles, sizes, low, noise, shifts: constexpr, padded: constexpr):
    """Return rise and bend of u_i - u_j >= rise_ij + bend_ij / M, and their rounding errors."""
    slope, images = shifted(tiles, low, shifts)
    a_max, c_max = sizes
    rise = slope - diagonal_of(slope, padded)[None, :]
    square = diagonal_of(images, padded)
    bend = tl.maximum((square[:, None] + square[None, :]) / 2 - images, 0.0)
    size = c_max + tl.abs(low) * a_max
    return rise, bend, 2 * noise * size * a_max, 2 * noise * size * size


@triton.jit
def weights_at(bounds, flatness, exact: constexpr, count: constexpr, padded: constexpr):
    """Return the weights of the digraph, with an allowance for rounding unless `exact`.

    They are 0 on the diagonal and -inf for neighbors that are not used."""
    i = tl.arange(0, padded)
    rise, bend, rise_error, bend_error = bounds
    error = rise_error * 0 if exact else rise_error + bend_error * tl.abs(flatness)
    weights = rise + bend * flatness - error
    weights = tl.where(pairs_of(count, padded), weights, -float("inf"))
    return tl.where(i[:, None] == i[None, :], 0.0, weights)


@triton.jit
def worst_cycle(longest, padded: constexpr):
    return tl.max(diagonal_of(longest, padded), axis=0)


@triton.jit
def longest_paths(bounds, flatness, count: constexpr, padded: constexpr):
    """Return the closure and its worst cycle, with allowance for rounding if it is positive."""
    longest = closure(weights_at(bounds, flatness, True, count, padded), count, padded)
    cycle = worst_cycle(longest, padded)
    if cycle > 0:
        longest = closure(weights_at(bounds, flatness, False, count, padded), count, padded)
        cycle = worst_cycle(longest, padded)
    return longest, cycle


@triton.jit
def relaxed(
    tiles, sizes, high, low, steps,
    climbs: constexpr, shifts: constexpr, count: constexpr, padded: constexpr,
):  # fmt: skip
    """Return the longest paths with allowance for rounding, L, l, and whether they were relaxed.

    L is infinite if no curvature works."""
    noise = tl.load(steps)
    bounds = constraints(tiles, sizes, low, noise, shifts, padded)
    longest, cycle = longest_paths(bounds, 1 / (high - low), count, padded)
    raised = cycle > 0
    if raised:
        if climbs:
            high, low = climbed(tiles, sizes, high, low, steps, shifts, count, padded)
            bounds = constraints(tiles, sizes, low, noise, shifts, padded)
        else:
            flatness = greatest_flatness(bounds, count, padded)
            exists = flatness > 0
            least = tl.where(exists, 1 / tl.where(exists, flatness, 1.0), float("inf"))
            # Slightly above the least, so that rounding does not leave a cycle positive.
            high = tl.maximum(low + least * (1 + 16 * noise), high)
        longest, cycle = longest_paths(bounds, 1 / (high - low), count, padded)
    return longest, high, low, raised


@triton.jit
def climbed(tiles, sizes, high, low, steps, shifts: constexpr, count: constexpr, padded: constexpr):
    """Return (L + t up, l - t down) for the first step t with potentials.

    L is infinite if there is none. `steps` are the noise, the steps up and down, and the largest
    L."""
    noise, up = tl.load(steps), tl.load(steps + 1)
    down, cap = tl.load(steps + 2), tl.load(steps + 3)
    room = tl.where(up > 0, (cap - high) / tl.where(up > 0, up, 1.0), _MOST_CLIMB)
    last = tl.minimum(tl.floor(room + 1e-9), _MOST_CLIMB)
    below = last * 0
    above = tl.minimum(last, 1.0)
    probe = above
    works = last < 0
    going = last >= 0
    while going:  # doubling until a step works, then bisection
        least = low - probe * down
        flatness = 1 / (tl.minimum(high + probe * up, cap) - least)
        bounds = constraints(tiles, sizes, least, noise, shifts, padded)
        _, cycle = longest_paths(bounds, flatness, count, padded)
        fine = cycle <= 0
        stuck = (above >= last) & (fine == 0)
        grown = tl.minimum(2 * above, last)
        below = tl.where(fine, below, probe)
        above = tl.where(fine, probe, tl.where(works, above, grown))
        works = works | fine
        going = (works & (above - below > 1)) | ((works == 0) & (stuck == 0))
        probe = tl.where(works, tl.floor((below + above) / 2), above)
    raised = tl.where(works, tl.minimum(high + above * up, cap), float("inf"))
    return raised, low - above * down


@triton.jit
def greatest_flatness(bounds, count: constexpr, padded: constexpr):
    """Return the largest 1/M without a positive cycle, by Newton's method from above."""
    rise, bend, _, bend_error = bounds
    # Cycles of two neighbors give the first bound.
    rise2, bend2 = rise + tl.trans(rise), bend + tl.trans(bend)
    bounding = pairs_of(count, padded) & (bend2 > 2 * bend_error)
    ratio = tl.where(bounding, rise2 / tl.where(bounding, bend2, 1.0), -float("inf"))
    flatness = -largest(ratio)
    steps = 0
    going = tl.abs(flatness) < float("inf")
    while going:
        weights = weights_at(bounds, flatness, False, count, padded)
        gain, rate = closure_with_slope(weights, bend, count, padded)
        positive = (gain > 0) & (rate > 0)
        bound = tl.where(positive, flatness - gain / tl.where(positive, rate, 1.0), float("inf"))
        bound = tl.min(bound, axis=0)
        steps += 1
        going = (bound < flatness) & (steps < _MOST_NEWTON_STEPS)
        flatness = tl.minimum(flatness, bound)
    return flatness
