"""From inner products to multipliers on a GPU: one launch of one kernel, whatever the batch.

`solve_torch` takes some five hundred small operations, each of which costs a launch; for a batch of
a hundred queries that is most of the time. Here every row has a program of its own
(`otad.cip.kernels.row`). The few rows it does not finish are left to `solve_torch`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from otad.cip.local.products import Products
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import DualSolution
from otad.cip.local.stream_triton import has_triton, launch, padded_count

_MOST_NEIGHBORS = 32  # registers hold several padded K x K tiles of float64


def can_solve(products: Products) -> bool:
    """Whether the kernel applies."""
    return products.values.is_cuda and products.count <= _MOST_NEIGHBORS and has_triton()


def solve_triton(
    products: Products,
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
    dtype: torch.dtype,
    *,
    sensitive: bool,
) -> tuple[DualSolution, Tensor]:
    """The solution, with multipliers, potentials and value in `dtype`, and the outcome (B,) on the
    CPU: 1 for a solved row, 0 for one that is left to `solve_torch`, -1 for one without a solution.

    The sensitivity is computed if `sensitive`.
    """
    from otad.cip.kernels.row import row_kernel

    values = products.values
    segments, batch, _, _ = values.shape
    total, padded = products.count, padded_count(products.count)
    up, down = relaxation.climb or (0.0, 0.0)
    cap = relaxation.max_smoothness
    steps = _settings(products.noise, up, down, cap, device=values.device)
    shares = values.new_empty((2, batch, total), dtype=dtype)
    value = values.new_empty(batch, dtype=dtype)
    numbers = values.new_empty((4, batch), dtype=torch.float64)
    status = values.new_empty(batch, dtype=torch.int64)
    outcome = values.new_empty(batch, dtype=torch.int32)
    active = values.new_empty((batch, total), dtype=torch.int8)
    sensitivity = values.new_empty((batch, total, total) if sensitive else 0, dtype=torch.float64)
    launch(
        row_kernel,
        (batch,),
        values,
        products.squares,
        smoothness.contiguous(),
        strong_convexity.contiguous(),
        steps,
        shares,
        value,
        numbers,
        status,
        active,
        outcome,
        sensitivity,
        batch,
        segments=segments,
        total=total,
        count=total - relaxation.spares,
        padded=padded,
        shifts=products.with_offsets,
        climbs=relaxation.climb is not None,
        consistent=mode == "consistent",
        sensitive=sensitive,
        rule=rule,
        num_warps=1 if padded == 16 else 4,
    )
    solution = DualSolution(
        multipliers=shares[0],
        sensitivity=sensitivity if sensitive else None,
        value=value,
        potentials=shares[1],
        smoothness=numbers[0],
        strong_convexity=numbers[1],
        map_convexity=numbers[2],
        active=active.view(torch.bool),
        residual=numbers[3],
        status=status,
    )
    return solution, outcome.cpu()  # the only synchronization


@lru_cache(maxsize=64)
def _settings(*numbers: float, device: torch.device) -> Tensor:
    """Numbers for a kernel in float64: as plain arguments they would be rounded to float32."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)
