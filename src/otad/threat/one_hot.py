"""Groups of one-hot columns: the categories of a categorical feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otad.checks import require


def switched(x: Tensor, groups: Sequence[Sequence[int]], aims: Tensor, chosen: Tensor) -> Tensor:
    """Return x (B,*) with the category at position `aims` (B,G) in each `chosen` group (B,G)."""
    result = x.flatten(1).clone()
    for number, group in enumerate(groups):
        columns, rows = torch.tensor(group, device=x.device), chosen[:, number].nonzero()
        result[rows, columns] = 0.0
        result[rows[:, 0], columns[aims[rows[:, 0], number]]] = 1.0
    return result.view_as(x)


def check_groups(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    plain = tuple(tuple(int(column) for column in group) for group in groups)
    columns = [column for group in plain for column in group]
    fits = all(plain) and min(columns, default=0) >= 0 and len({*columns}) == len(columns)
    expected = "the columns of each group, from 0, each at most once"
    require(fits, "groups", expected, repr(groups)[:200])
    return plain


def is_one_hot(values: Tensor) -> Tensor:
    """Return whether rows (B,m) have exactly one 1 and are 0 elsewhere."""
    ones = values == 1
    return (ones | (values == 0)).all(1) & (ones.sum(1) == 1)
