"""CSV files with a named target and NumPy archives: what is read how, and what is refused."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from otad import data
from otad.data import MissingDataError, load_csv, read_table
from otad.data.user_files import as_inputs, load_npz, read_npz
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
        ([HEADER, *2 * ROWS, "1,,5", "1,two,5"], "line 15, column 'sugar': .* got 'two'"),
        ([HEADER, *(f",{k},5" for k in range(4))], "'acidity': expected at least one cell"),
        ([HEADER, *(f"word {k},1,5" for k in range(101))], "'acidity': .* 100 categories, got 101"),
        ([HEADER, "inf,1,2", *ROWS], "got 'inf'"),
        ([HEADER, "1e39,1,2", *ROWS], "got '1e39'"),
        ([HEADER, "1_0,1,2", *ROWS], "got '1_0'"),
        ([HEADER, *ROWS, "1,1,"], "line 8, column 'quality': .* got ''"),
        ([HEADER, *ROWS, "1,1,NA"], "line 8, column 'quality': .* got 'NA'"),
        ([HEADER, *ROWS, "1,1,?"], r"line 8, column 'quality': .* got '\?'"),
        ([HEADER], "at least one row, got a header alone"),
        ([""], "at least one row, got an empty file"),
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


X = np.arange(40, dtype=np.float64).reshape(10, 4)
Y = np.array([3, 7] * 5)


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_whole_numbers_and_text_are_classes_and_other_numbers_targets(tmp_path: Path) -> None:
    for y, classes in ((Y, ("3", "7")), (np.array(["b", "a"] * 5), ("a", "b")), (Y / 2, ())):
        made = load_npz(save(tmp_path / "a.npz", x=X, y=y))
        assert (made.task, made.classes) == ("classification" if classes else "regression", classes)
    overruled = load_npz(save(tmp_path / "d.npz", x=X, y=Y), task="regression")
    assert set(overruled.train_y.tolist()) == {3.0, 7.0}


def test_floats_that_look_like_labels_are_pointed_out(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", x=X, y=Y.astype(float))
    with pytest.warns(UserWarning, match="floats 3, 7 are taken as values.* as integers") as seen:
        assert data.load_npz(path).task == "regression"
    assert seen[0].filename == __file__
    assert load_npz(path, task="regression").task == "regression"  # asked for
    few = save(tmp_path / "b.npz", x=X, y=np.arange(10.0))  # each once
    assert load_npz(few).task == "regression"


def test_a_test_part_is_taken_as_it_is_and_else_held_out_by_seed(tmp_path: Path) -> None:
    given = load_npz(save(tmp_path / "a.npz", x=X, y=Y, test_x=X[:2] + 1, test_y=Y[:2]))
    torch.testing.assert_close(given.train_x, torch.tensor(X).float())
    torch.testing.assert_close(given.test_x, torch.tensor(X[:2] + 1).float())
    assert given.test_y.tolist() == [0, 1]
    path = save(tmp_path / "b.npz", x=X, y=Y)
    held = load_npz(path, test_fraction=0.4, seed=1)
    assert (len(held.train_x), len(held.test_x)) == (6, 4)
    rows = torch.cat([held.train_x, held.test_x])
    labels = torch.cat([held.train_y, held.test_y])
    order = rows[:, 0].argsort()
    torch.testing.assert_close(rows[order], torch.tensor(X).float())
    assert labels[order].tolist() == [0, 1] * 5


def test_images_get_a_channel_and_bytes_become_shares_of_255(tmp_path: Path) -> None:
    pixels = np.array([[[0, 51], [102, 255]]], dtype=np.uint8)
    read = as_inputs(pixels, tmp_path, "x")
    torch.testing.assert_close(read, torch.tensor([[[[0.0, 0.2], [0.4, 1.0]]]]))
    assert as_inputs(np.zeros((2, 3, 4, 4)), tmp_path, "x").shape == (2, 3, 4, 4)
    levels = as_inputs(np.array([[0, 255]], dtype=np.uint8), tmp_path, "x")
    assert levels.tolist() == [[0.0, 255.0]]  # a vector, in its own units


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "expected the arrays x, y, got x"),
        ({"x": X, "y": Y[:3]}, "10 y.* got 3"),
        ({"x": X, "y": Y, "test_x": X}, "both test_x and test_y"),
        ({"x": X, "y": Y, "test_x": X, "test_y": Y + 1}, "3, 7, got '4' in row 0"),
        ({"x": X[:, 0], "y": Y}, r"shape \(N,d\), \(N,H,W\) or \(N,C,H,W\), got \(10,\)"),
        ({"x": X.astype(str), "y": Y}, "x: expected numbers"),
        ({"x": X, "y": Y / 2}, "y: .*whole numbers or text.*float64"),
        ({"x": X, "y": Y[:, None]}, r"y: .*whole numbers or text.*\(10, 1\)"),
        ({"x": np.where(X == 5, np.nan, X), "y": Y}, "expected finite values, got nan"),
        ({"x": X, "y": np.zeros(10, int)}, "expected two classes or more"),
        ({"x": X[:0], "y": Y[:0]}, "x: expected at least one row, got none"),
        ({"x": X.reshape(10, 2, 2), "y": Y}, r"expected values in \[0.0, 1.0\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_npz(save(tmp_path / "bad.npz", **arrays), task="classification")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (mark,)

    renamed = tmp_path / "renamed.npz"
    renamed.write_bytes(pickle.dumps(Hostile()))
    inside = save(tmp_path / "inside.npz", x=np.array([Hostile()], dtype=object), y=Y)
    truncated = tmp_path / "truncated.npz"
    truncated.write_bytes(save(tmp_path / "whole.npz", x=X, y=Y).read_bytes()[:200])
    for path in (renamed, inside, truncated):
        with pytest.raises(InputError, match="not a readable NPZ file"):
            load_npz(path)
    assert not mark.exists()
    with (tmp_path / "single.npz").open("wb") as stream:
        np.save(stream, X)
    with pytest.raises(InputError, match="got a single array"):
        load_npz(tmp_path / "single.npz")


def test_no_more_is_unpacked_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otad.data.user_files.most_unpacked", lambda path: 99)
    with pytest.raises(InputError, match="at most 99 bytes"):
        load_npz(save(tmp_path / "large.npz", x=X, y=Y))


@pytest.mark.parametrize("compressed", [False, True])
def test_no_damage_is_more_than_an_unreadable_file(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "damaged.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=X[:2, :1])
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 128]) + whole[place + 1 :])
        with contextlib.suppress(InputError):  # some bytes, such as dates, mean nothing
            read_npz(path, ("x",))
