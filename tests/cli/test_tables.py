"""Tables with text and missing cells on the command line, from training to evaluation; units."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
import torch
from cli.small import read_csv, terminal

import otad
from otad.cli.options import threat_to
from otad.evaluate import PRESETS
from otad.evaluate.suite import Choice

pytestmark = pytest.mark.usefixtures("brief_reports")
NAMES = ["age", "color=blue", "color=green", "color=red", "color is missing", "income"]
NAMES += ["income is missing", "sex=f", "sex=m"]
STD = "standard deviations of the training data"


def write_customers(path: Path, rows: int = 120, seed: int = 0) -> None:
    draw = random.Random(seed)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["age", "color", "income", "sex", "bought"])
        for _ in range(rows):
            color, sex = draw.choice(["red", "green", "blue", ""]), draw.choice("mf")
            age, income = draw.gauss(40, 10), draw.gauss(3, 1)
            score = (age - 40) / 10 + 1.5 * (color == "red") - (color == "")
            known = "" if draw.random() < 0.1 else f"{income:.3f}"
            writer.writerow([f"{age:.2f}", color, known, sex, "yes" if score > 0 else "no"])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_customers(folder / "rows.csv")
    reading = ("--target", "bought", "--task", "classification", "--epochs", 8, "--blocks", 2)
    terminal.succeed("train", folder / "rows.csv", "--out", folder / "net", *reading)
    terminal.succeed("defend", folder / "net", "--out", folder / "model")
    return folder


def test_new_tables_are_encoded_as_in_training(shop: Path) -> None:
    model = otad.load(shop / "model")
    assert model.notes["feature_names"] == NAMES
    assert model.backbone.std.tolist()[1:5] == [1.0] * 4
    terminal.succeed("predict", shop / "model", shop / "rows.csv", "--out", "all.csv")
    answers = {row["row"]: row["prediction"] for row in read_csv("all.csv")}
    rows = read_csv(shop / "rows.csv")
    some = [row for row in rows if row["color"] == "red" and row["income"]][:3]
    with Path("few.csv").open("w", newline="") as stream:  # other order, fewer categories
        writer = csv.DictWriter(stream, ["sex", "income", "color", "age"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(some)
    terminal.succeed("predict", shop / "model", "few.csv", "--out", "few-out.csv")
    expected = [answers[f"line {rows.index(row) + 2}"] for row in some]
    assert [row["prediction"] for row in read_csv("few-out.csv")] == expected
    explained = terminal.json("explain", shop / "model", "few.csv", "--out", "why.json")
    assert explained["neighbors"]
    assert json.loads(Path("why.json").read_text())["feature_names"] == NAMES
    header = "age,color,income,sex\n"
    for line, expected in (("40,violet,1,m", "'violet'"), (",red,1,m", "a missing cell")):
        Path("odd.csv").write_text(header + line + "\n")
        assert expected in terminal.refuse("predict", shop / "model", "odd.csv", "--out", "no.csv")


def test_other_data_is_encoded_as_the_net_was_trained(shop: Path) -> None:
    """Medians and categories are those of the net, also where the new data has others."""
    write_customers(Path("more.csv"), 60, seed=1)
    terminal.succeed("defend", shop / "net", "more.csv", "--out", "model")
    cards = [otad.load(folder).notes["preparation"] for folder in (shop / "model", "model")]
    assert cards[0] == cards[1]
    assert terminal.json("predict", "model", "test", "--out", "p.csv")["rows"] == 12


def test_categories_are_groups_of_the_threat_and_std_its_unit(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = otad.load(shop / "model")
    ball = threat_to(model, "l2", 1.5, immutable=["sex"])
    assert ball.groups == ((1, 2, 3, 4), (7, 8))
    assert ball.mutable.tolist() == [True] * 6 + [False] * 3
    assert torch.equal(ball.scale, model.backbone.std)
    assert ball.describe().startswith(f"l2, eps = 1.5 {STD}")
    assert threat_to(model, "l2", 1.5, unit="1").scale is None
    Path("units.json").write_text('{"age": 5, "income": 0.5}')
    ball = threat_to(model, "linf", 1.5, scale=Path("units.json"))
    assert ball.scale.tolist() == [5.0, 1, 1, 1, 1, 0.5, 0.5, 1, 1]
    assert ball.unit_name == "units of units.json"

    monkeypatch.setitem(PRESETS, "quick", [Choice("noise", {"draws": 9})])
    options = ("--eps", "1.5", "--rows", 6, "--no-flags", "--suite", "quick")
    printed = terminal.json("evaluate", shop / "model", "test", *options)
    assert printed["threat"]["unit_name"] == STD
    page = Path("evaluation/report.md").read_text(encoding="utf-8")
    assert f"1.5 {STD}" in page
    assert "2 categories (6 columns) switch as a whole, up to 1 of them" in page
    assert f"change in {STD}" in page
    few = ("--attack", "categories", "--option", "beam=1", "--option", "steps=2", "--rows", 6)
    values = []
    for eps in (0.5, 1.5):
        found = terminal.json("attack", shop / "model", "test", "--eps", eps, *few)
        values.append(found["attacked"]["value"])
    assert values[1] < values[0]
    certified = terminal.json("certify", shop / "model", "test", "--rows", 8)
    assert certified["unit"] == STD


def test_value_change_and_unit_of_a_feature_agree(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before + change = attacked, and change / unit is the change in units."""
    monkeypatch.setitem(PRESETS, "quick", [Choice("pgd", {"steps": 5})])
    options = ("--eps", "0.5", "--rows", 3, "--no-flags", "--suite", "quick")
    terminal.succeed("evaluate", workshop / "body-model", "test", *options)
    page = Path("evaluation/report.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split("|") for line in page.splitlines() if line.startswith("| bmi")]
    rows = [[cell.strip() for cell in row[1:]] for row in rows if len(row) == 6]
    assert rows
    std = float(otad.load(workshop / "body-model").backbone.std[2])
    for before, attacked, change, unit, in_units in (map(float, row) for row in rows):
        assert before + change == pytest.approx(attacked, abs=0.02)
        assert unit == pytest.approx(std, rel=0.01)
        assert change / unit == pytest.approx(in_units, rel=0.02)
