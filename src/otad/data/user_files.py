"""Your own data files: CSV tables with a target column, and NumPy archives with x and y, perhaps
test_x, test_y and feature_names. Pickled objects are refused."""

from __future__ import annotations

import csv
import zipfile
import zlib
from collections.abc import Sequence
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
    warn_of_labels,
)
from otad.data.encoding import MISSING, Cell, TableEncoding, looks_like_text, number_in_cell
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
    r"""A CSV file as text: one header, and rows of the same length.

    Attributes
    ----------
    path : Path
        The file.
    columns : tuple of str
        The names in the header.
    rows : tuple of tuples of str
        The cells.
    lines : tuple of int
        The line of each row in the file, where the header is line 1.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.data import read_table
    >>> _ = Path("points.csv").write_text("x,color\n1.5,red\n?,blue\n")
    >>> table = read_table("points.csv")
    >>> table.texts("color")
    ['red', 'blue']
    >>> table.cells(["x"])
    {'x': ['1.5', None]}
    """

    path: Path
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each row: its line in the file, such as "line 2" for the first one."""
        return tuple(f"line {line}" for line in self.lines)

    def texts(self, column: str) -> list[str]:
        """Return the cells of one column; a missing cell, as in `cells`, is refused."""
        position = self._position(column)
        texts = [row[position] for row in self.rows]
        for row, text in enumerate(texts):
            known = text.lower() not in MISSING
            require(known, self.where(column, row), "text", f"{text!r}, a missing cell")
        return texts

    def numbers(self, columns: Sequence[str]) -> Tensor:
        """Return float64 (N, d); a cell that is no finite number, also in float32, is refused."""
        positions = [self._position(column) for column in columns]
        cells = [[number_in_cell(row[position]) for position in positions] for row in self.rows]
        values = torch.tensor(cells, dtype=torch.float64)
        for row, k in (~values.float().isfinite()).nonzero()[:1].tolist():
            cell = self.rows[row][positions[k]]
            where = self.where(columns[k], row)
            raise InputError(f"{where}: expected a finite number, got {cell!r}")
        return values

    def cells(self, columns: Sequence[str]) -> dict[str, list[Cell]]:
        """Return the text of each cell by column, and None where it is missing.

        Empty cells, NA, N/A, NaN, null and ? count as missing.
        """
        found: dict[str, list[Cell]] = {}
        for column in columns:
            position = self._position(column)
            texts = [row[position] for row in self.rows]
            found[column] = [None if text.lower() in MISSING else text for text in texts]
        return found

    def where(self, column: str, row: int) -> str:
        """Return the place of a cell, for error messages."""
        return f"{self.path} line {self.lines[row]}, column {column!r}"

    def _position(self, column: str) -> int:
        columns = f"one of the columns {', '.join(self.columns)}"
        require(column in self.columns, str(self.path), columns, repr(column))
        return self.columns.index(column)


def read_table(path: Path) -> Table:
    r"""Read a CSV file with a header.

    The separator is a semicolon, a tab or a comma: the one that occurs equally often in the header
    and in the first row, and most often of these.

    Raises
    ------
    InputError
        If the file is no table in UTF-8, a row has another length, or a column has no name of its
        own.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.data import read_table
    >>> _ = Path("points.csv").write_text("x;y\n1;2\n3;4\n")
    >>> read_table("points.csv").columns
    ('x', 'y')
    """
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
    found = "a header alone" if numbered else "an empty file"
    require(len(numbered) > 1, str(path), "a header and at least one row", found)
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
    r"""Make a data set of a CSV file with a header.

    Values stay in their own units. Columns of text become one-hot columns, and missing numbers
    become the median with a further column that marks them. Rows are named by their lines in the
    file, such as "line 2" for the first one.

    Parameters
    ----------
    path : Path
        The file.
    target : str
        The column to predict.
    task : "classification" or "regression"
        What the target is.
    features : sequence of str, optional
        The columns to predict from. If None, all but the target.
    test_fraction : float
        The fraction of rows in the test part, stratified by class.
    seed : int
        Determines the split.
    name, source : str
        For reports; by default the name of the file, and "the user's CSV file".
    encoding : TableEncoding, optional
        How text and missing cells become numbers. If None, it is learned from this file; it is then
        the `preparation` of the data set.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.data import load_csv
    >>> rows = [f"{k},{'red' if k % 3 else 'blue'},{k % 2}" for k in range(20)]
    >>> _ = Path("points.csv").write_text("\n".join(["size,color,label", *rows]))
    >>> points = load_csv("points.csv", "label")
    >>> points
    Dataset('points', classification of 2 classes, 16 train and 4 test inputs (3,))
    >>> points.feature_names
    ('size', 'color=blue', 'color=red')
    """
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
        train, _ = holdout(y, test_fraction, seed, task=task, name="test_fraction")
        try:
            encoding = TableEncoding.fit(cells, texts, train.tolist())
        except InputError as error:
            raise InputError(f"{path}, {error}") from error
    about["feature_names"] = encoding.feature_names
    about["preparation"] = None if encoding.is_plain else encoding
    x, y = in_working_dtype(encoding.encode(table.cells(encoding.names), table.where), y)
    about["names"] = table.names
    return split_rows(x, y, test_fraction, seed, classes=classes, **about)


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
    """Make a data set of a NumPy archive with the arrays x and y.

    Parameters
    ----------
    path : Path
        An `.npz` file. `x` holds vectors (N, d), or images (N, H, W) or (N, C, H, W) in [0, 1] or
        as uint8. `y` (N,) holds labels or values. It may also hold `test_x`, `test_y` and
        `feature_names`.
    task : "classification" or "regression", optional
        What y is. If None, integers and text are classes, and floats are values.
    test_fraction, seed : float, int
        The fraction of rows in the test part, and the seed of the split, where there is no
        `test_x`.

    Examples
    --------
    >>> import numpy as np
    >>> from otad.data import load_npz
    >>> np.savez("points.npz", x=np.random.rand(10, 3), y=np.arange(10) % 2)
    >>> load_npz("points.npz")
    Dataset('points', classification of 2 classes, 8 train and 2 test inputs (3,))
    """
    arrays = read_npz(path, ("x", "y"), _OPTIONAL)
    paired = ("test_x" in arrays) == ("test_y" in arrays)
    require(paired, str(path), "both test_x and test_y or neither", ", ".join(arrays))
    x, y = as_inputs(arrays["x"], path, "x"), arrays["y"]
    require(len(x), f"{path}, x", "at least one row", "none")
    chosen = task or ("regression" if y.dtype.kind == "f" else "classification")
    check_choice(chosen, "task", TASKS)
    classes = () if chosen == "regression" else class_names(_texts(y, path, "y"))
    targets = as_targets(y, path, "y", classes)
    if task is None:
        remedy = "for classification, store labels as integers; else name the task"
        warn_of_labels(targets, f"{path}: y", remedy, stacklevel=4)
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
    return Dataset(about.pop("name"), x, targets, test_x, test_y, chosen, **about)


def read_npz(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Array]:
    """Read arrays of a NumPy archive by name; others in the file are ignored.

    Parameters
    ----------
    path : Path
        An `.npz` file. Pickled objects are refused.
    needed : sequence of str
        Arrays that must be there.
    optional : sequence of str
        Arrays that are read where they are there.

    Returns
    -------
    dict of str to ndarray
        The arrays by name.

    Examples
    --------
    >>> import numpy as np
    >>> from otad.data import read_npz
    >>> np.savez("points.npz", x=np.zeros((2, 3)))
    >>> read_npz("points.npz", ["x"], ["y"])["x"].shape
    (2, 3)
    """
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
    """Return vectors (N, d) in float64, or images (N, C, H, W) in [0, 1]. Images of uint8 are
    divided by 255, and images (N, H, W) get one channel."""
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
    """Return positions in `classes` (N,), or the values themselves where there are no classes."""
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
