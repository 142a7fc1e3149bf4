"""Products with the neighbors of each query as compiled code for a CPU: one row after the other.

The neighbors of a row fit in the cache of a core, so they are read from memory once."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import njit

_WIDTH = 1024  # columns of the neighbors at a time, which fit in the cache of a core
_SUMS = {"reassoc", "contract", "nsz"}  # lets sums over features be vectorized


def compiled(**options):
    """Compile a function when it is first called, and keep the code for later processes.

    Where no folder can be written, every process compiles it again. Compiled code must not call
    that of another file: Numba would not notice that the other file has changed."""
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

    def decorate(function):
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no folder for the compiled code
            return njit(**options)(function)

    return decorate


def called_by_compiled(**options):
    """The same for a function that Python does not call: a way from there takes long to compile."""
    return compiled(no_cpython_wrapper=True, **options)


@compiled(fastmath=_SUMS)
def sum_of_squares(numbers):
    total = numbers.dtype.type(0)
    for t in range(len(numbers)):
        total += numbers[t] * numbers[t]
    return total


@compiled(fastmath=_SUMS)
def multiply_rows(query, inputs, features, indices, values, squares, begin):
    """Compute `values` and `squares` of `otad.cip.local.products.Products`, without segments.

    The neighbors of the b rows from `begin` on are the rows `indices` (b,K) of a bank. Sums over
    some features at a time are in the dtype of the query, and their sum is in float64."""
    (batch, count), dim = indices.shape, query.shape[1]
    first = values.shape[1] - count
    stack = np.empty((2 * count, min(_WIDTH, dim)), query.dtype)
    cross, images, offsets = np.empty((3, count, count))
    square = np.empty(count)
    for b in range(begin, begin + batch):
        rows = indices[b - begin]
        for i in range(count):
            square[i] = 0.0
            for j in range(count):
                cross[i, j] = images[i, j] = offsets[i, j] = 0.0
        for start in range(0, dim, _WIDTH):
            size = min(_WIDTH, dim - start)
            fill_stack(query[b], inputs, features, rows, start, size, stack)
            for part in range(3 if first > 0 else 2):
                left, right = 0 if part == 2 else count, count if part == 1 else 0
                total = cross if part == 0 else images if part == 1 else offsets
                add_products(stack, left, right, size, total)
            for k in range(count):
                length, offset = stack.dtype.type(0), stack[k]
                for t in range(size):
                    length += offset[t] * offset[t]
                square[k] += length
        for i in range(count):
            squares[b, i] = square[i]
            for j in range(count):
                i1, j1 = max(i, j), min(i, j)  # below the diagonal
                values[b, first + i, j] = cross[i, j]
                values[b, first + i, count + j] = images[i1, j1]
                if first > 0:
                    values[b, i, j] = offsets[i1, j1]
                    values[b, i, count + j] = cross[j, i]


@called_by_compiled()
def fill_stack(query, inputs, features, rows, start, size, stack):
    """Compute some columns of a_1..a_K, z_1, c_2..c_K."""
    count, here = len(rows), query[start : start + size]
    first = features[rows[0], start : start + size]
    for k in range(count):
        point = inputs[rows[k], start : start + size]
        feature = features[rows[k], start : start + size]
        offset, spread = stack[k], stack[count + k]
        for t in range(size):
            offset[t] = point[t] - here[t]
        if k == 0:
            for t in range(size):
                spread[t] = first[t]
        else:
            for t in range(size):
                spread[t] = feature[t] - first[t]


@called_by_compiled(fastmath=_SUMS)
def add_products(stack, left, right, size, total):
    """Add the inner products of the K rows of the stack from `left` on with those from `right` on
    to `total` (K,K). Of a symmetric matrix those below the diagonal are enough.

    Two rows and four rows at a time stay in registers. Behind the last row, it is used again."""
    count, zero = len(total), stack.dtype.type(0)
    for i in range(0, count, 2):
        i1 = min(i + 1, count - 1)
        a, b = stack[left + i], stack[left + i1]
        for j in range(0, i1 + 1 if left == right else count, 4):
            j1, j2, j3 = min(j + 1, count - 1), min(j + 2, count - 1), min(j + 3, count - 1)
            p, q, r, s = stack[right + j], stack[right + j1], stack[right + j2], stack[right + j3]
            ap, aq, ar, az, bp, bq, br, bz = zero, zero, zero, zero, zero, zero, zero, zero
            for t in range(size):
                x, y = a[t], b[t]
                ap += x * p[t]
                aq += x * q[t]
                ar += x * r[t]
                az += x * s[t]
                bp += y * p[t]
                bq += y * q[t]
                br += y * r[t]
                bz += y * s[t]
            one = total[i, j] + ap, total[i, j1] + aq, total[i, j2] + ar, total[i, j3] + az
            two = total[i1, j] + bp, total[i1, j1] + bq, total[i1, j2] + br, total[i1, j3] + bz
            total[i, j], total[i, j1], total[i, j2], total[i, j3] = one
            total[i1, j], total[i1, j1], total[i1, j2], total[i1, j3] = two


@compiled(fastmath=_SUMS)
def combine_rows(points, indices, weights, total, begin):
    """Compute sum_k weights[b,k] points[indices[b-begin,k]] (B,d) for the b from `begin` on."""
    for b in range(begin, begin + len(indices)):
        row, rows = total[b], indices[b - begin]
        for t in range(len(row)):
            row[t] = 0
        for k in range(len(rows)):
            weight, point = weights[b, k], points[rows[k]]
            if weight != 0:
                for t in range(len(row)):
                    row[t] += weight * point[t]


@compiled(fastmath=_SUMS)
def dot_rows(points, indices, vectors, dots, begin):
    """Compute <points[indices[b-begin,k]], vectors[b]> (B,K) for the b from `begin` on, summed as
    in `multiply_rows`."""
    dim = vectors.shape[1]
    for b in range(begin, begin + len(indices)):
        rows = indices[b - begin]
        for k in range(len(rows)):
            dots[b, k] = 0.0
            for start in range(0, dim, _WIDTH):
                size = min(_WIDTH, dim - start)
                point = points[rows[k], start : start + size]
                vector = vectors[b, start : start + size]
                total = vectors.dtype.type(0)
                for t in range(size):
                    total += point[t] * vector[t]
                dots[b, k] += total
