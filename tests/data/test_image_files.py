"""MNIST's IDX files and the binary version of CIFAR-10. Pickled batches are never opened."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from otad.data import MissingDataError, load
from otad.data.images import read_idx
from otad.errors import InputError

ROWS = 4
BATCHES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]


def idx_bytes(values: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, packed: bool = False) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (17, 4, 3))
    labels = np.arange(17) % 10
    for prefix, rows in (("train", slice(0, 12)), ("t10k", slice(12, None))):
        for kind, values in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            path, data = folder / f"{prefix}-{kind}-ubyte", idx_bytes(values)
            if packed:
                path, data = path.with_name(f"{path.name}.gz"), gzip.compress(data)
            path.write_bytes(data)
    return images


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_pixels_and_labels(tmp_path: Path, name: str, packed: bool) -> None:
    images = write_idx(tmp_path / name, packed=packed)
    dataset = load(name, tmp_path)
    assert dataset.train_x.shape == (12, 1, 4, 3)
    assert dataset.test_x.shape == (5, 1, 4, 3)
    pixels = torch.cat([dataset.train_x, dataset.test_x]).squeeze(1).numpy() * 255
    np.testing.assert_allclose(pixels, images, atol=1e-4)
    assert dataset.train_y.tolist() == [k % 10 for k in range(12)]
    assert (dataset.bounds, len(dataset.classes)) == ((0.0, 1.0), 10)


def test_idx_files_directly_in_the_data_folder(tmp_path: Path) -> None:
    """Both sets use the same file names: the name of the folder has to tell them apart."""
    for name, folder, other in (
        ("mnist", "digits", "fashion_mnist"),
        ("fashion_mnist", "fashion-mnist", "mnist"),
    ):
        write_idx(tmp_path / folder)
        assert load(name, tmp_path / folder).name == name
        with pytest.raises(MissingDataError):
            load(other, tmp_path / folder)


def test_a_missing_idx_file_names_the_paths_tried(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", packed=True)
    missing = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    missing.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load("mnist", tmp_path)
    assert str(missing) in str(caught.value)
    assert "yann.lecun.com" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "expected 24 bytes .* got 23"),
        (lambda data: data + b"\0", "expected 24 bytes .* got 25"),
        (lambda data: b"", "empty file"),
        (lambda data: b"\0\0\x0d" + data[3:], "00 00 08"),
        (lambda data: b"PK" + data[2:], "50 4b 08 03"),
        (lambda data: data[:9], "expected a header of 12 bytes, got 5"),
        (lambda data: data[:4] + b"\xff" * 12, "4294967295"),
        (lambda data: data[:4] + b"\0" * 4 + data[8:], r"\(0, 4, 3\)"),
    ],
)
def test_damaged_idx_files_are_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    good = idx_bytes(np.arange(24).reshape(2, 4, 3))
    path = tmp_path / "images"
    for data in (damage(good), gzip.compress(damage(good))):
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_idx(path)
    path.write_bytes(gzip.compress(good)[:-9])
    with pytest.raises(InputError, match="gzip"):
        read_idx(path)


def test_idx_labels_and_images_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    write_idx(folder)
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(11)))
    with pytest.raises(InputError, match=r"12 labels.*11"):
        load("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(12)))
    with pytest.raises(InputError, match=r"\[0, 9\], got \[0, 11\]"):
        load("mnist", tmp_path)
    shutil.copy(folder / "train-images-idx3-ubyte", labels)
    with pytest.raises(InputError, match="expected 1 axes"):
        load("mnist", tmp_path)


def cifar_batches() -> list[tuple[list[int], np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        (random.integers(0, 10, ROWS).tolist(), random.integers(0, 256, (ROWS, 3072)).astype("u1"))
        for _ in BATCHES
    ]


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (labels, pixels) in zip(BATCHES, cifar_batches(), strict=True):
        rows = np.concatenate([np.array(labels, dtype="u1")[:, None], pixels], axis=1)
        rows.tofile(folder / f"{name}.bin")
    return folder


def test_cifar_rows_arrive_in_the_official_order(tmp_path: Path) -> None:
    write_binary(tmp_path)
    dataset = load("cifar10", tmp_path, rows_per_file=ROWS)
    assert (len(dataset.train_x), len(dataset.test_x)) == (5 * ROWS, ROWS)
    labels, pixels = cifar_batches()[1]
    assert dataset.train_y[ROWS : 2 * ROWS].tolist() == labels
    expected = pixels.reshape(ROWS, 3, 32, 32) / 255
    np.testing.assert_allclose(dataset.train_x[ROWS : 2 * ROWS].numpy(), expected, atol=1e-7)


def test_binary_files_may_be_gzipped_some_or_all(tmp_path: Path) -> None:
    folder = write_binary(tmp_path)
    plain = load("cifar10", tmp_path, rows_per_file=ROWS).fingerprint()
    for name in (BATCHES[3], BATCHES[0], BATCHES[5]):
        path = folder / f"{name}.bin"
        path.with_name(f"{name}.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        assert load("cifar10", tmp_path, rows_per_file=ROWS).fingerprint() == plain
    packed = folder / "test_batch.bin.gz"
    for damaged in (packed.read_bytes()[:-9], b"no gzip"):
        packed.write_bytes(damaged)
        with pytest.raises(InputError, match=r"test_batch.bin.gz: .*gzip"):
            load("cifar10", tmp_path, rows_per_file=ROWS)


def test_refusals_of_the_binary_version(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "data_batch_3.bin"
    with pytest.raises(InputError, match="10000 images, got 12292"):
        load("cifar10", tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"data_batch_3.bin: .*12292 bytes.*got 12291"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.write_bytes(b"\x0a" + data[1:])
    with pytest.raises(InputError, match=r"\[0, 9\], got \[0, 10\]"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3.bin"):
        load("cifar10", tmp_path, rows_per_file=ROWS)


class Hostile:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    trap, folder = tmp_path / "made", tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    data = pickle.dumps({"data": Hostile(trap), "labels": [1]})
    for name in BATCHES:
        (folder / name).write_bytes(data)
    with pytest.raises(MissingDataError, match=r"cifar-10-binary.tar.gz"):
        load("cifar10", tmp_path)
    binary = write_binary(tmp_path)
    (binary / "data_batch_1.bin").write_bytes(data)
    with pytest.raises(InputError, match="12292 bytes"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    assert not trap.exists()
    pickle.loads(data)  # the trap is a real one
    assert trap.exists()
