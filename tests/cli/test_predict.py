"""`otad predict` and `otad explain`: every kind of input, what they write, and refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, QUICK, Terminal, read_csv, write_body, write_digits
from PIL import Image

import otad
from otad.cip import ExactCip
from otad.cli.sources import bank_part
from otad.data import Dataset
from otad.model.bank import FeatureBank


def test_every_column_is_that_of_the_trace(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    model = otad.load(workshop / "digits-model")
    options = ("--out", "p.csv", "--json", "--batch-size", 7)
    result = terminal.succeed("predict", workshop / "digits-model", "test", *options)
    with torch.no_grad():
        trace = model.trace(digits.test_x)
    lines = read_csv("p.csv")
    sure, chosen = trace.outputs.softmax(1).max(1)
    assert [line["row"] for line in lines] == [str(row) for row in range(len(digits.test_x))]
    assert [line["prediction"] for line in lines] == [str(code) for code in chosen.tolist()]
    columns = {
        "probability": sure,
        "nearest": trace.neighbors.indices[:, 0],
        "distance": trace.neighbors.distances[:, 0],
        "smoothness": trace.solution.smoothness,
    }
    for name, expected in columns.items():
        found = torch.tensor([float(line[name]) for line in lines], dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)
    names = ("solved", "raised", "repaired", "infeasible", "unsolved")
    assert [line["status"] for line in lines] == [names[k] for k in trace.solution.status.tolist()]
    record = json.loads(result.stdout)
    assert record["rows"] == len(lines)
    assert sum(record["status"].values()) == len(lines)
    assert record["accuracy"] == pytest.approx(float((chosen == digits.test_y).double().mean()))


@pytest.mark.parametrize(("name", "score"), [("digits", ("accuracy", 0)), ("body", ("mse", "inf"))])
def test_an_abstention_is_no_prediction(
    terminal: Terminal, workshop: Path, name: str, score: tuple[str, object]
) -> None:
    """Bank points at one place with different features contradict each other in every row."""
    model = otad.load(workshop / f"{name}-model")
    inputs = model.bank_inputs[:1].expand_as(model.bank_inputs).contiguous()
    bank = FeatureBank(inputs, model.bank_features, model.bank_labels, "one place", verify=False)
    silent = otad.OTAD(model.backbone, bank, solver=ExactCip(on_failure="abstain"))
    silent.notes = model.notes
    silent.save("silent")
    result = terminal.succeed("predict", "silent", "test", "--out", "p.csv", "--json")
    metric, value = score
    assert json.loads(result.stdout)[metric] == value
    lines = read_csv("p.csv")
    assert {line["status"] for line in lines} == {"infeasible"}
    assert {(line["prediction"], line["probability"]) for line in lines} == {("", "")}


def test_brackets_in_a_name_are_no_markup(terminal: Terminal, workshop: Path) -> None:
    for out in ("answers[bold].csv", "answers[/b].csv"):
        shown = terminal.succeed("predict", workshop / "body-model", "test", "--out", out).stdout
        assert out.split("/")[-1] in shown


def test_columns_are_found_by_name_and_others_ignored(terminal: Terminal, workshop: Path) -> None:
    with (workshop / "body.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))[:5]
    with Path("new.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["bp", "remark", *BODY[:3]], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    result = terminal.succeed("predict", workshop / "body-model", "new.csv", "--out", "p.csv")
    x = torch.tensor([[float(row[name]) for name in BODY] for row in rows])
    with torch.no_grad():
        expected = otad.load(workshop / "body-model")(x)
    lines = read_csv("p.csv")
    assert [float(line["prediction"]) for line in lines] == pytest.approx(expected.tolist(), 1e-5)
    assert {line["probability"] for line in lines} == {""}
    assert "accuracy" not in result.stdout


def test_images_flat_or_in_subfolders_gray_or_in_color(terminal: Terminal, workshop: Path) -> None:
    whole = np.load(workshop / "digits.npz")
    levels = (whole["x"][:6] * 255).round().astype(np.uint8)
    for number, pixels in enumerate(levels):
        for path in (Path("flat"), Path("sorted", str(number % 2))):
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path / f"{number}.png")
    np.savez("bytes.npz", x=levels)
    answers = {}
    for source in ("flat", "sorted", "bytes.npz"):
        terminal.succeed("predict", workshop / "digits-model", source, "--out", "p.csv")
        answers[source] = {line["row"]: line["probability"] for line in read_csv("p.csv")}
    assert list(answers["flat"]) == [f"{k}.png" for k in range(6)]
    assert list(answers["sorted"]) == [f"{k % 2}/{k}.png" for k in (0, 2, 4, 1, 3, 5)]
    assert list(answers["flat"].values()) == list(answers["bytes.npz"].values())
    for name, probability in answers["sorted"].items():
        assert answers["flat"][Path(name).name] == probability
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    color = Image.fromarray(pixels)
    found = []
    for source, image in (("color", color), ("gray", color.convert("L"))):
        Path(source).mkdir()
        image.save(Path(source, "a.png"))
        terminal.succeed("predict", workshop / "digits-model", source, "--out", "p.csv")
        found.append(float(read_csv("p.csv")[0]["distance"]))
    assert found[0] == pytest.approx(found[1], abs=0.05)  # Pillow rounds to 256 levels


def test_refused_inputs_leave_no_file(terminal: Terminal, workshop: Path) -> None:
    write_body(Path("body.csv"))
    Path("short.csv").write_text("age,bmi\n1,2\n")
    Path("words.csv").write_text("age,sex,bmi,bp\n1,2,3,high\n")
    np.savez("wide.npz", x=np.zeros((2, 5)))
    np.savez("bright.npz", x=np.full((2, 8, 8), 1.5))
    np.savez("empty.npz", x=np.zeros((0, 4)))
    np.savez("nan.npz", x=np.full((2, 4), np.nan))
    Path("images").mkdir()
    Path("notes.txt").write_text("hello")
    digits, body = workshop / "digits-model", workshop / "body-model"
    for model, source, message in (
        (body, "short.csv", "2 of them: sex, bp"),
        (body, "words.csv", "words.csv line 2, column 'bp': expected a finite number, got 'high'"),
        (body, "wide.npz", "got (2, 5)"),
        (body, "empty.npz", "empty.npz, x: expected at least one row"),
        (body, "nan.npz", "x: expected finite values, got nan"),
        (body, "images", "images: expected inputs of shape (4,)"),
        (body, "cells.h5ad", "input file not found"),
        (body, "absent.csv", "input file not found"),
        (body, "notes.txt", "input: expected 'test', an image folder or a file that ends in .csv"),
        (digits, "body.csv", "as the model has no feature names"),
        (digits, "bright.npz", "x: expected values within the declared bounds (0.0, 1.0)"),
        (digits, "images", "expected images, got an empty folder"),
        ("absent", "test", "absent: expected a model folder with card.json"),
    ):
        assert message in terminal.refuse("predict", model, source, "--out", "p.csv")
        assert not list(Path().glob("*p.csv*"))
    model = otad.load(workshop / "body-model")
    model.notes["feature_names"] = ["age", "sex", "age", "bp"]
    model.save("model")
    message = terminal.refuse("predict", "model", "body.csv", "--out", "p.csv")
    assert "feature names: expected distinct names, got repeated age" in message


def test_a_refusal_keeps_the_predictions_of_before(terminal: Terminal, workshop: Path) -> None:
    Path("p.csv").write_text("precious")
    np.savez("late.npz", x=np.array([[50.0, 1.0, 25.0, 90.0]] * 3 + [[np.nan] * 4]))
    options = ("--out", "p.csv", "--batch-size", 1)
    terminal.refuse("predict", workshop / "body-model", "late.npz", *options)
    assert Path("p.csv").read_text() == "precious"


def test_a_model_saved_from_python_will_do(terminal: Terminal, workshop: Path) -> None:
    model = otad.load(workshop / "digits-model")
    model.notes = {}
    model.save("mine", data="some digits")
    np.savez("x.npz", x=np.load(workshop / "digits.npz")["x"][:4])
    terminal.succeed("predict", "mine", "x.npz", "--out", "mine.csv")
    terminal.succeed("predict", workshop / "digits-model", "x.npz", "--out", "ours.csv")
    assert Path("mine.csv").read_text() == Path("ours.csv").read_text()
    message = terminal.refuse("predict", "mine", "test", "--out", "p.csv")
    assert "input: expected for 'test' a model made by `otad defend`" in message


def test_test_rows_of_changed_data_are_refused(terminal: Terminal) -> None:
    write_digits(Path("digits.npz"))
    terminal.succeed("train", "digits.npz", "--out", "net", *QUICK)
    terminal.succeed("defend", "net", "--out", "model")
    terminal.succeed("predict", "model", "test", "--out", "p.csv")
    write_digits(Path("digits.npz"), 150)
    message = terminal.refuse("predict", "model", "test", "--out", "p.csv")
    assert "expected 'digits.npz' as it was when the model was made" in message


def test_data_named_by_a_relative_path_is_found_from_other_folders(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    for folder in (made_in, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(made_in)
    write_body(made_in / "body.csv")
    named = ("--target", "progression", "--task", "regression", "--features", "bmi")
    terminal.succeed("train", "body.csv", *named, *QUICK, "--out", "net")
    terminal.succeed("defend", "net", "--out", "model")
    card = Path("model/card.json").read_text()
    assert '"data": "body.csv"' in card
    assert str(tmp_path) not in card
    monkeypatch.chdir(elsewhere)
    predict = ("predict", "../made/model", "test", "--out")
    message = terminal.refuse(*predict, "p.csv")
    assert str(elsewhere / "body.csv") in message
    assert "--data-dir" in message
    terminal.succeed(*predict, "p.csv", "--data-dir", made_in)
    before = (made_in / "body.csv").read_text()
    message = terminal.refuse(*predict, made_in / "body.csv", "--data-dir", made_in)
    assert "which would overwrite" in message
    assert (made_in / "body.csv").read_text() == before


def test_the_weights_are_those_of_the_trace(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    model = otad.load(workshop / "digits-model")
    options = ("--row", 3, "--json", "--out", "why.json")
    result = terminal.succeed("explain", workshop / "digits-model", "test", *options)
    record = json.loads(result.stdout)
    with torch.no_grad():
        trace = model.trace(digits.test_x[3:4])
    weights = {neighbor["index"]: neighbor["weight"] for neighbor in record["neighbors"]}
    found = trace.neighbors.indices[0].tolist(), trace.solution.multipliers[0].tolist()
    assert weights == pytest.approx(dict(zip(*found, strict=True)))
    assert record["prediction"] == str(int(trace.outputs.argmax()))
    written = json.loads(Path("why.json").read_text())
    assert written["neighbors"][0]["index"] == record["neighbors"][0]["index"]
    assert torch.tensor(written["inputs"]).shape == (1, 8, 8)
    result = terminal.succeed("explain", workshop / "digits-model", "test", "--out", "why.png")
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote why.png" in result.stderr
    assert "weight" in result.stdout


def test_images_are_found_where_the_bank_has_some_of_them_only(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    shape = ("--net", "vit", "--patch", 4, "--width", 8, "--heads", 2, "--blocks", 1)
    training = ("--epochs", 1, "--optimizer", "adamw", "--learning-rate", 0.01)
    terminal.succeed("train", workshop / "digits.npz", "--out", "net", *shape, *training)
    terminal.succeed("defend", "net", "--out", "model", "--per-class", 6, "--seed", 1)
    terminal.succeed("explain", "model", "test", "--out", "why.json")
    kept, _ = bank_part(digits, per_class=6, seed=1)
    for neighbor in json.loads(Path("why.json").read_text())["neighbors"]:
        assert torch.equal(torch.tensor(neighbor["inputs"]), kept[neighbor["index"]])
    command = ("attack", "model", "test", "--attack", "straight", "--eps", 0.5, "--rows", 5)
    terminal.succeed(*command)


def test_tables_get_their_columns_by_name(terminal: Terminal, workshop: Path) -> None:
    result = terminal.succeed("explain", workshop / "body-model", workshop / "body.csv")
    for name in ("age", "bmi", "weight", "distance"):
        assert name in result.stdout
