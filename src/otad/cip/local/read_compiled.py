"""Reads neighbors on a CPU by the compiled code of `otad.cip.kernels.cpu_products`, on all threads.

Neighbors of the dtype of the query are read where they are, and others are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.cip.execution import blocks, problem_blocks, run_parts
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.protocols import RowProblem
from otad.io.environment import has_numba
from otad.io.mapped_rows import in_file

Array = NDArray[Any]
_FEWEST_NUMBERS = 2**19  # of a thread: fewer are read before it has started
_IN_BANK = {"anchors": "inputs", "images": "features"}


def can_compile(tensor: Tensor) -> bool:
    return tensor.is_cpu and has_numba()


def compiled_products(
    problem: RowProblem, chunk: int | None, *, with_offsets: bool
) -> tuple[Tensor, Tensor]:
    """Return `values` and `squares` of `Products`, in a single part."""
    from otad.cip.kernels.cpu_products import multiply_rows

    query, (batch, count, _) = array_of(problem.query), problem.shape
    height = 2 * count if with_offsets else count
    values = np.empty((1, batch, height, 2 * count), query.dtype)
    squares = np.empty((1, batch, count), query.dtype)

    def work(rows: slice, inputs: Array, features: Array, indices: Array) -> None:
        found = values[0, rows], squares[0, rows]
        multiply_rows(query[rows], inputs, features, indices, *found)

    _run(problem, chunk, work, "anchors", "images")
    return torch.from_numpy(values), torch.from_numpy(squares)


def compiled_combination(
    problem: RowProblem, which: str, weights: Tensor, chunk: int | None
) -> Tensor:
    """Return sum_k weights[b,k] p_k (B,d), where p_k are the "anchors" or "images" of row b."""
    from otad.cip.kernels.cpu_products import combine_rows

    shares = array_of(weights)
    total = np.empty(problem.query.shape, shares.dtype)

    def work(rows: slice, points: Array, indices: Array) -> None:
        combine_rows(points, indices, shares[rows], total[rows])

    _run(problem, chunk, work, which)
    return torch.from_numpy(total)


def compiled_dots(problem: RowProblem, which: str, vectors: Tensor, chunk: int | None) -> Tensor:
    """Return <p_k, vectors[b]> (B,K) in float64 for the same p_k."""
    from otad.cip.kernels.cpu_products import dot_rows

    given, dots = array_of(vectors), np.empty(problem.shape[:2])

    def work(rows: slice, points: Array, indices: Array) -> None:
        dot_rows(points, indices, given[rows], dots[rows])

    _run(problem, chunk, work, which)
    return torch.from_numpy(dots)


def _run(problem: RowProblem, chunk: int | None, work: Callable[..., None], *names: str) -> None:
    """Call `work` with rows, the named points (n,d), and the indices (b,K) of their neighbors."""
    found = _readable(problem, names)

    def part(rows: slice) -> None:
        if found is None:
            work(rows, *_gathered(problem, rows, names))
        else:
            *points, indices = found
            work(rows, *points, indices[rows])

    batch, count, dim = problem.shape
    share = max(-(-batch // torch.get_num_threads()), -(-_FEWEST_NUMBERS // (count * dim)))
    parts = problem_blocks(problem, chunk) if found is None else blocks(batch, share)
    if len(parts) == 1:
        part(parts[0])
    else:
        run_parts(parts, part, problem.query.device)


def _readable(problem: RowProblem, names: tuple[str, ...]) -> list[Array] | None:
    """Return the points of all rows and indices, if compiled code can read them in place."""
    (batch, count, dim), dtype = problem.shape, problem.query.dtype
    if isinstance(problem, CipProblem) and problem.anchors.dtype == dtype:
        points = [array_of(getattr(problem, name)).reshape(-1, dim) for name in names]
        return [*points, np.arange(batch * count).reshape(batch, count)]
    if isinstance(problem, BankProblem):
        parts = [getattr(problem, _IN_BANK[name]) for name in names]
        if all(one.is_cpu and one.dtype == dtype and in_file(one) is None for one in parts):
            return [array_of(part) for part in (*parts, problem.indices)]
    return None


def _gathered(problem: RowProblem, rows: slice, names: tuple[str, ...]) -> list[Array]:
    """Return the points of some rows in the dtype of the query, and their indices."""
    dtype, (_, count, dim) = problem.query.dtype, problem.shape
    parts = [getattr(problem, f"{name}_of")(rows).to(dtype) for name in names]
    points = [array_of(part).reshape(-1, dim) for part in parts]
    return [*points, np.arange(len(points[0])).reshape(-1, count)]


def array_of(tensor: Tensor) -> Array:
    """Return a tensor on the CPU as a contiguous array."""
    return np.ascontiguousarray((tensor.detach() if tensor.requires_grad else tensor).numpy())
