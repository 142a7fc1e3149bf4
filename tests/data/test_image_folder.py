"""Image folders made of tiny pictures."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from otad.data import MissingDataError, load, load_image_folder, read_images
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


def test_train_and_val_folders_are_the_split(tmp_path: Path) -> None:
    paint_classes(tmp_path / "train", 3)
    paint_classes(tmp_path / "val", 1)
    (tmp_path / "train" / "red" / ".hidden").write_text("not an image")
    dataset = load_image_folder(tmp_path, size=4)
    assert dataset.classes == ("blue", "green", "red")
    assert dataset.train_x.shape == (9, 3, 4, 4)
    assert dataset.test_x.shape == (3, 3, 4, 4)
    assert dataset.bounds == (0.0, 1.0)
    assert colors_match_labels(dataset.train_x, dataset.train_y)
    assert colors_match_labels(dataset.test_x, dataset.test_y)


def test_class_folders_alone_are_split_by_seed(tmp_path: Path) -> None:
    paint_classes(tmp_path, 5)
    dataset = load_image_folder(tmp_path, size=4, test_fraction=0.2, seed=3)
    assert torch.bincount(dataset.train_y).tolist() == [4, 4, 4]
    assert torch.bincount(dataset.test_y).tolist() == [1, 1, 1]
    assert colors_match_labels(dataset.test_x, dataset.test_y)


def test_the_center_is_cropped_after_the_short_side_is_resized(tmp_path: Path) -> None:
    pixels = np.zeros((4, 12, 3), dtype=np.uint8)
    pixels[:, 4:8] = np.arange(48).reshape(4, 4, 3)
    path = tmp_path / "wide.png"
    Image.fromarray(pixels).save(path)
    kept = read_images([path], 4)[0].mul(255).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(kept, pixels[:, 4:8], atol=1e-4)
    paint(tmp_path / "tall.png", (10, 20, 30), (5, 17))
    shrunk = read_images([tmp_path / "tall.png"], 3, resize=4)
    assert shrunk.shape == (1, 3, 3, 3)
    torch.testing.assert_close(shrunk[0, :, 1, 1] * 255, torch.tensor([10.0, 20.0, 30.0]))
    assert read_images([tmp_path / "tall.png"], 16).shape == (1, 3, 16, 16)  # enlarged


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
    resize = Image.Image.resize

    def watched(image: Image.Image, size: tuple[int, int], *args: Any, **kw: Any) -> Image.Image:
        assert size[0] * size[1] <= 2**26, f"{size} pixels at once"
        return resize(image, size, *args, **kw)

    monkeypatch.setattr(Image.Image, "resize", watched)
    found = read_images([tmp_path / "strip.png"], 224)[0] * 255
    levels = torch.tensor([10.0, 20.0, 30.0])[:, None, None]
    torch.testing.assert_close(found, levels.expand(3, 224, 224))


def test_gray_images_become_rgb_and_levels_above_255_are_refused(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 51).save(tmp_path / "gray.png")
    assert torch.equal(read_images([tmp_path / "gray.png"], 4), torch.full((1, 3, 4, 4), 0.2))
    Image.fromarray(np.full((4, 4), 5000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(InputError, match="8-bit"):
        read_images([tmp_path / "deep.png"], 4)


def test_refusals(tmp_path: Path) -> None:
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
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: expected images, got an empty folder"):
        load_image_folder(tmp_path, size=4)


def test_imagenette_gets_readable_names(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for wnid in ("n01440764", "n03888257"):
            paint(tmp_path / "imagenette" / part / wnid / "0.png", (5, 5, 5))
    dataset = load("imagenette", tmp_path, size=8)
    assert dataset.classes == ("tench", "parachute")
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
