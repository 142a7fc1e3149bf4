"""The official files of MNIST (IDX) and CIFAR-10 (binary version)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_count
from otad.data.dataset import Dataset
from otad.data.registry import MissingDataError, find_first
from otad.errors import InputError

_UNSIGNED_BYTE = 0x08
_LARGEST = 1 << 32  # bytes; a header that claims more is damaged

CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PIXELS = 3 * 32 * 32


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
    """50,000 + 10,000 images (3, 32, 32) in the official order; the files may be gzipped."""
    check_count(rows_per_file, "rows_per_file")
    folders = (root / "cifar-10-batches-bin", root / "cifar10", root)

    def part(*files: str) -> tuple[Tensor, Tensor]:
        rows = []
        for file in files:
            paths = [folder / f"{file}.bin{end}" for folder in folders for end in ("", ".gz")]
            path = find_first(paths, f"{name}: {file}")
            rows.append(_cifar_rows(path))
            if len(rows[-1]) != rows_per_file:
                raise InputError(f"{path}: expected {rows_per_file} images, got {len(rows[-1])}")
        data = torch.from_numpy(np.concatenate(rows))
        return data[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), data[:, 0].long()

    try:
        train = part(*(f"data_batch_{k}" for k in range(1, 6)))
        return _images(train, part("test_batch"), CIFAR_CLASSES, name, source)
    except MissingDataError as error:
        if (root / "cifar-10-batches-py").exists():
            raise MissingDataError(
                f"{error}\nThe python version is not read: it is a pickle, which runs code"
            ) from error
        raise


def _cifar_rows(path: Path) -> np.ndarray:
    """Rows of one label byte and 3072 pixel bytes, channel by channel."""
    data = np.frombuffer(_unpacked(path), dtype=np.uint8)
    if data.size == 0 or data.size % (1 + _PIXELS):
        raise InputError(
            f"{path}: expected a whole number of {1 + _PIXELS}-byte rows, got {data.size} bytes"
        )
    return data.reshape(-1, 1 + _PIXELS)


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
