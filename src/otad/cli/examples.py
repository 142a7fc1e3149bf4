"""Inputs together with their right answers: what can be attacked and what accuracy needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from otad.cli.console import remark
from otad.cli.inputs import InputRows, open_inputs
from otad.cli.options import READING
from otad.data import read_h5ad, read_table
from otad.data.npz import read_npz
from otad.data.preprocess import encode_labels
from otad.data.table import Table
from otad.errors import InputError
from otad.model.otad import OTAD

TABLES = (".csv", ".tsv")

Targets = Annotated[
    str | None,
    typer.Option(
        help="Where the right answers are: a column of the CSV, an obs column of the .h5ad, an "
        "array of the NPZ, or another CSV or NPZ file in the order of the rows. By default those "
        "the model was trained on: the target column, the array y, the folder of each image.",
        rich_help_panel=READING,
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(help="Only so many rows, drawn at random by --seed.", min=1),
]


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs x (B,*input_shape) with one name a row; y (B,) labels or values where known."""

    source: str
    names: tuple[str, ...]
    x: Tensor
    y: Tensor | None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def answers(self) -> Tensor:
        """y, refused where it is not known."""
        if self.y is None:
            raise InputError(
                f"{self.source}: expected inputs with their right answers, got inputs only; name a "
                "column, an array or a file that holds them by --targets, or use the word test"
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
    """The rows of `source` on the device of the model, with the answers that can be found."""
    inputs = open_inputs(model, source, data_dir)
    y = _answers(model, source, inputs, targets)
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
            "them are not those of new data"
        )
    return Examples(
        source,
        tuple(inputs.names[row] for row in chosen),
        x,
        None if y is None else y[torch.tensor(chosen)].to(device),
    )


def class_names_of(model: OTAD) -> tuple[str, ...]:
    """In the user's own words; codes for a model saved from Python, none in regression."""
    if model.backbone.task == "regression":
        return ()
    known = model.notes.get("classes") or range(model.backbone.n_outputs)
    return tuple(map(str, known))


@torch.no_grad()
def _training_points(model: OTAD, x: Tensor) -> int:
    """How many inputs are in the bank as they are."""
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


def _answers(model: OTAD, source: str, inputs: InputRows, targets: str | None) -> Tensor | None:
    if inputs.targets is not None:
        if targets is not None:
            raise InputError("targets: expected none for the test part, which has its own")
        return inputs.targets
    classes, path = class_names_of(model), Path(source)
    if targets is not None and Path(targets).suffix.lower() in (*TABLES, ".npz"):
        return _from_file(model, Path(targets), classes)
    if path.is_dir():
        if targets is not None:
            raise InputError(f"targets: expected a CSV or NPZ file for images, got {targets!r}")
        folders = [name.partition("/")[0] for name in inputs.names]
        return encode_labels(folders, classes, source) if set(folders) <= {*classes} else None
    if path.suffix.lower() in TABLES:
        table, column = read_table(path), targets or _noted(model, "target")
        if targets is None and column not in table.columns:
            return None
        return _from_table(table, str(column), classes)
    if path.suffix.lower() == ".npz":
        if targets is None and not read_npz(path, (), ("y",)):
            return None
        return _from_archive(path, targets or "y", classes)
    labels = read_h5ad(path, targets or _noted(model, "label"), may_miss=targets is None).labels
    return None if labels is None else _encode(labels, classes, path)


def _noted(model: OTAD, option: str) -> str | None:
    """The column the model was trained on, as its card tells."""
    card = model.notes.get("data")
    choice = card.get("choice", {}) if isinstance(card, dict) else {}
    column = choice.get("options", {}).get(option)
    return None if column is None else str(column)


def _from_file(model: OTAD, path: Path, classes: Sequence[str]) -> Tensor:
    if path.suffix.lower() == ".npz":
        return _from_archive(path, "y", classes)
    table, column = read_table(path), _noted(model, "target")
    if column not in table.columns:
        if len(table.columns) > 1:
            raise InputError(f"{path}: expected one column, got {', '.join(table.columns)}")
        column = table.columns[0]
    return _from_table(table, str(column), classes)


def _from_table(table: Table, column: str, classes: Sequence[str]) -> Tensor:
    if classes:
        return _encode(table.texts(column), classes, table.path)
    return table.numbers([column]).flatten()


def _from_archive(path: Path, name: str, classes: Sequence[str]) -> Tensor:
    values = read_npz(path, (name,))[name]
    kinds = "iuU" if classes else "fiu"
    if values.ndim != 1 or values.dtype.kind not in kinds:
        what = "whole numbers or text" if classes else "numbers"
        raise InputError(
            f"{path}: expected {what} of shape (N,) in {name}, "
            f"got {values.shape} of dtype {values.dtype}"
        )
    if classes:
        return _encode([str(value) for value in values.tolist()], classes, path)
    return torch.tensor(values.tolist(), dtype=torch.float32)


def _encode(texts: Sequence[str], classes: Sequence[str], path: Path) -> Tensor:
    return encode_labels(texts, classes, f"{path}, right answers")
