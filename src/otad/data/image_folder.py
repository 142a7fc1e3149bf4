"""Image folders: one subfolder a class, read with Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from otad.checks import check_count
from otad.data.dataset import Dataset
from otad.data.preprocess import encode_labels
from otad.data.registry import MissingDataError, find_first
from otad.data.splits import holdout
from otad.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TEST_FOLDERS = ("val", "test")
_MOST_PIXELS = 2**26  # of a resized image; Pillow takes four bytes for each


def read_images(paths: Sequence[Path], size: int, *, resize: int | None = None) -> Tensor:
    """RGB images (N, 3, size, size) in [0, 1].

    The shorter side is resized to `resize` (default: `size`), then the center is cropped.
    """
    check_count(size, "size")
    short = size if resize is None else check_count(resize, "resize", least=size)
    pixels = np.empty((len(paths), 3, size, size), dtype=np.uint8)
    for row, path in enumerate(paths):
        pixels[row] = _read_image(path, size, short).transpose(2, 0, 1)
    return torch.from_numpy(pixels).float().div_(255)


def list_images(folder: Path) -> list[Path]:
    """The image files of one folder by name. Hidden files do not count; others are refused."""
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for name in (folder.name, *(path.name for path in files)):
        try:
            name.encode()
        except UnicodeEncodeError as error:  # it could not be written beside a prediction
            raise InputError(f"{folder}: expected names in UTF-8, got {name!r}") from error
    for path in files:
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            raise InputError(f"{path}: expected an image ({', '.join(SUFFIXES)})")
    if not files:
        raise InputError(f"{folder}: expected images, got an empty folder")
    return files


def load_image_folder(
    root: Path,
    *,
    size: int,
    resize: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    class_labels: Mapping[str, str] | None = None,
    source: str = "the user's image folder",
) -> Dataset:
    """root/CLASS/*.jpg, split by seed, or root/train/CLASS and root/val (or test)/CLASS.

    `class_labels` may give readable names to the class folders.
    """
    find_first([root], "image folder")
    if (root / "train").is_dir():
        classes, train_paths, train_y = _scan(root / "train", None)
        held_out = next((root / part for part in _TEST_FOLDERS if (root / part).is_dir()), None)
        if held_out is None:
            raise MissingDataError(
                f"{root.absolute()}: expected a folder 'val' or 'test' beside 'train'"
            )
        _, test_paths, test_y = _scan(held_out, classes)
    else:
        classes, paths, labels = _scan(root, None)
        kept, held = holdout(labels, test_fraction, seed, task="classification")
        train_paths, train_y = [paths[i] for i in kept.tolist()], labels[kept]
        test_paths, test_y = [paths[i] for i in held.tolist()], labels[held]
    readable = class_labels or {}
    return Dataset(
        name=name or root.name,
        train_x=read_images(train_paths, size, resize=resize),
        train_y=train_y,
        test_x=read_images(test_paths, size, resize=resize),
        test_y=test_y,
        task="classification",
        source=source,
        classes=tuple(readable.get(label, label) for label in classes),
        bounds=(0.0, 1.0),
    )


def _scan(folder: Path, known: Sequence[str] | None) -> tuple[Sequence[str], list[Path], Tensor]:
    """Classes, image paths and their labels; with `known` classes, others are refused."""
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in found:
        if not path.is_dir():
            raise InputError(f"{path}: expected one subfolder for each class, got a file")
    if not found:
        raise InputError(f"{folder}: expected one subfolder for each class, got an empty folder")
    paths = {path.name: list_images(path) for path in found}
    classes = known or tuple(paths)
    names = [name for name, files in paths.items() for _ in files]
    files = [file for group in paths.values() for file in group]
    return classes, files, encode_labels(names, classes, str(folder))


def _read_image(path: Path, size: int, short: int) -> np.ndarray:
    try:
        with Image.open(path) as opened:
            if opened.mode[0] in "IF":  # 16- or 32-bit levels, which RGB would cut off at 255
                raise InputError(f"{path}: expected 8-bit levels, got Pillow mode {opened.mode}")
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything within Pillow
        raise InputError(f"{path}: not a readable image ({error})") from error
    return np.asarray(_resize_and_crop(image, size, short))


def _resize_and_crop(image: Image.Image, size: int, short: int) -> Image.Image:
    width, height = image.size
    scale = short / min(width, height)
    wide, high = max(short, round(width * scale)), max(short, round(height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    center = (left, top, left + size, top + size)
    if wide * high > _MOST_PIXELS:  # a long strip: only what is kept of it is resized
        across, down = width / wide, height / high
        kept = (left * across, top * down, (left + size) * across, (top + size) * down)
        return image.resize((size, size), Image.Resampling.BILINEAR, box=kept)
    if scale != 1.0:
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    return image.crop(center)
