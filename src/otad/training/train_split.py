"""The parts of training data, as a user may give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from otad.checks import check_shape, check_tensor
from otad.errors import InputError
from otad.nets.inputs import InputNet

_PARTS = ("train_x", "train_y", "val_x", "val_y")
_WHITE = 255


class Split(Protocol):
    """Training inputs (N,*input_shape) and targets (N,); `val_x` and `val_y` alike may follow."""

    @property
    def train_x(self) -> Tensor: ...
    @property
    def train_y(self) -> Tensor: ...


def parts_of(data: Split | Sequence[Tensor]) -> dict[str, Tensor]:
    """train_x, train_y and, where given, val_x and val_y, as they came."""
    found: dict[str, Tensor | None]
    if isinstance(data, Sequence):
        found = dict(zip((*_PARTS, "more"), data, strict=False))
    else:
        found = {name: getattr(data, name, None) for name in _PARTS}
    parts = {name: part for name, part in found.items() if part is not None}
    if tuple(parts) not in (_PARTS[:2], _PARTS):
        raise InputError(
            f"data: expected {', '.join(_PARTS[:2])} or {', '.join(_PARTS)}, "
            f"got {', '.join(parts) or type(data).__name__}"
        )
    return parts


def refuse_one_class(labels: Tensor) -> None:
    """Training labels (N,) must have something to tell apart."""
    if bool((labels == labels[0]).all()):
        raise InputError(
            f"train_y: expected at least two classes, got only the label {int(labels[0])}"
        )


def check_kept(net: InputNet, x: Tensor, name: str) -> Tensor:
    """Inputs of the net, or the same in bytes, a quarter of the memory: see `to_inputs`."""
    if not isinstance(x, Tensor) or x.dtype != torch.uint8:
        return net.check_inputs(x, name)
    if net.bounds is None:
        raise InputError(f"{name}: expected floats for a net without bounds, got uint8")
    axes = ",".join(["B", *(str(size) for size in net.input_shape)])
    levels = check_tensor(x, name, axes, dtypes=(torch.uint8,), finite=False)
    check_shape(levels, name, (len(levels), *net.input_shape), "as the net declares")
    return levels


def to_inputs(x: Tensor, net: InputNet) -> Tensor:
    """Bytes 0 to 255 spread over the bounds of the net; floats as they are."""
    if x.dtype != torch.uint8 or net.bounds is None:
        return x
    low, high = net.bounds
    return low + (high - low) * (x.to(net.mean.dtype) / _WHITE)
