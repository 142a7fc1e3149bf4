"""From what a user wants predicted (a table, arrays, images, cells) to inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import check_training_inputs, knows_inputs
from otad.cli.data_choice import DataChoice, bank_part
from otad.data import (
    CellPreparation,
    list_images,
    read_h5ad,
    read_images,
    read_table,
)
from otad.data.dataset import refuse_repeats
from otad.data.npz import as_inputs, read_npz
from otad.data.registry import find_first
from otad.errors import InputError
from otad.model.otad import OTAD

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow turns color to gray


@dataclass(frozen=True, eq=False)
class InputRows:
    """Inputs of a model, read a few at a time.

    `names`: one a row, its number or its file. `read(rows)` gives inputs (B,*input_shape);
    `targets` (N,) are known for the test part of a data set only.
    """

    names: tuple[str, ...]
    read: Callable[[slice], Tensor]
    targets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    def batches(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        for start in range(0, len(self), size):
            rows = slice(start, min(start + size, len(self)))
            yield rows, self.read(rows)

    def row(self, number: int) -> Tensor:
        """One input (1,*input_shape)."""
        if not 0 <= number < len(self):
            raise InputError(f"row: expected 0 to {len(self) - 1}, got {number}")
        return self.read(slice(number, number + 1))


def open_inputs(model: OTAD, source: str, data_dir: Path | None = None) -> InputRows:
    """The rows of `source`, read the way the model's card says."""
    if source == "test":
        return _test_part(model, data_dir)
    path = Path(source)
    if path.is_dir():
        return _images(model, path)
    readers = {".csv": _table, ".tsv": _table, ".npz": _arrays, ".h5ad": _cells}
    if path.suffix.lower() not in readers:
        raise InputError(
            f"input: expected 'test', an image folder or a file that ends in {', '.join(readers)}, "
            f"got {source!r}"
        )
    find_first([path], "input file")
    return readers[path.suffix.lower()](model, path)


def _test_part(model: OTAD, data_dir: Path | None) -> InputRows:
    card = data_card(model)
    if not card:
        raise InputError("input: 'test' needs a model made by `otad defend`, which names its data")
    dataset = DataChoice.from_json(card["choice"]).load(data_dir)
    if dataset.fingerprint() != card["fingerprint"]:
        raise InputError(
            f"input: expected {card['choice']['data']!r} as it was when the model was made, got "
            "other contents, so rows of its test part may have been trained on"
        )
    return _from_tensor(dataset.test_x, dataset.test_y)


def data_card(model: OTAD) -> dict[str, Any]:
    """What `otad defend` noted of the data; empty for a model saved by other means."""
    card = model.notes.get("data")
    return card if isinstance(card, dict) and "choice" in card else {}


def training_inputs(model: OTAD, data_dir: Path | None) -> Tensor | None:
    """The inputs of the bank where it does not tell them itself: those of the data the model was
    made from. None where that is not at hand; what needs them is refused then, or told to be
    missing."""
    card = data_card(model)
    if knows_inputs(model, None) or not card:
        return None
    try:
        dataset = DataChoice.from_json(card["choice"]).load(data_dir)
        return check_training_inputs(model, bank_part(dataset, **card.get("kept", {}))[0])
    except InputError:
        return None


def _table(model: OTAD, path: Path) -> InputRows:
    if model.notes.get("preparation") is not None:
        raise InputError(f"{path}: expected an .h5ad file, whose counts the model prepares itself")
    names = model.notes.get("feature_names")
    if names is None:
        raise InputError(f"{path}: expected NPZ or images, as the model has no feature names")
    refuse_repeats(names, "the model's feature names")
    table = read_table(path)
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise InputError(
            f"{path}: expected the {len(names)} columns the model was trained on, "
            f"{len(missing)} are missing: {', '.join(missing)}"
        )
    return _from_tensor(table.numbers(names))


def _arrays(model: OTAD, path: Path) -> InputRows:
    x = as_inputs(read_npz(path, ("x",))["x"], path, "x")
    if len(x) == 0:
        raise InputError(f"{path}: expected at least one row in x, got none")
    return _from_tensor(x)


def _cells(model: OTAD, path: Path) -> InputRows:
    card = model.notes.get("preparation")
    if card is None:
        raise InputError(f"{path}: expected no cells, as the model was not trained on any")
    prepare, cells = CellPreparation.from_json(card), read_h5ad(path)
    count = cells.values.shape[0]
    return InputRows(
        tuple(map(str, range(count))),
        lambda rows: prepare(cells.rows(range(count)[rows])),
    )


def _images(model: OTAD, folder: Path) -> InputRows:
    """A flat folder of images, or one of subfolders, as for training."""
    shape = model.backbone.input_shape
    if len(shape) != 3 or shape[1] != shape[2] or shape[0] not in (1, 3):
        raise InputError(
            f"{folder}: expected no images, as the model takes inputs of shape {shape}"
        )
    parts = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    if parts and all(part.is_dir() for part in parts):
        paths = [path for part in parts for path in list_images(part)]
    else:
        paths = list_images(folder)
    card = data_card(model)
    resize = card["choice"]["options"].get("resize") if card else None

    def read(rows: slice) -> Tensor:
        images = read_images(paths[rows], shape[1], resize=resize)
        return images if shape[0] == 3 else _gray(images)

    return InputRows(tuple(path.relative_to(folder).as_posix() for path in paths), read)


def _gray(images: Tensor) -> Tensor:
    """(B,3,H,W) -> (B,1,H,W); gray images keep their levels to the bit."""
    weights = images.new_tensor(_LUMINANCE).view(3, 1, 1)
    mixed = (images * weights).sum(1, keepdim=True).clamp_(0, 1)
    first = images[:, :1]
    return torch.where((images == first).all(1, keepdim=True), first, mixed)


def _from_tensor(x: Tensor, targets: Tensor | None = None) -> InputRows:
    return InputRows(tuple(map(str, range(len(x)))), lambda rows: x[rows], targets)
