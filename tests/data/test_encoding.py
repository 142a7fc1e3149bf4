"""Columns of text and missing cells as numbers, against pandas; saved as plain JSON; refusals."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import refuses

from otad.data import load_csv, read_table
from otad.data.encoding import Column, TableEncoding, frame_cells, is_mixed, looks_like_text
from otad.errors import InputError

HEADER = "age,color,income,target"
ROWS = [
    "40,red,1.5,0", "30,green,NA,1", "50,,2.5,0", "20,red,?,1", "45,blue,4,0", "35,blue,3,1",
    "41,n/a,2,0", "29,green,1,1", "51,red,2,0", "22,red,8,1",
]  # fmt: skip


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_is_encoded_as_pandas_does_it(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = write(tmp_path / "a.csv", HEADER, *ROWS)
    dataset = load_csv(path, "target", seed=3)
    frame = pandas.read_csv(path, na_values=["?", "n/a"])
    expected = pandas.get_dummies(frame[["age", "color", "income"]], dummy_na=True, dtype=float)
    names = ["age", "color=blue", "color=green", "color=red", "color is missing"]
    names += ["income", "income is missing"]
    assert dataset.feature_names == tuple(names)
    x = torch.cat([dataset.train_x, dataset.test_x])
    order, rows = x[:, 0].argsort(), frame["age"].argsort()
    dummies = expected[["color_blue", "color_green", "color_red", "color_nan"]].to_numpy()
    np.testing.assert_array_equal(x[order, 1:5].numpy(), dummies[rows])
    missing = frame["income"].isna().to_numpy()
    np.testing.assert_array_equal(x[order, 6].numpy(), missing[rows].astype(float))
    known = dataset.train_x[dataset.train_x[:, 6] == 0, 5]  # the median is that of the train part
    filled = np.where(missing, np.median(known), frame["income"])
    np.testing.assert_allclose(x[order, 5].numpy(), filled[rows])
    encoding = dataset.preparation
    assert encoding.groups == ((1, 2, 3, 4),)
    assert encoding.indicators == (6,)


def test_numbers_alone_are_not_encoded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a,b,target", *(f"{k},{k * k},{k % 2}" for k in range(6)))
    dataset = load_csv(path, "target")
    assert dataset.preparation is None
    assert dataset.feature_names == ("a", "b")


def test_an_encoding_is_plain_json_and_reads_other_tables_as_the_first(tmp_path: Path) -> None:
    first = load_csv(write(tmp_path / "a.csv", HEADER, *ROWS), "target")
    card = json.loads(json.dumps(first.preparation.to_json()))
    notes = {"preparation": card, "feature_names": list(first.feature_names)}
    encoding = TableEncoding.of(notes)
    assert encoding == first.preparation
    few = write(tmp_path / "b.csv", HEADER, *ROWS[:2], *ROWS[4:6])  # no missing text, no green
    second = load_csv(few, "target", encoding=encoding)
    assert second.feature_names == first.feature_names
    for lines, match in (
        (["40,pink,1,0"], r"line 2, column 'color'.* 'red', a missing cell, got 'pink'"),
        (["NA,red,1,0"], r"column 'age': expected a finite number, got a missing cell"),
        (["40,red,1e39,0"], r"column 'income'.*'1e39'"),
    ):
        path = write(tmp_path / "c.csv", HEADER, *lines, *ROWS)
        refuses(load_csv, path, "target", encoding=encoding, match=match)
    assert TableEncoding.of({"preparation": {"genes": []}}) is None
    assert TableEncoding.of({}) is None


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"name": "color"}, "feature_names"),
        ({"name": "color", "categories": ["a", "a"]}, "color.*repeated a"),
        ({"name": "color", "categories": [1]}, "categories"),
        ({"name": "color", "categories": ["a"], "median": 1.0}, "median"),
        ({"name": "color", "categories": [str(k) for k in range(101)]}, "100 categories, got 101"),
        ({"name": "color", "median": "nan"}, "median"),
        ({"name": "color", "run": "code"}, "run"),
        ({"categories": []}, "name"),
        ("color", "table"),
    ],
)
def test_forged_notes_are_refused(column: object, match: str) -> None:
    notes = {"preparation": {"columns": [column]}, "feature_names": ["x"]}
    refuses(TableEncoding.of, notes, match=match)


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        (["1,5", "-2,25", ",5"], r"column 'size': expected numbers with a decimal point.*'1,5'"),
        (["1,234", "12 345,5", "1.234.567"], r"column 'size': expected numbers.*'1,234'"),
        (["2020-01-31", "2020/2/1", "2020-02-01 12:30"], r"column 'size': expected dates as num"),
        (["31.1.2020", "01/02/2020", None], r"column 'size': expected dates.*'31.1.2020'"),
    ],
)
def test_numbers_in_another_style_and_dates_are_no_categories(
    cells: list[str | None], match: str, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    lines = [f"{k},{'' if cell is None else cell};{k % 2}" for k, cell in enumerate(2 * cells)]
    path = write(tmp_path / "a.csv", "size;target", *(line.split(",", 1)[1] for line in lines))
    refuses(load_csv, path, "target", match=rf"a\.csv, {match}")
    refuses(TableEncoding.of_frame, pandas.DataFrame({"size": cells}), match=match)


def test_words_with_digits_and_lists_of_codes_are_categories() -> None:
    codes = ["1.234", "2.500"]  # plain numbers, which a table has as text on purpose
    mixed = ["1,5", "big"]
    for words in (["10-20", "20-30"], ["1,2,3", "1,3,4"], ["1.2.3", "2020-01"], mixed, codes):
        (column,) = TableEncoding.fit({"size": words}, ["size"], [0]).columns
        assert column.categories == tuple(words)


def test_standardization_leaves_one_hot_columns(tmp_path: Path) -> None:
    from otad.data import Standardizer

    dataset = load_csv(write(tmp_path / "a.csv", HEADER, *ROWS), "target")
    fitted = Standardizer.fit(dataset.train_x)
    inputs = dataset.preparation.unscaled(fitted)
    assert inputs.mean.tolist()[1:5] == [0.0] * 4
    assert inputs.std.tolist()[6] == 1.0
    assert inputs.std[0] == fitted.std[0]


def test_frames(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame({"a": [1, 2], "b": [True, False]})
    assert not is_mixed(plain)
    assert not is_mixed(plain.to_numpy())
    mixed = plain.assign(
        c=["x", None],
        d=pandas.array([1, None], dtype="Int64"),
        e=pandas.Categorical([3, 4]),
        f=[1.5, np.nan],
    )
    assert is_mixed(mixed)
    cells, texts = frame_cells(mixed)
    assert texts == ["c", "e"]
    assert cells["c"] == ["x", None]
    assert cells["d"] == [1, None]
    encoding = TableEncoding.fit(cells, texts, [0, 1])
    assert encoding.columns[:2] == (Column("a"), Column("b"))
    assert encoding.columns[3] == Column("d", median=1.0)
    assert encoding.columns[4].categories == ("3", "4")
    with pytest.raises(InputError, match=r"column 'when'.*datetime"):
        frame_cells(plain.assign(when=pandas.to_datetime(["2020-01-01", "2020-01-02"])))
    refuses(frame_cells, pandas.DataFrame([[1, 2]], columns=["a", "a"]), match="repeated a")


def test_categories_of_a_frame_are_the_same_with_and_without_gaps() -> None:
    """A gap makes floats of whole numbers in pandas, and these round those beyond 2^53."""
    pandas = pytest.importorskip("pandas")
    large, few = [2, 10, 2**53 + 1], [1, 2, 10]
    for whole, gaps in (
        (large, pandas.Categorical([None, *large], categories=large)),
        (few, pandas.Series([None, *few]).astype("category")),
        (few, pandas.Series([None, *few], dtype="Int64").astype("category")),
    ):
        encoding = TableEncoding.of_frame(pandas.DataFrame({"c": gaps}))
        assert encoding.columns[0].categories == (*map(str, whole), "")
        found = encoding.encode_frame(pandas.DataFrame({"c": pandas.Categorical(whole)}), "X")
        assert torch.equal(found, torch.eye(4).double()[:3])


def test_booleans_of_a_csv_file_are_those_of_the_frame_it_was_written_from(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = {"b": [True, False, None, True] * 3, "c": [*"xyxy"] * 3, "d": [True, False] * 6}
    frame = pandas.DataFrame({name: pandas.Series(rows[name], dtype=object) for name in "bcd"})
    encoding = TableEncoding.of_frame(frame)
    frame["target"] = [0, 0, 1, 1] * 3
    frame.to_csv(tmp_path / "a.csv", index=False)
    table = read_table(tmp_path / "a.csv")
    read = encoding.encode(table.cells(encoding.names), table.where)
    assert torch.equal(read, encoding.encode_frame(frame, "X"))
    learned = load_csv(tmp_path / "a.csv", "target").preparation
    assert learned.feature_names == encoding.feature_names
    assert torch.equal(learned.encode(table.cells(learned.names), table.where), read)
    numbers = frame["d"].astype(float).tolist()
    assert table.numbers(["d"]).flatten().tolist() == numbers
    write(tmp_path / "b.csv", "b,c,d,e", "TRUE,x,false,True", "true,y,FALSE,maybe", "?,x,1,False")
    table = read_table(tmp_path / "b.csv")
    read = encoding.encode(table.cells(encoding.names), table.where)
    assert read.tolist() == [[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 1, 1, 0, 1]]
    cells = table.cells([*"bcde"])
    assert [looks_like_text(cells[name]) for name in "bcde"] == [False, True, False, True]
    words = TableEncoding.fit(cells, ["e"], [0])  # and in a column of text they are categories
    assert words.columns[3].categories == ("False", "True", "maybe")


def test_empty_text_of_a_frame_is_missing() -> None:
    pandas = pytest.importorskip("pandas")
    text = pandas.Series(["", "a", None, "b"])
    for column in (text, text.astype("category"), text.astype("string")):
        frame = pandas.DataFrame({"c": column})
        encoding = TableEncoding.of_frame(frame)
        assert encoding.feature_names == ("c=a", "c=b", "c is missing")
        assert encoding.encode_frame(frame, "X").argmax(1).tolist() == [2, 0, 2, 1]


def test_a_column_of_a_frame_is_text_if_most_cells_are_no_numbers_or_all_are_text() -> None:
    pandas = pytest.importorskip("pandas")
    for cells, is_text in (
        (["big", 1, 2, None], False),
        (["big", "10", 2, 3], False),
        (["big", "small", 2, None], True),
        (["10115", "80331", None], True),  # as zip codes are
        ([Decimal("1.5"), Decimal(2)], False),
    ):
        _, texts = frame_cells(pandas.DataFrame({"size": pandas.Series(cells, dtype=object)}))
        assert texts == ["size"] * is_text


def test_booleans_of_a_frame_are_numbers_with_and_without_gaps() -> None:
    pandas = pytest.importorskip("pandas")
    complete = pandas.DataFrame({"b": [True, False, True], "c": ["x", "y", "x"]})
    (column, _) = TableEncoding.of_frame(complete).columns
    assert column == Column("b")
    for dtype in ("boolean", "object"):
        gaps = complete.assign(b=pandas.Series([True, None, True], dtype=dtype))
        encoding = TableEncoding.of_frame(gaps)
        assert encoding.feature_names[:2] == ("b", "b is missing")
        assert encoding.encode_frame(gaps, "X")[:, :2].tolist() == [[1, 0], [1, 1], [1, 0]]
        assert encoding.encode_frame(complete, "X")[:, :2].tolist() == [[1, 0], [0, 0], [1, 0]]
