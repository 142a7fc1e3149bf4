"""CSV tables with a named target column."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.checks import check_choice, require
from otad.data.dataset import TASKS, Dataset, Task, class_names, encode_labels
from otad.data.registry import find_first
from otad.data.splits import split_rows
from otad.errors import InputError

_SEPARATORS = (";", "\t", ",")


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
        for line, row in zip(self.lines, self.rows, strict=True):
            where = f"{self.path} line {line}, column {column!r}"
            require(row[position], where, "text", "an empty cell")
        return [row[position] for row in self.rows]

    def numbers(self, columns: Sequence[str]) -> Tensor:
        """float32 (N, d); cells that are no finite number are refused."""
        positions = [self._position(column) for column in columns]
        cells = [[_number(row[position]) for position in positions] for row in self.rows]
        values = torch.tensor(cells, dtype=torch.float32)
        for row, k in (~values.isfinite()).nonzero()[:1].tolist():
            where = f"{self.path} line {self.lines[row]}, column {columns[k]!r}"
            cell = self.rows[row][positions[k]]
            raise InputError(f"{where}: expected a finite number, got {cell!r}")
        return values

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
) -> Dataset:
    """Features are all columns but the target unless named; values stay in their own units."""
    table = read_table(path)
    if features is None:
        features = [column for column in table.columns if column != target]
    besides = bool(features) and target not in features
    require(besides, str(path), f"feature columns besides the target {target!r}", features)
    classes: tuple[str, ...] = ()
    if check_choice(task, "task", TASKS) == "regression":
        y = table.numbers([target]).flatten()
    else:
        texts = table.texts(target)
        classes = class_names(texts)
        y = encode_labels(texts, classes, target)
    about = {"name": name or path.stem, "source": source, "feature_names": tuple(features)}
    return split_rows(table.numbers(features), y, test_fraction, seed, classes=classes, **about)


def _separator(header: str, row: str) -> str:
    named, held = (
        {mark: sum(text.count(mark) for text in line.split('"')[::2]) for mark in _SEPARATORS}
        for line in (header, row)
    )  # counted outside the quotes
    alike = [mark for mark in _SEPARATORS if named[mark] == held[mark] > 0]
    return max(alike or _SEPARATORS, key=lambda mark: named[mark])


def _number(cell: str) -> float:
    """NaN for what is no number; float() alone would read 1_000 as one."""
    try:
        return math.nan if "_" in cell else float(cell)
    except ValueError:
        return math.nan
