"""CSV files with a named target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from otad.data import MissingDataError, load, load_csv, read_table
from otad.errors import InputError

HEADER = "acidity,sugar,quality"
ROWS = ["7.5,1e1,5", "7,-2.25,6", "6,3,5", "5,4,6", "4,5,10", "3,6,10"]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_regression_keeps_the_units(tmp_path: Path) -> None:
    dataset = load_csv(write(tmp_path / "a.csv", HEADER, *ROWS), "quality", task="regression")
    assert (dataset.feature_names, dataset.classes) == (("acidity", "sugar"), ())
    assert (len(dataset.train_x), len(dataset.test_x)) == (4, 2)
    rows = torch.cat([dataset.train_x, dataset.test_x])
    y = torch.cat([dataset.train_y, dataset.test_y])
    order = rows[:, 0].argsort(descending=True)
    assert rows[order].tolist() == [[7.5, 10], [7, -2.25], [6, 3], [5, 4], [4, 5], [3, 6]]
    assert y[order].tolist() == [5, 6, 5, 6, 10, 10]


def test_classes_are_in_the_order_of_numbers_or_of_the_alphabet(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, *ROWS)
    dataset = load_csv(path, "quality", features=["sugar"], test_fraction=0.5)
    assert dataset.classes == ("5", "6", "10")
    assert sorted(dataset.train_y.tolist()) == [0, 1, 2]
    path = write(tmp_path / "b.csv", "kind,x", "pear,1", "apple,2", "pear,3", "apple,4")
    dataset = load_csv(path, "kind", test_fraction=0.5)
    assert dataset.classes == ("apple", "pear")
    assert torch.equal(dataset.train_x.flatten() % 2, dataset.train_y)  # pears: the odd numbers


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_is_read_off_the_header(tmp_path: Path, separator: str) -> None:
    header = separator.join(['"residual, sugar; or so"', '"quality"'])
    path = write(tmp_path / "a.csv", "\ufeff" + header, f"1{separator}2", f"3{separator}4", "", "")
    table = read_table(path)
    assert table.columns == ("residual, sugar; or so", "quality")
    assert table.numbers(["quality", "residual, sugar; or so"]).tolist() == [[2, 1], [4, 3]]


@pytest.mark.parametrize(
    ("header", "row", "columns"),
    [
        ("length, mm\twidth, mm, outer\ty", "1\t2\t3", ("length, mm", "width, mm, outer", "y")),
        ("length, mm;width, mm, outer;y", "1;2;3", ("length, mm", "width, mm, outer", "y")),
        ("length;mm,width", "1,2", ("length;mm", "width")),
        ("a;b;c", "1,5;2,5;3,5", ("a", "b", "c")),
        ('"a,b,c";d', '"1,2,3";4', ("a,b,c", "d")),
        ("a,b", '"one\ntwo, three",4', ("a", "b")),  # the first row continues in the next line
    ],
)
def test_names_may_hold_other_separators(
    tmp_path: Path, header: str, row: str, columns: tuple[str, ...]
) -> None:
    assert read_table(write(tmp_path / "a.csv", header, row)).columns == columns


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER, *ROWS, "1,2"], "line 8: expected 3 cells, got 2"),
        ([HEADER, *ROWS, "1,2,3,4"], "line 8: expected 3 cells, got 4"),
        ([HEADER, "", *ROWS], "line 2: expected 3 cells, got 0"),
        ([HEADER, *ROWS, "1,two,3"], "line 8, column 'sugar': .* got 'two'"),
        ([HEADER, *ROWS, "1,,3"], "column 'sugar': expected a finite number, got ''"),
        ([HEADER, "nan,1,2", *ROWS], "line 2, column 'acidity': .* got 'nan'"),
        ([HEADER, "inf,1,2", *ROWS], "got 'inf'"),
        ([HEADER, "1e39,1,2", *ROWS], "got '1e39'"),
        ([HEADER, "1_0,1,2", *ROWS], "got '1_0'"),
        ([HEADER, "1,1,", *ROWS], "column 'quality'"),
        ([HEADER], "at least one row, got 1"),
        ([""], "at least one row, got 0"),
        (["a,a,quality", *ROWS], "distinct"),
        (["a,,quality", *ROWS], "non-empty column names"),
        (["a,b,c", *ROWS], "a, b, c, got 'quality'"),
        (["quality", "1", "2"], "feature columns besides the target"),
        ([HEADER, '"7.5,1,5', *ROWS], "not a CSV file"),
    ],
)
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_refusals(tmp_path: Path, lines: list[str], message: str, task: str) -> None:
    path = write(tmp_path / "bad.csv", *lines)
    with pytest.raises(InputError, match=message) as caught:
        load_csv(path, "quality", task=task)  # type: ignore[arg-type]
    assert str(path) in str(caught.value)


def test_other_refusals(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", HEADER, *ROWS)
    with pytest.raises(InputError, match="besides the target"):
        load_csv(path, "quality", features=["sugar", "quality"])
    with pytest.raises(InputError, match="got 'salt'"):
        load_csv(path, "quality", features=["salt"])
    with pytest.raises(InputError, match=r"task: .* 'ranking'"):
        load_csv(path, "quality", task="ranking")  # type: ignore[arg-type]
    path = tmp_path / "b.csv"
    with pytest.raises(MissingDataError, match=r"b.csv"):
        read_table(path)
    path.write_bytes(b"a,b\n\xff\xfe,1\n")
    with pytest.raises(InputError, match="UTF-8"):
        read_table(path)
    with pytest.raises(InputError, match="not a CSV file"):
        read_table(tmp_path)


def test_red_wine_in_the_layout_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "wine").mkdir()
    lines = [f"{k}.5;{k % 3};{5 + k % 2}" for k in range(20)]
    write(tmp_path / "wine" / "winequality-red.csv", '"pH";"alcohol";"quality"', *lines)
    dataset = load("red-wine", tmp_path)
    assert (dataset.task, dataset.name) == ("regression", "red_wine")
    assert (len(dataset.train_x), len(dataset.test_x)) == (16, 4)
    assert load("red_wine", tmp_path, task="classification").classes == ("5", "6")
    other = load("red_wine", tmp_path, seed=1)
    assert not torch.equal(other.test_x, dataset.test_x)
