"""The solver of one row after the other as compiled code for a CPU, from the inner products.

The steps are those of `otad.cip.local.solve_torch`, which solves the rows that are left over: those
without a potential within the limits, and those whose images are nearly affinely dependent."""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from otad.cip.kernels.cpu_products import called_by_compiled, compiled
from otad.cip.solution import Status

LEFT_OVER, _SOLVED, _RAISED = -1, int(Status.SOLVED), int(Status.RAISED)  # statuses
_INFINITY, _TINY = math.inf, float(np.finfo(float).tiny)
_GUESSES, _REFINEMENTS = 8, 3  # as in `simplex_qp`
_MOST_NEWTON_STEPS = 100


# Memory for one row, which the next row uses again, with names as in `Gram`, `Constraints` and
# `solve_torch`: (K,K) numbers, K numbers, and the places of the support. The `matrix` is the Gram
# matrix plus its largest diagonal entry, and `weight` and `edge` belong to the support.
_SQUARE = "cross images offsets rise bend longest slope gram matrix factor"
_FLAT = "tilt square norm level line linear weights potentials bound onward onward_slope weight"
Work = namedtuple("Work", f"{_SQUARE} {_FLAT} edge gains step before support")


@compiled()
def solve_rows(
    values, squares, smoothness, convexity, limits, rule, consistent, raises,
    multipliers, potentials, value, found, residual, status, sensitivity, start, stop,
):  # fmt: skip
    """Solve the rows `start` to `stop` of all B, and return how many of them are left over.

    `smoothness` and `convexity` (B,) are L and l as requested. `limits` are the noise of products,
    its worst case, and the largest L. The `rule` is 1, 0 or -1 for the lowest, canonical or highest
    potentials. Rows without a potential are left over unless `raises`. The results are the
    `multipliers` and `potentials` (B,K), `value`, the L that was `found`, `residual` and `status`
    (B,) and, unless it is empty, `sensitivity` (B,K,K), which is 0 before."""
    work, left = memory_for(squares.shape[1]), 0
    for b in range(start, stop):
        center = read_products(values[b], squares[b], work)
        given = center, smoothness[b], convexity[b], limits, rule, consistent, raises
        status[b], found[b], value[b], residual[b], size = solve_row(given, work)
        for k in range(squares.shape[1]):
            multipliers[b, k], potentials[b, k] = work.weights[k], work.potentials[k]
        left += status[b] == LEFT_OVER
        if status[b] != LEFT_OVER and len(sensitivity):
            invert(work, size, sensitivity[b])
    return left


@called_by_compiled()
def memory_for(count):
    m, v, support = np.empty((10, count, count)), np.empty((16, count)), np.empty(count, np.int64)
    return Work(
        m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8], m[9],
        v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13],
        v[14], v[15], support,
    )  # fmt: skip


@called_by_compiled()
def read_products(values, squares, work):
    """Read the parts of `Gram`, as `Products.gram` does, and return |z_1|^2."""
    count = len(squares)
    first = len(values) - count
    for i in range(count):
        work.square[i], work.tilt[i] = squares[i], values[first, i]
        for j in range(count):
            work.cross[i, j] = values[first + i, j] if i > 0 else 0.0
            work.images[i, j] = values[first + i, count + j] if i > 0 and j > 0 else 0.0
            work.offsets[i, j] = values[i, j] if first > 0 else 0.0
    return np.float64(values[first, count])  # so that one `solve_row` is for all dtypes


@called_by_compiled()
def solve_row(given, work):
    """Solve a row from its inner products. Multipliers and potentials stay in the working memory.

    Return its status, L, value, residual and the number of neighbors with weight."""
    center, high, low, limits, rule, consistent, raises = given
    noise, worst, cap = limits
    cross, images, offsets, gram = work.cross, work.images, work.offsets, work.gram
    rise, bend, longest, weights = work.rise, work.bend, work.longest, work.weights
    tilt, square, norm, level = work.tilt, work.square, work.norm, work.level
    line, potentials, bound, count = work.line, work.potentials, work.bound, len(work.tilt)
    left = LEFT_OVER, high, math.nan, math.nan, 0
    size, reach, spread = abs(center), 0.0, 0.0
    for i in range(count):
        size += abs(tilt[i]) + square[i]
        reach, spread = max(reach, square[i]), max(spread, images[i, i])
        for j in range(count):
            size += abs(cross[i, j]) + abs(images[i, j])
    if not size < _INFINITY:
        return left
    offset_size = math.sqrt(reach)
    image_size = math.sqrt(spread) + abs(low) * offset_size
    if low != 0:
        for i in range(count):
            for j in range(i + 1):
                both = cross[i, j] + cross[j, i]
                images[i, j] += low * (low * offsets[i, j] - both)
                images[j, i] = images[i, j]
        for i in range(count):
            for j in range(count):
                cross[i, j] -= low * offsets[i, j]
    for i in range(count):
        norm[i] = images[i, i]

    # Eq. (2): the potentials.
    for i in range(count):
        for j in range(count):
            rise[i, j] = cross[j, i] - cross[j, j]
            bend[i, j] = max((norm[i] + norm[j]) / 2 - images[i, j], 0.0)
    # Two products make a difference.
    errors = 2 * noise * image_size * offset_size, 2 * noise * image_size * image_size
    modulus, status = high - low, _SOLVED
    if not find_paths(work, 1 / modulus, errors):
        if not raises:
            return left
        if worst > noise:  # rounding may be the reason: products in float64 decide
            share = worst / noise
            if longest_paths(work, 1 / modulus, (share * errors[0], share * errors[1])):
                return left
        flatness = greatest_flatness(work, errors)
        # Slightly above the least L, so that rounding does not leave a cycle positive.
        raised = max(high, low + (1 + 16 * noise) / flatness)
        if not 0 < flatness < _INFINITY or not raised <= cap or raised == _INFINITY:
            return left
        high, status = raised, _RAISED
        find_paths(work, 1 / (high - low), errors)
    for i in range(count):
        lowest = highest = 0.0
        for j in range(count):
            lowest += longest[i, j]
            highest -= longest[j, i]
        level[i] = ((1 + rule) * lowest + (1 - rule) * highest) / (2 * count)
    center_values(level)
    level_gap = 0.0
    for i in range(count):
        for j in range(count):
            level_gap = max(level_gap, longest[i, j] + level[j] - level[i])
        potentials[i] = level[i] + low / 2 * square[i] + tilt[i]
    mean = center_values(potentials)

    # Eq. (3): the multipliers, for the curvature of the map.
    if consistent:
        modulus = high - low
    for i in range(count):
        line[i] = level[i] - mean - cross[i, i] + norm[i] / (2 * modulus)
        for j in range(count):
            gram[i, j] = images[i, j] / modulus
    used = maximize(work, noise)
    if used == 0:
        return left
    half = value = 0.0
    for i in range(count):
        bound[i] = 0.0
        for j in range(count):
            bound[i] += gram[i, j] * weights[j]
        half += weights[i] * bound[i] / 2
    for i in range(count):
        bound[i] = line[i] + half - bound[i]  # q_i(z')
        value += weights[i] * bound[i]
    above = apart = total = 0.0
    for i in range(count):
        above = max(above, bound[i] - value)
        apart += weights[i] * abs(bound[i] - value)
        total += weights[i]
    # The residual, as `otad.cip.judge.relative` defines it.
    size = math.sqrt(center) + image_size
    size *= offset_size + size / (2 * modulus)
    residual = max(max(above, apart, level_gap) / max(size, _TINY), abs(total - 1))
    if not abs(value) + residual < _INFINITY:
        return left
    return status, high, value, residual, used


@called_by_compiled()
def find_paths(work, flatness, errors):
    """Find the longest paths for 1 / M = `flatness`, and return whether no cycle is positive.

    Rounding is allowed for only if a cycle is positive otherwise, so that the map passes through
    the anchors."""
    return longest_paths(work, flatness, (0.0, 0.0)) or longest_paths(work, flatness, errors)


@called_by_compiled()
def longest_paths(work, flatness, errors):
    """Find the longest paths, with weights lowered by the errors of `rise` and `bend`.

    Return whether no cycle is positive."""
    longest, onward, count = work.longest, work.onward, len(work.onward)
    fill_weights(work.rise, work.bend, flatness, errors, longest)
    for k in range(count):
        for j in range(count):
            onward[j] = longest[k, j]
        for i in range(count):
            reach = longest[i, k]
            for j in range(count):
                longest[i, j] = max(longest[i, j], reach + onward[j])
    worst = 0.0
    for k in range(count):
        worst = max(worst, longest[k, k])
    return worst <= 0


@called_by_compiled()
def fill_weights(rise, bend, flatness, errors, weights):
    """Compute the weights of eq. (2), as `Constraints.weights` does."""
    error = errors[0] + errors[1] * abs(flatness)
    for i in range(len(weights)):
        for j in range(len(weights)):
            weights[i, j] = rise[i, j] + bend[i, j] * flatness - error
        weights[i, i] = 0.0


@called_by_compiled()
def greatest_flatness(work, errors):
    """Return the largest 1 / M without a positive cycle, by Newton's method.

    See `otad.cip.local.potentials.greatest_flatness`."""
    rise, bend, longest, slope = work.rise, work.bend, work.longest, work.slope
    onward, onward_slope, count = work.onward, work.onward_slope, len(work.onward)
    flatness = _INFINITY
    for i in range(count):  # cycles of two neighbors
        for j in range(i):
            both = bend[i, j] + bend[j, i]
            if both > 2 * errors[1]:
                flatness = min(flatness, -(rise[i, j] + rise[j, i]) / both)
    for _ in range(_MOST_NEWTON_STEPS):
        if not 0 < flatness < _INFINITY:
            break
        fill_weights(rise, bend, flatness, errors, longest)
        for i in range(count):
            for j in range(count):
                slope[i, j] = bend[i, j] if i != j else 0.0
        for k in range(count):
            for j in range(count):
                onward[j], onward_slope[j] = longest[k, j], slope[k, j]
            for i in range(count):
                reach, reach_slope = longest[i, k], slope[i, k]
                for j in range(count):
                    if reach + onward[j] > longest[i, j]:
                        longest[i, j] = reach + onward[j]
                        slope[i, j] = reach_slope + onward_slope[j]
        bound = _INFINITY
        for k in range(count):
            if longest[k, k] > 0 and slope[k, k] > 0:
                bound = min(bound, flatness - longest[k, k] / slope[k, k])
        if not bound < flatness:
            break
        flatness = bound
    return flatness


@called_by_compiled()
def maximize(work, noise):
    """Maximize line . w - w^T gram w / 2 over the simplex, by the exchange of `simplex_qp`.

    Return the number of neighbors with weight, or 0 if the row is left over."""
    gram, matrix, factor, support = work.gram, work.matrix, work.factor, work.support
    line, linear, weights, weight = work.line, work.linear, work.weights, work.weight
    edge, gains, step, before = work.edge, work.gains, work.step, work.before
    count, scale, largest = len(line), 0.0, 0.0
    for i in range(count):
        linear[i] = line[i]
    center_values(linear)  # so that differences keep their digits
    for i in range(count):
        scale, largest = max(scale, gram[i, i]), max(largest, abs(linear[i]))
        support[i] = i
    if not scale > 0:
        scale = 1.0
    for i in range(count):
        for j in range(count):
            matrix[i, j] = gram[i, j] + scale
    floor, size, rounds = noise * (1 + largest / scale), count, 0
    while True:
        if rounds == _GUESSES or not factorize(matrix, support, size, noise * scale, factor):
            return 0
        rounds += 1
        for i in range(size):
            weight[i], edge[i] = linear[support[i]], 1.0
        solve(factor, size, weight)
        solve(factor, size, edge)
        mass = rate = 0.0
        for i in range(size):
            mass += weight[i]
            rate += edge[i]
        level, least, most = (mass - 1) / rate, 0.0, 0.0
        if not abs(level) < _INFINITY:
            return 0
        for i in range(size):
            weight[i] -= level * edge[i]
            least = min(least, weight[i])
        find_gains(matrix, linear, level, support, size, weight, gains)
        for i in range(count):
            most = max(most, gains[i])
        if least >= -floor and most <= floor * scale:
            break
        for i in range(size):
            gains[support[i]] = weight[i]
        size = 0
        for i in range(count):
            if gains[i] > 0:
                support[size] = i
                size += 1
    for _ in range(1 + _REFINEMENTS):  # the gains on the support are rounding errors
        shift = total = moved = 0.0
        for i in range(size):
            step[i], before[i] = gains[support[i]], weight[i]
        solve(factor, size, step)
        for i in range(size):
            shift += step[i] / rate
        for i in range(size):
            weight[i] = max(weight[i] + step[i] - shift * edge[i], 0.0)
            total += weight[i]
        for i in range(size):
            weight[i] /= total
            moved = max(moved, abs(weight[i] - before[i]))
        if moved <= 1e-12:
            break
        find_gains(matrix, linear, level, support, size, weight, gains)
    for i in range(count):
        weights[i] = 0.0
    for i in range(size):
        weights[support[i]] = weight[i]
    return size


@called_by_compiled()
def center_values(values):
    """Subtract the mean of some values in place, and return it."""
    mean = 0.0
    for i in range(len(values)):
        mean += values[i] / len(values)
    for i in range(len(values)):
        values[i] -= mean
    return mean


@called_by_compiled()
def find_gains(matrix, linear, level, support, size, weight, gains):
    for i in range(len(gains)):
        gains[i] = linear[i] - level
        for j in range(size):
            gains[i] -= matrix[i, support[j]] * weight[j]


@called_by_compiled()
def factorize(matrix, support, size, least, factor):
    """Compute the Cholesky factor of the `matrix` on the `support`.

    Return whether all squared pivots are above the `least`."""
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[support[i], support[j]]
            for k in range(j):
                rest -= factor[i, k] * factor[j, k]
            if i > j:
                factor[i, j] = rest / factor[j, j]
            elif rest > least:
                factor[i, i] = math.sqrt(rest)
            else:
                return False
    return True


@called_by_compiled()
def solve(factor, size, side):
    """Apply the inverse of the factorized matrix to a vector, in place."""
    for i in range(size):
        for k in range(i):
            side[i] -= factor[i, k] * side[k]
        side[i] /= factor[i, i]
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, size):
            side[i] -= factor[k, i] * side[k]
        side[i] /= factor[i, i]


@called_by_compiled()
def invert(work, size, sensitivity):
    """Write H_SS^-1 - r r^T / sum r into zeros, with the edge r = H_SS^-1 1 on the support S.

    H is the `matrix` of the working memory."""
    factor, edge, column, support = work.factor, work.edge, work.step, work.support
    rate = 0.0
    for i in range(size):
        rate += edge[i]
    for j in range(size):
        for i in range(size):
            column[i] = 1.0 if i == j else 0.0
        solve(factor, size, column)
        for i in range(size):
            sensitivity[support[i], support[j]] = column[i] - edge[i] * edge[j] / rate
