"""The least of a quantity over the whole bank, without measuring all of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FIRST_BLOCK, LARGEST_BLOCK = 32, 1024  # bank points of a query measured in one go

Measure = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows (r,) of a batch, bank points (r,T) of each, the least found for each row (r,) -> a quantity
(r,T) for each of these points, which need not be right where it exceeds the least."""


def least_over_bank(
    floor: Tensor, start: Tensor, measure: Measure, rows_at_once: Callable[[int], int]
) -> Tensor:
    """min(start, min over i of measure_i) (B,), for quantities that are at least floor_i (B,N).

    Bank points are measured in the order of their floor, in growing blocks, until no floor is below
    the least found. `floor` is used up. `rows_at_once` tells how many rows of T points fit.
    """
    best = start.clone()
    rows = torch.arange(len(floor), device=floor.device)
    block = FIRST_BLOCK
    while len(rows):
        width = min(block, floor.shape[1])
        lowest, indices = floor[rows].topk(width, largest=False)
        unsettled = lowest[:, 0] < best[rows]
        rows, indices = rows[unsettled], indices[unsettled]
        at_once = rows_at_once(width)
        for part, points in zip(rows.split(at_once), indices.split(at_once), strict=True):
            least = measure(part, points, best[part]).amin(1)
            best[part] = torch.minimum(best[part], least)
        floor[rows[:, None], indices] = torch.inf
        block = min(2 * block, LARGEST_BLOCK)
    return best
