"""The Triton kernels of `otad.cip.local.stream_triton`."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton does not compile starred tuples)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def columns_of(block, vector: constexpr):
    """Return the 2 or 4 columns of a block as a tuple, in a fixed order."""
    if vector == 2:
        return tl.split(block)
    else:
        even, odd = tl.split(tl.reshape(block, (block.shape[0], 2, 2)))
        return tl.split(even) + tl.split(odd)


@triton.jit
def with_pairs(sums, stack, count: constexpr, shifts: constexpr):
    """Return sums to which the products of all pairs of a stack are added.

    It is a function, and its tuples are made line by line, because compiling takes longest here."""
    found = ()
    for i in tl.static_range(2 * count):
        line = ()
        for k in tl.static_range(i + 1):
            total = sums[i * (i + 1) // 2 + k]
            # Nobody needs <c_i, z_1>.
            if i == k or ((shifts or i >= count) and k != count):
                total += stack[i] * stack[k]
            line = line + (total,)
        found = found + line
    return found


@triton.jit(do_not_specialize=["batches", "size"])
def pairs_kernel(
    query, inputs, features, indices, products, squares, batches, size, dim, length,
    count: constexpr, shifts: constexpr, vector: constexpr, stages: constexpr,
):  # fmt: skip
    """Compute all inner products of the stack, for few neighbors: one warp per query and segment.

    A segment has `length` features. Each thread adds up every product for its own features, in
    registers and without matrix units, so that nothing is padded and rows are read once. If an
    index is not below `size`, the squares are NaN."""
    lanes: constexpr = 32
    batch = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * length
    lane = tl.arange(0, lanes)[:, None] * vector + tl.arange(0, vector)[None, :]
    anchors, images, sums = (), (), ()
    for k in tl.static_range(count):
        row = tl.load(indices + batch * count + k)
        row = tl.minimum(tl.maximum(row, 0), size - 1) * dim
        anchors, images = anchors + (inputs + row,), images + (features + row,)
    for i in tl.static_range(2 * count):
        line = ()
        for _ in tl.static_range(i + 1):
            line = line + (tl.zeros((lanes,), dtype=tl.float32),)
        sums = sums + line
    for start in tl.range(0, length, lanes * vector, num_stages=stages):
        j = first + start + lane
        inside = j < dim
        x = columns_of(tl.load(query + batch * dim + j, mask=inside, other=0.0), vector)
        a, z = (), ()
        for k in tl.static_range(count):
            point = tl.load(anchors[k] + j, mask=inside, other=0.0)
            image = tl.load(images[k] + j, mask=inside, other=0.0)
            a, z = a + (columns_of(point, vector),), z + (columns_of(image, vector),)
        for v in tl.static_range(vector):
            center = z[0][v].to(tl.float32)
            offsets, centered = (), (center,)
            for k in tl.static_range(count):
                offsets = offsets + (a[k][v].to(tl.float32) - x[v],)
                if k > 0:
                    centered = centered + (z[k][v].to(tl.float32) - center,)
            sums = with_pairs(sums, offsets + centered, count, shifts)

    # Here instead of above, where every register is needed. So the load must not be shared either.
    place = tl.arange(0, lanes)
    rows = tl.load(indices + batch * count + place, mask=place < count, other=0, volatile=True)
    wrong = tl.max(tl.where(rows == tl.minimum(tl.maximum(rows, 0), size - 1), 0, 1), axis=0)
    part = tl.program_id(1) * batches + batch
    top: constexpr = 0 if shifts else count
    values = products + part * (2 * count - top) * 2 * count - top * 2 * count
    for i in tl.static_range(2 * count):
        for k in tl.static_range(i + 1):
            if shifts or i >= count or i == k:
                total = tl.sum(sums[i * (i + 1) // 2 + k], axis=0)
                if i >= top:
                    tl.store(values + i * 2 * count + k, total)
                if k >= top:
                    tl.store(values + k * 2 * count + i, total)
                if i < count and i == k:
                    total = tl.where(wrong > 0, float("nan"), total)
                    tl.store(squares + part * count + i, total)


@triton.jit
def nearest_in_tf32(tile):
    """Return float32 numbers rounded to the 10 bits of TF32."""
    return ((tile.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def dots(left, right, start):
    return tl.dot(left, tl.trans(right), start, input_precision="tf32")


@triton.jit(do_not_specialize=["batches", "size"])
def gram_kernel(
    query, inputs, features, indices, products, squares, batches, size, dim, length,
    count: constexpr, padded: constexpr, shifts: constexpr, width: constexpr, stages: constexpr,
):  # fmt: skip
    """Compute all inner products of the stack on matrix units, one program per query and segment.

    A segment has `length` features, and a program makes one pass over the neighbors. If an index
    is not below `size`, the squares are NaN.

    Each number is the sum of two in TF32, h + l. Of the products of two such sums, l l is too small
    to matter. So a symmetric matrix of products is the mean of the sum of h (h + 2 l)^T and its
    transpose."""
    batch = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * length
    k = tl.arange(0, padded)
    real = k < count
    # Beyond the last neighbor come copies of the first, whose products are not stored.
    given = tl.load(indices + batch * count + tl.where(real, k, 0))
    rows = tl.minimum(tl.maximum(given, 0), size - 1)
    wrong = tl.max(tl.where(rows == given, 0, 1), axis=0)
    rows *= dim
    nearest = tl.sum(tl.where(k == 0, rows, 0), axis=0)
    cross = tl.zeros((padded, padded), dtype=tl.float32)
    image = tl.zeros((padded, padded), dtype=tl.float32)
    offset = tl.zeros((padded, padded), dtype=tl.float32)
    zero = tl.zeros((padded, padded), dtype=tl.float32)
    square = tl.zeros((padded, width), dtype=tl.float32)
    for start in tl.range(0, length, width, num_stages=stages):
        j = first + start + tl.arange(0, width)
        inside = j < dim  # what is outside is 0 in all rows, and so in all differences
        place = rows[:, None] + j[None, :]
        x = tl.load(query + batch * dim + j, mask=inside, other=0.0)
        center = tl.load(features + nearest + j, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(inputs + place, mask=inside[None, :], other=0.0).to(tl.float32) - x[None, :]
        z = tl.load(features + place, mask=inside[None, :], other=0.0).to(tl.float32)
        c = tl.where(k[:, None] == 0, z, z - center[None, :])
        a_high, c_high = nearest_in_tf32(a), nearest_in_tf32(c)
        a_low, c_low = a - a_high, c - c_high
        # Matrix units lose digits when they add to a large sum, so every block begins at 0.
        cross += dots(c_high, a_high, dots(c_high, a_low, dots(c_low, a_high, zero)))
        image += dots(c_high, c_high, dots(c_high, 2 * c_low, zero))
        if shifts:
            offset += dots(a_high, a_high, dots(a_high, 2 * a_low, zero))
        square += a * a

    lines: constexpr = 2 * count if shifts else count
    part = tl.program_id(1) * batches + batch
    upper = products + part * lines * 2 * count
    lower = upper + (lines - count) * 2 * count
    place = k[:, None] * 2 * count + k[None, :]
    mask = real[:, None] & real[None, :]
    tl.store(lower + place, cross, mask=mask)
    tl.store(lower + count + place, (image + tl.trans(image)) / 2, mask=mask)
    if shifts:
        tl.store(upper + place, (offset + tl.trans(offset)) / 2, mask=mask)
        tl.store(upper + count + place, tl.trans(cross), mask=mask)
    total = tl.where(wrong > 0, float("nan"), tl.sum(square, axis=1))
    tl.store(squares + part * count + k, total, mask=real)


@triton.jit(do_not_specialize=["size"])
def combine_kernel(
    points, indices, weights, total, size, dim, count: constexpr, width: constexpr
):  # fmt: skip
    """Compute weighted sums of points, with one program per query and `width` features.

    Points of weight zero are not read. No load waits for another one."""
    batch = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * width + tl.arange(0, width)
    answer = tl.zeros((width,), dtype=tl.float32)
    for k in tl.static_range(count):
        weight = tl.load(weights + batch * count + k)
        row = tl.load(indices + batch * count + k)
        row = tl.minimum(tl.maximum(row, 0), size - 1)
        limit = tl.where(weight != 0, dim, 0)
        point = tl.load(points + row * dim + j, mask=j < limit, other=0.0)
        answer += weight * point.to(tl.float32)
    tl.store(total + batch * dim + j, answer, mask=j < dim)


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
