"""NumPy archives: x and y, perhaps test_x, test_y, feature_names. Pickled objects are refused."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_choice, require
from otad.data.dataset import TASKS, Dataset, Task, class_names, encode_labels
from otad.data.registry import find_first
from otad.data.splits import split_rows
from otad.errors import InputError

Array = np.ndarray[Any, Any]
_OPTIONAL = ("test_x", "test_y", "feature_names")
# RuntimeError where a damaged file seems to need a password or an unknown method.
_UNREADABLE = (
    OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError,
)  # fmt: skip


def load_npz(
    path: Path, *, task: Task | None = None, test_fraction: float = 0.2, seed: int = 0
) -> Dataset:
    """A data set from the arrays x and y; a share is held out unless test_x and test_y are there.
    Whole numbers or text in y are classes, other numbers values, unless `task` says otherwise."""
    arrays = read_npz(path, ("x", "y"), _OPTIONAL)
    paired = ("test_x" in arrays) == ("test_y" in arrays)
    require(paired, str(path), "both test_x and test_y or neither", ", ".join(arrays))
    x, y = as_inputs(arrays["x"], path, "x"), arrays["y"]
    if task is None:
        task = "regression" if y.dtype.kind == "f" else "classification"
    check_choice(task, "task", TASKS)
    classes = () if task == "regression" else class_names(_texts(y, path, "y"))
    targets = as_targets(y, path, "y", classes)
    require(len(x) == len(targets), str(path), f"{len(x)} y for as many x", len(targets))
    named = arrays.get("feature_names")
    about: dict[str, Any] = {"name": path.stem, "source": "the user's NPZ file", "classes": classes}
    about["bounds"] = (0.0, 1.0) if x.dim() == 4 else None
    about["feature_names"] = None if named is None else tuple(map(str, named.ravel()))
    if "test_x" not in arrays:
        return split_rows(x, targets, test_fraction, seed, **about)
    test_x = as_inputs(arrays["test_x"], path, "test_x")
    test_y = as_targets(arrays["test_y"], path, "test_y", classes)
    return Dataset(about.pop("name"), x, targets, test_x, test_y, task, **about)


def read_npz(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """The arrays asked for; others in the file are left alone."""
    find_first([path], "NPZ file")
    try:
        # A file opened here is closed here, even where NumPy gives up on it halfway.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: expected an NPZ archive, got a single array")
            complete, stored = set(needed) <= {*archive.files}, ", ".join(archive.files)
            require(complete, str(path), f"the arrays {', '.join(needed)}", stored or "none")
            wanted = (*needed, *(name for name in optional if name in archive.files))
            return {name: archive[name] for name in wanted}
    except InputError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{path}: not a readable NPZ file ({error})") from error


def as_inputs(values: Array, path: Path, name: str) -> Tensor:
    """Vectors (N,d), or images (N,C,H,W) or (N,H,W) in [0, 1], as float32; images of uint8 are
    divided by 255."""
    where = f"{path}, {name}"
    require(values.dtype.kind in "fiu", where, "numbers", f"dtype {values.dtype}")
    shapes = "shape (N,d), (N,H,W) or (N,C,H,W)"
    require(values.ndim in (2, 3, 4), where, shapes, values.shape)
    x = torch.from_numpy(values.astype(np.float32))
    if values.ndim == 2:
        return x
    if values.dtype == np.uint8:
        x = x.div_(255)
    return x.unsqueeze(1) if values.ndim == 3 else x


def as_targets(values: Array, path: Path, name: str, classes: tuple[str, ...]) -> Tensor:
    """(N,) positions in `classes`, or values where there are none."""
    if classes:
        return encode_labels(_texts(values, path, name), classes, f"{path}, {name}")
    _check_column(values, f"{path}, {name}", "numbers", "fiu")
    return torch.from_numpy(values.astype(np.float32))


def _texts(values: Array, path: Path, name: str) -> list[str]:
    _check_column(values, f"{path}, {name}", "whole numbers or text", "iuU")
    return [str(value) for value in values.tolist()]


def _check_column(values: Array, where: str, what: str, kinds: str) -> None:
    fits = values.ndim == 1 and values.dtype.kind in kinds
    require(fits, where, f"{what} of shape (N,)", f"{values.shape} of dtype {values.dtype}")
