"""Rows of memory-mapped tensors, read from the file by their position.

Rows read through a memory map stay in resident memory, with up to 2 MB around each: after some
thousand rows the whole file is resident. Reading them from the file needs no memory and is faster.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from otad.checks import require


class FileRows:
    """The rows of a mapped tensor (N,...) in its file, which stays open, from an offset on."""

    def __init__(self, path: Path, offset: int, mapped: Tensor) -> None:
        self.path, self.offset = path, offset
        self.shape, self.dtype = tuple(mapped.shape), mapped.dtype
        self.row_bytes = math.prod(self.shape[1:]) * mapped.element_size()
        self.changes = mapped._version
        self._file = os.open(path, os.O_RDONLY)  # stays this file when another gets its name
        weakref.finalize(self, os.close, self._file)

    def read(self, rows: Tensor, *, pinned: bool = False) -> Tensor:
        """The rows (M,...) of these indices (M,)."""
        if rows.numel() > 0:
            low, high = (int(end) for end in rows.aminmax())
            expected = f"0 to {self.shape[0] - 1}, the rows of {self.path}"
            require(low >= 0 and high < self.shape[0], "rows", expected, f"{low} to {high}")
        # Python integers: 32 bits cannot count the bytes of a large file.
        places = [self.offset + row * self.row_bytes for row in rows.tolist()]
        if hasattr(os, "posix_fadvise"):  # the disk may fetch them all at once
            for place in places:
                os.posix_fadvise(self._file, place, self.row_bytes, os.POSIX_FADV_WILLNEED)
        found, memory = self._empty(len(places), pinned)
        for start, place in enumerate(places):
            self._fill(memory[start * self.row_bytes : (start + 1) * self.row_bytes], place)
        return found

    def block(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop`, no further than the last."""
        stop = min(stop, self.shape[0])
        found, memory = self._empty(max(0, stop - start), pinned=False)
        self._fill(memory, self.offset + start * self.row_bytes)
        return found

    def _empty(self, count: int, pinned: bool) -> tuple[Tensor, memoryview]:
        found = torch.empty((count, *self.shape[1:]), dtype=self.dtype, pin_memory=pinned)
        return found, found.view(-1).view(torch.uint8).numpy().data

    def _fill(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            read = os.preadv(self._file, [memory[done:]], place + done)
            expected = f"{len(memory)} bytes from byte {place} on"
            require(read > 0, str(self.path), expected, f"{done}: the file was truncated")
            done += read


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


def in_file(points: Tensor) -> FileRows | None:
    """The rows of a tensor in its file, if it is mapped from one and unchanged."""
    rows: FileRows | None = _IN_FILES.get(points)
    return rows if rows is not None and rows.changes == points._version else None


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
