"""Rows of memory-mapped tensors, read from the file by their position.

Rows read through a memory map stay in resident memory, with up to 2 MB around each: after some
thousand rows the whole file is resident. So rows come from a map whose pages are dropped after each
read, and blocks are read from the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from otad.checks import require
from otad.errors import OtadError
from otad.threads import torch_threads

MOST_READERS = 8  # more are not faster
_HUGE_PAGE = 2**21  # bytes


class FileRows:
    """The rows of a mapped tensor (N,...) in its file, which stays open, from an offset on."""

    def __init__(self, path: Path, offset: int, mapped: Tensor) -> None:
        self.path, self.offset = path, offset
        self.shape, self.dtype = tuple(mapped.shape), mapped.dtype
        self.row_bytes = math.prod(self.shape[1:]) * mapped.element_size()
        self.changes = mapped._version
        self._file = os.open(path, os.O_RDONLY)  # stays this file when another gets its name
        weakref.finalize(self, os.close, self._file)
        self._end = offset + mapped.numel() * mapped.element_size()
        self._map = mmap.mmap(self._file, self._end, access=mmap.ACCESS_COPY)
        flat = np.frombuffer(self._map, np.uint8)[offset:]
        self._rows = torch.from_numpy(flat).view(mapped.dtype).view(self.shape)

    @property
    def changed(self) -> int:
        """When the file was last changed, in nanoseconds."""
        return os.fstat(self._file).st_mtime_ns

    def read(self, rows: Tensor, *, pinned: bool = False) -> Tensor:
        """The rows (M,...) of these indices (M,)."""
        _check_rows(rows, self.shape[0], str(self.path))
        size = os.fstat(self._file).st_size
        found = f"{size}: the file was truncated"
        require(size >= self._end, str(self.path), f"at least {self._end} bytes", found)
        if hasattr(os, "posix_fadvise"):  # the disk may fetch them all at once
            for row in rows.tolist():  # 32 bits could not count the bytes of a large file
                place = self.offset + row * self.row_bytes
                os.posix_fadvise(self._file, place, self.row_bytes, os.POSIX_FADV_WILLNEED)
        copied, _ = self._empty(len(rows), pinned)
        with torch_threads(_readers()) if pinned else nullcontext():
            torch.index_select(self._rows, 0, rows, out=copied)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        return copied

    def block(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, no further than the last."""
        stop = min(stop, self.shape[0])
        found, memory = self._empty(max(0, stop - start), pinned=False)
        self._fill(memory, self.offset + start * self.row_bytes)
        return found

    def _empty(self, count: int, pinned: bool) -> tuple[Tensor, memoryview]:
        shape, size = (count, *self.shape[1:]), count * self.row_bytes
        if pinned or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            found = torch.empty(shape, dtype=self.dtype, pin_memory=pinned)
            return found, found.view(-1).view(torch.uint8).numpy().data
        # Fresh memory in pages of the usual size takes longer than to read the rows.
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape), memoryview(memory)

    def _fill(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            read = os.preadv(self._file, [memory[done:]], place + done)
            expected = f"{len(memory)} bytes from byte {place} on"
            require(read > 0, str(self.path), expected, f"{done}: the file was truncated")
            done += read


def _readers() -> int:
    """Return how many threads copy rows while a GPU waits. A thread without a core would hold up
    all others, so they are at most half of the cores of this process, or as many as torch may use.
    """
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return max(torch.get_num_threads(), min(MOST_READERS, len(allowed(0)) // 2))


def _check_rows(rows: Tensor, count: int, of: str) -> None:
    if rows.numel() > 0:
        low, high = (int(end) for end in rows.aminmax())
        expected = f"0 to {count - 1}, the rows of {of}"
        require(low >= 0 and high < count, "rows", expected, f"{low} to {high}")


class JoinedRows(Tensor):
    """Tensors (N_i,d) of several files, one below the other, as one constant tensor (N,d).

    `gathered` and `block_of` read rows from the files that hold them, and so do indices along the
    first axis. Any other operation first copies all rows to memory."""

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _FIXED = "no change of tensors that are joined from several files"
    tensors: tuple[Tensor, ...]
    starts: Tensor

    @staticmethod
    def __new__(cls, tensors: Sequence[Tensor]) -> Self:
        first, *stops = accumulate((len(one) for one in tensors), initial=0)
        shape, dtype = (stops[-1], *tensors[0].shape[1:]), tensors[0].dtype
        joined: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        joined.tensors, joined.starts = tuple(tensors), torch.tensor([first, *stops])
        return joined

    def read(self, rows: Tensor, *, pinned: bool = False) -> Tensor:
        """The rows (M,...) of these indices (M,)."""
        _check_rows(rows, len(self), "the joined files")
        found = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype, pin_memory=pinned)
        owners = torch.bucketize(rows.contiguous(), self.starts[1:], right=True)
        for owner in owners.unique().tolist():
            own = owners == owner
            found[own] = gathered(self.tensors[owner], rows[own] - self.starts[owner])
        return found

    def block(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, no further than the last."""
        parts = []
        for tensor, first in zip(self.tensors, self.starts.tolist(), strict=False):
            low, high = max(0, start - first), min(len(tensor), stop - first)
            if low < high:
                parts.append(block_of(tensor, low, high))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else self.tensors[0][:0].clone()

    @classmethod
    @torch.inference_mode(False)  # torch counts the changes of views, also of those read from files
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operation, first = function.overloadpacket, args[0] if args else None
        aten = torch.ops.aten
        if isinstance(first, cls):
            if operation in (aten.detach, aten.alias):
                return cls(first.tensors)
            if operation is aten.select and args[1] == 0:
                return first.read(torch.tensor([args[2] % len(first)]))[0]
            if operation is aten.slice and args[1:2] in ((), (0,)) and len(args) < 5:
                start, stop, _ = slice(*args[2:4]).indices(len(first))
                return first.block(start, stop)
            if operation is aten.index_select and args[1] == 0:
                return first.read(args[2])
            if operation is aten.index and len(args[1]) == 1 and args[1][0].dtype == torch.int64:
                rows = torch.where(args[1][0] < 0, args[1][0] + len(first), args[1][0])
                return first.read(rows.flatten()).view(*rows.shape, *first.shape[1:])
        require(not function._schema.is_mutable, "bank", cls._FIXED, function)
        whole = lambda it: it.block(0, len(it)) if isinstance(it, cls) else it  # noqa: E731
        return function(*tree_map(whole, args), **tree_map(whole, kwargs or {}))

    def __setitem__(self, place: Any, value: Any) -> None:
        require(False, "bank", self._FIXED, "new values")

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(self.tensors)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.block(0, len(self)).__reduce_ex__(protocol)


_IN_FILES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # mapped tensor -> its FileRows


def remember(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """From now on read rows of these tensors, mapped from a safetensors file, by position; except
    for tensors made in inference mode, whose changes torch does not count."""
    if not hasattr(os, "preadv"):
        return  # rows are read through the map
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, mapped in tensors.items():
        if not mapped.is_inference():
            offset = 8 + size + header[name]["data_offsets"][0]
            _IN_FILES[mapped] = FileRows(path, offset, mapped)


def map_rows(
    path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, changed: int
) -> Tensor:
    """Map rows of a file that another process reads as well, unless it was changed since."""
    expected = f"the file that the caller maps, unchanged, at {path}"
    try:
        found = path.stat().st_mtime_ns
        flat = np.memmap(path, np.uint8, "c", offset, (math.prod(shape) * dtype.itemsize,))
    except (OSError, ValueError) as error:
        raise OtadError(f"executor: expected {expected}, got: {error}") from error
    if found != changed:
        raise OtadError(f"executor: expected {expected}, got one that was changed")
    mapped = torch.from_numpy(flat).view(dtype).view(shape)
    if hasattr(os, "preadv"):
        _IN_FILES[mapped] = FileRows(path, offset, mapped)
    return mapped


def in_file(points: Tensor) -> FileRows | JoinedRows | None:
    """The rows of a tensor in its file or files, if it is mapped from there and unchanged."""
    if isinstance(points, JoinedRows):
        return points
    rows: FileRows | None = _IN_FILES.get(points)
    return rows if rows is not None and rows.changes == points._version else None


def changes_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place. It is None if it was made in inference mode: torch
    does not count the changes of these."""
    return None if tensor.is_inference() else tensor._version


def gathered(points: Tensor, indices: Tensor, device: torch.device | None = None) -> Tensor:
    """points[indices] (...,d) for points (N,d), on a device: by default, where they are."""
    device = points.device if device is None else device
    flat = indices.reshape(-1)
    rows = in_file(points)
    if rows is None:
        found = points.index_select(0, flat.to(points.device)).to(device)
    else:
        pinned = device.type == "cuda"
        found = rows.read(flat.cpu(), pinned=pinned).to(device, non_blocking=True)
    return found.view(*indices.shape, *points.shape[1:])


def block_of(points: Tensor, start: int, stop: int) -> Tensor:
    """points[start:stop] for points (N,d), where they are."""
    rows = in_file(points)
    return points[start:stop] if rows is None else rows.block(start, stop)


def spread_rows(count: int, most: int) -> Tensor:
    """Up to `most` of so many rows, evenly spread from the first to the last."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).long()
