"""DataFrames with text, categories and missing values in the estimators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refuses

import otad
from otad.estimators import OTADClassifier, OTADRegressor


def mixed_frame(rows: int = 80) -> tuple[Any, Any]:
    """Text, categories and missing values; the answer depends on text and on what is missing."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    color = rng.choice(["red", "green", "blue"], rows).astype(object)
    color[::9] = None
    income = np.where(rng.random(rows) < 0.2, np.nan, rng.normal(3, 1, rows))
    frame = pandas.DataFrame({"age": rng.normal(40, 10, rows), "color": color, "income": income})
    label = np.where((color == "red") | np.isnan(income), "yes", "no")
    return frame, label


def test_frames_with_text_and_missing_values(tmp_path: Path) -> None:
    frame, label = mixed_frame()
    clf = OTADClassifier(epochs=30, random_state=0).fit(frame, label)
    assert clf.feature_names_in_.tolist() == ["age", "color", "income"]
    assert clf.n_features_in_ == 3
    assert clf.groups_ == ((1, 2, 3, 4),)
    assert (clf.predict(frame) == label).mean() > 0.9
    # The same numbers by hand give the same answers.
    columns = [frame[["age"]].to_numpy()]
    columns += [(frame["color"] == name).to_numpy()[:, None] for name in ("blue", "green", "red")]
    columns += [frame["color"].isna().to_numpy()[:, None]]
    missing = frame["income"].isna().to_numpy()
    columns += [frame["income"].fillna(frame["income"].median()).to_numpy()[:, None]]
    by_hand = torch.tensor(np.concatenate([*columns, missing[:, None]], 1)).float()
    with torch.no_grad():
        found = clf.module_(by_hand).argmax(1).numpy()
    assert clf.classes_[found].tolist() == clf.predict(frame).tolist()
    assert clf.module_.backbone.std.tolist()[1:5] == [1.0] * 4
    clf.save(tmp_path / "saved")
    again = OTADClassifier.load(tmp_path / "saved")
    assert again.predict(frame).tolist() == clf.predict(frame).tolist()
    assert again.groups_ == clf.groups_
    (one, *_) = clf.explain(frame[:2])
    assert "color is missing" in one.feature_names
    model = otad.load(tmp_path / "saved")
    radii = otad.certify(clf, frame[:3]).radius
    assert torch.equal(otad.certify(model, frame[:3]).radius, radii)
    threat = otad.L2(1.5, groups=clf.groups_)
    how = {"attacks": ["categories"], "flags": False}
    assert otad.evaluate(clf, frame[:4], label[:4], threat=threat, **how).is_sound
    value = OTADRegressor(epochs=1).fit(frame, frame["age"])
    assert value.predict(frame).shape == (80,)


def test_frames_that_differ_from_those_of_the_fit_are_refused() -> None:
    frame, label = mixed_frame()
    clf = OTADClassifier(epochs=1).fit(frame, label)
    refuses(clf.predict, frame.assign(color="violet"), match="column 'color', row 0.*'violet'")
    refuses(clf.predict, frame.assign(age=np.nan), match="column 'age', row 0.*a missing cell")
    refuses(clf.predict, frame.to_numpy(), match="X: expected a DataFrame")
    with pytest.raises(ValueError, match="feature names"):
        clf.predict(frame[["color", "age", "income"]])
    refuses(otad.certify, clf.module_, frame[["age"]], match="x: expected a DataFrame")
    with pytest.raises(ValueError, match="NaN"):
        OTADClassifier(epochs=1).fit(np.where(frame[["age"]] > 40, np.nan, 1.0), label)
    clf.fit(frame[["age"]], label)  # nothing to encode any more
    assert clf.groups_ == ()
    refuses(clf.predict, frame[["age"]].assign(age=np.nan), match="X, column 'age', row 0.*missing")


def test_cells_that_are_no_numbers_are_named() -> None:
    frame, label = mixed_frame()
    numbers, clf = frame[["age"]].assign(size=1.0), OTADClassifier(epochs=1)
    pandas = pytest.importorskip("pandas")
    fit = lambda x: clf.fit(x, label)  # noqa: E731
    for other, message in (
        (numbers.assign(size=np.inf), "X, column 'size', row 0: expected a finite number, got inf"),
        (numbers.assign(size=pandas.Timestamp("2020-01-01")), "X, column 'size': .*datetime64"),
        (numbers.assign(size=pandas.Timestamp("2020-01-01", tz="UTC")), "'size': .*datetime64"),
        (numbers[["age"]].astype("timedelta64[s]"), "X, column 'age': .*timedelta64"),
        (frame.assign(age=pandas.Timestamp("2020-01-01")), "X, column 'age': .*datetime64"),
        (numbers.to_numpy().astype("datetime64[s]"), "X: expected no dates, got dtype date"),
        (frame.assign(age=[*[1.0] * 79, "big"]), "X, column 'age', row 79: .* got 'big'"),
        (frame.assign(age=["big", None, *[1] * 78]), "X, column 'age', row 0: .* got 'big'"),
        (frame[["age", "age"]], "X, columns: expected distinct names, got repeated age"),
    ):
        refuses(fit, other, match=message)
    fit(numbers)
    for other, message in (
        (numbers.assign(size=pandas.Timestamp("2020-01-01")), "X, column 'size': .*datetime64"),
        (numbers.assign(size="tall"), "X, column 'size', row 0: .*got 'tall'"),
        (numbers.assign(size=[*[1.0] * 79, np.nan]), "X, column 'size', row 79: .*missing"),
    ):
        refuses(clf.predict, other, match=message)
    with pytest.raises(ValueError, match="feature names"):
        clf.predict(numbers[["size", "age"]])


def test_medians_are_those_of_rows_with_a_weight() -> None:
    frame, label = mixed_frame()
    weight = np.where(frame["age"] > 40, 1.0, 0.0)
    clf = OTADClassifier(epochs=1).fit(frame, label, sample_weight=weight)
    expected = frame["income"][weight > 0].median()
    assert clf.encoding_.columns[2].median == pytest.approx(expected)


def test_targets_that_are_missing_or_no_numbers_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(4, 2))
    for y, got in (
        (["p", None, "n", "p"], "None"),
        (["p", "", "n", "p"], "''"),
        (["p", np.nan, "n", "p"], "nan"),  # which NumPy alone would make the label "nan"
        (pandas.Series(["p", None, "n", "p"], dtype="category"), "nan"),
        (pandas.Series([1, None, 0, 1], dtype="Int64"), "<NA>"),
    ):
        refuses(OTADClassifier().fit, x, y, match=f"y, row 1: expected a label, got {got}")
    refuses(OTADClassifier().fit, x, ["p"] * 4, match="two classes, got one class: 'p'")
    made = OTADRegressor(n_neighbors=2, epochs=1).fit(x, ["1", "2", "3", "4"])
    for y, got in (([1, None, 2, 3], "None"), (["1", "a", "2", "3"], "'a'")):
        message = f"y, row 1: expected a number, got {got}"
        refuses(made.fit, x, y, match=message)
        refuses(otad.evaluate, made, x, y, otad.L2(0.1), match=message)


def test_dates_and_durations_are_no_values() -> None:
    pandas = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(4, 2))
    made = OTADRegressor(n_neighbors=2, epochs=1).fit(x, range(4))
    days = pandas.date_range("2020-01-01", periods=4)
    for y, message in (
        (days.to_numpy(), "y: expected no dates, got dtype datetime64"),
        (pandas.Series(days - days[0]), "y: expected no dates, got dtype timedelta64"),
        (list(days.to_numpy()), "y: expected no dates"),
        (days.to_frame(), "y: expected no dates"),
        (pandas.Series(days.tz_localize("UTC")), "y, row 0: expected a number, got Timestamp"),
        (days.date, "y, row 0: expected a number, got datetime.date"),
    ):
        refuses(made.fit, x, y, match=message)
        refuses(otad.evaluate, made, x, y, otad.L2(0.1), match="y.*: expected")
