"""The Triton kernels of `otad.cip.local.stream_triton`."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["batches"])
def gram_kernel(
    query, inputs, features, indices, products, squares, batches, dim,
    count: constexpr, padded: constexpr, shifts: constexpr, length: constexpr, width: constexpr,
):  # fmt: skip
    """Compute all inner products of the stack, with one program per query and segment.

    A segment has `length` features, and a program makes one pass over the neighbors."""
    batch = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * length
    k = tl.arange(0, padded)
    real = k < count
    rows = tl.load(indices + batch * count + k, mask=real, other=0)
    nearest = tl.load(indices + batch * count)
    cross = tl.zeros((padded, padded), dtype=tl.float32)
    image = tl.zeros((padded, padded), dtype=tl.float32)
    offset = tl.zeros((padded, padded), dtype=tl.float32)
    square = tl.zeros((padded,), dtype=tl.float32)
    for start in range(0, length, width):
        j = first + start + tl.arange(0, width)
        inside = j < dim
        mask = real[:, None] & inside[None, :]
        place = rows[:, None] * dim + j[None, :]
        x = tl.load(query + batch * dim + j, mask=inside, other=0.0)
        a = tl.load(inputs + place, mask=mask, other=0.0).to(tl.float32) - x[None, :]
        a = tl.where(mask, a, 0.0)
        center = tl.load(features + nearest * dim + j, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(features + place, mask=mask, other=0.0).to(tl.float32)
        c = tl.where(k[:, None] == 0, center[None, :], z - center[None, :])
        c = tl.where(mask, c, 0.0)
        # Three TF32 products make one of nearly float32 precision.
        cross += tl.dot(c, tl.trans(a), input_precision="tf32x3")
        image += tl.dot(c, tl.trans(c), input_precision="tf32x3")
        if shifts:
            offset += tl.dot(a, tl.trans(a), input_precision="tf32x3")
        square += tl.sum(a * a, axis=1)

    lines = 2 * count if shifts else count
    part = tl.program_id(1) * batches + batch
    upper = products + part * lines * 2 * count
    lower = upper + (lines - count) * 2 * count
    place = k[:, None] * 2 * count + k[None, :]
    mask = real[:, None] & real[None, :]
    tl.store(lower + place, cross, mask=mask)
    tl.store(lower + count + place, image, mask=mask)
    if shifts:
        tl.store(upper + place, offset, mask=mask)
        tl.store(upper + count + place, tl.trans(cross), mask=mask)
    tl.store(squares + part * count + k, square, mask=real)


@triton.jit
def combine_kernel(points, indices, weights, total, dim, count: constexpr, width: constexpr):
    """Compute weighted sums of points, with one program per query and `width` features.

    Points of weight zero are not read."""
    batch = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * width + tl.arange(0, width)
    inside = j < dim
    answer = tl.zeros((width,), dtype=tl.float32)
    for k in range(count):
        weight = tl.load(weights + batch * count + k)
        if weight != 0:
            row = tl.load(indices + batch * count + k)
            point = tl.load(points + row * dim + j, mask=inside, other=0.0)
            answer += weight * point.to(tl.float32)
    tl.store(total + batch * dim + j, answer, mask=inside)


@triton.jit(do_not_specialize=["batches"])
def dot_kernel(
    points, indices, vectors, dots, batches, dim,
    count: constexpr, padded: constexpr, length: constexpr, width: constexpr,
):  # fmt: skip
    """Compute products of neighbors with a vector of the query, one program per segment."""
    batch = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * length
    k = tl.arange(0, padded)
    real = k < count
    rows = tl.load(indices + batch * count + k, mask=real, other=0)
    total = tl.zeros((padded,), dtype=tl.float32)
    for start in range(0, length, width):
        j = first + start + tl.arange(0, width)
        inside = j < dim
        mask = real[:, None] & inside[None, :]
        vector = tl.load(vectors + batch * dim + j, mask=inside, other=0.0)
        point = tl.load(points + rows[:, None] * dim + j[None, :], mask=mask, other=0.0)
        total += tl.sum(point.to(tl.float32) * vector[None, :], axis=1)
    part = tl.program_id(1) * batches + batch
    tl.store(dots + part * count + k, total, mask=real)
