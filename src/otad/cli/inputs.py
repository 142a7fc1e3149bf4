"""Inputs of a model and their targets: tables, arrays, images, cells, the test part of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.cli.console import remark
from otad.cli.sources import DataChoice, data_card
from otad.data import (
    CellPreparation,
    Table,
    list_images,
    read_h5ad,
    read_images,
    read_npz,
    read_table,
)
from otad.data.dataset import refuse_repeats
from otad.data.npz import as_inputs
from otad.data.preprocess import encode_labels
from otad.data.registry import find_first
from otad.errors import InputError
from otad.model.otad import OTAD

_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow converts color to gray


@dataclass(frozen=True, eq=False)
class InputRows:
    """Inputs of a model, read a few at a time.

    `names`: the number or the file of each row. `read(rows)` gives inputs (B,*input_shape).
    `targets(name)` gives the targets (N,) from the column or array of that name, by default from
    where the model was trained on; None where these are missing.
    """

    names: tuple[str, ...]
    read: Callable[[slice], Tensor]
    targets: Callable[[str | None], Tensor | None]

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


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x (B,*input_shape) with a name per row; y (B,) labels or values where known."""

    source: str
    names: tuple[str, ...]
    x: Tensor
    y: Tensor | None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def targets(self) -> Tensor:
        """y, refused where it is not known."""
        if self.y is None:
            raise InputError(
                f"{self.source}: expected inputs with targets, got inputs only; name a column, an "
                "array or a file that contains them by --targets, or use the word test"
            )
        return self.y


def open_examples(
    model: OTAD,
    source: str,
    *,
    targets: str | None = None,
    data_dir: Path | None = None,
    rows: int | None = None,
    seed: int = 0,
) -> Examples:
    """The rows of `source` on the device of the model, with the targets that can be found."""
    if source == "test" and targets is not None:
        raise InputError("targets: expected none for the test part, which has its own")
    inputs = open_inputs(model, source, data_dir)
    if targets is not None and Path(targets).suffix.lower() in (".csv", ".tsv", ".npz"):
        y: Tensor | None = _targets_in_file(model, Path(targets))
    else:
        y = inputs.targets(targets)
    if y is not None and len(y) != len(inputs):
        raise InputError(
            f"targets: expected one for each of the {len(inputs)} rows, got {len(y)} of them"
        )
    chosen = _draw(len(inputs), rows, seed)
    if len(chosen) == len(inputs):
        x = torch.cat([part for _, part in inputs.batches(1000)])
    else:
        x = torch.cat([inputs.row(row) for row in chosen])
    device = model.backbone.mean.device
    x = model.backbone.check_inputs(x.to(device))
    if source != "test" and (copies := _training_points(model, x)):
        remark(
            f"note: {copies} of the {len(x)} rows are training points of the model: figures on "
            "them do not apply to new data"
        )
    names = tuple(inputs.names[row] for row in chosen)
    return Examples(source, names, x, None if y is None else y[torch.tensor(chosen)].to(device))


def class_names_of(model: OTAD) -> tuple[str, ...]:
    """As in the training data; numbers for a model saved from Python, none in regression."""
    if model.backbone.task == "regression":
        return ()
    known = model.notes.get("classes") or range(model.backbone.n_outputs)
    return tuple(map(str, known))


@torch.no_grad()
def _training_points(model: OTAD, x: Tensor) -> int:
    """How many inputs are in the bank."""
    nearest = (model.neighbors(model.query_keys(part)).distances[:, 0] for part in x.split(1000))
    return sum(int((distances == 0).sum()) for distances in nearest)


def _draw(count: int, rows: int | None, seed: int) -> list[int]:
    """Distinct row numbers, ascending."""
    if rows is None or rows == count:
        return list(range(count))
    if rows > count:
        raise InputError(f"rows: expected at most the {count} rows of the input, got {rows}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:rows].tolist())


def open_inputs(model: OTAD, source: str, data_dir: Path | None = None) -> InputRows:
    """The rows of `source`, read as the model's card says."""
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
    return _from_tensor(dataset.test_x, lambda name: dataset.test_y)


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

    def targets(name: str | None) -> Tensor | None:
        column = name or _trained_on(model, "target")
        if name is None and column not in table.columns:
            return None
        return _targets_in_table(model, table, str(column))

    return _from_tensor(table.numbers(names), targets)


def _arrays(model: OTAD, path: Path) -> InputRows:
    x = as_inputs(read_npz(path, ("x",))["x"], path, "x")
    if len(x) == 0:
        raise InputError(f"{path}: expected at least one row in x, got none")

    def targets(name: str | None) -> Tensor | None:
        if name is None and not read_npz(path, (), ("y",)):
            return None
        return _targets_in_archive(model, path, name or "y")

    return _from_tensor(x, targets)


def _cells(model: OTAD, path: Path) -> InputRows:
    card = model.notes.get("preparation")
    if card is None:
        raise InputError(f"{path}: expected no cells, as the model was not trained on any")
    prepare, cells = CellPreparation.from_json(card), read_h5ad(path)
    count = cells.values.shape[0]

    def targets(name: str | None) -> Tensor | None:
        label = name or _trained_on(model, "label")
        labels = read_h5ad(path, label, may_miss=name is None).labels
        return None if labels is None else _encode(model, labels, path)

    return InputRows(
        tuple(map(str, range(count))), lambda rows: prepare(cells.rows(range(count)[rows])), targets
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
    names = tuple(path.relative_to(folder).as_posix() for path in paths)
    card = data_card(model)
    resize = card["choice"]["options"].get("resize") if card else None

    def read(rows: slice) -> Tensor:
        images = read_images(paths[rows], shape[1], resize=resize)
        return images if shape[0] == 3 else _gray(images)

    def targets(name: str | None) -> Tensor | None:
        if name is not None:
            raise InputError(f"targets: expected a CSV or NPZ file for images, got {name!r}")
        labels = [file.partition("/")[0] for file in names]
        known = set(labels) <= {*class_names_of(model)}
        return _encode(model, labels, folder) if known else None

    return InputRows(names, read, targets)


def _gray(images: Tensor) -> Tensor:
    """(B,3,H,W) -> (B,1,H,W). Images that are gray already do not change by a bit."""
    weights = images.new_tensor(_LUMINANCE).view(3, 1, 1)
    mixed = (images * weights).sum(1, keepdim=True).clamp_(0, 1)
    first = images[:, :1]
    return torch.where((images == first).all(1, keepdim=True), first, mixed)


def _from_tensor(x: Tensor, targets: Callable[[str | None], Tensor | None]) -> InputRows:
    return InputRows(tuple(map(str, range(len(x)))), lambda rows: x[rows], targets)


def _trained_on(model: OTAD, option: str) -> str | None:
    """The column of the targets in the training data, from the model's card."""
    card = data_card(model)
    column = card["choice"]["options"].get(option) if card else None
    return None if column is None else str(column)


def _targets_in_file(model: OTAD, path: Path) -> Tensor:
    if path.suffix.lower() == ".npz":
        return _targets_in_archive(model, path, "y")
    table, column = read_table(path), _trained_on(model, "target")
    if column not in table.columns:
        if len(table.columns) > 1:
            raise InputError(f"{path}: expected one column, got {', '.join(table.columns)}")
        column = table.columns[0]
    return _targets_in_table(model, table, str(column))


def _targets_in_table(model: OTAD, table: Table, column: str) -> Tensor:
    if class_names_of(model):
        return _encode(model, table.texts(column), table.path)
    return table.numbers([column]).flatten()


def _targets_in_archive(model: OTAD, path: Path, name: str) -> Tensor:
    values, classes = read_npz(path, (name,))[name], class_names_of(model)
    if values.ndim != 1 or values.dtype.kind not in ("iuU" if classes else "fiu"):
        what = "whole numbers or text" if classes else "numbers"
        raise InputError(
            f"{path}: expected {what} of shape (N,) in {name}, "
            f"got {values.shape} of dtype {values.dtype}"
        )
    if classes:
        return _encode(model, [str(value) for value in values.tolist()], path)
    return torch.tensor(values.tolist(), dtype=torch.float32)


def _encode(model: OTAD, labels: Sequence[str], path: Path) -> Tensor:
    return encode_labels(labels, class_names_of(model), f"{path}, targets")
