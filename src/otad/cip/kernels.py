"""The Triton kernels of `otad.cip.fused`, apart because importing them needs Triton."""

# Kernels are compiled from their source, not called: their arguments carry no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gram_kernel(
    query,
    inputs,
    features,
    indices,
    products,
    squares,
    dim,
    count,
    padded: tl.constexpr,
    bends: tl.constexpr,
    width: tl.constexpr,
):
    """One program per query: all inner products of its stack, in one pass over its neighbors."""
    batch = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, padded)
    real = k < count
    rows = tl.load(indices + batch * count + k, mask=real, other=0)
    nearest = tl.load(indices + batch * count)
    cross = tl.zeros((padded, padded), dtype=tl.float32)
    image = tl.zeros((padded, padded), dtype=tl.float32)
    offset = tl.zeros((padded, padded), dtype=tl.float32)
    square = tl.zeros((padded,), dtype=tl.float32)
    for start in range(0, dim, width):
        j = start + tl.arange(0, width)
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
        if bends:
            offset += tl.dot(a, tl.trans(a), input_precision="tf32x3")
        square += tl.sum(a * a, axis=1)

    lines = 2 * count if bends else count
    lower = products + (batch * lines + lines - count) * 2 * count
    place = k[:, None] * 2 * count + k[None, :]
    mask = real[:, None] & real[None, :]
    tl.store(lower + place, cross, mask=mask)
    tl.store(lower + count + place, image, mask=mask)
    if bends:
        upper = products + batch * lines * 2 * count
        tl.store(upper + place, offset, mask=mask)
        tl.store(upper + count + place, tl.trans(cross), mask=mask)
    tl.store(squares + batch * count + k, square, mask=real)


@triton.jit
def combine_kernel(points, indices, weights, total, dim, count, width: tl.constexpr):
    """One program per query and stretch of `width` features; zero weights cost no reading."""
    batch = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * width + tl.arange(0, width)
    inside = j < dim
    answer = tl.zeros((width,), dtype=tl.float32)
    for k in range(count):
        weight = tl.load(weights + batch * count + k)
        if weight != 0:
            row = tl.load(indices + batch * count + k)
            answer += weight * tl.load(points + row * dim + j, mask=inside, other=0.0).to(
                tl.float32
            )
    tl.store(total + batch * dim + j, answer, mask=inside)
