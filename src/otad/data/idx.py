"""IDX files: the format of MNIST and Fashion-MNIST, gzip-compressed or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from otad.data.dataset import Dataset
from otad.data.files import find_first
from otad.errors import InputError

_UNSIGNED_BYTE = 0x08
_LARGEST = 1 << 32  # bytes; a header that claims more is damaged


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an IDX file: 0, 0, type, number of axes, big-endian sizes, data."""
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            return _parse(cast(BinaryIO, stream), path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged gzip file ({error})") from error


def _parse(stream: BinaryIO, path: Path) -> Tensor:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or magic[3] == 0:
        raise InputError(
            f"{path}: expected an IDX file of unsigned bytes (first bytes 00 00 08), "
            f"got {magic.hex(' ') or 'an empty file'}"
        )
    axes = magic[3]
    sizes_raw = stream.read(4 * axes)
    if len(sizes_raw) < 4 * axes:
        raise InputError(f"{path}: truncated IDX header, expected {axes} sizes")
    sizes = struct.unpack(f">{axes}I", sizes_raw)
    expected = math.prod(sizes)
    if not 0 < expected <= _LARGEST:
        raise InputError(f"{path}: IDX header with implausible sizes {sizes}")
    data = stream.read(expected + 1)  # one more byte shows a file that is too long
    if len(data) != expected:
        got = f"{len(data)}" if len(data) < expected else "more"
        raise InputError(f"{path}: expected {expected} bytes for sizes {sizes}, got {got}")
    return torch.from_numpy(np.frombuffer(data, np.uint8).reshape(sizes).copy())


def load_idx(
    folders: Sequence[Path], *, name: str, classes: tuple[str, ...], source: str, hint: str
) -> Dataset:
    """The four official files, each in the first folder that has it, with or without .gz."""

    def read(file: str, axes: int) -> Tensor:
        paths = [folder / (file + suffix) for folder in folders for suffix in ("", ".gz")]
        path = find_first(paths, f"{name}: {file}", hint)
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

    train_x, train_y = part("train")
    test_x, test_y = part("t10k")
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        task="classification",
        source=source,
        classes=classes,
        bounds=(0.0, 1.0),
    )
