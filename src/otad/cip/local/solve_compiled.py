"""Solves rows on a CPU by the compiled code of `otad.cip.kernels.cpu_row`, on all threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otad.cip.execution import blocks, run_parts
from otad.cip.local.products import Products
from otad.cip.local.read_compiled import array_of
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import DualSolution

_RULES = {"lowest": 1, "canonical": 0, "highest": -1}
_FEWEST_STEPS = 2**18  # of a thread: fewer are done before it has started


def solve_compiled(
    products: Products,
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
    worst: float,
    *,
    sensitive: bool,
) -> tuple[DualSolution, Tensor]:
    """Return the solution of a batch, and the rows (n,) that are left over.

    No neighbor is left out. `worst` is the largest relative error that products may have."""
    from otad.cip.kernels.cpu_row import LEFT_OVER, solve_rows

    values, squares = array_of(products.values)[0], array_of(products.squares)[0]
    (batch, count), dtype = squares.shape, squares.dtype
    given = values, squares, array_of(smoothness), array_of(strong_convexity)
    limits = products.noise, max(worst, products.noise), float(relaxation.max_smoothness)
    how = limits, _RULES[rule], mode == "consistent", relaxation.climb is None
    weights, levels = np.empty((batch, count), dtype), np.empty((batch, count), dtype)
    value, high, residual = np.empty(batch, dtype), np.empty(batch), np.empty(batch)
    status, slopes = np.empty(batch, np.int64), np.zeros((batch if sensitive else 0, count, count))
    found = weights, levels, value, high, residual, status, slopes

    def work(rows: slice) -> None:
        solve_rows(*(part[rows] for part in given), *how, *(part[rows] for part in found))

    share = max(-(-batch // torch.get_num_threads()), -(-_FEWEST_STEPS // count**3))
    if batch <= share:
        work(slice(0, batch))
    else:
        run_parts(blocks(batch, share), work, products.values.device)
    active, of = np.ones((batch, count), bool), torch.from_numpy
    solution = DualSolution(
        multipliers=of(weights),
        sensitivity=of(slopes) if sensitive else None,
        value=of(value),
        potentials=of(levels),
        smoothness=of(high),
        strong_convexity=of(given[3].copy()),
        map_convexity=of(given[3].copy()),
        active=of(active),
        residual=of(residual),
        status=of(status),
    )
    return solution, of((status == LEFT_OVER).nonzero()[0])
