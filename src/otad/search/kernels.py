"""The Triton kernels of `otad.search.grouped_product`."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["count", "groups"])
def square_kernel(
    places, chosen, queries, points, order, squares, dim, count, groups,
    size: constexpr, width: constexpr, halvings: constexpr, at_once: constexpr,
):  # fmt: skip
    """Compute squared distances, with one program per query and `at_once` of its candidates."""
    query = tl.program_id(0).to(tl.int64)
    some = query * size + tl.program_id(1) * at_once + tl.arange(0, at_once)
    place = tl.load(places + some)
    row = place // size * groups + tl.load(chosen + query * size + place % size)
    column = tl.load(order + tl.arange(0, width))
    real = column >= 0
    x = tl.load(queries + query * dim + column, mask=real, other=0.0).to(tl.float64)
    mask = (row < count)[:, None] & real[None, :]
    y = tl.load(points + row[:, None] * dim + column[None, :], mask=mask, other=0.0)
    gap = tl.where(mask, y.to(tl.float64) - x[None, :], 0.0)
    total = gap * gap
    for level in tl.static_range(halvings):
        total = tl.sum(tl.reshape(total, (at_once, 2, width >> (level + 1))), axis=1)
    tl.store(squares + some, tl.reshape(total, (at_once,)))


@triton.jit(do_not_specialize=["count", "groups"])
def rank_kernel(
    values, places, chosen, squares, lengths, exclude, numbers,
    indices, distances, beyond, count, groups, k: constexpr, size: constexpr,
):  # fmt: skip
    """Sort the candidates of a query by distance and then index, with one program per query."""
    query = tl.program_id(0).to(tl.int64)
    found = query * size + tl.arange(0, size)
    place = tl.load(places + found)
    row = place // size * groups + tl.load(chosen + query * size + place % size)
    left_out = (row >= count) | (row == tl.load(exclude + query))
    length = tl.sqrt(tl.load(squares + found))
    length = tl.where(left_out | (length != length), float("inf"), length)  # NaN has no rank
    before = length[None, :] < length[:, None]
    before |= (length[None, :] == length[:, None]) & (row[None, :] < row[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1)
    # A graph gathers rows before anyone reads that they are not proved, so they have to exist.
    tl.store(indices + query * k + rank, tl.minimum(row, count - 1), mask=rank < k)
    tl.store(distances + query * k + rank, length, mask=rank < k)

    ceiling = tl.min(tl.load(values + found).to(tl.float64), axis=0)
    norm = tl.load(lengths + query)
    error = tl.load(numbers) * norm + tl.load(numbers + 1) + tl.load(numbers + 2) * norm * norm
    least = tl.maximum(norm * norm - ceiling - error, 0.0) * tl.load(numbers + 3)
    farther = tl.sqrt(least) * tl.load(numbers + 4)
    # Nothing is proved about a query that is not finite, or whose products overflow.
    finite = (norm < float("inf")) & (ceiling > float("-inf")) & (ceiling < float("inf"))
    tl.store(beyond + query, tl.where(finite, farther, float("nan")))
