"""Class names and their integer codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from otad.errors import InputError


def class_names(values: Sequence[str]) -> tuple[str, ...]:
    """The distinct values: in numeric order if all are whole numbers, else alphabetical."""
    distinct = set(values)
    if all(value.removeprefix("-").isdecimal() for value in distinct):
        return tuple(sorted(distinct, key=lambda value: (int(value), value)))
    return tuple(sorted(distinct))


def encode_labels(values: Sequence[str], classes: Sequence[str], where: str) -> Tensor:
    """int64 (N,) positions in `classes`; a value that is not there is refused."""
    codes = {name: code for code, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in codes:
            raise InputError(
                f"{where}: unknown label {value!r} in row {row}, "
                f"expected one of {', '.join(classes)}"
            )
    return torch.tensor([codes[value] for value in values], dtype=torch.int64)
