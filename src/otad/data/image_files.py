"""The official files of MNIST (IDX) and CIFAR-10 (binary, or pickled batches)."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.checks import check_count
from otad.data.dataset import Dataset
from otad.data.registry import find_first
from otad.errors import InputError

_UNSIGNED_BYTE = 0x08
_LARGEST = 1 << 32  # bytes; a header that claims more is damaged

CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PIXELS = 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{k}" for k in range(1, 6))
_BINARY = (".bin", ".bin.gz")
Bytes = NDArray[np.uint8]


def load_idx(
    folders: Sequence[Path], *, classes: tuple[str, ...], name: str, source: str
) -> Dataset:
    """The four official files, each in the first folder that has it, with or without .gz."""

    def read(file: str, axes: int) -> Tensor:
        paths = [folder / (file + suffix) for folder in folders for suffix in ("", ".gz")]
        path = find_first(paths, f"{name}: {file}")
        values = read_idx(path)
        if values.dim() != axes:
            raise InputError(f"{path}: expected {axes} axes, got sizes {tuple(values.shape)}")
        return values

    def part(prefix: str) -> tuple[Tensor, Tensor]:
        images = read(f"{prefix}-images-idx3-ubyte", 3)
        labels = read(f"{prefix}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise InputError(
                f"{name} {prefix}: expected as many labels as images, "
                f"got {len(labels)} labels and {len(images)} images"
            )
        return images.unsqueeze(1).float().div_(255), labels.long()

    return _images(part("train"), part("t10k"), classes, name, source)


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an IDX file: 0, 0, type, number of axes, big-endian sizes, data."""
    content = _unpacked(path)
    magic, content = content[:4], content[4:]
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or magic[3] == 0:
        raise InputError(
            f"{path}: expected an IDX file of unsigned bytes (first bytes 00 00 08), "
            f"got {magic.hex(' ') or 'an empty file'}"
        )
    axes = magic[3]
    if len(content) < 4 * axes:
        raise InputError(f"{path}: truncated IDX header, expected {axes} sizes")
    sizes = struct.unpack(f">{axes}I", content[: 4 * axes])
    if not 0 < math.prod(sizes) <= _LARGEST:
        raise InputError(f"{path}: IDX header with implausible sizes {sizes}")
    data = np.frombuffer(content, np.uint8, offset=4 * axes)
    if data.size != math.prod(sizes):
        expected = math.prod(sizes)
        raise InputError(f"{path}: expected {expected} bytes for sizes {sizes}, got {data.size}")
    return torch.from_numpy(data.reshape(sizes).copy())


def load_cifar10(root: Path, *, rows_per_file: int = 10_000, name: str, source: str) -> Dataset:
    """50,000 + 10,000 images (3, 32, 32) in the official order; binary files may be gzipped."""
    check_count(rows_per_file, "rows_per_file")
    folders = [root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root / "cifar10", root]
    starts = [folder / (_TRAIN[0] + suffix) for folder in folders for suffix in (*_BINARY, "")]
    start = find_first(starts, f"{name}: first train batch")
    pickled = start.name == _TRAIN[0]

    def part(*files: str) -> tuple[Tensor, Tensor]:
        all_labels, all_pixels = [], []
        for file in files:
            suffixes = ("",) if pickled else _BINARY
            path = find_first([start.with_name(file + end) for end in suffixes], f"{name}: {file}")
            labels, pixels = _read_pickled(path) if pickled else _read_binary(path)
            if len(labels) != rows_per_file:
                raise InputError(f"{path}: expected {rows_per_file} images, got {len(labels)}")
            all_labels.append(labels)
            all_pixels.append(pixels)
        x = torch.from_numpy(np.concatenate(all_pixels).reshape(-1, 3, 32, 32)).float().div_(255)
        return x, torch.from_numpy(np.concatenate(all_labels).astype(np.int64))

    return _images(part(*_TRAIN), part("test_batch"), CIFAR_CLASSES, name, source)


def _read_binary(path: Path) -> tuple[Bytes, Bytes]:
    """Rows of one label byte and 3072 pixel bytes, channel by channel."""
    data = np.frombuffer(_unpacked(path), dtype=np.uint8)
    if data.size == 0 or data.size % (1 + _PIXELS):
        raise InputError(
            f"{path}: expected a whole number of {1 + _PIXELS}-byte rows, got {data.size} bytes"
        )
    rows = data.reshape(-1, 1 + _PIXELS)
    return rows[:, 0], rows[:, 1:]


def _read_pickled(path: Path) -> tuple[Bytes, Bytes]:
    try:
        batch = _BatchUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        items = {key.decode() if isinstance(key, bytes) else key: batch[key] for key in batch}
        pixels, labels = items["data"].values, items["labels"]
        count = len(labels)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file may raise anything within pickle
        raise InputError(
            f"{path}: expected a batch of CIFAR-10 with 'data' and 'labels', got: {error!r}"
        ) from error
    if pixels is None or pixels.shape != (count, _PIXELS):
        shape = None if pixels is None else pixels.shape
        raise InputError(f"{path}: expected data of shape {(count, _PIXELS)}, got {shape}")
    if not all(isinstance(label, int) and 0 <= label < len(CIFAR_CLASSES) for label in labels):
        raise InputError(f"{path}: expected labels 0 to {len(CIFAR_CLASSES) - 1}")
    return np.array(labels, dtype=np.uint8), pixels


class _BatchUnpickler(pickle.Unpickler):
    """Reads a pickled batch of CIFAR-10 and nothing else.

    A pickle calls the functions that it names. The few names that a uint8 array needs are replaced
    by the harmless stand-ins below and all others are refused, so a hostile file runs nothing.
    """

    def find_class(self, module: str, name: str) -> Any:
        stand_ins = {
            "numpy.core.multiarray._reconstruct": _PickledArray,
            "numpy._core.multiarray._reconstruct": _PickledArray,
            "numpy.ndarray": None,  # only passed to _reconstruct
            "numpy.dtype": _PickledDtype,
            "_codecs.encode": _encode_latin1,
        }
        if f"{module}.{name}" not in stand_ins:
            raise InputError(f"refused: the file wants to use '{module}.{name}'")
        return stand_ins[f"{module}.{name}"]


class _PickledDtype:
    """uint8, the only dtype in a batch. Its state is the byte order, which uint8 does not have."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("u1", b"u1", "uint8"):
            raise InputError(f"refused: expected an array of uint8, got dtype {name!r:.80}")

    def __setstate__(self, state: object) -> None:
        pass


class _PickledArray:
    """A uint8 array in `values`, made of the bytes and the shape in the file."""

    values: Bytes | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _PickledDtype(), bool(fortran), bytes() | str() as raw):
                data = raw.encode("latin1") if isinstance(raw, str) else raw
            case _:
                raise InputError("expected the contents of a uint8 array")
        if not all(isinstance(size, int) for size in shape) or math.prod(shape) != len(data):
            raise InputError(f"expected as many bytes as shape {shape} has, got {len(data)}")
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


def _encode_latin1(text: str, encoding: str) -> bytes:
    """Protocol 2 writes bytes as a call of this function."""
    if encoding not in ("latin1", "latin-1"):
        raise InputError(f"refused: expected the encoding latin1, got {encoding!r:.80}")
    return text.encode("latin1")


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b" and path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged gzip file ({error})") from error


def _images(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: tuple[str, ...],
    name: str,
    source: str,
) -> Dataset:
    return Dataset(
        name, *train, *test, task="classification", source=source, classes=classes,
        bounds=(0.0, 1.0),
    )  # fmt: skip
