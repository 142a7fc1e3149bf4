"""Neighbors streamed straight from a bank on the GPU, without ever being gathered into memory.

The work of a batch on one GPU is bound by reading B*K rows of two arrays. Gathering, converting
and stacking them costs several more passes over as many bytes; these two Triton kernels read each
neighbor once for the Gram products and once more, if its multiplier is not zero, for the answer.
They serve a float32 batch whose bank lies on the same CUDA device; everything else takes the
plain path, which they are tested against.
"""

from __future__ import annotations

import importlib.util
from typing import Any, TypeGuard

import torch
from torch import Tensor

from otad.cip.problem import BankProblem
from otad.cip.rows import RowProblem

_MOST_NEIGHBORS = 64  # registers hold a padded K x K block of products


def streams(problem: RowProblem) -> TypeGuard[BankProblem]:
    """Whether the kernels apply."""
    return (
        isinstance(problem, BankProblem)
        and problem.query.is_cuda
        and problem.query.dtype == torch.float32
        and problem.inputs.device == problem.query.device
        and problem.inputs.dtype != torch.float64
        and problem.shape[1] <= _MOST_NEIGHBORS
        and importlib.util.find_spec("triton") is not None
    )


def streamed_products(problem: BankProblem, *, bends: bool) -> tuple[Tensor, Tensor]:
    """Products (B,2K or K,2K) of the stack a_1..a_K, z_1, c_2..c_K, and |a_i|^2 (B,K).

    Only the rows of z_1, c_2..c_K against all, unless `bends` asks for those of the a_i too.
    """
    from otad.cip.kernels import gram_kernel

    batch, count, dim = problem.shape
    first = 0 if bends else count
    query = problem.query.detach().contiguous()
    products = query.new_empty((batch, 2 * count - first, 2 * count))
    squares = query.new_empty((batch, count))
    _launch(
        gram_kernel,
        (batch,),
        query,
        problem.inputs.contiguous(),
        problem.features.contiguous(),
        problem.indices.contiguous(),
        products,
        squares,
        dim,
        count,
        padded=_padded(count),
        bends=bends,
        width=32,
        num_warps=2,
    )
    return products, squares


def streamed_combination(points: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """sum_k weights[b,k] points[indices[b,k]] (B,d) in the dtype of the weights."""
    from otad.cip.kernels import combine_kernel

    batch, count = indices.shape
    dim, width = points.shape[1], 1024
    total = weights.new_empty((batch, dim))
    grid = (batch, -(-dim // width))
    arrays = (points.contiguous(), indices.contiguous(), weights.contiguous(), total)
    _launch(combine_kernel, grid, *arrays, dim, count, width=width)
    return total


def _padded(count: int) -> int:
    """The next size the matrix units take."""
    return max(16, 1 << (count - 1).bit_length())


def _launch(kernel: Any, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
    with torch.cuda.device(values[0].device):
        kernel[grid](*values, **constants)
