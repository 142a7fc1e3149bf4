"""Input checks. Each one raises an `InputError` that says what was expected and what came."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor, nn

from otad.errors import InputError, OtadError

WORKING_DTYPES = (torch.float32, torch.float64)
MOST_VALUES = 2**28  # of one input, and of what a layer from a file returns for it
MOST_BLOCKS = 10_000  # of a network: more is a typing error, which would take hours to build
_FEW_ENTRIES = 10_000
STORAGE_DTYPES = (torch.float16, torch.bfloat16, *WORKING_DTYPES)
_assumed: ContextVar[list[Tensor] | None] = ContextVar("assumed", default=None)


def require(ok: object, name: str, expected: str, got: object) -> None:
    """Raise an `InputError` "name: expected ..., got ..." unless `ok` is true."""
    if not ok:
        raise InputError(f"{name}: expected {expected}, got {got}")


def holds(condition: Tensor) -> bool:
    """Return whether a condition is true in all its entries, or `assuming` so.

    It has an entry for each row of a batch, or a single one."""
    assumed = _assumed.get()
    if assumed is None:
        return bool(condition.all())
    assumed.append(condition)
    return True


@contextmanager
def assuming() -> Iterator[list[Tensor]]:
    """Take every condition that `holds` is asked about as true, and collect them.

    While a CUDA graph is captured, nothing can be read from the device. The conditions are read
    when the graph has run."""
    conditions: list[Tensor] = []
    token = _assumed.set(conditions)
    try:
        yield conditions
    finally:
        _assumed.reset(token)


@contextmanager
def refusing(expected: str) -> Iterator[None]:
    """Turn errors of code that builds something from the values of a file into an `InputError`."""
    wrong = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        yield
    except OtadError:
        raise
    except wrong as error:
        raise InputError(f"{expected}, got: {error!r}") from error


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Rename the argument in an `InputError` of a function that got it by another name than the
    user gave it by."""
    try:
        yield
    except InputError as error:
        message = str(error)
        found = re.match(r"\w*", message)[0]  # type: ignore[index]
        error.args = (names.get(found, found) + message[len(found) :],)
        raise


@contextmanager
def taking(x: Tensor, name: str) -> Iterator[None]:
    """Turn errors of a module that cannot take x into an `InputError`, unless memory is lacking."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, OtadError) or "memory" in str(error):
            raise
        takes = f"{_dtype_name(x.dtype)} of shape {tuple(x.shape)} on {x.device}"
        raise InputError(f"{name}: expected a module that takes {takes}, got: {error}") from error


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
    """Return a non-empty tensor with one axis for each name in `axes`, such as "B,K,d"; refuse
    others."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected a torch.Tensor ({axes}), got {type(value).__name__}")
    sizes = value.shape
    if value.is_meta:
        raise InputError(f"{name}: expected numbers, on a device such as cpu, got a meta tensor")
    if value.layout != torch.strided:
        raise InputError(f"{name}: expected a dense tensor, got {value.layout}")
    if len(sizes) != axes.count(",") + 1 or 0 in sizes:
        names = axes.split(",")
        empty = f"at least one entry along {dict(zip(sizes, names, strict=False)).get(0)}"
        expected = empty if len(sizes) == len(names) else f"{len(names)} axes ({axes})"
        raise InputError(f"{name}: expected {expected}, got shape {tuple(sizes)}")
    if value.dtype not in dtypes:
        allowed, got = " or ".join(map(_dtype_name, dtypes)), _dtype_name(value.dtype)
        raise InputError(f"{name}: expected dtype {allowed}, got {got}")
    if finite:
        check_finite(value, name)
    return value


def check_finite(value: Tensor, name: str) -> None:
    """Refuse NaN and infinity, and name the first position that holds one."""
    if adds_up(value):
        return
    good = torch.isfinite(value)
    if not bool(good.all()):
        index = tuple((~good).nonzero()[0].tolist())
        raise InputError(f"{name}: expected finite values, got {value[index].item()} at {index}")


def adds_up(value: Tensor) -> bool:
    """Return whether a sum of all entries is finite, which takes one cheap pass.

    If it is, every entry is. If not, an entry is not finite, or the sum overflowed."""
    if type(value) is Tensor and value.is_cpu and value.dtype in WORKING_DTYPES:
        array = value.numpy(force=True)
        # BLAS wakes threads for many entries, and so does torch. They wait in a busy loop.
        if array.size < _FEW_ENTRIES:
            return math.isfinite(np.vdot(array, array))
        with np.errstate(all="ignore"):
            if _FEW_ENTRIES // 100 < array.shape[-1] < _FEW_ENTRIES:
                array = np.vecdot(array, array)
            return math.isfinite(np.add.reduce(array, None))
    wide = torch.promote_types(value.dtype, torch.float32)  # half a million halves overflow
    return math.isfinite(value.detach().sum(dtype=wide).item())


def check_shape(value: Tensor, name: str, expected: tuple[int, ...], reason: str) -> None:
    if value.shape != expected:
        raise InputError(f"{name}: expected shape {expected} {reason}, got {tuple(value.shape)}")


def check_broadcast(value: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """Return a value for each entry of one input, in its shape; refuse shapes that do not broadcast
    to it."""
    if value.dim() <= len(shape):
        with suppress(RuntimeError):
            return value.expand(tuple(shape)).contiguous()
    per_channel = (*shape[:1], *[1] * len(shape[1:]))
    expected = f"shape {tuple(shape)} like one input, or one that broadcasts to it"
    expected += f", such as {per_channel}" if len(shape) > 1 else ""
    raise InputError(f"{name}: expected {expected}, got {tuple(value.shape)}")


def check_alike(value: Tensor, name: str, other: Tensor, other_name: str) -> None:
    """Refuse a tensor that has not the device and dtype of another one."""
    if value.device != other.device:
        expected = f"device {other.device} like {other_name}"
        raise InputError(f"{name}: expected {expected}, got {value.device}")
    if value.dtype != other.dtype:
        expected, got = f"dtype {_dtype_name(other.dtype)} like {other_name}", value.dtype
        raise InputError(f"{name}: expected {expected}, got {_dtype_name(got)}")


def check_evaluation(net: object, name: str) -> None:
    """Refuse a module with a part in training mode, in which answers depend on the batch."""
    if not isinstance(net, nn.Module):
        raise InputError(f"{name}: expected a torch.nn.Module, got {type(net).__name__}")
    if not _is_training(net):
        return
    for part, module in net.named_modules():
        if module.training:
            place = f"{name}.{part}" if part else name
            raise InputError(
                f"{place}: expected evaluation mode, got training mode; call eval() on {name}"
            )


def _is_training(net: nn.Module) -> bool:
    """Return whether a part is in training mode. `named_modules` would take three times as long."""
    rest, seen = [net], set[int]()
    while rest:
        module = rest.pop()
        if module.training:
            return True
        if module._modules and id(module) not in seen:
            seen.add(id(module))
            rest += [part for part in module._modules.values() if part is not None]
    return False


def check_weights(net: nn.Module, name: str) -> None:
    """Refuse parameters and buffers that are not finite. A buffer may hold -inf, as attention masks
    do, and NaN if its module names it in `nan_buffers`."""
    buffers = {name for name, _ in net.named_buffers()}
    meant = {
        f"{part}.{buffer}".lstrip(".")
        for part, module in net.named_modules()
        for buffer in getattr(module, "nan_buffers", ())
    }
    for part, tensor in (*net.named_parameters(), *net.named_buffers()):
        if not tensor.is_floating_point() or part in meant:
            continue
        wide = torch.promote_types(tensor.dtype, torch.float32)
        if part not in buffers or tensor.sum(dtype=wide).item() != -math.inf:
            check_finite(tensor, f"{name}.{part}")


def check_choice(value: str, name: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise InputError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def check_count(value: object, name: str, *, least: int = 1, most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        above = isinstance(value, int) and value > most
        limit = f"at most {most}" if above else f"at least {least}"
        found = "more" if isinstance(value, int) and abs(value) >= 2**256 else repr(value)
        raise InputError(f"{name}: expected an integer of {limit}, got {found}")
    return value


def check_positive(value: float | Sequence[float], name: str, *, most: float = math.inf) -> None:
    """Refuse anything but finite positive numbers of at most `most`."""
    values = value if isinstance(value, Sequence) else (value,)
    fits = values and all(0 < one <= most and one < math.inf for one in values)
    limit = "" if most == math.inf else f" up to {most:g}"
    require(fits, name, f"finite positive numbers{limit}", repr(value))


def check_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest legal value as plain numbers."""
    ordered = False
    with suppress(TypeError):  # if they are no numbers
        ordered = len(bounds) == 2 and -math.inf < bounds[0] < bounds[1] < math.inf
    require(ordered, "bounds", "two finite numbers low < high", repr(bounds))
    return float(bounds[0]), float(bounds[1])


def check_device(name: str) -> torch.device:
    """Return a device that exists and can compute; refuse others."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    # torch asserts that it was built with CUDA, and imports the drivers of rarer devices
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"device: expected one that is present, got {name!r}: {reason}") from error
    return device
