"""The small stage on a GPU: one launch of one kernel, whatever the batch, and one look at it.

`SmallStage` takes some five hundred small operations, each of which costs a launch; for a batch of
a hundred queries that is most of the time. Here every row has a program of its own
(`otad.cip.kernels.row`). The few rows it does not finish are named, and go the general way.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from otad.cip.local.answer import Answer
from otad.cip.local.fused import has_triton, launch, padded_count
from otad.cip.local.gram import Products
from otad.cip.local.solve_torch import SmallStage

_MOST_NEIGHBORS = 32  # registers hold several padded K x K tiles of float64


def fits(products: Products) -> bool:
    """Whether the kernel applies."""
    return products.values.is_cuda and products.count <= _MOST_NEIGHBORS and has_triton()


def solve_rows(
    stage: SmallStage,
    products: Products,
    smoothness: Tensor,
    strong_convexity: Tensor,
    dtype: torch.dtype,
    *,
    sensitive: bool,
) -> tuple[Answer, Tensor]:
    """The answer, multipliers, levels and value in `dtype`, and the outcome (B,) on the CPU.

    The outcome is 1 for a row that is answered, 0 for one that is left to `stage` itself, -1 for
    one that has no answer. The sensitivity comes along if `sensitive`.
    """
    from otad.cip.kernels.row import row_kernel

    values = products.values
    segments, batch, _, _ = values.shape
    total = products.count
    count = total - stage.relaxation.spares
    climb, padded = stage.relaxation.climb, padded_count(total)
    up, down = climb or (0.0, 0.0)
    settings = _settings(
        products.noise, up, down, stage.relaxation.max_smoothness, device=values.device
    )
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
        settings,
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
        count=count,
        padded=padded,
        bends=products.bends,
        climbs=climb is not None,
        consistent=stage.mode == "consistent",
        sensitive=sensitive,
        rule=stage.potential,
        num_warps=1 if padded == 16 else 4,
    )
    answer = Answer(
        weight=shares[0],
        sensitivity=sensitivity if sensitive else None,
        value=value,
        level=shares[1],
        smoothness=numbers[0],
        strong_convexity=numbers[1],
        map_convexity=numbers[2],
        active=active.view(torch.bool),
        residual=numbers[3],
        status=status,
    )
    return answer, outcome.cpu()  # the one time the host waits


@lru_cache(maxsize=64)
def _settings(*numbers: float, device: torch.device) -> Tensor:
    """Numbers for a kernel in float64: as plain arguments they would be rounded to float32."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)
