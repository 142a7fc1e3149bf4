"""Rows of tensors that lie in a file, read by their position in it.

A tensor mapped from a file is a tensor like any other, but what is touched of it stays in the
resident memory of the process, and for a row of some KB the system maps up to 2 MB, a whole page of
its cache: some thousand rows, and all of the file is resident. So whoever needs some rows of a
tensor that may be mapped asks `gathered` or `block_of` for them. Those of a tensor known to lie in
a file are copied from there, which leaves nothing behind and is faster too.
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

from otad.errors import InputError


class FileRows:
    """Where the rows of a mapped tensor (N,...) are: an open file and the offset of the first."""

    def __init__(self, path: Path, offset: int, mapped: Tensor) -> None:
        self.path, self.offset = path, offset
        self.shape, self.dtype = tuple(mapped.shape), mapped.dtype
        self.row_bytes = math.prod(self.shape[1:]) * mapped.element_size()
        self._changes = mapped._version
        self._file = os.open(path, os.O_RDONLY)  # the very file, also once another has its name
        weakref.finalize(self, os.close, self._file)

    def holds(self, mapped: Tensor) -> bool:
        """Whether the tensor has not been changed in memory since, as far as torch counts."""
        return mapped._version == self._changes

    def read(self, rows: Tensor, *, pinned: bool = False) -> Tensor:
        """The rows (M,...) of these indices (M,)."""
        places = self._offsets(rows)
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

    def _offsets(self, rows: Tensor) -> list[int]:
        if rows.numel() == 0:
            return []
        rows = rows.cpu()
        low, high = (int(end) for end in rows.aminmax())
        if low < 0 or high >= self.shape[0]:
            raise InputError(
                f"rows: expected 0 to {self.shape[0] - 1}, the rows of {self.path}, "
                f"got {low} to {high}"
            )
        # In integers of Python: those of 32 bits could not count the bytes of a large file.
        return [self.offset + row * self.row_bytes for row in rows.tolist()]

    def _empty(self, count: int, pinned: bool) -> tuple[Tensor, memoryview]:
        found = torch.empty((count, *self.shape[1:]), dtype=self.dtype, pin_memory=pinned)
        return found, found.view(-1).view(torch.uint8).numpy().data

    def _fill(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            read = os.preadv(self._file, [memory[done:]], place + done)
            if read == 0:
                raise InputError(
                    f"{self.path}: expected {len(memory)} bytes from byte {place} on, got {done}: "
                    "the file was truncated after it was opened"
                )
            done += read


_IN_FILES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # mapped tensor -> its FileRows


def remember(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """From now on rows of these tensors, mapped from a safetensors file, are read by position.

    Not those of tensors made in inference mode: torch does not count how often they are changed.
    """
    if not hasattr(os, "preadv"):
        return  # the maps serve
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, mapped in tensors.items():
        if not mapped.is_inference():
            offset = 8 + size + header[name]["data_offsets"][0]
            _IN_FILES[mapped] = FileRows(path, offset, mapped)


def in_file(points: Tensor) -> FileRows | None:
    """Where the rows of a tensor are, if that is in a file."""
    rows: FileRows | None = _IN_FILES.get(points)
    return rows if rows is not None and rows.holds(points) else None


def gathered(points: Tensor, indices: Tensor, device: torch.device | None = None) -> Tensor:
    """points[indices] (...,d) for points (N,d), on a device: by default, where they are."""
    device = points.device if device is None else device
    flat = indices.reshape(-1)
    rows = in_file(points)
    if rows is None:
        found = points.index_select(0, flat.to(points.device)).to(device)
    else:
        found = rows.read(flat, pinned=device.type == "cuda").to(device, non_blocking=True)
    return found.view(*indices.shape, *points.shape[1:])


def block_of(points: Tensor, start: int, stop: int) -> Tensor:
    """points[start:stop] for points (N,d), where they are."""
    rows = in_file(points)
    return points[start:stop] if rows is None else rows.block(start, stop)
