"""Image folders of tiny pictures, MNIST's IDX files, the binary version of CIFAR-10."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from otad.data import MissingDataError, load, load_image_folder, read_images
from otad.data.images import read_idx
from otad.errors import InputError

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def paint(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def paint_classes(root: Path, count: int) -> None:
    for name, color in COLORS.items():
        for k in range(count):
            paint(root / name / f"{k}.png", color)


def colors_match_labels(x: torch.Tensor, y: torch.Tensor) -> bool:
    expected = torch.tensor(list(COLORS.values())).float().div(255)[y]
    return torch.equal(x, expected[:, :, None, None].expand_as(x))


def test_only_images_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, started = tmp_path / "drawing.png", Mock()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", started)
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(InputError, match=r"drawing.png: not a readable image"):
        read_images([path], 4)
    assert not started.called


def test_no_more_is_unpacked_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "large.png", (0, 0, 0), (9, 8))
    monkeypatch.setattr("otad.data.images._MOST_STORED", 71)
    with pytest.raises(InputError, match=r"large.png: expected at most 71 pixels, got 72"):
        read_images([tmp_path / "large.png"], 4)
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    monkeypatch.setattr("otad.data.images.most_unpacked", lambda path: 999)
    with pytest.raises(InputError, match=r"zeros.gz: expected at most 999 bytes"):
        read_idx(path)


@pytest.mark.parametrize("is_split", [True, False])
def test_folders_are_the_split_or_are_split_by_seed(tmp_path: Path, is_split: bool) -> None:
    if is_split:
        paint_classes(tmp_path / "train", 3)
        paint_classes(tmp_path / "val", 1)
        (tmp_path / "train" / "red" / ".hidden").write_text("not an image")
    else:
        paint_classes(tmp_path, 4)
    dataset = load_image_folder(tmp_path, size=4, test_fraction=0.25, seed=3)
    assert dataset.classes == ("blue", "green", "red")
    assert torch.bincount(dataset.train_y).tolist() == [3, 3, 3]
    assert torch.bincount(dataset.test_y).tolist() == [1, 1, 1]
    assert dataset.bounds == (0.0, 1.0)
    assert dataset.train_x.shape == (9, 3, 4, 4)
    assert colors_match_labels(dataset.train_x, dataset.train_y)
    assert colors_match_labels(dataset.test_x, dataset.test_y)


@pytest.mark.parametrize(
    ("width", "height", "size", "resize"),
    [(40, 30, 16, None), (31, 57, 16, 20), (16, 16, 16, None), (9, 13, 32, 48), (64, 20, 20, None)],
)
def test_ordinary_images_are_resized_whole(
    tmp_path: Path, width: int, height: int, size: int, resize: int | None
) -> None:
    """To the bit as Pillow does it: figures on image folders rest on these very pixels."""
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    image.save(tmp_path / "noise.png")
    scale = (resize or size) / min(width, height)
    whole = image.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
    left, top = (whole.width - size) // 2, (whole.height - size) // 2
    expected = np.asarray(whole)[top : top + size, left : left + size].transpose(2, 0, 1)
    found = read_images([tmp_path / "noise.png"], size, resize=resize)[0]
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("shape", [(3, 500), (500, 3), (40, 30)])
def test_the_center_of_a_strip_is_resized_alone(
    tmp_path: Path, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same levels, but for rounding."""
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "strip.png")
    whole = read_images([tmp_path / "strip.png"], 8, resize=10)
    monkeypatch.setattr("otad.data.images._MOST_PIXELS", 0)
    alone = read_images([tmp_path / "strip.png"], 8, resize=10)
    torch.testing.assert_close(255 * alone, 255 * whole, atol=1.001, rtol=0)


@pytest.mark.parametrize("turned", [False, True])
def test_a_strip_never_takes_gigabytes(
    tmp_path: Path, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.zeros((1, 100_000, 3), dtype=np.uint8)
    pixels[:, 49_990:50_010] = (10, 20, 30)
    Image.fromarray(pixels.swapaxes(0, 1) if turned else pixels).save(tmp_path / "strip.png")
    watched = Mock(side_effect=Image.Image.resize)
    monkeypatch.setattr(Image.Image, "resize", lambda *args, **options: watched(*args, **options))
    found = read_images([tmp_path / "strip.png"], 224)[0] * 255
    assert [call.args[1] for call in watched.call_args_list] == [(224, 224)]
    levels = torch.tensor([10.0, 20.0, 30.0])[:, None, None]
    torch.testing.assert_close(found, levels.expand(3, 224, 224))


def test_gray_images_become_rgb_and_levels_above_255_are_refused(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 51).save(tmp_path / "gray.png")
    assert torch.equal(read_images([tmp_path / "gray.png"], 4), torch.full((1, 3, 4, 4), 0.2))
    Image.fromarray(np.full((4, 4), 5000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="8-bit"):
        read_images([tmp_path / "deep.png"], 4)


def test_gray_folders_have_one_channel_whatever_their_files_say(tmp_path: Path) -> None:
    for number in range(8):
        level = 20 * number + 5
        gray = Image.new("L", (6, 6), level)
        path = tmp_path / ("dark" if number < 4 else "light") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        gray.convert("RGB" if number % 2 else "L").save(path)
    dataset = load_image_folder(tmp_path)  # of the size that all images have
    assert dataset.input_shape == (1, 6, 6)
    levels = torch.cat([dataset.train_x, dataset.test_x])[:, 0, 0, 0].sort().values * 255
    torch.testing.assert_close(levels, torch.arange(5.0, 165.0, 20.0))
    assert load_image_folder(tmp_path, channels=3).input_shape == (3, 6, 6)
    kept = Path(dataset.train_names[0])
    Image.new("RGB", (6, 6), (200, 0, 0)).save(tmp_path / kept)
    assert load_image_folder(tmp_path).input_shape == (3, 6, 6)
    red = load_image_folder(tmp_path, channels=1).train_x[0, 0, 0, 0] * 255
    assert abs(float(red) - 0.299 * 200) < 1e-3


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    for number, size in enumerate([(6, 6), (6, 6), (8, 6), (30, 20), (5, 5)]):
        path = tmp_path / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (number, 0, 0)).save(path)
    with pytest.raises(InputError, match=r"--size.*4 sizes.*: 6 x 6 \(2\), .*, \.\.\.") as caught:
        load_image_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert load_image_folder(tmp_path, size=4).input_shape == (3, 4, 4)
    for path in tmp_path.rglob("*.png"):
        Image.new("RGB", (8, 6)).save(path)
    with pytest.raises(InputError, match=r"1 sizes, width x height: 8 x 6 \(5\)"):
        load_image_folder(tmp_path)


def test_refusals_of_folders(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="absent"):
        load_image_folder(tmp_path / "absent", size=4)
    with pytest.raises(InputError, match="empty folder"):
        load_image_folder(tmp_path, size=4)
    paint_classes(tmp_path / "train", 2)
    with pytest.raises(MissingDataError, match="'val' or 'test'"):
        load_image_folder(tmp_path, size=4)
    paint(tmp_path / "test" / "violet" / "0.png", (1, 2, 3))
    with pytest.raises(InputError, match=r"blue, green, red, got 'violet'"):
        load_image_folder(tmp_path, size=4)
    with pytest.raises(InputError, match="resize: expected an integer of at least 4"):
        read_images([], 4, resize=3)


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        ("red/notes.txt", "expected an image"),
        ("red/broken.png", "not a readable image"),
        ("stray.png", "expected one subfolder for each class"),
    ],
)
def test_a_class_folder_holds_images_only(tmp_path: Path, stray: str, message: str) -> None:
    paint_classes(tmp_path, 2)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    (tmp_path / "noise.png").rename(tmp_path / stray)
    (tmp_path / stray).write_bytes((tmp_path / stray).read_bytes()[:-1000])
    with pytest.raises(InputError, match=rf"{stray}: {message}"):
        load_image_folder(tmp_path, size=4)
    (tmp_path / stray).unlink()
    (tmp_path / "red" / "more").mkdir()
    with pytest.raises(InputError, match=r"more: expected an image .*, got a folder"):
        load_image_folder(tmp_path, size=4)
    (tmp_path / "red" / "more").rmdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: expected images, got an empty folder"):
        load_image_folder(tmp_path, size=4)


def test_imagenette_gets_readable_names(tmp_path: Path) -> None:
    for name in ("train/n01440764", "train/n03888257", "val/n01440764", "val/n03888257"):
        paint(tmp_path / "imagenette" / name / "0.png", (5, 5, 5))
    assert load("imagenette", tmp_path, size=8).classes == ("tench", "parachute")
    with pytest.raises(MissingDataError, match="fastai/imagenette"):
        load("imagenette", tmp_path / "imagenette")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
@pytest.mark.parametrize("name", [b"caf\xe9/0.png", b"tea/caf\xe9.png"])
def test_names_that_cannot_be_written_are_refused(tmp_path: Path, name: bytes) -> None:
    paint_classes(tmp_path, 2)
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir()
    Image.new("RGB", (4, 4)).save(path)
    with pytest.raises(InputError, match=r"expected names in UTF-8, got 'caf\\udce9"):
        load_image_folder(tmp_path, size=4)


ROWS = 4
BATCHES = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
CIFAR = np.random.default_rng(0).integers(0, 256, (len(BATCHES), ROWS, 3073)).astype("u1")
CIFAR[:, :, 0] %= 10


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
    """Both sets use the same file names: the name of the folder separates them."""
    sets = {"mnist": "digits", "fashion_mnist": "fashion-mnist"}
    for (name, folder), other in zip(sets.items(), reversed(sets), strict=True):
        write_idx(tmp_path / folder)
        assert load(name, tmp_path / folder).name == name
        with pytest.raises(MissingDataError):
            load(other, tmp_path / folder)
    missing = tmp_path / "digits" / "t10k-labels-idx1-ubyte"
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=rf"(?s){missing}.*yann.lecun.com"):
        load("mnist", tmp_path / "digits")


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
    with pytest.raises(InputError, match=r"train_y: .*12 .*11"):
        load("mnist", tmp_path)
    labels.write_bytes(idx_bytes(np.arange(12)))
    with pytest.raises(InputError, match=r"\[0, 9\], got \[0, 11\]"):
        load("mnist", tmp_path)
    shutil.copy(folder / "train-images-idx3-ubyte", labels)
    with pytest.raises(InputError, match="expected 1 axes"):
        load("mnist", tmp_path)


def write_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, rows in zip(BATCHES, CIFAR, strict=True):
        rows.tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otad.data.images.ROWS_OF_FILE", ROWS)


@pytest.mark.usefixtures("short_files")
def test_cifar_rows_arrive_in_the_official_order_gzipped_or_not(tmp_path: Path) -> None:
    folder = write_binary(tmp_path)
    dataset = load("cifar10", tmp_path)
    assert (len(dataset.train_x), len(dataset.test_x)) == (5 * ROWS, ROWS)
    second = CIFAR[1]
    assert dataset.train_y[ROWS : 2 * ROWS].tolist() == second[:, 0].tolist()
    expected = second[:, 1:].reshape(ROWS, 3, 32, 32) / 255
    np.testing.assert_allclose(dataset.train_x[ROWS : 2 * ROWS].numpy(), expected, atol=1e-7)
    for name in (BATCHES[3], BATCHES[0], BATCHES[5]):
        path = folder / f"{name}.bin"
        path.with_name(f"{name}.bin.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        packed = load("cifar10", tmp_path)
        assert packed.fingerprint() == dataset.fingerprint()
    (folder / "test_batch.bin.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"test_batch.bin.gz: .*gzip"):
        load("cifar10", tmp_path)


def test_a_file_of_the_binary_version_has_all_its_images(tmp_path: Path) -> None:
    write_binary(tmp_path)
    with pytest.raises(InputError, match="10000 images, got 12292"):
        load("cifar10", tmp_path)


@pytest.mark.usefixtures("short_files")
def test_refusals_of_the_binary_version(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "data_batch_3.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match=r"data_batch_3.bin: .*12292 bytes.*got 12291"):
        load("cifar10", tmp_path)
    path.write_bytes(b"\x0a" + data[1:])
    with pytest.raises(InputError, match=r"\[0, 9\], got \[0, 10\]"):
        load("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(MissingDataError, match=r"data_batch_3.bin"):
        load("cifar10", tmp_path)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    trap, folder = tmp_path / "made", tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    data = b"cos\nmkdir\n(V" + str(trap).encode() + b"\ntR."  # unpickling this makes a folder
    for name in BATCHES:
        (folder / name).write_bytes(data)
    with pytest.raises(MissingDataError, match=r"(?s)a pickle.*cifar-10-binary.tar.gz"):
        load("cifar10", tmp_path)
    (write_binary(tmp_path) / "data_batch_1.bin").write_bytes(data)
    with pytest.raises(InputError, match="30730000 bytes"):
        load("cifar10", tmp_path)
    assert not trap.exists()
    pickle.loads(data)  # the trap is a real one
    assert trap.exists()
