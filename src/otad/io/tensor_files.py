"""Sealed safetensors files: the one file format of banks, checkpoints and models.

The metadata of a sealed file has a `checksum`: the SHA-256 of the file itself with these 64
characters all "0". Files are replaced atomically, and equal contents give equal files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from otad.checks import require
from otad.errors import InputError, OtadError
from otad.io.codec import parse_json
from otad.io.files import replacing
from otad.io.mapped_rows import in_file

FORMAT = "otad-tensors"
OLD_FORMAT = "otad-checkpoint-1"  # with a checksum of the tensors and the header in its one entry
BLOCK_BYTES = 16 * 2**20
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_UNSEALED = "0" * 64
_SEAL = b'"checksum": "'

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and shape of each tensor, in file order."""


class TensorFile(NamedTuple):
    tensors: dict[str, Tensor]
    header: dict[str, Any]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header of plain JSON values, as one whole file."""
    widest_first = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    layout = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in widest_first}
    metadata = {"format": FORMAT, "header": json.dumps(header, sort_keys=True)}
    write_sealed(path, layout, metadata, ((name, tensors[name]) for name in layout))


def read_tensors(path: Path) -> TensorFile:
    """Tensors on the CPU and the header, or an `InputError` if any byte was changed."""
    require(path.is_file(), str(path), "a safetensors file", "none, or no regular file")
    mapped, metadata = map_sealed(path)
    if list(metadata) == [OLD_FORMAT]:
        checksum, text = metadata[OLD_FORMAT][:64], metadata[OLD_FORMAT][64:]
        _compare(path, checksum, hashlib.sha256((fingerprint(mapped) + text).encode()).hexdigest())
    else:
        ours = metadata.get("format") == FORMAT
        require(ours, str(path), f"format {FORMAT!r}", sorted(metadata))
        check_seal(path)
        text = metadata["header"]
    header = parse_json(text, str(path))
    return TensorFile({name: tensor.clone() for name, tensor in mapped.items()}, header)


def write_sealed(
    path: Path, layout: Layout, metadata: Mapping[str, str], rows: Iterable[tuple[str, Tensor]]
) -> str:
    """Write a sealed file from the next `rows` of a tensor, again and again, in its own dtype; its
    checksum. Tensors of wider dtypes come first in the layout, so that all are aligned."""
    header: dict[str, object] = {"__metadata__": {**metadata, "checksum": _UNSEALED}}
    starts, stops, stop = {}, {}, 0
    for name, (dtype, shape) in layout.items():
        start, stop = stop, stop + dtype.itemsize * math.prod(shape)
        starts[name], stops[name] = start, stop
        entry = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape)}
        header[name] = entry | {"data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    with replacing(path) as partial:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, some in rows:
                file.seek(8 + len(text) + starts[name])
                starts[name] += file.write(_bytes_of(some.cpu()))
        if starts != stops:
            raise OtadError(f"{path}: expected rows up to {stops}, got {starts}")
        place, _, checksum = _read_seal(partial)
        with partial.open("rb+") as file:
            file.seek(place)
            file.write(checksum.encode())
    return checksum


def map_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Memory-mapped tensors and the metadata. Changes made in memory never reach the file."""
    try:
        # Never inference tensors: torch counts the changes of others, for `mapped_rows`.
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise InputError(
            f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that are "
            f"not one ({error}); pickles are never read"
        ) from error
    except FileNotFoundError:
        raise  # it names the path
    except OSError as error:
        found = "a folder" if path.is_dir() else error
        raise InputError(f"{path}: expected a safetensors file, got: {found}") from error


def refuse_other_file(path: Path, kind: str, name: str) -> None:
    """Refuse to replace a file unless it is a sealed file of this format."""
    if path.exists():
        found = "a file without whole tensors" if path.is_file() else "a folder"
        if path.is_file():
            with suppress(InputError):
                found = map_sealed(path)[1].get("format", "other tensors")
        expected = f"a new file, or one of the format {kind}"
        require(found == kind, name, expected, f"{path}, {found}")


def check_seal(path: Path) -> None:
    """Refuse a sealed file in which any byte was changed; it is read in blocks."""
    _compare(path, *_read_seal(path)[1:])


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, for any device and order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        require(isinstance(tensor, Tensor), name, "a torch.Tensor", type(tensor).__name__)
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        for part in _parts_of(tensor):
            digest.update(_bytes_of(part.cpu()))
    return digest.hexdigest()


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor, in blocks if they are in files, so that memory stays small."""
    if (rows := in_file(tensor)) is None:
        yield tensor
        return
    count = max(1, BLOCK_BYTES // max(1, tensor[:1].nbytes))
    for start in range(0, len(tensor), count):
        yield rows.block(start, start + count)


def fingerprint_of(
    net: nn.Module | Mapping[str, Tensor], data: Mapping[str, Tensor] | None = None, note: str = ""
) -> str:
    """SHA-256 of the weights (a module or its state), the data by name, and a note."""
    state = net.state_dict() if isinstance(net, nn.Module) else net
    tensors = {f"net/{name}": tensor for name, tensor in state.items()}
    tensors |= {f"data/{name}": tensor for name, tensor in (data or {}).items()}
    return hashlib.sha256((fingerprint(tensors) + note).encode()).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, row by row, without a copy where it is contiguous."""
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # an axis of one may have any stride
    held: memoryview = flat.view(torch.uint8).numpy().data
    return held


def _read_seal(path: Path) -> tuple[int, str, str]:
    """The place of the checksum in the file, its value, and the value it should have."""
    with path.open("rb") as file:
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
        start = header.find(_SEAL) + len(_SEAL)
        stop = start + len(_UNSEALED)
        digest = hashlib.sha256(prefix + header[:start] + _UNSEALED.encode() + header[stop:])
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return 8 + start, header[start:stop].decode(errors="replace"), digest.hexdigest()


def _compare(path: Path, stored: str, found: str) -> None:
    damaged = f"{found}: the file is damaged; take it from a copy, or make it again"
    require(stored == found, str(path), f"contents with checksum {stored}", damaged)
