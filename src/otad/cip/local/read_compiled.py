"""Reads neighbors on a CPU by the compiled code of `otad.cip.kernels.cpu_products`, on all threads.

Neighbors of the dtype of the query are read where they are, and others are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.cip.execution import compiled_code, problem_blocks, run_parts, shares
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.protocols import RowProblem
from otad.io.mapped_rows import in_file

Array = NDArray[Any]
_FEWEST_NUMBERS = 2**19  # of a thread: fewer are read before it has started
_IN_BANK = {"anchors": "inputs", "images": "features"}


def compiled_products(
    problem: RowProblem, chunk: int | None, *, with_offsets: bool
) -> tuple[Array, Array]:
    """Return `values` (B,2K or K,2K) and `squares` (B,K) of `Products`, in a single part."""
    query, (batch, count, _) = array_of(problem.query), problem.shape
    values = np.empty((batch, 2 * count if with_offsets else count, 2 * count), query.dtype)
    squares = np.empty((batch, count), query.dtype)

    def work(begin: int, inputs: Array, features: Array, indices: Array) -> None:
        compiled_code("cpu_products").multiply_rows(
            query, inputs, features, indices, values, squares, begin
        )

    _run(problem, chunk, work, "anchors", "images")
    return values, squares


def compiled_combination(
    problem: RowProblem, which: str, weights: Tensor, chunk: int | None
) -> Tensor:
    """Return sum_k weights[b,k] p_k (B,d), where p_k are the "anchors" or "images" of row b."""
    given, (batch, _, dim) = array_of(weights), problem.shape
    total = np.empty((batch, dim), given.dtype)

    def work(begin: int, points: Array, indices: Array) -> None:
        compiled_code("cpu_products").combine_rows(points, indices, given, total, begin)

    _run(problem, chunk, work, which)
    return torch.from_numpy(total)


def compiled_dots(problem: RowProblem, which: str, vectors: Tensor, chunk: int | None) -> Tensor:
    """Return <p_k, vectors[b]> (B,K) in float64 for the same p_k."""
    given, dots = array_of(vectors), np.empty(problem.shape[:2])

    def work(begin: int, points: Array, indices: Array) -> None:
        compiled_code("cpu_products").dot_rows(points, indices, given, dots, begin)

    _run(problem, chunk, work, which)
    return torch.from_numpy(dots)


def _run(problem: RowProblem, chunk: int | None, work: Callable[..., None], *names: str) -> None:
    """Call `work` with the first of some rows, the named points (n,d), and the indices (b,K) of
    their neighbors."""
    batch, count, dim = problem.shape
    found = _readable(problem, names)

    def part(rows: slice) -> None:
        if found is None:
            work(rows.start, *_gathered(problem, rows, names))
        else:
            *points, indices = found
            work(rows.start, *points, indices[rows])

    if found is None:
        parts = problem_blocks(problem, chunk)
    else:
        parts = shares(batch, -(-_FEWEST_NUMBERS // (count * dim)))
    if len(parts) == 1:
        part(parts[0])
    else:
        run_parts(parts, part, problem.query.device)


def _readable(problem: RowProblem, names: tuple[str, ...]) -> list[Array] | None:
    """Return the points of all rows and indices, if compiled code can read them in place."""
    dtype = problem.query.dtype
    if isinstance(problem, CipProblem) and problem.anchors.dtype == dtype:
        return _with_indices([array_of(getattr(problem, name)) for name in names])
    if isinstance(problem, BankProblem):
        parts = [getattr(problem, _IN_BANK[name]) for name in names]
        if all(one.is_cpu and one.dtype == dtype and in_file(one) is None for one in parts):
            return [array_of(part) for part in (*parts, problem.indices)]
    return None


def _gathered(problem: RowProblem, rows: slice, names: tuple[str, ...]) -> list[Array]:
    """Return the points of some rows in the dtype of the query, and their indices."""
    parts = (getattr(problem, f"{name}_of")(rows) for name in names)
    return _with_indices([array_of(part.to(problem.query.dtype)) for part in parts])


def _with_indices(points: list[Array]) -> list[Array]:
    """Return neighbors (b,K,d) as points (bK,d), and the indices (b,K) of those of each row."""
    batch, count, dim = points[0].shape
    indices = np.arange(batch * count).reshape(batch, count)
    return [*(part.reshape(-1, dim) for part in points), indices]


def array_of(tensor: Tensor) -> Array:
    """Return a tensor on the CPU as a contiguous array."""
    return np.ascontiguousarray((tensor.detach() if tensor.requires_grad else tensor).numpy())
