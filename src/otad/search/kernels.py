"""The Triton kernel of `otad.search.grouped_product`."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def confirm_kernel(
    values, places, chosen, queries, lengths, exclude, points, order, numbers,
    indices, distances, beyond, dim, count, groups,
    k: constexpr, size: constexpr, width: constexpr, halvings: constexpr, at_once: constexpr,
):  # fmt: skip
    """Sort the candidates of a query by their distance, with one program per query."""
    query = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, size)
    found = query * size + lanes
    place = tl.load(places + found)
    row = place // size * groups + tl.load(chosen + query * size + place % size)
    ceiling = tl.min(tl.load(values + found).to(tl.float64), axis=0)

    column = tl.load(order + tl.arange(0, width))
    real = column >= 0
    x = tl.load(queries + query * dim + column, mask=real, other=0.0).to(tl.float64)
    square = tl.zeros((size,), dtype=tl.float64)
    for start in range(0, size, at_once):
        some = start + tl.arange(0, at_once)
        at = tl.load(places + query * size + some)
        near = at // size * groups + tl.load(chosen + query * size + at % size)
        mask = (near < count)[:, None] & real[None, :]
        y = tl.load(points + near[:, None] * dim + column[None, :], mask=mask, other=0.0)
        gap = tl.where(mask, y.to(tl.float64) - x[None, :], 0.0)
        total = gap * gap
        for level in tl.static_range(halvings):
            total = tl.sum(tl.reshape(total, (at_once, 2, width >> (level + 1))), axis=1)
        total = tl.reshape(total, (at_once, 1))
        square += tl.sum(tl.where(some[:, None] == lanes[None, :], total, 0.0), axis=0)

    left_out = (row >= count) | (row == tl.load(exclude + query))
    length = tl.where(left_out, float("inf"), tl.sqrt(square))
    before = length[None, :] < length[:, None]
    before |= (length[None, :] == length[:, None]) & (row[None, :] < row[:, None])
    rank = tl.sum(before.to(tl.int32), axis=1)
    tl.store(indices + query * k + rank, row, mask=rank < k)
    tl.store(distances + query * k + rank, length, mask=rank < k)

    norm = tl.load(lengths + query)
    error = tl.load(numbers) * norm + tl.load(numbers + 1) + tl.load(numbers + 2) * norm * norm
    least = tl.maximum(norm * norm - ceiling - error, 0.0) * tl.load(numbers + 3)
    farther = tl.sqrt(least) * tl.load(numbers + 4)
    # Nothing is proved about a query that is not finite.
    tl.store(beyond + query, tl.where(norm < float("inf"), farther, float("nan")))
