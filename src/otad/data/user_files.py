"""Data files of users: CSV tables with a named target column, and NumPy archives with x and y,
perhaps test_x, test_y and feature_names, in which pickled objects are refused."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_choice, require
from otad.data.dataset import (
    TASKS,
    Dataset,
    Task,
    class_names,
    encode_labels,
    in_working_dtype,
    refuse_repeats,
)
from otad.data.encoding import MISSING, Cell, TableEncoding, looks_like_text, number_in
from otad.data.registry import find_first
from otad.data.splits import holdout, split_rows
from otad.errors import InputError
from otad.io.files import most_unpacked

_SEPARATORS = (";", "\t", ",")
Array = np.ndarray[Any, Any]
_OPTIONAL = ("test_x", "test_y", "feature_names")
# RuntimeError where a damaged file seems to need a password or an unknown method.
_UNREADABLE = (
    OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A CSV file as text: one header, rows of the same length."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]  # of each row in the file, for error messages

    def texts(self, column: str) -> list[str]:
        """The cells of one column; an empty cell is refused."""
        position = self._position(column)
        for number, row in enumerate(self.rows):
            require(row[position], self.where(column, number), "text", "an empty cell")
        return [row[position] for row in self.rows]

    def numbers(self, columns: Sequence[str]) -> Tensor:
        """float64 (N, d); cells that are no finite number, in float32 either, are refused."""
        positions = [self._position(column) for column in columns]
        cells = [[number_in(row[position]) for position in positions] for row in self.rows]
        values = torch.tensor(cells, dtype=torch.float64)
        for row, k in (~values.float().isfinite()).nonzero()[:1].tolist():
            cell = self.rows[row][positions[k]]
            where = self.where(columns[k], row)
            raise InputError(f"{where}: expected a finite number, got {cell!r}")
        return values

    def cells(self, columns: Sequence[str]) -> dict[str, list[Cell]]:
        """The text of each cell, None where it is missing: empty, NA, N/A, NaN, null or ?."""
        found: dict[str, list[Cell]] = {}
        for column in columns:
            position = self._position(column)
            texts = [row[position] for row in self.rows]
            found[column] = [None if text.lower() in MISSING else text for text in texts]
        return found

    def where(self, column: str, row: int) -> str:
        """The place of a cell, for error messages."""
        return f"{self.path} line {self.lines[row]}, column {column!r}"

    def _position(self, column: str) -> int:
        columns = f"one of the columns {', '.join(self.columns)}"
        require(column in self.columns, str(self.path), columns, repr(column))
        return self.columns.index(column)


def read_table(path: Path) -> Table:
    """A CSV file with a header. The separator is that of semicolon, tab and comma which the header
    and the first row have equally often, and more often than another such."""
    find_first([path], "CSV file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            separator = _separator(stream.readline(), stream.readline())
            stream.seek(0)
            reader = csv.reader(stream, delimiter=separator, strict=True)
            numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    while numbered and not numbered[-1][1]:  # blank lines at the end hold no row
        numbered.pop()
    require(len(numbered) > 1, str(path), "a header and at least one row", len(numbered))
    (_, header), *body = numbered
    distinct = len(set(header)) == len(header) and all(header)
    require(distinct, str(path), "distinct, non-empty column names", header)
    for line, row in body:
        require(len(row) == len(header), f"{path} line {line}", f"{len(header)} cells", len(row))
    lines, rows = zip(*body, strict=True)
    return Table(path, tuple(header), tuple(map(tuple, rows)), lines)


def load_csv(
    path: Path,
    target: str,
    *,
    task: Task = "classification",
    features: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    name: str | None = None,
    source: str = "the user's CSV file",
    encoding: TableEncoding | None = None,
) -> Dataset:
    """Features are all columns but the target unless named; values stay in their own units. Columns
    of text and missing cells are encoded (`otad.data.encoding`), by default as learned here: the
    `preparation` of the data set."""
    table = read_table(path)
    if features is None:
        features = [column for column in table.columns if column != target]
    besides = bool(features) and target not in features
    require(besides, str(path), f"feature columns besides the target {target!r}", features)
    refuse_repeats(features, f"{path}, features")
    classes: tuple[str, ...] = ()
    if check_choice(task, "task", TASKS) == "regression":
        y = table.numbers([target]).flatten()
    else:
        texts = table.texts(target)
        classes = class_names(texts)
        y = encode_labels(texts, classes, target)
    about: dict[str, Any] = {"name": name or path.stem, "source": source}
    if encoding is None:
        cells = table.cells(features)
        texts = [column for column, listed in cells.items() if looks_like_text(listed)]
        train, _ = holdout(y, test_fraction, seed, task=task)
        with naming(str(path)):
            encoding = TableEncoding.fit(cells, texts, train.tolist())
    about["feature_names"] = encoding.feature_names
    about["preparation"] = None if encoding.is_plain else encoding
    x, y = in_working_dtype(encoding.encode(table.cells(encoding.names), table.where), y)
    return split_rows(x, y, test_fraction, seed, classes=classes, **about)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Refusals name the file as well."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}, {error}") from error


def _separator(header: str, row: str) -> str:
    named, held = (
        {mark: sum(text.count(mark) for text in line.split('"')[::2]) for mark in _SEPARATORS}
        for line in (header, row)
    )  # counted outside the quotes
    alike = [mark for mark in _SEPARATORS if named[mark] == held[mark] > 0]
    return max(alike or _SEPARATORS, key=lambda mark: named[mark])


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
    x, targets = in_working_dtype(x, targets)
    named = arrays.get("feature_names")
    about: dict[str, Any] = {"name": path.stem, "source": "the user's NPZ file", "classes": classes}
    about["bounds"] = (0.0, 1.0) if x.dim() == 4 else None
    about["feature_names"] = None if named is None else tuple(map(str, named.ravel()))
    if "test_x" not in arrays:
        return split_rows(x, targets, test_fraction, seed, **about)
    test_x = as_inputs(arrays["test_x"], path, "test_x").to(x.dtype)
    test_y = as_targets(arrays["test_y"], path, "test_y", classes).to(targets.dtype)
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
            members: Any = archive.zip
            size, most = sum(one.file_size for one in members.infolist()), most_unpacked(path)
            require(size <= most, str(path), f"at most {most} bytes unpacked", size)
            return {name: archive[name] for name in wanted}
    except InputError:
        raise
    except _UNREADABLE as error:
        raise InputError(f"{path}: not a readable NPZ file ({error})") from error


def as_inputs(values: Array, path: Path, name: str) -> Tensor:
    """Vectors (N,d) in float64, or images (N,C,H,W) or (N,H,W) in [0, 1]; uint8 images are divided
    by 255."""
    where = f"{path}, {name}"
    require(values.dtype.kind in "fiu", where, "numbers", f"dtype {values.dtype}")
    shapes = "shape (N,d), (N,H,W) or (N,C,H,W)"
    require(values.ndim in (2, 3, 4), where, shapes, values.shape)
    if values.ndim == 2:
        return torch.from_numpy(values.astype(np.float64))
    x = torch.from_numpy(values.astype(np.float32))
    if values.dtype == np.uint8:
        x = x.div_(255)
    return x.unsqueeze(1) if values.ndim == 3 else x


def as_targets(values: Array, path: Path, name: str, classes: tuple[str, ...]) -> Tensor:
    """(N,) positions in `classes`, or values where there are none."""
    if classes:
        return encode_labels(_texts(values, path, name), classes, f"{path}, {name}")
    _check_column(values, f"{path}, {name}", "numbers", "fiu")
    return torch.from_numpy(values.astype(np.float64))


def _texts(values: Array, path: Path, name: str) -> list[str]:
    _check_column(values, f"{path}, {name}", "whole numbers or text", "iuU")
    return [str(value) for value in values.tolist()]


def _check_column(values: Array, where: str, what: str, kinds: str) -> None:
    fits = values.ndim == 1 and values.dtype.kind in kinds
    require(fits, where, f"{what} of shape (N,)", f"{values.shape} of dtype {values.dtype}")
