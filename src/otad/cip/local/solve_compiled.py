"""Solves rows on a CPU by the compiled code of `otad.cip.kernels.cpu`, on all threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otad.cip.local.products import NOISE, Array, array_of, run_compiled
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import DualSolution
from otad.cip.protocols import RowProblem

_RULES = {"lowest": 1, "canonical": 0, "highest": -1}


def solve_compiled(
    problem: RowProblem,
    relaxation: Relaxation,
    rule: str,
    mode: str,
    chunk: int | None,
    *,
    sensitive: bool,
) -> tuple[DualSolution, Tensor, Array]:
    """Return the solution of a batch, its images (B,d), and the rows (n,) that are left over.

    No neighbor is left out."""
    from otad.cip.kernels.cpu import LEFT_OVER, solve_rows

    batch, count, dim = problem.shape
    high, low = problem.smoothness, problem.strong_convexity
    given = [array_of(part) for part in (problem.query, high, low)]
    dtype, noise = given[0].dtype, NOISE[problem.query.dtype]
    # The largest error of a sum of d products in float32; nearly equal terms come close to it.
    worst = (dim + 2) * 2.0**-24 if dtype == np.float32 else noise
    limits = noise, worst, float(relaxation.max_smoothness)
    how = limits, _RULES[rule], mode == "consistent", relaxation.climb is None
    shapes = (batch, dim), (batch, count), (batch, count), (batch,)
    image, weights, levels, value = (np.empty(shape, dtype) for shape in shapes)
    smoothness, residual = np.empty(batch), np.empty(batch)
    status, slopes = np.empty(batch, np.int64), np.empty((batch if sensitive else 0, count, count))
    found = image, weights, levels, value, smoothness, residual, status, slopes

    def work(rows: slice, *bank: Array) -> None:
        query, *curvature = (part[rows] for part in given)
        solve_rows(query, *bank, *curvature, *how, *(part[rows] for part in found))

    run_compiled(problem, chunk, work)
    active, of = np.ones((batch, count), bool), torch.from_numpy
    convexity = of(given[2].copy())
    solution = DualSolution(
        multipliers=of(weights),
        sensitivity=of(slopes) if sensitive else None,
        value=of(value),
        potentials=of(levels),
        smoothness=of(smoothness),
        strong_convexity=convexity,
        map_convexity=convexity,
        active=of(active),
        residual=of(residual),
        status=of(status),
    )
    return solution, of(image), (status == LEFT_OVER).nonzero()[0]
