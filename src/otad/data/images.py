"""Images: folders with one subfolder per class, and the files of MNIST (IDX) and CIFAR-10."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from otad.checks import check_count, require
from otad.data.dataset import Dataset, encode_labels
from otad.data.registry import find_first
from otad.data.splits import holdout
from otad.errors import InputError
from otad.io.files import most_unpacked

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # others may start programs
_MOST_PIXELS = 2**26  # of a resized image; Pillow takes four bytes for each
_MOST_STORED = 2**27  # pixels of an image file
_LARGEST = 1 << 32  # bytes; a header that claims more is damaged

CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_PIXELS = 3 * 32 * 32
ROWS_OF_FILE = 10_000  # of the binary version of CIFAR-10
Found = TypeVar("Found")


def read_images(paths: Sequence[Path], size: int, *, resize: int | None = None) -> Tensor:
    """Read image files as RGB, (N, 3, size, size) in [0, 1].

    The shorter side of each image is resized to `resize` pixels, or to `size` if that is None. Then
    the center is cropped.

    Raises
    ------
    InputError
        If a file is no readable image with 8-bit levels.

    Examples
    --------
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from otad.data import read_images
    >>> Image.new("RGB", (40, 30), "red").save("red.png")
    >>> read_images([Path("red.png")], 16).shape
    torch.Size([1, 3, 16, 16])
    """
    check_count(size, "size", most=2**16)
    short = size if resize is None else check_count(resize, "resize", least=size)
    pixels = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    for row, path in enumerate(paths):
        image = _opened(path, lambda image: ImageOps.exif_transpose(image).convert("RGB"))
        pixels[row] = np.asarray(_resize_and_crop(image, size, short))
    return torch.from_numpy(pixels).movedim(3, 1).contiguous().float().div_(255)


def to_gray(images: Tensor) -> Tensor:
    """(B,3,H,W) -> (B,1,H,W). Images that are gray already do not change by a bit."""
    weights = images.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)  # ITU-R BT.601, as Pillow
    mixed, first = (images * weights).sum(1, keepdim=True).clamp_(0, 1), images[:, :1]
    return torch.where((images == first).all(1, keepdim=True), first, mixed)


def common_size(paths: Sequence[Path], folder: Path) -> int:
    """The side of images that are squares of one size; others are refused, with their sizes."""
    counts = Counter(_opened(path, lambda image: image.size) for path in paths)
    (width, height), *others = sorted(counts)
    named = [f"{wide} x {high} ({count})" for (wide, high), count in counts.most_common(3)]
    found = f"{len(counts)} sizes, width x height: {', '.join(named)}"
    found += ", ..." if len(counts) > 3 else ""
    expected = "square images of one size, or a size (--size) to resize and crop them to"
    require(not others and width == height, str(folder), expected, found)
    return width


def list_images(folder: Path) -> list[Path]:
    """Return the image files of one folder, sorted by name.

    Hidden files are ignored. Any other file is refused.

    Examples
    --------
    >>> from PIL import Image
    >>> from otad.data import list_images
    >>> Image.new("L", (8, 8)).save("first.png")
    >>> [path.name for path in list_images(".")]
    ['first.png']
    """
    files = visible(folder)
    for name in (folder.name, *(path.name for path in files)):
        try:
            name.encode()
        except UnicodeEncodeError as error:  # it could not be written beside a prediction
            raise InputError(f"{folder}: expected names in UTF-8, got {name!r}") from error
    for path in files:
        fits = path.suffix.lower() in SUFFIXES and path.is_file()
        found = "a folder" if path.is_dir() else "something else"
        require(fits, str(path), f"an image ({', '.join(SUFFIXES)})", found)
    require(files, str(folder), "images", "an empty folder")
    return files


def visible(folder: Path) -> list[Path]:
    """Files and folders of one folder in order of name, without hidden ones."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def load_image_folder(
    root: Path,
    *,
    size: int | None = None,
    resize: int | None = None,
    channels: Literal[1, 3] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    class_labels: Mapping[str, str] | None = None,
    source: str = "the user's image folder",
) -> Dataset:
    """Make a data set of a folder that has one subfolder of images for each class.

    The images are in `root/CLASS/`, and the split follows from `seed`; or they are in
    `root/train/CLASS/` and `root/val/CLASS/` (or `test`).

    Parameters
    ----------
    root : Path
        The folder.
    size : int, optional
        The side to which all images are cropped. If None, all must be squares of one size.
    resize : int, optional
        The length to which the shorter side is resized before; by default `size`.
    channels : 1 or 3, optional
        Gray or color. If None, 1 where all images of the train part are gray, else 3.
    test_fraction : float
        The fraction of images in the test part, where the folder has no split of its own.
    seed : int
        Determines that split.
    name, source : str
        For reports; by default the name of the folder, and "the user's image folder".
    class_labels : mapping of str to str, optional
        Readable names for the class folders.

    Examples
    --------
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from otad.data import load_image_folder
    >>> for label, color in [("cat", "red"), ("dog", "blue")]:
    ...     Path("pets", label).mkdir(parents=True)
    ...     for number in range(5):
    ...         Image.new("RGB", (16, 16), color).save(f"pets/{label}/{number}.png")
    >>> load_image_folder("pets")
    Dataset('pets', classification of 2 classes, 8 train and 2 test inputs (3, 16, 16))
    """
    find_first([root], "image folder")
    if (root / "train").is_dir():
        held_out = [root / "val", root / "test"]
        test = find_first(held_out, "a folder 'val' or 'test' beside 'train'")
        classes, paths, labels = _scan(root / "train")
        parts = [(paths, labels), _scan(test, classes)[1:]]
    else:
        classes, paths, labels = _scan(root)
        rows = holdout(labels, test_fraction, seed, task="classification", name="test_fraction")
        parts = [([paths[row] for row in part.tolist()], labels[part]) for part in rows]
    if size is None:
        size = common_size([path for found, _ in parts for path in found], root)
    read = [(read_images(files, size, resize=resize), y) for files, y in parts]
    images = read[0][0]
    if channels == 1 or (channels is None and torch.equal(images, images[:, :1].expand_as(images))):
        read = [(to_gray(x), y) for x, y in read]
    names = tuple((class_labels or {}).get(label, label) for label in classes)
    files = [tuple(path.relative_to(root).as_posix() for path in found) for found, _ in parts]
    about: dict[str, Any] = {"train_names": files[0], "test_names": files[1], "source": source}
    return _dataset(*read, classes=names, name=name or root.name, **about)


def _scan(folder: Path, known: Sequence[str] = ()) -> tuple[Sequence[str], list[Path], Tensor]:
    """Classes, image paths and their labels; with `known` classes, others are refused."""
    found, expected = visible(folder), "one subfolder for each class"
    for path in found:
        require(path.is_dir(), str(path), expected, "a file")
    require(found, str(folder), expected, "an empty folder")
    files = [file for path in found for file in list_images(path)]
    classes = known or tuple(path.name for path in found)
    return classes, files, encode_labels([file.parent.name for file in files], classes, str(folder))


def _opened(path: Path, read: Callable[[Image.Image], Found]) -> Found:
    """What is read from an image of the formats and sizes that are taken."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            pixels = math.prod(opened.size)
            require(pixels <= _MOST_STORED, str(path), f"at most {_MOST_STORED} pixels", pixels)
            wide = opened.mode[0] in "IF"  # 16- or 32-bit levels, which RGB would cut off at 255
            require(not wide, str(path), "8-bit levels", f"Pillow mode {opened.mode}")
            return read(opened)
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything within Pillow
        raise InputError(f"{path}: not a readable image ({error})") from error


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


def load_idx(folders: Sequence[Path], *, name: str, **about: Any) -> Dataset:
    """The four official files, each in the first folder that has it, with or without .gz."""

    def read(file: str, axes: int) -> Tensor:
        path = _find_packed(folders, file, name)
        values = read_idx(path)
        require(values.dim() == axes, str(path), f"{axes} axes", f"sizes {tuple(values.shape)}")
        return values

    def part(prefix: str) -> tuple[Tensor, Tensor]:
        images = read(f"{prefix}-images-idx3-ubyte", 3)
        labels = read(f"{prefix}-labels-idx1-ubyte", 1)
        return images.unsqueeze(1).float().div_(255), labels.long()

    return _dataset(part("train"), part("t10k"), name=name, **about)


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor in an IDX file: 0, 0, type, number of axes, big-endian sizes, data."""
    content = _unpacked(path)
    magic, content = content[:4], content[4:]
    is_idx = len(magic) == 4 and magic[:3] == b"\x00\x00\x08" and magic[3] > 0
    what = "an IDX file of unsigned bytes (first bytes 00 00 08)"
    require(is_idx, str(path), what, magic.hex(" ") or "an empty file")
    start = 4 * magic[3]
    require(len(content) >= start, str(path), f"a header of {start} bytes", len(content))
    sizes = struct.unpack(f">{magic[3]}I", content[:start])
    count = math.prod(sizes)
    require(0 < count <= _LARGEST, str(path), f"plausible sizes, 1 to {_LARGEST} bytes", sizes)
    data = np.frombuffer(content, np.uint8, offset=start)
    require(data.size == count, str(path), f"{count} bytes for sizes {sizes}", data.size)
    return torch.from_numpy(data.reshape(sizes).copy())


def load_cifar10(root: Path, *, name: str, source: str) -> Dataset:
    """50,000 + 10,000 images (3, 32, 32) in the official order; the files may be gzipped."""
    folders = (root / "cifar-10-batches-bin", root / "cifar10", root)
    pickled = "The python version is not read: it is a pickle, which runs code"
    hint = pickled if (root / "cifar-10-batches-py").exists() else ""

    def part(*files: str) -> tuple[Tensor, Tensor]:
        rows = []
        for file in files:
            path = _find_packed(folders, f"{file}.bin", name, hint)
            content = np.frombuffer(_unpacked(path), dtype=np.uint8)  # label, then 3072 pixels
            size = ROWS_OF_FILE * (1 + _PIXELS)
            expected = f"{size} bytes, {ROWS_OF_FILE} images"
            require(content.size == size, str(path), expected, content.size)
            rows.append(content.reshape(ROWS_OF_FILE, 1 + _PIXELS))
        data = torch.from_numpy(np.concatenate(rows))
        return data[:, 1:].reshape(-1, 3, 32, 32).float().div_(255), data[:, 0].long()

    train = part(*(f"data_batch_{k}" for k in range(1, 6)))
    return _dataset(train, part("test_batch"), classes=CIFAR_CLASSES, name=name, source=source)


def _find_packed(folders: Sequence[Path], file: str, name: str, hint: str = "") -> Path:
    """The file, with or without .gz, in the first folder that has it."""
    paths = [folder / (file + suffix) for folder in folders for suffix in ("", ".gz")]
    return find_first(paths, f"{name}: {file}", hint)


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b" and path.suffix != ".gz":
        return content
    try:
        most = most_unpacked(path)
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(most + 1)
        require(len(unpacked) <= most, str(path), f"at most {most} bytes unpacked", "more")
        return unpacked
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged gzip file ({error})") from error


def _dataset(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], **about: Any) -> Dataset:
    name = about.pop("name")
    return Dataset(name, *train, *test, task="classification", bounds=(0.0, 1.0), **about)
