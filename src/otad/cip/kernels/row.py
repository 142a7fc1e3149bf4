"""One row, from inner products to multipliers, in one Triton kernel.

A program holds its row's K x K products in registers and finds potentials, relaxing the curvature
where it must, then the multipliers, the value and the residual: see
`otad.cip.local.solve_torch`, which does the same for a batch, step by step. A row that needs more
(a neighbor to leave out, numbers out of range, too many pivots) is left to it.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from otad.cip.kernels.relax import (
    climbed,
    constraints,
    diagonal_of,
    greatest_flatness,
    largest,
    longest_paths,
    pairs_of,
    shifted,
)
from otad.cip.kernels.simplex import maximize_on_simplex
from otad.cip.solution import Status

_INFEASIBLE = tl.constexpr(int(Status.INFEASIBLE))
_FAILED = tl.constexpr(-1)
_TINY = tl.constexpr(2.2250738585072014e-308)


@triton.jit
def loaded(
    products,
    squares,
    row,
    batch,
    segments: tl.constexpr,
    count: tl.constexpr,
    padded: tl.constexpr,
    shifts: tl.constexpr,
):
    """The row's tiles slope, mixed, images and offsets, and its vectors tilt, |a_i|^2, |z_1|^2."""
    i = tl.arange(0, padded)
    lines = 2 * count if shifts else count
    real = i < count
    both = pairs_of(count, padded)
    centered = both & (i[:, None] > 0) & (i[None, :] > 0)  # z_1 has the place of c_1 = 0
    slope = tl.zeros((padded, padded), dtype=tl.float64)
    mixed = tl.zeros((padded, padded), dtype=tl.float64)
    images = tl.zeros((padded, padded), dtype=tl.float64)
    offsets = tl.zeros((padded, padded), dtype=tl.float64)
    tilt = tl.zeros((padded,), dtype=tl.float64)
    square = tl.zeros((padded,), dtype=tl.float64)
    center = tl.full((), 0.0, tl.float64)
    for segment in range(segments):
        part = segment * batch + row
        upper = products + part * lines * 2 * count
        lower = upper + (lines - count) * 2 * count
        straight = i[:, None] * 2 * count + i[None, :]
        turned = i[None, :] * 2 * count + i[:, None]
        cross = tl.load(lower + turned, mask=both & (i[None, :] > 0), other=0.0).to(tl.float64)
        slope += cross
        images += tl.load(lower + count + straight, mask=centered, other=0.0).to(tl.float64)
        if shifts:
            other = tl.load(lower + straight, mask=both & (i[:, None] > 0), other=0.0)
            mixed += cross + other.to(tl.float64)
            offsets += tl.load(upper + straight, mask=both, other=0.0).to(tl.float64)
        tilt += tl.load(lower + i, mask=real, other=0.0).to(tl.float64)
        square += tl.load(squares + part * count + i, mask=real, other=0.0).to(tl.float64)
        center += tl.load(lower + count).to(tl.float64)
    return slope, mixed, images, offsets, tilt, square, center


@triton.jit
def levels_of(longest, rule: tl.constexpr, count: tl.constexpr, padded: tl.constexpr):
    """Potentials of mean zero from the longest paths, and how far they violate eq. (2)."""
    active = tl.arange(0, padded) < count
    paths = tl.where(pairs_of(count, padded), longest, 0.0)
    lowest = tl.sum(paths, axis=1) / count
    highest = -tl.sum(paths, axis=0) / count
    if rule == "lowest":
        chosen = lowest
    elif rule == "highest":
        chosen = highest
    else:
        chosen = (lowest + highest) / 2
    chosen = tl.where(active, chosen - tl.sum(chosen, axis=0) / count, 0.0)
    return chosen, largest(longest + chosen[None, :] - chosen[:, None])


@triton.jit(do_not_specialize=["batch"])
def row_kernel(
    products,
    squares,
    smoothness,
    convexity,
    steps,
    shares,
    value_at,
    numbers,
    status,
    takes_part,
    outcome,
    sensitivity,
    batch,
    segments: tl.constexpr,
    total: tl.constexpr,
    count: tl.constexpr,
    padded: tl.constexpr,
    shifts: tl.constexpr,
    climbs: tl.constexpr,
    consistent: tl.constexpr,
    sensitive: tl.constexpr,
    rule: tl.constexpr,
):
    """One program per row, of `total` neighbors of which the first `count` take part.

    `steps`: noise, the steps up and down of the climb, the cap. Written are `shares` (2,B,K):
    multipliers and levels; `value_at` (B,); `numbers` (4,B): L, l and the map's l, the residual;
    `status` (B,); `takes_part` (B,K); `outcome` (B,): 1 for a solved row, 0 for one that is left to
    `solve_torch`, -1 for one without a solution; `sensitivity` (B,K,K).
    """
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    active = i < count
    noise = tl.load(steps)
    cap = tl.load(steps + 3)
    requested_high, requested_low = tl.load(smoothness + row), tl.load(convexity + row)
    slope, mixed, images, offsets, tilt, square, center = loaded(
        products, squares, row, batch, segments, total, padded, shifts
    )
    size = tl.sum(tl.sum(tl.abs(slope) + tl.abs(images), axis=1), axis=0) + tl.abs(center)
    finite = size + tl.sum(tl.abs(tilt) + square, axis=0) < float("inf")
    # Products overflowed: park the row on harmless numbers.
    slope, mixed = tl.where(finite, slope, 0.0), tl.where(finite, mixed, 0.0)
    images, offsets = tl.where(finite, images, 0.0), tl.where(finite, offsets, 0.0)
    tilt, square = tl.where(finite, tilt, 0.0), tl.where(finite, square, 0.0)
    # The largest |a_i| and |c_i|.
    a_max = tl.sqrt(tl.max(tl.where(active, square, 0.0), axis=0))
    own = diagonal_of(images, padded)
    c_max = tl.sqrt(tl.max(tl.where(active, own, 0.0), axis=0))

    # Potentials, for the requested curvature or the nearest that works.
    high, low = requested_high, requested_low
    rise, bend, rise_error, bend_error = constraints(
        slope, mixed, images, offsets, low, a_max, c_max, noise, shifts, padded
    )
    longest, cycle = longest_paths(
        rise, bend, rise_error, bend_error, 1 / (high - low), count, padded
    )
    raised = cycle > 0
    if raised:
        if climbs:
            high, low = climbed(
                slope, mixed, images, offsets, a_max, c_max, high, low, steps, shifts, count, padded
            )
            rise, bend, rise_error, bend_error = constraints(
                slope, mixed, images, offsets, low, a_max, c_max, noise, shifts, padded
            )
        else:
            flatness = greatest_flatness(rise, bend, rise_error, bend_error, count, padded)
            exists = flatness > 0
            least = tl.where(exists, 1 / tl.where(exists, flatness, 1.0), float("inf"))
            # Slightly above the least, so that rounding does not leave a cycle positive.
            high = tl.maximum(low + least * (1 + 16 * noise), high)
        longest, _ = longest_paths(
            rise, bend, rise_error, bend_error, 1 / (high - low), count, padded
        )
    exists = high < float("inf")
    found = finite & exists & (high <= cap)
    fails = finite & (exists == 0) & (cap == float("inf"))
    high = tl.where(exists, high, requested_high)  # meaningless, but no NaN
    chosen, level_gap = levels_of(longest, rule, count, padded)
    level = chosen + low / 2 * square + tilt
    level = level - tl.sum(tl.where(active, level, 0.0), axis=0) / count

    # Multipliers, for the curvature of the map.
    if consistent:
        map_high, map_low = high, low
    else:
        map_high, map_low = requested_high, requested_low
    modulus = map_high - map_low
    slope, images = shifted(slope, mixed, images, offsets, map_low, shifts)
    line = level - (map_low / 2 * square + tilt)
    line = line - diagonal_of(slope, padded) + diagonal_of(images, padded) / (2 * modulus)
    weights, inverse, solved = maximize_on_simplex(images, modulus * line, noise, count, padded)
    pull = tl.sum(images * weights[None, :], axis=1)
    bound = line + (tl.sum(weights * pull, axis=0) / 2 - pull) / modulus  # q_i(z')
    value = tl.sum(weights * tl.where(active, bound, 0.0), axis=0)
    gap = tl.where(active, bound - value, 0.0)

    # The residual, as `otad.cip.judge.relative` defines it.
    map_size = tl.sqrt(center) + c_max + tl.abs(map_low) * a_max
    value_size = map_size * a_max + map_size * map_size / (2 * modulus)
    value_gap = tl.maximum(tl.max(gap, axis=0), level_gap)
    value_gap = tl.maximum(value_gap, tl.sum(tl.abs(weights * gap), axis=0))
    off_simplex = tl.abs(tl.sum(weights, axis=0) - 1)
    tiny = tl.full((), _TINY, tl.float64)
    residual = tl.maximum(value_gap / tl.maximum(value_size, tiny), off_simplex)

    real = i < total
    tl.store(shares + row * total + i, weights, mask=real)
    level = tl.where(active, level, float("nan"))
    tl.store(shares + (batch + row) * total + i, level, mask=real)
    tl.store(takes_part + row * total + i, active.to(tl.int8), mask=real)
    tl.store(value_at + row, value)
    tl.store(numbers + row, high)
    tl.store(numbers + batch + row, low)
    tl.store(numbers + 2 * batch + row, map_low)
    tl.store(numbers + 3 * batch + row, tl.maximum(residual, 0.0))
    tl.store(status + row, tl.where(fails, _INFEASIBLE, raised.to(tl.int64)))
    answered = found & solved & (residual < float("inf"))
    tl.store(outcome + row, tl.where(fails, _FAILED, answered.to(tl.int32)))
    if sensitive:
        place = sensitivity + row * total * total + i[:, None] * total + i[None, :]
        tl.store(place, inverse * modulus, mask=real[:, None] & real[None, :])
