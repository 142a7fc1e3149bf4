"""Input checks. Each one raises `InputError` saying what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from otad.errors import InputError

WORKING_DTYPES = (torch.float32, torch.float64)
STORAGE_DTYPES = (torch.float16, torch.bfloat16, *WORKING_DTYPES)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(
    value: object,
    name: str,
    axes: str,
    *,
    dtypes: Sequence[torch.dtype] = WORKING_DTYPES,
    finite: bool = True,
) -> Tensor:
    """A non-empty tensor with one axis for each comma-separated name in `axes`, e.g. "B,K,d"."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a torch.Tensor ({axes}), got {type(value).__name__}")
    names = axes.split(",")
    if value.dim() != len(names):
        raise InputError(
            f"{name}: expected {len(names)} axes ({axes}), got shape {tuple(value.shape)}"
        )
    for axis, size in zip(names, value.shape, strict=True):
        if size == 0:
            raise InputError(
                f"{name}: expected at least one entry along {axis}, got shape {tuple(value.shape)}"
            )
    if value.dtype not in dtypes:
        allowed = " or ".join(_dtype_name(dtype) for dtype in dtypes)
        raise InputError(f"{name}: expected dtype {allowed}, got {_dtype_name(value.dtype)}")
    if finite:
        check_finite(value, name)
    return value


def check_finite(value: Tensor, name: str) -> None:
    """Refuse NaN and infinity, naming the first row that holds one."""
    wide = torch.promote_types(value.dtype, torch.float32)  # half a million halves overflow
    if math.isfinite(value.detach().sum(dtype=wide).item()):  # one cheap pass, mostly enough
        return
    good = torch.isfinite(value)
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise InputError(f"{name}: expected finite values, got {value[index].item()} at {index}")


def check_shape(value: Tensor, name: str, expected: tuple[int, ...], reason: str) -> None:
    if tuple(value.shape) != expected:
        raise InputError(f"{name}: expected shape {expected} {reason}, got {tuple(value.shape)}")


def check_alike(value: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Same device and dtype as another tensor."""
    if value.device != other.device:
        raise InputError(
            f"{name}: expected device {other.device} like {other_name}, got {value.device}"
        )
    if value.dtype != other.dtype:
        raise InputError(
            f"{name}: expected dtype {_dtype_name(other.dtype)} like {other_name}, "
            f"got {_dtype_name(value.dtype)}"
        )


def check_evaluation(net: object, name: str) -> None:
    """A module no part of which is in training mode, where answers depend on the batch."""
    if not isinstance(net, nn.Module):
        raise InputError(f"{name}: expected a torch.nn.Module, got {type(net).__name__}")
    for part, module in net.named_modules():
        if module.training:
            place = f"{name}.{part}" if part else name
            raise InputError(
                f"{place}: expected evaluation mode, got training mode; call eval() on {name}"
            )


def check_choice(value: str, name: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise InputError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def check_count(value: object, name: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return value
