"""CIFAR-10 in both versions; the python version must never run what it reads."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from otad.data import MissingDataError, load
from otad.data.batch_reader import read_batch
from otad.errors import InputError

ROWS = 4
NAMES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]


def batches() -> list[tuple[list[int], np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        (random.integers(0, 10, ROWS).tolist(), random.integers(0, 256, (ROWS, 3072)).astype("u1"))
        for _ in NAMES
    ]


def write_binary(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (labels, pixels) in zip(NAMES, batches(), strict=True):
        rows = np.concatenate([np.array(labels, dtype="u1")[:, None], pixels], axis=1)
        rows.tofile(folder / f"{name}.bin")


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
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85"
        + text(b"b")
        + b"\x87Rq\x04(K\x01"
        + shape
        + b"\x86"
        + dtype
        + b"\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tb"
    )
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}q\x01("
        + text(b"batch_label")
        + text(b"a batch")
        + text(b"labels")
        + b"]q\x07("
        + numbers
        + b"e"
        + text(b"data")
        + array
        + b"u."
    )


def python3_pickle(protocol: int) -> Callable[[list[int], np.ndarray], bytes]:
    def write(labels: list[int], pixels: np.ndarray) -> bytes:
        batch = {b"data": pixels, b"labels": labels, b"filenames": [b"a.png"] * len(labels)}
        return pickle.dumps(batch, protocol=protocol)

    return write


@pytest.mark.parametrize(
    "write",
    [python2_pickle, python3_pickle(2), python3_pickle(3), python3_pickle(4)],
    ids=["python2", "protocol2", "protocol3", "protocol4"],
)
def test_both_versions_hold_the_same_data(
    tmp_path: Path, write: Callable[[list[int], np.ndarray], bytes]
) -> None:
    write_binary(tmp_path / "one")
    folder = tmp_path / "two" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (labels, pixels) in zip(NAMES, batches(), strict=True):
        (folder / name).write_bytes(write(labels, pixels))
    binary = load("cifar10", tmp_path / "one", rows_per_file=ROWS)
    python = load("cifar10", tmp_path / "two", rows_per_file=ROWS)
    assert binary.fingerprint() == python.fingerprint()
    labels, pixels = batches()[1]
    assert binary.train_y[ROWS : 2 * ROWS].tolist() == labels
    expected = pixels.reshape(ROWS, 3, 32, 32) / 255
    np.testing.assert_allclose(binary.train_x[ROWS : 2 * ROWS].numpy(), expected, atol=1e-7)
    assert (len(binary.train_x), len(binary.test_x)) == (5 * ROWS, ROWS)


def test_binary_files_may_be_gzipped_some_or_all(tmp_path: Path) -> None:
    write_binary(tmp_path)
    plain = load("cifar10", tmp_path, rows_per_file=ROWS).fingerprint()
    for name in (NAMES[3], NAMES[0], NAMES[5]):
        path = tmp_path / "cifar-10-batches-bin" / f"{name}.bin"
        path.with_name(f"{name}.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        assert load("cifar10", tmp_path, rows_per_file=ROWS).fingerprint() == plain
    packed = path.with_name(f"{NAMES[5]}.bin.gz")
    for damaged in (packed.read_bytes()[:-9], b"no gzip"):
        packed.write_bytes(damaged)
        with pytest.raises(InputError, match=r"test_batch.bin.gz: expected a gzip file"):
            load("cifar10", tmp_path, rows_per_file=ROWS)


def test_an_array_in_column_order_is_read_in_its_own_order() -> None:
    pixels = np.asfortranarray(batches()[0][1])
    batch = read_batch(pickle.dumps({"data": pixels}, protocol=2), "batch")
    np.testing.assert_array_equal(batch["data"], pixels)


class Malicious:
    """Unpickling this touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "touched"
    data = pickle.dumps({"data": Malicious(trap)}, protocol=protocol)
    with pytest.raises(InputError, match=r"refused: the file wants to use '(posix|nt).mkdir'"):
        read_batch(data, "batch")
    assert not trap.exists()
    pickle.loads(data)  # the trap is a real one
    assert trap.exists()


def test_harmless_looking_names_stay_names() -> None:
    """Known names with arguments that mean something else are refused too."""
    for data in (
        b"\x80\x02cnumpy\ndtype\n(U\x01OtR.",  # a dtype of Python objects
        b"\x80\x02c_codecs\nencode\n(U\x01aU\x05rot13tR.",
        b"\x80\x02cnumpy\nndarray\n(K\x01tR.",
        b"\x80\x02(cos\nsystem\nU\x02lso.",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x05\x8e\x00\x00\x00\x00\x00\x00\x00\x00.",
        b"(i__main__\nX\n.",
        b"\x80\x02Ppersistent\n.",
    ):
        with pytest.raises(InputError, match=r"batch: "):
            read_batch(data, "batch")


def test_damaged_batches_are_refused() -> None:
    good = python2_pickle(*batches()[0])
    for cut in (0, 1, 5, 40, 200, len(good) - 1):
        with pytest.raises(InputError, match="batch: "):
            read_batch(good[:cut], "batch")
    with pytest.raises(InputError, match="expected a dict, got list"):
        read_batch(pickle.dumps([1], protocol=2), "batch")
    with pytest.raises(InputError, match="batch: "):
        read_batch(b"\x80\x02}K\x01K\x02u.", "batch")  # items without a mark
    short = good.replace(b"M" + struct.pack("<H", ROWS), b"M" + struct.pack("<H", ROWS + 1))
    with pytest.raises(InputError, match="expected as many bytes as shape"):
        read_batch(short, "batch")


def test_refusals_of_the_binary_version(tmp_path: Path) -> None:
    write_binary(tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    with pytest.raises(InputError, match="expected 10000 images, got 4"):
        load("cifar10", tmp_path)
    path = folder / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"data_batch_3.bin: expected a whole number of 3073-byte"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.write_bytes(b"\x0a" + data[1:])
    with pytest.raises(InputError, match="expected labels 0 to 9, got 0 to 10"):
        load("cifar10", tmp_path, rows_per_file=ROWS)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3.bin"):
        load("cifar10", tmp_path, rows_per_file=ROWS)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": np.zeros((2, 3072), "u1")}, "expected an array 'data' and a list 'labels'"),
        ({"data": np.zeros((2, 3072), "u1"), "labels": [1]}, "expected data of shape"),
        ({"data": np.zeros((1, 3072), "u1"), "labels": [10]}, "expected labels 0 to 9"),
    ],
)
def test_refusals_of_the_python_version(
    tmp_path: Path, batch: dict[str, object], message: str
) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(InputError, match=message):
        load("cifar10", tmp_path, rows_per_file=1)
