"""How torch rounds float32 products and convolutions: settings of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends import cudnn

from otad.threads import ProcessWide

Precision = tuple[str, ...]
_OLD = ("highest", "high", "medium")  # the first value of settings that are made in the old way


def product_precision() -> Precision:
    """Return the present settings, for `set_product_precision`.

    Torch has an old and a new way to make them. Once the new one was used it refuses to read the
    old one, so both are supported. Convolutions on a CPU have only the new one."""
    try:
        old = torch.get_float32_matmul_precision(), "tf32" if cudnn.allow_tf32 else "ieee"
    except RuntimeError:
        return tuple(place.fp32_precision for place in _places())
    return *old, *(place.fp32_precision for place in _cpu_convolutions())


def set_product_precision(values: Precision) -> None:
    places = _places()
    if values[0] in _OLD:
        torch.set_float32_matmul_precision(values[0])
        cudnn.allow_tf32 = values[1] == "tf32"
        places, values = _cpu_convolutions(), values[2:]
    for place, value in zip(places, values, strict=True):
        place.fp32_precision = value


@contextmanager
def _unrounded() -> Iterator[None]:
    before = product_precision()
    first = _OLD[0] if before[0] in _OLD else "ieee"
    set_product_precision((first, *("ieee" for _ in before[1:])))
    for place in _cudnn_places():
        if place.fp32_precision == "tf32":  # the old way left it to a setting for all backends
            place.fp32_precision = "ieee"
    try:
        yield
    finally:
        set_product_precision(before)


FULL_PRODUCTS = ProcessWide(_unrounded)
"""While it is entered, no product and no convolution of torch is rounded to fewer digits."""


def _places() -> tuple[Any, ...]:
    backends: Any = torch.backends
    products = backends.cuda.matmul, *_cudnn_places(), backends.mkldnn.matmul
    return *products, *_cpu_convolutions()


def _cudnn_places() -> tuple[Any, ...]:
    """Return the places of convolutions and recurrent layers; older versions have none."""
    backend: Any = cudnn
    return tuple(getattr(backend, name) for name in ("conv", "rnn") if hasattr(backend, name))


def _cpu_convolutions() -> tuple[Any, ...]:
    """Return the place of their setting, which older versions of torch do not have."""
    place = getattr(torch.backends.mkldnn, "conv", None)
    return () if place is None else (place,)
