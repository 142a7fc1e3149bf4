"""Solves rows on a CPU by the compiled code of `otad.cip.kernels.cpu_row`, on all threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otad.cip.execution import compiled_code, run_parts, shares
from otad.cip.local.read_compiled import Array, array_of
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import DualSolution

_RULES = {"lowest": 1, "canonical": 0, "highest": -1}
_FEWEST_STEPS = 2**18  # of a thread: fewer are done before it has started


def solve_compiled(
    arrays: tuple[Array, Array],
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
    errors: tuple[float, float],
    *,
    sensitive: bool,
) -> tuple[DualSolution, int]:
    """Return the solution of a batch, and how many rows are left over. Their status is negative.

    The `arrays` are those of `Products`. `errors` are the relative error of products and the
    largest one that they may have. No neighbor is left out."""
    values, squares = arrays
    (batch, count), dtype = squares.shape, squares.dtype
    low = array_of(strong_convexity)
    limits = errors[0], max(errors), float(relaxation.max_smoothness)
    how = limits, _RULES[rule], mode == "consistent", relaxation.climb is None
    weights, levels = np.empty((batch, count), dtype), np.empty((batch, count), dtype)
    value, high, residual = np.empty(batch, dtype), np.empty(batch), np.empty(batch)
    status, slopes = np.empty(batch, np.int64), np.zeros((batch if sensitive else 0, count, count))
    given = values, squares, array_of(smoothness), low, *how
    found = weights, levels, value, high, residual, status, slopes

    def work(rows: slice) -> int:
        left: int = compiled_code("cpu_row").solve_rows(*given, *found, rows.start, rows.stop)
        return left

    parts = shares(batch, -(-_FEWEST_STEPS // count**3))
    left = sum(run_parts(parts, work, strong_convexity.device)) if parts[1:] else work(parts[0])
    active, of = np.empty((batch, count), bool), torch.from_numpy
    active.fill(True)
    solution = DualSolution(
        multipliers=of(weights),
        sensitivity=of(slopes) if sensitive else None,
        value=of(value),
        potentials=of(levels),
        smoothness=of(high),
        strong_convexity=of(low.copy()),
        map_convexity=of(low.copy()) if left else strong_convexity,  # else nothing overwrites it
        active=of(active),
        residual=of(residual),
        status=of(status),
    )
    return solution, left
