"""`otad predict` and `otad explain`: every kind of input, what they write, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, QUICK, column, read_csv, terminal, write_body, write_image, write_rows
from PIL import Image

import otad
from otad.cip import ExactCip
from otad.cli.console import write_csv
from otad.data import Dataset
from otad.model.bank import FeatureBank


def test_every_column_is_that_of_the_trace(
    workshop: Path, digits: Dataset, digits_model: otad.OTAD
) -> None:
    options = ("--out", "p.csv", "--batch-size", 7)
    record = terminal.json("predict", workshop / "digits-model", "test", *options)
    with torch.no_grad():
        trace = digits_model.trace(digits.test_x)
    sure, chosen = trace.outputs.softmax(1).max(1)
    assert column("p.csv", "row", int) == list(range(len(digits.test_x)))
    assert column("p.csv", "prediction", int) == chosen.tolist()
    columns = {
        "probability": sure,
        "nearest": trace.neighbors.indices[:, 0],
        "distance": trace.neighbors.distances[:, 0],
        "smoothness": trace.solution.smoothness,
    }
    for name, expected in columns.items():
        found = torch.tensor(column("p.csv", name, float), dtype=torch.float64)
        torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-5)
    names = ("solved", "raised", "repaired", "infeasible", "unsolved")
    assert column("p.csv", "status") == [names[k] for k in trace.solution.status.tolist()]
    assert record["rows"] == sum(record["status"].values()) == len(chosen)
    assert record["accuracy"] == pytest.approx(float((chosen == digits.test_y).double().mean()))
    shown = terminal.text("predict", workshop / "digits-model", "test", "--out", "p.csv", "--force")
    assert f"accuracy {record['accuracy']:.2%}" in shown


@pytest.mark.parametrize(("name", "score"), [("digits", ("accuracy", 0)), ("body", ("mse", "inf"))])
def test_an_abstention_is_no_prediction(
    workshop: Path, name: str, score: tuple[str, object]
) -> None:
    """Bank points at one place with different features contradict each other in every row."""
    model = otad.load(workshop / f"{name}-model")
    inputs = model.bank_inputs[:1].expand_as(model.bank_inputs).contiguous()
    bank = FeatureBank(inputs, model.bank_features, model.bank_labels, "one place", verify=False)
    silent = otad.OTAD(model.backbone, bank, solver=ExactCip(on_failure="abstain"))
    silent.notes = model.notes
    silent.save("silent")
    metric, value = score
    assert terminal.json("predict", "silent", "test", "--out", "p.csv")[metric] == value
    assert set(column("p.csv", "status")) == {"infeasible"}
    assert set(column("p.csv", "prediction") + column("p.csv", "probability")) == {""}


def test_brackets_in_a_name_are_no_markup(workshop: Path) -> None:
    for out in ("answers[bold].csv", "answers[/b].csv"):
        shown = terminal.text("predict", workshop / "body-model", "test", "--out", out)
        assert out.split("/")[-1] in shown


def test_offsets_of_a_table_cost_nothing(workshop: Path) -> None:
    rows, names, answers = read_csv(workshop / "body.csv"), [*BODY, "progression"], []
    for offset in (0.0, 1.7e9):
        far = [
            row | {name: str(float(row[name]) + offset) for name in ("bmi", "progression")}
            for row in rows
        ]
        folder, table = f"model-{offset}", f"{offset}.csv"
        write_rows(table, far, names)
        reading = ("--target", "progression", "--task", "regression")
        terminal.succeed("train", table, *reading, "--out", folder + "-net", *QUICK)
        terminal.succeed("defend", folder + "-net", "--out", folder, "--neighbors", 5)
        write_rows("new.csv", far[:9], names)
        terminal.succeed("predict", folder, "new.csv", "--out", "p.csv", "--force")
        answers.append(np.array(column("p.csv", "prediction", float)) - offset)
        terminal.succeed("certify", folder, "test", "--eps", 0.1)
        shown = terminal.json("explain", folder, "new.csv")
        assert float(far[0]["progression"]) in [it["label"] for it in shown["neighbors"]]
    assert np.ptp(answers[0]) > 10
    np.testing.assert_allclose(*answers, rtol=0.01)


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    cells = ["=1+1", "+x", "-x", "@x", "\t=1", "-1.5e-3", "+2", "-inf", "x=1", "", "'q"]
    write_csv(tmp_path / "cells.csv", [cells])
    found = (tmp_path / "cells.csv").read_text().strip().split(",")
    assert found == ["'=1+1", "'+x", "'-x", "'@x", "'\t=1", *cells[5:]]


def test_columns_are_found_by_name_and_others_ignored(
    workshop: Path, body_model: otad.OTAD
) -> None:
    rows = read_csv(workshop / "body.csv")[:5]
    write_rows("new.csv", rows, ["bp", "remark", *BODY[:3]])
    shown = terminal.text("predict", workshop / "body-model", "new.csv", "--out", "p.csv")
    x = torch.tensor([[float(row[name]) for name in BODY] for row in rows])
    with torch.no_grad():
        expected = body_model(x).tolist()
    assert column("p.csv", "prediction", float) == pytest.approx(expected, 1e-5)
    assert set(column("p.csv", "probability")) == {""}
    assert "accuracy" not in shown
    shown = terminal.text("explain", workshop / "body-model", workshop / "body.csv")
    assert all(name in shown for name in ("age", "bmi", "weight", "distance"))


def test_images_flat_or_in_subfolders_gray_or_in_color(workshop: Path) -> None:
    pixels = np.load(workshop / "digits.npz")["x"][:6]
    for number in range(6):
        for folder in ("flat", f"sorted/{number % 2}"):
            write_image(Path(folder, f"{number}.png"), pixels[number])
    np.savez("bytes.npz", x=(pixels * 255).round().astype(np.uint8))
    answers = {}
    for source in ("flat", "sorted", "bytes.npz"):
        terminal.succeed("predict", workshop / "digits-model", source, "--out", "p.csv", "--force")
        answers[source] = {line["row"]: line["probability"] for line in read_csv("p.csv")}
    assert list(answers["flat"]) == [f"{k}.png" for k in range(6)]
    assert list(answers["sorted"]) == [f"{k % 2}/{k}.png" for k in (0, 2, 4, 1, 3, 5)]
    assert list(answers["flat"].values()) == list(answers["bytes.npz"].values())
    for name, probability in answers["sorted"].items():
        assert answers["flat"][Path(name).name] == probability
    color = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    found = []
    for source, image in (("color", color), ("gray", color.convert("L"))):
        Path(source).mkdir()
        image.save(Path(source, "a.png"))
        terminal.succeed("predict", workshop / "digits-model", source, "--out", "p.csv", "--force")
        found += column("p.csv", "distance", float)
    assert found[0] == pytest.approx(found[1], abs=0.05)  # Pillow rounds to 256 levels


def test_refused_inputs_leave_no_file(workshop: Path, body_model: otad.OTAD) -> None:
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
        (body, "words.csv", "words.csv line 2, column 'bp'"),
        (body, "wide.npz", "got (2, 5)"),
        (body, "empty.npz", "empty.npz, x: expected at least one row"),
        (body, "nan.npz", "got nan"),
        (body, "images", "images: expected inputs of shape (4,)"),
        (body, "cells.h5ad", "input file not found"),
        (body, "absent.csv", "input file not found"),
        (body, "notes.txt", "input: expected 'test'"),
        (digits, "body.csv", "no feature names"),
        (digits, "bright.npz", "bounds (0.0, 1.0)"),
        (digits, "images", "got an empty folder"),
        ("absent", "test", "absent: expected a model folder with card.json"),
        (
            workshop / "digits-net",
            "test",
            "give this folder to `otad defend`",
        ),
    ):
        assert message in terminal.refuse("predict", model, source, "--out", "p.csv")
        assert not list(Path().glob("*p.csv*"))
    body_model.notes["feature_names"] = ["age", "sex", "age", "bp"]
    body_model.save("model")
    assert "repeated age" in terminal.refuse("predict", "model", "body.csv", "--out", "p.csv")
    Path("p.csv").write_text("precious")  # and a refusal in a later batch replaces none
    np.savez("late.npz", x=np.array([[50.0, 1.0, 25.0, 90.0]] * 3 + [[np.nan] * 4]))
    terminal.refuse("predict", body, "late.npz", "--out", "p.csv", "--batch-size", 1)
    assert Path("p.csv").read_text() == "precious"


def test_a_model_saved_from_python_will_do(workshop: Path, digits_model: otad.OTAD) -> None:
    digits_model.notes = {}
    digits_model.save("mine", data="some digits")
    np.savez("x.npz", x=np.load(workshop / "digits.npz")["x"][:4])
    terminal.succeed("predict", "mine", "x.npz", "--out", "mine.csv")
    terminal.succeed("predict", workshop / "digits-model", "x.npz", "--out", "ours.csv")
    assert Path("mine.csv").read_text() == Path("ours.csv").read_text()
    assert "not name its data" in terminal.refuse("predict", "mine", "test", "--out", "p.csv")


def test_data_is_found_by_a_relative_path_and_must_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    write_body(made_in / "body.csv", 90)
    message = terminal.refuse(*predict, "q.csv", "--data-dir", made_in)
    assert "'body.csv' as it was when the model was made" in message


def test_the_weights_are_those_of_the_trace(
    workshop: Path, digits: Dataset, digits_model: otad.OTAD
) -> None:
    options = ("--row", 3, "--out", "why.json")
    record = terminal.json("explain", workshop / "digits-model", "test", *options)
    with torch.no_grad():
        trace = digits_model.trace(digits.test_x[3:4])
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


@pytest.mark.filterwarnings("ignore:defense")
def test_training_images_that_the_model_does_not_have_are_not_drawn(digits: Dataset) -> None:
    layers = torch.nn.Linear(64, 9), torch.nn.ReLU(), torch.nn.Linear(9, 10)
    net = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    otad.defend(net, digits.train_x, digits.train_y, inputs="features").save("model")
    np.savez("new.npz", x=digits.test_x[:1].numpy())
    message = terminal.refuse("explain", "model", "new.npz", "--out", "why.png")
    assert "out: expected a .json file, as the model does not have its training images" in message
    terminal.succeed("explain", "model", "new.npz", "--out", "why.json")


def test_files_of_images_are_named() -> None:
    for number in range(12):
        for label in ("bright", "dark"):
            image = np.full((8, 8), (200 if label == "bright" else 20) + number) / 255
            write_image(Path("photos", label, f"{number}.png"), image)
    terminal.succeed("train", "photos", "--size", 8, *QUICK, "--out", "net")
    terminal.succeed("defend", "net", "--out", "model", "--neighbors", 3, "--per-class", 4)
    names = [path.relative_to("photos").as_posix() for path in sorted(Path("photos").glob("*/*"))]
    record = terminal.json("explain", "model", "photos", "--row", names[2])
    assert record["name"] == names[2]
    model = otad.load("model")
    noted = model.notes["train_names"]
    assert len(noted) == len(model.bank_labels) == 8
    for place, found in enumerate(noted):
        pixels = np.asarray(Image.open(Path("photos", found)), dtype=np.float32)
        expected = model.backbone.embed(torch.tensor(pixels)[None, None] / 255)
        torch.testing.assert_close(model.bank_inputs[place], expected[0], atol=1e-5, rtol=1e-5)
    for it in record["neighbors"]:
        assert it["name"] == noted[it["index"]]
    terminal.succeed("predict", "model", "test", "--out", "p.csv")
    tested = column("p.csv", "row")
    assert set(tested) <= {*names} - {*noted}
    shown = terminal.text("explain", "model", "test")
    assert tested[0] in shown
    assert terminal.json("explain", "model", "test")["neighbors"][0]["name"] in shown
    terminal.succeed("explain", "model", "test", "--out", "why.png")


def test_rows_of_a_table_are_named_by_their_lines(workshop: Path, body_model: otad.OTAD) -> None:
    rows = {f"line {k}": row for k, row in enumerate(read_csv(workshop / "body.csv"), 2)}
    noted = body_model.notes["train_names"]
    x = torch.tensor([[float(rows[name][it]) for it in BODY] for name in noted])
    torch.testing.assert_close(body_model.bank_inputs, body_model.backbone.embed(x))
    terminal.succeed("predict", workshop / "body-model", "test", "--out", "p.csv")
    tested = column("p.csv", "row")
    assert {*tested, *noted} == {*rows}
    record = terminal.json("explain", workshop / "body-model", "test", "--row", tested[3])
    assert record["name"] == tested[3]
    for it in record["neighbors"]:
        assert it["name"] == noted[it["index"]]
    assert column("p.csv", "nearest")[3] == record["neighbors"][0]["name"]


def test_a_row_of_a_file_has_the_name_that_it_has_as_a_training_point(
    workshop: Path, body_model: otad.OTAD
) -> None:
    model, noted = workshop / "body-model", set(body_model.notes["train_names"])
    terminal.succeed("predict", model, workshop / "body.csv", "--out", "p.csv")
    found = read_csv("p.csv")
    assert [line["row"] for line in found] == [f"line {k}" for k in range(2, 122)]
    own = [line["nearest"] == line["row"] for line in found]
    assert own == [line["row"] in noted for line in found]
    record = terminal.json("explain", model, workshop / "body.csv", "--row", "line 7")
    assert record["name"] == "line 7"
    some = ("--eps", "0.1", "--rows", 5, "--out", "c.csv")
    terminal.succeed("certify", model, workshop / "body.csv", *some)
    assert set(column("c.csv", "row")) < set(column("p.csv", "row"))
    message = terminal.refuse("explain", model, workshop / "body.csv", "--row", "7")
    assert "such as 'line 2'; `otad predict` lists them, got '7', the name of 0 rows" in message


def test_inputs_of_another_shape_are_refused_before_anything_is_printed(workshop: Path) -> None:
    np.savez("small.npz", x=np.zeros((3, 7, 7)))
    message = terminal.refuse("predict", workshop / "digits-model", "small.npz", "--out", "-")
    assert "small.npz, x: expected shape (3, 1, 8, 8)" in message
