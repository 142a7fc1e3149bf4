"""How torch rounds float32 products and convolutions: settings of the whole process."""

from __future__ import annotations

from typing import Any

import torch
from torch.backends import cudnn

Precision = tuple[str, ...]


def product_precision() -> Precision:
    """Return the present settings, for `set_product_precision`.

    Torch has an old and a new way to make them. Once the new one was used it refuses to read the
    old one, so both are supported."""
    try:
        return torch.get_float32_matmul_precision(), "tf32" if cudnn.allow_tf32 else "ieee"
    except RuntimeError:
        return tuple(place.fp32_precision for place in _places())


def set_product_precision(values: Precision) -> None:
    if len(values) == 2:
        torch.set_float32_matmul_precision(values[0])
        cudnn.allow_tf32 = values[1] == "tf32"
        return
    for place, value in zip(_places(), values, strict=True):
        place.fp32_precision = value


def full(values: Precision) -> Precision:
    """Return the settings, made in the same way as these, that round nothing to fewer digits."""
    return ("highest", "ieee") if len(values) == 2 else ("ieee",) * len(values)


def _places() -> tuple[Any, ...]:
    backends = torch.backends
    return backends.cuda.matmul, cudnn.conv, backends.mkldnn.matmul  # type: ignore[attr-defined]
