"""Reads neighbors from a bank on the GPU without gathering them into memory.

These Triton kernels read each neighbor once for the inner products, and once more for the feature
if its multiplier is not zero. The gradient costs as much again. They apply to a float32 batch whose
bank is on the same CUDA device."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from otad.cip.problem import BankProblem
from otad.cip.protocols import RowProblem
from otad.io.environment import has_triton

MOST_NEIGHBORS = 64  # registers hold a padded K x K block of products
_MOST_SUMS = 165  # that the registers of one thread hold
# The features that one program sums over. More would take less time, but lose accuracy.
_SEGMENT = 4096
_FEW_ROWS = 100  # fewer are cut into more segments, so that they fill the device


def can_stream(problem: RowProblem) -> TypeGuard[BankProblem]:
    return (
        isinstance(problem, BankProblem)
        and problem.query.is_cuda
        and problem.query.dtype == torch.float32
        and problem.inputs.device == problem.query.device
        and problem.inputs.dtype != torch.float64
        and problem.shape[1] <= MOST_NEIGHBORS
        and has_triton()
    )


def streamed_products(problem: BankProblem, *, with_offsets: bool) -> tuple[Tensor, Tensor]:
    """Return `values` and `squares` of `Products`, in S parts of one segment of features each.

    The squares of a row are NaN if one of its indices is outside the bank."""
    from otad.cip.kernels.gram import gram_kernel, pairs_kernel

    batch, count, dim = problem.shape
    height, half = 2 * count if with_offsets else count, problem.inputs.element_size() == 2
    segment = _SEGMENT if batch >= _FEW_ROWS else _SEGMENT // 4
    sums = count * (2 * count + 1) - (0 if with_offsets else count * (count - 1) // 2)
    if sums <= _MOST_SUMS:
        kernel, vector = pairs_kernel, 4
        step, constants = 32 * vector, {"vector": vector, "stages": 2 if half else 3}
        constants["num_warps"] = 1
    else:
        kernel, step, padded = gram_kernel, 32, padded_count(count)
        segment = segment * padded // 32  # so that the products of segments take little memory
        constants = {"padded": padded, "width": step, "stages": 3}
        constants["num_warps"] = 4 if padded == 64 else 2
    length = min(segment, -(-dim // step) * step)
    segments = -(-dim // length)
    query = problem.query.detach().contiguous()
    products = query.new_empty((segments, batch, height, 2 * count))
    squares = query.new_empty((segments, batch, count))
    bank = (part.contiguous() for part in (problem.inputs, problem.features, problem.indices))
    arrays = query, *bank, products, squares
    constants |= {"count": count, "shifts": with_offsets}
    sizes = batch, len(problem.inputs), dim, length
    launch(kernel, (batch, segments), *arrays, *sizes, **constants)
    return products, squares


def streamed_combination(points: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k weights[b,k] points[indices[b,k]] (B,d) in the dtype of the weights.

    An index outside the bank is taken as the nearest one inside, so that nothing else is read."""
    from otad.cip.kernels.gram import combine_kernel

    batch, count = indices.shape
    dim, width = points.shape[1], 512
    total = weights.new_empty((batch, dim))
    arrays = (points.contiguous(), indices.contiguous(), weights.contiguous(), total)
    sizes = {"count": count, "width": width, "num_warps": 2}
    launch(combine_kernel, (batch, -(-dim // width)), *arrays, len(points), dim, **sizes)
    return total


def streamed_dots(points: Tensor, indices: Tensor, vectors: Tensor) -> Tensor:
    """Return <points[indices[b,k]], vectors[b]> (B,K) in float64, for float32 vectors (B,d)."""
    from otad.cip.kernels.gram import dot_kernel

    batch, count = indices.shape
    dim, width = points.shape[1], 128
    segments = -(-dim // _SEGMENT)
    dots = vectors.new_empty((segments, batch, count))
    arrays = (points.contiguous(), indices.contiguous(), vectors.contiguous(), dots)
    sizes = {"count": count, "padded": padded_count(count), "width": width}
    sizes["length"] = min(_SEGMENT, -(-dim // width) * width)
    launch(dot_kernel, (batch, segments), *arrays, batch, dim, **sizes)
    return dots.sum(0, dtype=torch.float64)


def padded_count(count: int) -> int:
    """Return the next size that the matrix units of a GPU support."""
    return max(16, 1 << (count - 1).bit_length())


def launch(kernel: Any, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
    with torch.cuda.device_of(values[0]):
        kernel[grid](*values, **constants)
