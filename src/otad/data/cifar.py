"""CIFAR-10: the official binary version, or the python version read without unpickling."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.checks import check_count
from otad.data.batch_reader import read_batch
from otad.data.dataset import Dataset
from otad.data.files import find_first
from otad.errors import InputError

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
SOURCE = "CIFAR-10, Krizhevsky 2009 (free for research, no formal licence)"
HINT = (
    "cifar-10-binary.tar.gz (or cifar-10-python.tar.gz) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked in the data folder"
)
_PIXELS = 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{k}" for k in range(1, 6))
_TEST = "test_batch"
_BINARY = (".bin", ".bin.gz")


def load_cifar10(root: Path, *, rows_per_file: int = 10_000) -> Dataset:
    """50,000 + 10,000 images (3, 32, 32) in the official order; binary files may be gzipped."""
    check_count(rows_per_file, "rows_per_file")
    folders = [root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root / "cifar10", root]
    starts = [folder / (_TRAIN[0] + suffix) for folder in folders for suffix in (*_BINARY, "")]
    start = find_first(starts, "cifar10: first train batch", HINT)
    is_python = start.name == _TRAIN[0]

    def part(names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        suffixes = ("",) if is_python else _BINARY
        read = _read_python if is_python else _read_binary
        paths = [
            find_first([start.with_name(name + end) for end in suffixes], f"cifar10: {name}", HINT)
            for name in names
        ]
        batches = [read(path) for path in paths]
        for path, (labels, _) in zip(paths, batches, strict=True):
            if len(labels) != rows_per_file:
                raise InputError(f"{path}: expected {rows_per_file} images, got {len(labels)}")
        pixels = np.concatenate([pixels for _, pixels in batches]).reshape(-1, 3, 32, 32)
        codes = np.concatenate([labels for labels, _ in batches]).astype(np.int64)
        return torch.from_numpy(pixels).float().div_(255), torch.from_numpy(codes)

    train_x, train_y = part(_TRAIN)
    test_x, test_y = part((_TEST,))
    return Dataset(
        name="cifar10",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        task="classification",
        source=SOURCE,
        classes=CLASSES,
        bounds=(0.0, 1.0),
    )


def _read_binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows of one label byte and 3072 pixel bytes, channel by channel."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(f"{path}: expected a gzip file, got: {error}") from error
    data = np.frombuffer(content, dtype=np.uint8)
    if data.size == 0 or data.size % (1 + _PIXELS):
        raise InputError(
            f"{path}: expected a whole number of {1 + _PIXELS}-byte rows, got {data.size} bytes"
        )
    rows = data.reshape(-1, 1 + _PIXELS)
    return rows[:, 0], rows[:, 1:]


def _read_python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    batch = read_batch(path.read_bytes(), str(path))
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise InputError(f"{path}: expected an array 'data' and a list 'labels', got {list(batch)}")
    if pixels.shape != (len(labels), _PIXELS):
        raise InputError(
            f"{path}: expected data of shape {(len(labels), _PIXELS)} for {len(labels)} labels, "
            f"got {pixels.shape}"
        )
    if not all(isinstance(label, int) and 0 <= label < len(CLASSES) for label in labels):
        raise InputError(f"{path}: expected labels 0 to {len(CLASSES) - 1}")
    return np.array(labels, dtype=np.uint8), pixels
