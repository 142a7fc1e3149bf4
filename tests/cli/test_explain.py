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
