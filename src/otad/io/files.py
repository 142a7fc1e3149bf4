"""Files that are whole or not there: atomic replacement, and sealed safetensors files.

A sealed file is an ordinary safetensors file (8 bytes of header length, a JSON header, the bytes of
the tensors) whose metadata holds `checksum`: the SHA-256 of the file itself, taken while these 64
characters are all "0". So a change of any byte, in the header too, is noticed, and the tensors
can be written block by block: their sizes go first, the checksum last.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from otad.errors import InputError, OtadError

BLOCK_BYTES = 16 * 2**20
_DTYPE_NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
}
_UNSEALED = "0" * 64
_SEAL = b'"checksum": "'


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a new file beside `path`, which takes its place when the block ends well.

    A kill at any moment leaves what was at `path` before, or the whole new file. What a killed
    writer left beside it is cleared away by the next one; of two writers at once, the one that
    started first fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        leftover.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _flush(path.parent)


class SealedWriter:
    """A sealed safetensors file of known layout (name -> dtype and shape), written by rows."""

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        header: dict[str, object] = {"__metadata__": {**metadata, "checksum": _UNSEALED}}
        spans, end = {}, 0
        for name, (dtype, shape) in layout.items():
            start, end = end, end + dtype.itemsize * math.prod(shape)
            spans[name] = (start, end)
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # keeps the tensors aligned
        base = 8 + len(text)
        self._path = path
        self._next = {name: base + start for name, (start, _) in spans.items()}
        self._ends = {name: base + stop for name, (_, stop) in spans.items()}
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, name: str, rows: Tensor) -> None:
        """The next rows of a tensor, in its own dtype, on the CPU."""
        self._file.seek(self._next[name])
        self._next[name] += self._file.write(as_bytes(rows))

    def __enter__(self) -> SealedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is not None:
            return
        if self._next != self._ends:
            raise OtadError(f"{self._path}: expected rows up to {self._ends}, got {self._next}")
        place, _, checksum = _read_seal(self._path)
        with self._path.open("rb+") as file:
            file.seek(place)
            file.write(checksum.encode())


def read_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Memory-mapped tensors and the metadata. Changes made in memory never reach the file."""
    try:
        # Never inference tensors: torch counts the changes of others, which `file_rows` needs.
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise InputError(
            f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that are "
            f"not one ({error}): truncated, damaged, or of another kind (pickles are never read)"
        ) from error
    except FileNotFoundError:
        raise  # names the path, as any program expects
    except OSError as error:
        found = "a folder" if path.is_dir() else error
        raise InputError(f"{path}: expected a safetensors file, got: {found}") from error


def check_seal(path: Path) -> None:
    """Refuse a file that is not, to the byte, what was written; it is read in blocks."""
    _, stored, actual = _read_seal(path)
    if stored != actual:
        raise InputError(
            f"{path}: expected contents with checksum {stored}, got {actual}: the file is damaged"
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row by row, without a copy where it is contiguous."""
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # an axis of one may have any stride
    held: memoryview = flat.view(torch.uint8).numpy().data
    return held


def _read_seal(path: Path) -> tuple[int, str, str]:
    """Where the checksum stands in the file, what stands there, and what should."""
    with path.open("rb") as file:
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
        start = header.find(_SEAL) + len(_SEAL)
        stop = start + len(_UNSEALED)
        digest = hashlib.sha256(prefix + header[:start] + _UNSEALED.encode() + header[stop:])
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return 8 + start, header[start:stop].decode(errors="replace"), digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
