"""A Triton kernel that computes multipliers from inner products, with one program per row.

A program finds potentials, relaxes the curvature if it must, and computes multipliers, value and
residual, as `otad.cip.local.solve_torch` and `otad.cip.local.simplex_qp` do for a batch. A row that
needs more (a neighbor to leave out, numbers out of range, too many pivots) is left to them."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

from otad.cip.kernels import relax
from otad.cip.kernels.relax import diagonal_of, entry_of, first_at, row_of, with_cross
from otad.cip.solution import Status

_INFEASIBLE = constexpr(int(Status.INFEASIBLE))
_FAILED = constexpr(-1)
_TINY = constexpr(2.2250738585072014e-308)
_MOST_ROUNDS = constexpr(100)  # a row that needs more is left to `solve_torch`
_REFINEMENTS = constexpr(3)  # after the first


@triton.jit(do_not_specialize=["batch", "segments", "sensitive"])
def row_kernel(
    products, squares, smoothness, convexity, steps, multipliers, potentials, value_at, numbers,
    status, takes_part, outcome, sensitivity, batch, segments, sensitive,
    total: constexpr, count: constexpr, padded: constexpr, shifts: constexpr, climbs: constexpr,
    consistent: constexpr, rule: constexpr, stage: constexpr,
):  # fmt: skip
    """Solve one row per program. A row has `total` neighbors, of which the first `count` are used.

    `steps` are the noise, the steps up and down of the climb, and the largest L. The results are
    `multipliers` and `potentials` (B,K); `value_at` (B,); `numbers` (4,B), which are L, l, the l of
    the map and the residual; `status` (B,); `takes_part` (B,K); `outcome` (B,), see `solve_triton`;
    and unless `sensitive` is 0, `sensitivity` (B,K,K). The stage is "potentials", "multipliers" or
    "both"."""
    row = tl.program_id(0).to(tl.int64)
    where = products, row, batch, segments
    if stage != "multipliers":
        find_potentials(
            where, squares, smoothness, convexity, steps, potentials, numbers, status, takes_part,
            outcome, total, count, padded, shifts, climbs, consistent, rule,
        )  # fmt: skip
    if stage == "both":
        tl.debug_barrier()  # what other threads stored is read below
    if stage != "potentials":  # noqa: SIM102 (known when it is compiled)
        if tl.load(outcome + row) > 0:
            find_multipliers(
                where, squares, smoothness, steps, multipliers, potentials, value_at, numbers,
                outcome, sensitivity, sensitive, total, count, padded, shifts, consistent,
            )  # fmt: skip


@triton.jit
def find_potentials(
    where, squares, smoothness, convexity, steps, potentials, numbers, status, takes_part, outcome,
    total: constexpr, count: constexpr, padded: constexpr, shifts: constexpr, climbs: constexpr,
    consistent: constexpr, rule: constexpr,
):  # fmt: skip
    """Find potentials of a row, for the requested curvature or the nearest that works."""
    _, row, batch, _ = where
    i = tl.arange(0, padded)
    active, real = i < count, i < total
    noise, cap = tl.load(steps), tl.load(steps + 3)
    requested_high, requested_low = tl.load(smoothness + row), tl.load(convexity + row)
    tilt, square, _, image, center = read_vectors(where, squares, total, padded, shifts)
    sizes = sizes_of(square, image, count, padded)
    tiles = read_tiles(where, total, padded, shifts)
    size = tl.sum(tl.sum(tl.abs(tiles[0]) + tl.abs(tiles[2]), axis=1), axis=0) + tl.abs(center)
    finite = size + tl.sum(tl.abs(tilt) + square, axis=0) < float("inf")

    high, low = requested_high, requested_low
    bounds = relax.constraints(tiles, sizes, low, noise, shifts, padded)
    weights = relax.weights_at(bounds, 1 / (high - low), True, count, padded)
    longest = tl.where(finite, weights, 0.0)
    if relax.is_closed(longest, count, padded) == 0:
        longest = relax.closure(longest, count, padded)
    raised = relax.worst_cycle(longest, padded) > 0
    if raised:
        same = read_tiles(where, total, padded, shifts)
        longest, high, low, raised = relax.relaxed(
            same, sizes, high, low, steps, climbs, shifts, count, padded
        )
    exists = high < float("inf")
    within = finite & exists & (high <= cap)
    fails = finite & (exists == 0) & (cap == float("inf"))
    chosen, level_gap = levels_of(longest, rule, count, padded)
    level = chosen + low / 2 * square + tilt
    level = level - tl.sum(tl.where(active, level, 0.0), axis=0) / count

    level = tl.where(active, level, float("nan"))
    tl.store(potentials + row * total + i, level, mask=real)
    tl.store(takes_part + row * total + i, active.to(tl.int8), mask=real)
    tl.store(numbers + row, high)
    tl.store(numbers + batch + row, low)
    tl.store(numbers + 2 * batch + row, low if consistent else requested_low)
    tl.store(numbers + 3 * batch + row, level_gap)
    tl.store(status + row, tl.where(fails, _INFEASIBLE, raised.to(tl.int64)))
    tl.store(outcome + row, tl.where(fails, _FAILED, within.to(tl.int32)))


@triton.jit
def find_multipliers(
    where, squares, smoothness, steps, multipliers, potentials, value_at, numbers, outcome,
    sensitivity, sensitive, total: constexpr, count: constexpr, padded: constexpr,
    shifts: constexpr, consistent: constexpr,
):  # fmt: skip
    """Find the multipliers of a row with potentials, for the curvature of the map."""
    _, row, batch, _ = where
    i = tl.arange(0, padded)
    active, real = i < count, i < total
    noise = tl.load(steps)
    high = tl.load(numbers + row) if consistent else tl.load(smoothness + row)
    low, level_gap = tl.load(numbers + 2 * batch + row), tl.load(numbers + 3 * batch + row)
    modulus = high - low
    tilt, square, slope, image, center = read_vectors(where, squares, total, padded, shifts)
    a_max, c_max = sizes_of(square, image, count, padded)
    if shifts:
        image = image - 2 * low * slope + low * low * square
        slope = slope - low * square
    level = tl.load(potentials + row * total + i, mask=active, other=0.0)
    line = level - (low / 2 * square + tilt) - slope + image / (2 * modulus)
    largest = tl.max(image, axis=0)
    scale = 1 / tl.where(largest > 0, largest, 1.0)
    # Only differences of the linear term matter; centered, they keep their digits.
    linear = scale * modulus * line
    linear = linear - tl.sum(tl.where(active, linear, 0.0), axis=0) / count
    images = read_images(where, low, total, padded, shifts)
    weights, inverse, solved = pivot_to_optimum(images * scale, linear, noise, count, padded)
    images = read_images(where, low, total, padded, shifts)
    weights = refined(images * scale, linear, weights, inverse)
    images = read_images(where, low, total, padded, shifts)
    pull = tl.sum(images * weights[:, None], axis=0)
    bound = line + (tl.sum(weights * pull, axis=0) / 2 - pull) / modulus  # q_i(z')
    value = tl.sum(weights * tl.where(active, bound, 0.0), axis=0)
    gap = tl.where(active, bound - value, 0.0)

    # The residual, as `otad.cip.judge.relative` defines it.
    map_size = tl.sqrt(center) + c_max + tl.abs(low) * a_max
    value_size = map_size * a_max + map_size * map_size / (2 * modulus)
    value_gap = tl.maximum(tl.max(gap, axis=0), level_gap)
    value_gap = tl.maximum(value_gap, tl.sum(tl.abs(weights * gap), axis=0))
    off_simplex = tl.abs(tl.sum(weights, axis=0) - 1)
    tiny = tl.full((), _TINY, tl.float64)
    residual = tl.maximum(value_gap / tl.maximum(value_size, tiny), off_simplex)
    solved = solved & (tl.sum(tl.abs(weights), axis=0) < float("inf")) & (residual < float("inf"))

    tl.store(multipliers + row * total + i, weights, mask=real)
    tl.store(value_at + row, value)
    tl.store(numbers + 3 * batch + row, tl.maximum(residual, 0.0))
    tl.store(outcome + row, solved.to(tl.int32))
    if sensitive != 0:  # not known when it is compiled, which takes seconds
        place = sensitivity + row * total * total + i[:, None] * total + i[None, :]
        tl.store(place, inverse * (scale * modulus), mask=real[:, None] & real[None, :])


@triton.jit
def read_vectors(where, squares, total: constexpr, padded: constexpr, shifts: constexpr):
    """Return <z_1, a_i>, |a_i|^2, <c_i, a_i>, |c_i|^2 and |z_1|^2, summed over segments."""
    products, row, batch, segments = where
    i = tl.arange(0, padded)
    real = i < total
    empty = tl.zeros((padded,), tl.float64)
    tilt, square, slope, image = empty, empty, empty, empty
    center = tl.full((), 0.0, tl.float64)
    lines = 2 * total if shifts else total
    for segment in range(segments):
        part = segment * batch + row
        lower = products + (part * lines + lines - total) * 2 * total
        own = lower + i * (2 * total + 1)
        tilt += tl.load(lower + i, mask=real, other=0.0).to(tl.float64)
        square += tl.load(squares + part * total + i, mask=real, other=0.0).to(tl.float64)
        slope += tl.load(own, mask=real & (i > 0), other=0.0).to(tl.float64)
        image += tl.load(own + total, mask=real & (i > 0), other=0.0).to(tl.float64)
        center += tl.load(lower + total).to(tl.float64)
    return tilt, square, slope, image, center


@triton.jit
def sizes_of(square, image, count: constexpr, padded: constexpr):
    """Return the largest |a_i| and |c_i|."""
    active = tl.arange(0, padded) < count
    a_max = tl.sqrt(tl.max(tl.where(active, square, 0.0), axis=0))
    return a_max, tl.sqrt(tl.max(tl.where(active, image, 0.0), axis=0))


@triton.jit
def read_tiles(where, total: constexpr, padded: constexpr, shifts: constexpr):
    """Return the tiles of a row, as `otad.cip.kernels.relax` names them."""
    i = tl.arange(0, padded)
    down, across = i[:, None], i[None, :]
    slope = read_tile(where, across, down, "c", "a", total, padded, shifts)
    images = read_tile(where, down, across, "c", "c", total, padded, shifts)
    mixed, offsets = slope, images  # used only with shifts
    if shifts:
        mixed = slope + read_tile(where, down, across, "c", "a", total, padded, shifts)
        offsets = read_tile(where, down, across, "a", "a", total, padded, shifts)
    return slope, mixed, images, offsets


@triton.jit
def read_images(where, low, total: constexpr, padded: constexpr, shifts: constexpr):
    """Return the tile of images after the shift of `relax.shifted`."""
    i = tl.arange(0, padded)
    if shifts:
        _, images = relax.shifted(read_tiles(where, total, padded, shifts), low, shifts)
    else:
        images = read_tile(where, i[:, None], i[None, :], "c", "c", total, padded, shifts)
    return images


@triton.jit
def read_tile(
    where, left, right, lefts: constexpr, rights: constexpr,
    total: constexpr, padded: constexpr, shifts: constexpr,
):  # fmt: skip
    """Return the products of neighbors `left` with neighbors `right`, summed over segments.

    They are products of a_i or c_i, as `lefts` and `rights` say. Registers would not hold tiles
    from one step to the next, so every step reads them again. A volatile load keeps the compiler
    from sharing what was read before."""
    products, row, batch, segments = where
    lines = 2 * total if shifts else total
    first = products + left * 2 * total + right
    mask = (left < total) & (right < total)
    # z_1 is in the place of c_1, which is 0.
    if lefts == "c":
        first += (lines - total) * 2 * total
        mask = mask & (left > 0)
    if rights == "c":
        first += total
        mask = mask & (right > 0)
    tile = tl.zeros((padded, padded), tl.float64)
    for segment in range(segments):
        place = first + (segment * batch + row) * lines * 2 * total
        tile += tl.load(place, mask=mask, other=0.0, volatile=True).to(tl.float64)
    return tile


@triton.jit
def levels_of(longest, rule: constexpr, count: constexpr, padded: constexpr):
    """Return potentials of mean zero from the longest paths, and how far they violate eq. (2)."""
    active = tl.arange(0, padded) < count
    paths = tl.where(relax.pairs_of(count, padded), longest, 0.0)
    lowest = tl.sum(paths, axis=1) / count
    highest = -tl.sum(paths, axis=0) / count
    middle = (lowest + highest) / 2
    chosen = lowest if rule == "lowest" else (highest if rule == "highest" else middle)
    chosen = tl.where(active, chosen - tl.sum(chosen, axis=0) / count, 0.0)
    return chosen, relax.largest(longest + chosen[None, :] - chosen[:, None])


@triton.jit
def pivot_to_optimum(quadratic, linear, tolerance, count: constexpr, padded: constexpr):
    """Return weights, the inverse N on their basis, and whether the rounds were enough.

    `target` is the affine optimum in the basis and the gain of entering outside it. `barrier` is
    -inf for neighbors that may not enter. `entering` is the neighbor that enters in the next round,
    or -1. `curvature` is the diagonal of the tableau.
    """
    i = tl.arange(0, padded)
    active = i < count
    # The basis of the single best neighbor.
    own = diagonal_of(quadratic, padded)
    worth = tl.where(active, linear - own / 2, -float("inf"))
    start = first_at(worth, tl.max(worth, axis=0), padded)
    basis = tl.where(i == start, 1.0, linear * 0)
    row = row_of(quadratic, start, padded)
    corner = entry_of(row, start, padded)
    gain = linear - row - entry_of(linear, start, padded) + corner
    tableau = quadratic - row[:, None] - row[None, :] + corner
    tableau = with_cross(tableau, start, 1 - basis, padded)
    curvature = (own - row - row + corner) * (1 - basis)
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
            # If weights would turn negative, go towards the target until one reaches zero.
            fall = tl.minimum(point + tolerance, 0.0)
            ratio = (weights + tolerance) / (weights + tolerance - fall)
            step, leaving = tl.min(ratio, axis=0, return_indices=True)
            blocked = (step < 1) & (due == 0)
            # Otherwise the target is the new point, and the largest gain may enter.
            most, best = tl.max(target + barrier, axis=0, return_indices=True)
            free = (blocked == 0) & (due == 0)
            done = free & (most <= floor)
            fraction = tl.where(due, 0.0, tl.where(blocked, step, 1.0))
            weights = tl.maximum(weights + fraction * (point - weights), 0.0)
            pivot = tl.where(due, entering, tl.where(blocked, leaving, best))
            entering = start * 0 - 1
            # Without curvature along the entering direction, move until a weight vanishes.
            flat = free & (done == 0) & (entry_of(curvature, best, padded) <= tolerance)
            if flat:
                column = row_of(tableau, best, padded)
                weights, pivot = moved_along(column, weights, basis, best, tolerance, padded)
                entering = best
            tableau, curvature, target, basis, barrier = pivoted(
                tableau, curvature, target, basis, barrier, pivot, blocked | flat, done, padded
            )
    return weights, -tableau * basis[:, None] * basis[None, :], done


@triton.jit
def moved_along(column, weights, basis, best, tolerance, padded: constexpr):
    """Return weights after `best` entered as far as it can, and the neighbor that reached zero."""
    closed = (column > tolerance) & (basis > 0)
    reach = tl.where(closed, weights / tl.where(closed, column, 1.0), float("inf"))
    length, ended = tl.min(reach, axis=0, return_indices=True)
    moved = tl.maximum(weights - length * column * basis, 0.0)
    return tl.where(tl.arange(0, padded) == best, length, moved), ended


@triton.jit
def pivoted(tableau, curvature, target, basis, barrier, pivot, outward, done, padded: constexpr):
    """Do a symmetric pivot: a neighbor leaves (outward) or joins the basis, unless done."""
    pivot = tl.where(done, -1, pivot)
    chosen = tl.arange(0, padded) == pivot
    column = row_of(tableau, pivot, padded)
    aim = entry_of(target, pivot, padded)
    change = 1 / tl.where(done, 1.0, entry_of(column, pivot, padded))
    scaled = column * change
    target = tl.where(chosen, tl.where(outward, -aim, aim) * change, target - scaled * aim)
    curvature = tl.where(chosen, -change, curvature - scaled * column)
    # With this factor in place of the pivot, one product also gives its new row and column.
    factors = tl.where(chosen, tl.where(outward, 1.0, -1.0), column)
    tableau = tl.where(chosen[:, None] | chosen[None, :], 0.0, tableau)
    tableau = tableau - (factors * change)[:, None] * factors[None, :]
    basis = tl.where(chosen, tl.where(outward, 0.0, 1.0), basis)
    barrier = tl.where(chosen, tl.where(outward, 0.0, -float("inf")), barrier)
    return tableau, curvature, target, basis, barrier


@triton.jit
def refined(quadratic, linear, weights, inverse):
    """Remove the rounding errors of the pivots by iterative refinement."""
    better = refined_once(quadratic, linear, weights, inverse)
    left = 0
    while (tl.max(tl.abs(better - weights), axis=0) > 1e-12) & (left < _REFINEMENTS):
        weights = better
        better = refined_once(quadratic, linear, weights, inverse)
        left += 1
    return better


@triton.jit
def refined_once(quadratic, linear, weights, inverse):
    gap = linear - tl.sum(quadratic * weights[:, None], axis=0)
    gap = gap - tl.sum(weights * gap, axis=0)  # the inverse ignores constants; they cause rounding
    better = tl.maximum(weights + tl.sum(inverse * gap[:, None], axis=0), 0.0)
    return better / tl.sum(better, axis=0)
