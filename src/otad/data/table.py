"""CSV tables with a named target column."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.checks import check_choice
from otad.data.dataset import TASKS, Dataset, Task
from otad.data.preprocess import class_names, encode_labels
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
    lines: tuple[int, ...]  # where each row stands in the file, for error messages

    def texts(self, column: str) -> list[str]:
        """The cells of one column; an empty cell is refused."""
        position = self._position(column)
        for line, row in zip(self.lines, self.rows, strict=True):
            if not row[position]:
                raise InputError(f"{self.path} line {line}: empty cell in column {column!r}")
        return [row[position] for row in self.rows]

    def numbers(self, columns: Sequence[str]) -> Tensor:
        """float32 (N, d); cells that are no finite number are refused."""
        positions = [self._position(column) for column in columns]
        values = torch.tensor(
            [[_number(row[position]) for position in positions] for row in self.rows],
            dtype=torch.float32,
        )
        for row, k in (~values.isfinite()).nonzero()[:1].tolist():
            cell = self.rows[row][positions[k]]
            raise InputError(
                f"{self.path} line {self.lines[row]}, column {columns[k]!r}: "
                f"expected a finite number, got {cell!r}"
            )
        return values

    def _position(self, column: str) -> int:
        if column not in self.columns:
            raise InputError(
                f"{self.path}: no column {column!r}, expected one of {', '.join(self.columns)}"
            )
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
    if len(numbered) < 2:
        raise InputError(f"{path}: expected a header and at least one row")
    (_, header), *body = numbered
    if len(set(header)) != len(header) or not all(header):
        raise InputError(f"{path}: expected distinct, non-empty column names, got {header}")
    for line, row in body:
        if len(row) != len(header):
            raise InputError(f"{path} line {line}: expected {len(header)} cells, got {len(row)}")
    return Table(
        path=path,
        columns=tuple(header),
        rows=tuple(tuple(row) for _, row in body),
        lines=tuple(line for line, _ in body),
    )


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
    if not features or target in features:
        raise InputError(f"{path}: expected feature columns besides the target {target!r}")
    classes: tuple[str, ...] = ()
    if check_choice(task, "task", TASKS) == "regression":
        y = table.numbers([target]).flatten()
    else:
        labels = table.texts(target)
        classes = class_names(labels)
        y = encode_labels(labels, classes, str(path))
    return split_rows(
        table.numbers(features),
        y,
        test_fraction,
        seed,
        classes=classes,
        name=name or path.stem,
        source=source,
        feature_names=tuple(features),
    )


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
