"""`otad imitate`: a network in the place of a saved model's solver."""

from __future__ import annotations

from pathlib import Path

import torch
from cli.small import Terminal

import otad
from otad.cip.surrogate import CipNet

TINY = ("--width", "32", "--blocks", "1", "--heads", "2", "--epochs", "2", "--batch-size", "32")


def test_the_new_model_is_trained_tested_and_saved(terminal: Terminal, workshop: Path) -> None:
    source = workshop / "digits-model"
    arguments = ("imitate", source, "--out", "nn", *TINY, "--held-out", 20, "--json")
    record = terminal.json(*arguments)
    exact, model = otad.load(source), otad.load("nn")
    assert isinstance(model.solver, CipNet)
    assert (model.solver.width, model.solver.dim) == (32, 64)
    assert torch.equal(model.bank_inputs, exact.bank_inputs)
    assert [epoch["epoch"] for epoch in record["history"]] == [1, 2]
    assert record["history"][1]["held_out_error"] is not None
    assert record["exact"]["otad"] == exact.notes["metrics"]["otad"]
    assert record["estimated"]["status"] == {"estimated": 40}
    assert model.notes["metrics"] == record["estimated"]
    assert model.notes["imitation"]["alpha"] == 1.0
    assert model.notes["classes"] == exact.notes["classes"]
    again = terminal.json(*arguments)  # from the last checkpoint
    assert again["history"][1]["loss"] == record["history"][1]["loss"]
    shown = terminal.succeed("predict", "nn", "test", "--out", "answers.csv").stdout
    assert "40 estimated" in shown
    assert "estimated by a network" in terminal.succeed("explain", "nn", "test").stdout


def test_out_of_time_it_resumes_later(terminal: Terminal, workshop: Path) -> None:
    arguments = ("imitate", workshop / "digits-model", "--out", "nn", *TINY, "--save-seconds", 0)
    short = terminal.succeed(*arguments, "--max-seconds", "0.001")
    assert "Out of time after epoch 1 of 2" in short.stdout
    assert not Path("nn/card.json").exists()
    terminal.succeed(*arguments)
    whole = ("imitate", workshop / "digits-model", "--out", "whole", *TINY)
    result = terminal.succeed(*whole)
    assert "accuracy by CIP-net" in result.stdout
    assert "same answers" in result.stdout
    assert "otad evaluate whole test --eps EPS --out DIR" in result.stdout
    one, other = (otad.load(name).solver.state_dict() for name in ("nn", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_regression(terminal: Terminal, workshop: Path) -> None:
    options = (*TINY, "--readout", "hull", "--alpha", "0.5", "--solve-anew")
    shown = terminal.succeed("imitate", workshop / "body-model", "--out", "nn", *options).stdout
    assert "mse by CIP-net" in shown


def test_without_its_data_a_model_is_imitated_untested(terminal: Terminal, workshop: Path) -> None:
    model = otad.load(workshop / "digits-model")
    model.notes["data"]["choice"]["data"] = "moved.npz"
    model.save("model")
    result = terminal.succeed("imitate", "model", "--out", "nn", *TINY)
    assert "note: the new model will not be tested: NPZ file not found" in result.stderr
    assert isinstance(otad.load("nn").solver, CipNet)
    for name, notes in (("named", {"data": "some digits"}), ("nameless", {})):
        model.notes = notes
        model.save("model")
        result = terminal.succeed("imitate", "model", "--out", name, *TINY)
        assert "the model names no data, so it is not tested" in result.stderr


def test_the_model_itself_is_not_overwritten(terminal: Terminal, model_copy: Path) -> None:
    message = terminal.refuse("imitate", model_copy, "--out", model_copy, *TINY)
    assert "out: expected another place than that of an input" in message
    terminal.succeed("imitate", model_copy, "--out", "nn", *TINY)
    assert "CipNet" in terminal.refuse("imitate", "nn", "--out", "twice", *TINY)
