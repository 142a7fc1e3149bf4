"""IDX files written by hand, read back through the registry, and damaged in every way."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from otad.data import MissingDataError, load
from otad.data.idx import read_idx
from otad.errors import InputError

FILES = ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(values: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_set(folder: Path, *, packed: bool, train: int = 12, test: int = 5) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (train + test, 4, 3))
    labels = np.arange(train + test) % 10
    for prefix, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        for kind, values in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            data = idx_bytes(values)
            name = f"{prefix}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
    return images


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_pixels_and_labels_arrive(tmp_path: Path, name: str, packed: bool) -> None:
    images = write_set(tmp_path / name, packed=packed)
    dataset = load(name, tmp_path)
    assert dataset.input_shape == (1, 4, 3)
    assert (len(dataset.train_x), len(dataset.test_x)) == (12, 5)
    pixels = torch.cat([dataset.train_x, dataset.test_x]).squeeze(1).numpy() * 255
    np.testing.assert_allclose(pixels, images, atol=1e-4)
    assert dataset.train_y.tolist() == [k % 10 for k in range(12)]
    assert dataset.bounds == (0.0, 1.0)
    assert len(dataset.classes) == 10


def test_files_directly_in_the_data_folder(tmp_path: Path) -> None:
    """Both sets use the same file names: the name of the folder has to tell them apart."""
    write_set(tmp_path / "fashion-mnist", packed=True)
    write_set(tmp_path / "digits", packed=True)
    assert load("fashion_mnist", tmp_path / "fashion-mnist").name == "fashion_mnist"
    assert load("mnist", tmp_path / "digits").name == "mnist"
    with pytest.raises(MissingDataError):
        load("mnist", tmp_path / "fashion-mnist")
    with pytest.raises(MissingDataError):
        load("fashion_mnist", tmp_path / "digits")


def test_a_missing_file_names_the_paths_tried(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist", packed=True)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingDataError) as caught:
        load("mnist", tmp_path)
    assert str(tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz") in str(caught.value)
    assert "Where to get it" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "expected 24 bytes .* got 23"),
        (lambda data: data + b"\0", "expected 24 bytes .* got more"),
        (lambda data: b"", "empty file"),
        (lambda data: b"\0\0\x0d" + data[3:], "00 00 08"),
        (lambda data: b"PK" + data[2:], "50 4b 08 03"),
        (lambda data: data[:9], "truncated IDX header"),
        (lambda data: data[:4] + b"\xff" * 12, "implausible"),
        (lambda data: data[:4] + b"\0" * 4 + data[8:], "implausible"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: object, message: str) -> None:
    good = idx_bytes(np.arange(24).reshape(2, 4, 3))
    path = tmp_path / "images"
    assert callable(damage)
    for data in (damage(good), gzip.compress(damage(good))):
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            read_idx(path)


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    data = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (50, 4, 3))))
    path = tmp_path / "images.gz"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="truncated or damaged gzip"):
        read_idx(path)


def test_labels_and_images_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    write_set(folder, packed=False)
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(11)))
    with pytest.raises(InputError, match="11 labels and 12 images"):
        load("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(12)))
    with pytest.raises(InputError, match="expected labels 0 to 9, got 0 to 11"):
        load("mnist", tmp_path)
    shutil.copy(folder / FILES[0], labels)
    with pytest.raises(InputError, match="expected 1 axes"):
        load("mnist", tmp_path)
