"""MNIST's IDX files and CIFAR-10 in both versions. A pickled batch must never run what it reads."""

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
from otad.data.image_files import read_idx
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
        (lambda data: data[:9], "expected 3 sizes"),
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
    with pytest.raises(InputError, match="11 labels and 12 images"):
        load("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(12)))
    with pytest.raises(InputError, match="0 to 9, got 0 to 11"):
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


def python2_pickle(labels: list[int], pixels: np.ndarray) -> bytes:
    """Instruction by instruction what Python 2 wrote into the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    raw = pixels.tobytes()
    shape = b"M" + struct.pack("<H", pixels.shape[0]) + b"M" + struct.pack("<H", pixels.shape[1])
    dtype = (
        b"cnumpy\ndtype\nq\x05" + text(b"u1") + b"K\x00K\x01\x87Rq\x06"
        b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text(
        b"b"
    )
    array += b"\x87Rq\x04(K\x01" + shape + b"\x86" + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    start = b"\x80\x02}q\x01(" + text(b"batch_label") + text(b"a batch") + text(b"labels")
    return start + b"]q\x07(" + numbers + b"e" + text(b"data") + array + b"u."


def python3_pickle(protocol: int, order: str = "C") -> Callable[[list[int], np.ndarray], bytes]:
    def write(labels: list[int], pixels: np.ndarray) -> bytes:
        data = np.asarray(pixels, order=order)  # type: ignore[call-overload]
        batch = {b"data": data, b"labels": labels, b"filenames": [b"a.png"] * len(labels)}
        return pickle.dumps(batch, protocol=protocol)

    return write


def write_pickled(root: Path, write: Callable[[list[int], np.ndarray], bytes]) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (labels, pixels) in zip(BATCHES, cifar_batches(), strict=True):
        (folder / name).write_bytes(write(labels, pixels))


@pytest.mark.parametrize(
    "write",
    [
        python2_pickle,
        python3_pickle(2),
        python3_pickle(2, "F"),
        python3_pickle(3),
        python3_pickle(4),
    ],
    ids=["python2", "protocol2", "column order", "protocol3", "protocol4"],
)
def test_both_versions_of_cifar_hold_the_same_data(
    tmp_path: Path, write: Callable[[list[int], np.ndarray], bytes]
) -> None:
    write_binary(tmp_path / "one")
    write_pickled(tmp_path / "two", write)
    binary = load("cifar10", tmp_path / "one", rows_per_file=ROWS)
    pickled = load("cifar10", tmp_path / "two", rows_per_file=ROWS)
    assert binary.fingerprint() == pickled.fingerprint()
    labels, pixels = cifar_batches()[1]
    assert binary.train_y[ROWS : 2 * ROWS].tolist() == labels
    expected = pixels.reshape(ROWS, 3, 32, 32) / 255
    np.testing.assert_allclose(binary.train_x[ROWS : 2 * ROWS].numpy(), expected, atol=1e-7)
    assert (len(binary.train_x), len(binary.test_x)) == (5 * ROWS, ROWS)


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
    with pytest.raises(InputError, match="expected 10000 images, got 4"):
        load("cifar10", tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"data_batch_3.bin: .*3073-byte rows, got 12291"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.write_bytes(b"\x0a" + data[1:])
    with pytest.raises(InputError, match="0 to 9, got 0 to 10"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3.bin"):
        load("cifar10", tmp_path, rows_per_file=ROWS)


def load_pickle(folder: Path, data: bytes) -> None:
    for name in BATCHES:
        (folder / name).write_bytes(data)
    load("cifar10", folder, rows_per_file=1)


class Hostile:
    """Unpickling this makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "made"
    data = pickle.dumps({"data": Hostile(trap), "labels": [1]}, protocol=protocol)
    with pytest.raises(InputError, match=r"refused.*'(posix|nt).mkdir'"):
        load_pickle(tmp_path, data)
    assert not trap.exists()
    pickle.loads(data)  # the trap is a real one
    assert trap.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\ndtype\n(U\x01OtR.",  # a dtype of Python objects
        b"\x80\x02c_codecs\nencode\n(U\x01aU\x05rot13tR.",
        b"\x80\x02cnumpy\nndarray\n(K\x01tR.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02(cos\nsystem\nU\x02lso.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",  # through a known name
        b"\x80\x05\x8e\x00\x00\x00\x00\x00\x00\x00\x00.",
        b"(i__main__\nX\n.",
        b"\x80\x02Ppersistent\n.",
        b"\x80\x02\x82\x01.",  # a registered extension
        b"\x80\x02}K\x01K\x02u.",  # items without a mark
        pickle.dumps([1]),
        *(python2_pickle(*cifar_batches()[0])[:cut] for cut in (0, 1, 5, 40, 200, 12_300)),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match="data_batch_1"):
        load_pickle(tmp_path, data)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": np.zeros((2, 3072), "u1")}, "labels"),
        ({"data": np.zeros((2, 3072), "u1"), "labels": [1]}, r"\(1, 3072\), got \(2, 3072\)"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [10]}, "expected labels 0 to 9"),
        ({"data": np.zeros((1, 3072), "f4"), "labels": [1]}, "uint8, got dtype 'f4'"),
    ],
)
def test_refusals_of_the_pickled_version(
    tmp_path: Path, batch: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_pickle(tmp_path, pickle.dumps(batch, protocol=2))


def test_a_shape_that_does_not_fit_the_bytes_is_refused(tmp_path: Path) -> None:
    good = python2_pickle(*cifar_batches()[0])
    wrong = good.replace(b"M" + struct.pack("<H", ROWS), b"M" + struct.pack("<H", ROWS + 1))
    with pytest.raises(InputError, match=r"\(5, 3072\) has, got 12288"):
        load_pickle(tmp_path, wrong)
