"""Tables of numbers and text, with missing cells, as numbers.

- A column of text becomes a group of one-hot columns, one for each category. A missing cell is a
  category of its own where the column has some; else it is refused, like an unknown category.
- A missing number is replaced by the median of the train part, and a further column is 1 where it
  was missing, else 0. In a column that had none, a missing number is refused.
- One-hot columns and those of missing numbers are not standardized: a switch of category has the
  same length for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.checks import require
from otad.data.dataset import Standardizer, Task, class_names, refuse_repeats
from otad.errors import InputError
from otad.io.codec import from_plain, to_plain

MOST_CATEGORIES = 100
A_MISSING = "a missing cell"
MISSING = ("", "na", "n/a", "nan", "null", "?")  # cells of a CSV file, in small letters
BOOLEANS = {"true": 1.0, "false": 0.0}

# What a column of text must not hold: each value would become a category of its own.
_DAY, _YEAR = r"\d{1,2}", r"\d{4}"
_NO_TEXT = {
    "numbers with a decimal point and without other marks": re.compile(
        r"[+-]?(\d*,\d+|\d{1,3}([,.' ]\d{3})+([,.]\d+)?)"
    ),
    "dates as numbers, such as days since the first one": re.compile(
        rf"({_YEAR}([-/.]){_DAY}\2{_DAY}|{_DAY}([-/.]){_DAY}\3{_YEAR})([ T].*)?"
    ),
}

Cell = float | str | None  # None: missing
Where = Callable[[str, int], str]
"""The place of a cell, by its column and row, for error messages."""


@dataclass(frozen=True)
class Column:
    """A column of text has `categories`, "" for missing cells. A column of numbers has none, and a
    `median` if cells were missing."""

    name: str
    categories: tuple[str, ...] = ()
    median: float | None = None

    def __post_init__(self) -> None:
        refuse_repeats(self.categories, f"column {self.name!r}")
        few = len(self.categories) <= MOST_CATEGORIES
        remedy = "leave the column out, or join its categories"
        got = f"{len(self.categories)}: {remedy}"
        require(few, f"column {self.name!r}", f"at most {MOST_CATEGORIES} categories", got)
        fits = self.median is None or (math.isfinite(self.median) and not self.categories)
        require(fits, f"column {self.name!r}", "a finite median of numbers", self.median)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the columns it becomes."""
        missing = f"{self.name} is missing"
        if self.categories:
            return tuple(f"{self.name}={it}" if it else missing for it in self.categories)
        return (self.name,) if self.median is None else (self.name, missing)

    def encode(self, cells: Sequence[Cell], where: Where) -> NDArray[np.float64]:
        """(N, features); what it cannot encode is refused."""
        if not self.categories:
            return self._numbers(cells, where)
        codes = {category: code for code, category in enumerate(self.categories)}
        found = np.zeros((len(cells), len(codes)))
        for row, cell in enumerate(cells):
            text = _category(cell)
            if text not in codes:
                known = ", ".join(repr(it) if it else A_MISSING for it in self.categories)
                expected, got = f"one of the categories {known}", repr(text) if text else A_MISSING
                raise InputError(f"{where(self.name, row)}: expected {expected}, got {got}")
            found[row, codes[text]] = 1.0
        return found

    def _numbers(self, cells: Sequence[Cell], where: Where) -> NDArray[np.float64]:
        filled = math.nan if self.median is None else self.median
        values = np.array([filled if cell is None else number_in_cell(cell) for cell in cells])
        with np.errstate(over="ignore"):
            wrong = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
        for row in wrong[:1].tolist():
            got = f"{A_MISSING}, of which training had none in this column"
            got = got if cells[row] is None else repr(cells[row])
            raise InputError(f"{where(self.name, row)}: expected a finite number, got {got}")
        if self.median is None:
            return values[:, None]
        return np.stack([values, [float(cell is None) for cell in cells]], 1)


@dataclass(frozen=True)
class TableEncoding:
    """How the columns of a table become the columns of a model; see the top of this file."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        refuse_repeats((column.name for column in self.columns), "columns")
        refuse_repeats(self.feature_names, "columns and their categories")

    @classmethod
    def fit(
        cls, cells: Mapping[str, Sequence[Cell]], texts: Sequence[str], train: Sequence[int]
    ) -> TableEncoding:
        """Learn the encoding of these columns, of which `texts` hold text. Categories come from all
        rows and are sorted by number or alphabetically. Medians come from the rows `train`."""
        columns = []
        for name, values in cells.items():
            known = [value for value in values if value is not None]
            require(known, f"column {name!r}", "at least one cell that is not missing", "none")
            missing = len(known) < len(values)
            if name in texts:
                listed = list(map(_category, known))
                _refuse_numbers_and_dates(listed, f"column {name!r}")
                categories = class_names(listed)
                columns.append(Column(name, categories + ("",) * missing))
            elif not missing:
                columns.append(Column(name))
            else:
                kept = [cell for row in train if (cell := values[row]) is not None]
                found = map(number_in_cell, kept)
                numbers = list(filter(math.isfinite, found))  # `encode` refuses the others
                require(numbers, f"column {name!r}", "a finite number in the train part", "none")
                columns.append(Column(name, median=float(np.median(numbers))))
        return cls(tuple(columns))

    @classmethod
    def of_frame(cls, table: Any, weights: Any = None) -> TableEncoding | None:
        """Return the encoding of a DataFrame with text or missing values, with medians of the rows
        of positive weight; None for any other table."""
        if is_frame(table):
            refuse_repeats(map(str, table.columns), "X, columns")
        if not is_mixed(table):
            return None
        used = np.ones(len(table)) if np.ndim(weights) == 0 else np.asarray(weights, np.float64)
        train = [row for row in np.flatnonzero(used > 0).tolist() if row < len(table)]
        return cls.fit(*frame_cells(table), train)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.features)

    @property
    def is_plain(self) -> bool:
        """Whether all columns are numbers of which none is missing, so that nothing is encoded."""
        return self.feature_names == self.names and not self.groups

    def positions(self) -> dict[str, tuple[int, ...]]:
        """Return the positions of the features that each column becomes."""
        found, start = {}, 0
        for column in self.columns:
            end = start + len(column.features)
            found[column.name] = tuple(range(start, end))
            start = end
        return found

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The one-hot columns of each column of text: the `groups` of a threat."""
        places = self.positions()
        return tuple(places[column.name] for column in self.columns if column.categories)

    @property
    def indicators(self) -> tuple[int, ...]:
        """The columns that say that a number is missing."""
        places = self.positions()
        return tuple(places[it.name][1] for it in self.columns if it.median is not None)

    def encode(self, cells: Mapping[str, Sequence[Cell]], where: Where) -> Tensor:
        """float64 (N, features)."""
        parts = [column.encode(cells[column.name], where) for column in self.columns]
        return torch.from_numpy(np.concatenate(parts, 1))

    def encode_frame(self, frame: Any, name: str) -> Tensor:
        """Encode the columns of a DataFrame, which may have other columns as well."""
        cells = frame_cells(frame)[0] if hasattr(frame, "columns") else {}
        missing = [column for column in self.names if column not in cells]
        got = f"one without {', '.join(missing)}" if cells else type(frame).__name__
        require(not missing, name, f"a DataFrame with the columns {', '.join(self.names)}", got)
        return self.encode(cells, lambda column, row: f"{name}, column {column!r}, row {row}")

    def unscaled(self, inputs: Standardizer) -> Standardizer:
        """Return the standardization of numbers; one-hot columns and indicators stay 0 or 1."""
        mean, std = inputs.mean.clone(), inputs.std.clone()
        columns = [*(column for group in self.groups for column in group), *self.indicators]
        mean[columns], std[columns] = 0.0, 1.0
        return Standardizer(mean, std)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @staticmethod
    def of(notes: Mapping[str, Any]) -> TableEncoding | None:
        """What the notes of a model or a net say about its table; None where nothing is encoded."""
        card = notes.get("preparation")
        if not isinstance(card, dict) or "columns" not in card:
            return None
        found: TableEncoding = from_plain(TableEncoding, card, "notes.preparation")
        known = list(found.feature_names)
        listed = notes.get("feature_names")
        require(listed == known, "notes.feature_names", f"{known}", repr(listed)[:200])
        return found


def number_in(cell: Any) -> float:
    """NaN for text and objects that are no number; float() alone would read 1_000 as one."""
    try:
        return math.nan if isinstance(cell, str) and "_" in cell else float(cell)
    except (TypeError, ValueError):
        return math.nan


def number_in_cell(cell: Cell) -> float:
    """Like `number_in`. True and False are 1 and 0 also as text, which a CSV file makes of them."""
    return number_in(BOOLEANS.get(cell.lower(), cell) if isinstance(cell, str) else cell)


def _category(cell: Cell) -> str:
    """The category of a cell. It is the same for 1 and 1.0, since pandas makes floats of the whole
    numbers in a column with gaps."""
    if cell is None:
        return ""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def looks_like_text(cells: Sequence[Cell]) -> bool:
    """Whether fewer than half of the cells that are not missing are numbers, and not all are
    numbers or booleans. (A single word among numbers is an error, which is reported.)"""
    known = [cell for cell in cells if cell is not None]
    few = 2 * sum(not math.isnan(number_in(cell)) for cell in known) < len(known)
    return few and any(math.isnan(number_in_cell(cell)) for cell in known)


def _refuse_numbers_and_dates(texts: Sequence[str], where: str) -> None:
    """Refuse a column of text if more than half of it are numbers in another style, or dates."""
    for expected, pattern in _NO_TEXT.items():
        found = [it for it in texts if pattern.fullmatch(it) and math.isnan(number_in(it))]
        require(2 * len(found) <= len(texts), where, expected, repr((found or [""])[0]))


def is_mixed(table: Any) -> bool:
    """Whether this is a DataFrame with columns of text or categories, or with missing values."""
    if not is_frame(table):
        return False
    columns = (table[name] for name in table.columns)
    return any(
        str(column.dtype) == "category"
        or (values := column.to_numpy()).dtype.kind in "OUST"
        or (values.dtype.kind == "f" and bool(np.isnan(values).any()))
        for column in columns
    )


def is_frame(table: Any) -> bool:
    return hasattr(table, "columns") and hasattr(table, "dtypes")


def refuse_dates(table: Any, name: str) -> None:
    """Refuse dates and durations, which NumPy reads as numbers, in a DataFrame or an array."""
    dtypes = {name: getattr(table, "dtype", None)}
    if is_frame(table):
        columns = zip(table.columns, table.dtypes, strict=True)
        dtypes = {f"{name}, column {str(column)!r}": dtype for column, dtype in columns}
    for where, dtype in dtypes.items():
        fits = getattr(dtype, "kind", None) not in ("m", "M")
        require(fits, where, "no dates", f"dtype {dtype}: write dates as numbers")


def refuse_cells(table: Any, name: str) -> None:
    """Refuse a DataFrame with a cell that is no finite number, and name this cell."""
    if is_frame(table):
        columns = tuple(Column(str(column)) for column in table.columns)
        TableEncoding(columns).encode_frame(table, name)


def refuse_targets(targets: Any, task: Task) -> None:
    """Refuse a missing target, and in regression one that is no number, and name its row."""
    column = np.asarray(targets, object)
    if column.shape not in ((column.size,), (column.size, 1)):
        return  # no column: refused where shapes are checked
    if task == "regression":
        refuse_dates(np.asarray(targets), "y")
    expected = "a label" if task == "classification" else "a number"
    for row, value in enumerate(column.ravel().tolist()):
        # Complex numbers are left to scikit-learn, whose checks ask for its own words.
        is_word = not isinstance(value, complex) and math.isnan(number_in(value))
        if _is_missing(value) or (is_word and task == "regression"):
            raise InputError(f"y, row {row}: expected {expected}, got {value!r}")


def frame_numbers(frame: Any, name: str) -> NDArray[np.float64]:
    """Return a DataFrame of numbers and booleans as numbers (N, columns); name any other cell."""
    cells, _ = frame_cells(frame)
    for column, listed in cells.items():
        for row, cell in enumerate(listed):
            if not isinstance(cell, int | float):
                got = A_MISSING if cell is None else repr(cell)
                where = f"{name}, column {column!r}, row {row}"
                raise InputError(f"{where}: expected a number, got {got}")
    return np.array([*cells.values()], np.float64).T


def frame_cells(frame: Any) -> tuple[dict[str, list[Cell]], list[str]]:
    """The cells of a DataFrame by column, and which columns hold text or categories."""
    refuse_repeats(map(str, frame.columns), "X, columns")
    cells: dict[str, list[Cell]] = {}
    texts: list[str] = []
    for name in frame.columns:
        column, kind = frame[name], str(frame[name].dtype)
        values = column.to_numpy()
        fits = values.dtype.kind in "biufOUST"
        require(fits, f"X, column {str(name)!r}", "numbers or text", f"dtype {kind}")
        listed = values.tolist()
        if kind == "category":  # a gap has the code -1
            categories = [*column.cat.categories.tolist(), None]
            listed = [categories[code] for code in column.cat.codes]
        listed = [None if _is_missing(value) else value for value in listed]
        known = [value for value in listed if value is not None]
        all_text = all(isinstance(value, str) for value in known)  # even if it looks like numbers
        if kind == "category" or all_text or looks_like_text(known):
            texts.append(str(name))
        cells[str(name)] = listed
    return cells, texts


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, empty text, or NA or NaT of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return math.isnan(value) if isinstance(value, float) else isinstance(value, str) and not value
