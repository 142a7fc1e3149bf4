"""`otad explain`: table, picture, numbers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.small import Terminal

import otad
from otad.cli.sources import bank_part
from otad.data import Dataset
from otad.nets import vision_transformer


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
    expected = dict(
        zip(
            trace.neighbors.indices[0].tolist(),
            trace.solution.multipliers[0].tolist(),
            strict=True,
        )
    )
    assert weights == pytest.approx(expected)
    assert record["prediction"] == str(int(trace.outputs.argmax()))
    written = json.loads(Path("why.json").read_text())
    assert written["neighbors"][0]["index"] == record["neighbors"][0]["index"]
    assert torch.tensor(written["inputs"]).shape == (1, 8, 8)


def test_images_a_vision_transformer_hides_are_read_from_its_data(
    terminal: Terminal, workshop: Path, digits: Dataset
) -> None:
    net = vision_transformer((1, 8, 8), 10, patch=4, width=8, blocks=1, heads=2, bounds=(0.0, 1.0))
    model = otad.defend(net, digits.train_x, digits.train_y, n_neighbors=3)
    model.notes = dict(otad.load(workshop / "digits-model").notes)
    model.save("model")
    terminal.succeed("explain", "model", "test", "--out", "why.png")
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    terminal.succeed("explain", "model", "test", "--out", "why.json")
    for neighbor in json.loads(Path("why.json").read_text())["neighbors"]:
        assert torch.equal(torch.tensor(neighbor["inputs"]), digits.train_x[neighbor["index"]])


def test_they_are_found_where_the_bank_has_some_of_them_only(
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


def test_images_get_a_picture(terminal: Terminal, workshop: Path) -> None:
    result = terminal.succeed("explain", workshop / "digits-model", "test", "--out", "why.png")
    assert Path("why.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote why.png" in result.stderr
    assert "weight" in result.stdout


def test_tables_get_their_columns_by_name(terminal: Terminal, workshop: Path) -> None:
    result = terminal.succeed("explain", workshop / "body-model", workshop / "body.csv")
    for name in ("age", "bmi", "weight", "distance"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("digits-model", ["--row", "40"], "row: expected 0 to 39, got 40"),
        ("digits-model", ["--row", "-1"], "row: expected 0 to 39, got -1"),
        ("digits-model", ["--out", "why.bmp"], "out: expected a name that ends in .png, .svg"),
        ("body-model", ["--out", "why.png"], "only images can be drawn, got why.png"),
    ],
)
def test_refusals_write_nothing(
    terminal: Terminal, workshop: Path, model: str, options: list[str], message: str
) -> None:
    assert message in terminal.refuse("explain", workshop / model, "test", *options)
    assert not list(Path().iterdir())
