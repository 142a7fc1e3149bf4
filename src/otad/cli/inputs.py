"""Inputs of a model and their targets: tables, arrays, images, cells, or the test part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import refusing, require
from otad.cli.console import remark
from otad.cli.sources import data_note
from otad.data import CellPreparation, Table, read_h5ad, read_images, read_npz, read_table
from otad.data.dataset import encode_labels, refuse_repeats
from otad.data.encoding import TableEncoding
from otad.data.images import list_images, to_gray, visible
from otad.data.registry import find_first
from otad.data.user_files import as_inputs, as_targets
from otad.errors import InputError
from otad.io.mapped_rows import spread_rows
from otad.model.names import Described, class_names_of
from otad.model.otad import OTAD
from otad.model.training_inputs import SAMPLE, copies_of_bank
from otad.nets import PretrainedMetric
from otad.nets.adapt import denormalized, only_normalizes
from otad.nets.inputs import InputNet

ROUNDING = 0.01  # how far a bank in half precision may leave the range of its inputs


@dataclass(frozen=True, eq=False)
class InputRows:
    """Inputs of a model, read a few at a time. `names` has the line, file, cell or number of each
    row. `read(rows)` returns inputs (B,*input_shape). `targets(name)` returns targets (N,) from the
    column or array of that name, by default the one trained on; None if it is missing."""

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
        """Return one input (1,*input_shape)."""
        return self.read(slice(number, number + 1))

    def number_of(self, name: str) -> int:
        """Return the number of the row of this name."""
        found = [number for number, known in enumerate(self.names) if known == name]
        known = f"the name of one row, such as {self.names[0]!r}; `otad predict` lists them"
        require(len(found) == 1, "row", known, f"{name!r}, the name of {len(found)} rows")
        return found[0]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x (B,*input_shape), a name for each row, and labels or values y (B,) if known."""

    source: str
    names: tuple[str, ...]
    x: Tensor
    y: Tensor | None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def targets(self) -> Tensor:
        """Return y; refuse inputs without it."""
        if self.y is None:
            raise InputError(f"{self.source}: expected targets, got inputs only; see --targets")
        return self.y


def open_examples(
    model: Described,
    source: str,
    *,
    targets: str | None = None,
    data_dir: Path | None = None,
    rows: int | None = None,
    seed: int = 0,
    needs_targets: bool = True,
) -> Examples:
    """Return the rows of `source` on the device of the model, with targets if there are any. If
    none are named or needed, those that the model does not know are left out with a remark."""
    own = source != "test" or targets is None
    require(own, "targets", "none, because the test part has its own", targets)
    inputs = open_inputs(model, source, data_dir)
    suffix = Path(targets or "").suffix.lower()
    if targets is not None and suffix in (".csv", ".tsv"):
        table, column = read_table(Path(targets)), _trained_on(model, "target")
        if column not in table.columns:
            require(len(table.columns) == 1, targets, "one column", ", ".join(table.columns))
            column = table.columns[0]
        y: Tensor | None = _targets_in_table(model, table, column)
    elif targets is not None and suffix == ".npz":
        y = _targets_in_archive(model, Path(targets), "y")
    else:
        try:
            y = inputs.targets(targets)
        except InputError as error:
            if needs_targets or targets is not None:
                raise
            remark(f"note: targets are left out, because they are not known: {error}")
            y = None
    count = len(inputs)
    found = count if y is None else len(y)
    require(found == count, "targets", f"{count}, one for each row", found)
    require(rows is None or rows <= count, "rows", f"at most the {count} of the input", rows)
    if rows is None or rows == count:
        chosen = list(range(count))
        x = torch.cat([part for _, part in inputs.batches(1000)])
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        chosen = sorted(order[:rows].tolist())
        x = torch.cat([inputs.row(row) for row in chosen])
    device = model.backbone.mean.device
    x = model.backbone.check_inputs(x.to(device))
    if source != "test" and isinstance(model, OTAD) and (copies := copies_of_bank(model, x)):
        known = f"{copies} of the {len(x)} rows are training points of the model"
        remark(f"note: {known}. Scores on them do not apply to new data")
    names = tuple(inputs.names[row] for row in chosen)
    return Examples(source, names, x, None if y is None else y[torch.tensor(chosen)].to(device))


def open_inputs(model: Described, source: str, data_dir: Path | None = None) -> InputRows:
    """Return the rows of `source`, read as the card of the model says."""
    if source == "test":
        return _test_part(model, data_dir)
    path = Path(source)
    if path.is_dir():
        return _images(model, path)
    readers = {".csv": _table, ".tsv": _table, ".npz": _arrays, ".h5ad": _cells}
    expected = f"'test', an image folder or a file that ends in {', '.join(readers)}"
    require(path.suffix.lower() in readers, "input", expected, repr(source))
    find_first([path], "input file")
    return readers[path.suffix.lower()](model, path)


def _test_part(model: Described, data_dir: Path | None) -> InputRows:
    note = data_note(model)
    if note is None:
        got = "a model that does not name its data"
        expected = "a file, or for 'test' a model made by `otad defend`"
        raise InputError(f"input: expected {expected}, got {got}")
    dataset = note.choice.load(data_dir, model.notes)
    unchanged = dataset.fingerprint() == note.fingerprint
    expected = f"{note.choice.data!r} as it was when the model was made"
    require(unchanged, "input", expected, "changed data, which may contain training points")
    return _from_tensor(model, dataset.test_x, lambda name: dataset.test_y, dataset.test_names)


def _table(model: Described, path: Path) -> InputRows:
    encoding = TableEncoding.of(model.notes)
    counts = encoding is None and model.notes.get("preparation") is not None
    require(not counts, str(path), "an .h5ad file for a model of cells", "a table")
    names = list(map(str, model.notes.get("feature_names") or ()))
    if encoding is not None:
        names = list(encoding.names)
    require(names, str(path), "NPZ or images, as the model has no feature names", "a table")
    refuse_repeats(names, "the model's feature names")
    table = read_table(path)
    missing = [name for name in names if name not in table.columns]
    without = f"a table without {len(missing)} of them: {', '.join(missing)}"
    require(not missing, str(path), f"the {len(names)} columns of the training data", without)

    def targets(name: str | None) -> Tensor | None:
        column = name or _trained_on(model, "target")
        known = name is not None or column in table.columns
        return _targets_in_table(model, table, str(column)) if known else None

    if encoding is not None:
        x = encoding.encode(table.cells(names), table.where)
    else:
        x = table.numbers(names)
    return _from_tensor(model, x, targets, table.names)


def _arrays(model: Described, path: Path) -> InputRows:
    values = read_npz(path, ("x",))["x"]
    x = as_inputs(values, path, "x")
    if values.dtype == np.uint8 and x.dim() == 4:
        _check_scale(model, f"{path}, x")
    require(len(x), f"{path}, x", "at least one row", "none")
    x = model.backbone.check_inputs(x.to(model.backbone.mean.dtype), f"{path}, x")

    def targets(name: str | None) -> Tensor | None:
        known = name is not None or read_npz(path, (), ("y",))
        return _targets_in_archive(model, path, name or "y") if known else None

    return _from_tensor(model, x, targets)


def _cells(model: Described, path: Path) -> InputRows:
    card = model.notes.get("preparation") or {}
    require(card, str(path), "an input like the training data", "cells")
    with refusing("notes.preparation: expected a preparation of cells"):
        prepare = CellPreparation.from_json(card)
    cells = read_h5ad(path)
    count = cells.values.shape[0]

    def targets(name: str | None) -> Tensor | None:
        label = name or _trained_on(model, "label")
        labels = read_h5ad(path, label, may_miss=name is None).labels
        return None if labels is None else _encode(model, labels, path)

    return InputRows(cells.names, lambda rows: prepare(cells.rows(range(count)[rows])), targets)


def _images(model: Described, folder: Path) -> InputRows:
    shape = model.backbone.input_shape
    square = len(shape) == 3 and shape[1] == shape[2] and shape[0] in (1, 3)
    require(square, str(folder), f"inputs of shape {shape}", "images")
    _check_scale(model, str(folder))
    parts = visible(folder)
    flat = not parts or not all(part.is_dir() for part in parts)
    paths = [path for part in ([folder] if flat else parts) for path in list_images(part)]
    names = tuple(path.relative_to(folder).as_posix() for path in paths)
    resize = _trained_on(model, "resize")

    def read(rows: slice) -> Tensor:
        images = read_images(paths[rows], shape[1], resize=resize)
        return images if shape[0] == 3 else to_gray(images)

    def targets(name: str | None) -> Tensor | None:
        require(name is None, "targets", "a CSV or NPZ file for images", repr(name))
        labels = [file.partition("/")[0] for file in names]
        known = {*class_names_of(model)} & {*labels}  # then any other folder is refused
        return _encode(model, labels, folder) if known else None

    return InputRows(names, read, targets)


def _check_scale(model: Described, where: str) -> None:
    """Refuse images, which are read as values from 0 to 1, if the model has other bounds. If it has
    none, but training points beyond this range, remark it."""
    backbone, read = model.backbone, "images, which are read as values from 0 to 1"
    remedy = "write the values as floats to an NPZ file, which is read as it is"
    expected = f"values in the bounds {backbone.bounds} of the model"
    require(backbone.bounds in (None, (0.0, 1.0)), where, expected, f"{read}: {remedy}")
    found = _training_points(model) if backbone.bounds is None else None
    if found is None:
        return
    low, high = found.min().item(), found.max().item()
    if low < -ROUNDING or high > 1 + ROUNDING:
        known = f"but training points have values from {low:.3g} to {high:.3g}"
        remark(f"warning: {where} has {read}, {known}. If this is not meant, {remedy}")


def _training_points(model: Described) -> Tensor | None:
    """Return some training inputs, if the bank or its keys are inputs that are only normalized."""
    if not isinstance(model, OTAD):
        return None
    keys, metric = model.bank_keys, model.metric
    if keys is not None and isinstance(metric, PretrainedMetric) and metric.lipschitz is not None:
        net: InputNet = metric
        points = keys
    elif only_normalizes(model.backbone):
        net, points = model.backbone, model.bank_inputs
    else:
        return None
    rows = spread_rows(len(points), SAMPLE).to(points.device)
    return denormalized(net, points[rows].to(net.mean))


def _from_tensor(
    model: Described,
    x: Tensor,
    targets: Callable[[str | None], Tensor | None],
    names: tuple[str, ...] = (),
) -> InputRows:
    numbers, dtype = tuple(map(str, range(len(x)))), model.backbone.mean.dtype
    return InputRows(names or numbers, lambda rows: x[rows].to(dtype), targets)


def _trained_on(model: Described, option: str) -> Any:
    """Return an option with which the training data was read, from the card of the model."""
    note = data_note(model)
    return None if note is None else note.choice.options.get(option)


def _targets_in_table(model: Described, table: Table, column: str) -> Tensor:
    if class_names_of(model):
        return _encode(model, table.texts(column), table.path)
    return table.numbers([column]).flatten().to(model.backbone.mean.dtype)


def _targets_in_archive(model: Described, path: Path, name: str) -> Tensor:
    classes, dtype = class_names_of(model), model.backbone.mean.dtype
    found = as_targets(read_npz(path, (name,))[name], path, name, classes)
    return found if classes else found.to(dtype)


def _encode(model: Described, labels: Sequence[str], path: Path) -> Tensor:
    return encode_labels(labels, class_names_of(model), f"{path}, targets")
