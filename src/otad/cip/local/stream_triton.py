"""Reads neighbors from a bank on the GPU without gathering them into memory.

These Triton kernels read each neighbor once for the inner products, and once more for the feature
if its multiplier is not zero. The gradient costs as much again. They apply to a float32 batch whose
bank is on the same CUDA device."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from otad.cip.problem import BankProblem
from otad.cip.protocols import RowProblem

_MOST_NEIGHBORS = 64  # registers hold a padded K x K block of products
# The features that one program sums over, a multiple of 128, so that small batches fill the device.
_SEGMENT = 2048


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def can_stream(problem: RowProblem) -> TypeGuard[BankProblem]:
    return (
        isinstance(problem, BankProblem)
        and problem.query.is_cuda
        and problem.query.dtype == torch.float32
        and problem.inputs.device == problem.query.device
        and problem.inputs.dtype != torch.float64
        and problem.shape[1] <= _MOST_NEIGHBORS
        and has_triton()
    )


def streamed_products(problem: BankProblem, *, with_offsets: bool) -> tuple[Tensor, Tensor]:
    """Return `values` and `squares` of `Products`, in S parts of one segment of features each."""
    from otad.cip.kernels.gram import gram_kernel

    batch, count, dim = problem.shape
    first = 0 if with_offsets else count
    padded, width = padded_count(count), 32
    segment = _SEGMENT * padded // 16
    segments = -(-dim // segment)
    query = problem.query.detach().contiguous()
    products = query.new_empty((segments, batch, 2 * count - first, 2 * count))
    squares = query.new_empty((segments, batch, count))
    bank = (part.contiguous() for part in (problem.inputs, problem.features, problem.indices))
    sizes = {"count": count, "padded": padded, "shifts": with_offsets, "width": width}
    sizes["length"] = min(segment, -(-dim // width) * width)
    found = products, squares
    launch(gram_kernel, (batch, segments), query, *bank, *found, batch, dim, num_warps=2, **sizes)
    return found


def streamed_combination(points: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k weights[b,k] points[indices[b,k]] (B,d) in the dtype of the weights."""
    from otad.cip.kernels.gram import combine_kernel

    batch, count = indices.shape
    dim, width = points.shape[1], 1024
    total = weights.new_empty((batch, dim))
    arrays = (points.contiguous(), indices.contiguous(), weights.contiguous(), total)
    launch(combine_kernel, (batch, -(-dim // width)), *arrays, dim, count=count, width=width)
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
