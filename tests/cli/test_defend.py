"""`otad defend`: the model it saves, what it measures, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import Terminal, write_digits

import otad
from otad.cli.sources import TrainedNet
from otad.data import Dataset


def test_the_card_contains_data_reading_and_metrics(workshop: Path, digits: Dataset) -> None:
    model = otad.load(workshop / "digits-model")
    notes, metrics = model.notes, model.notes["metrics"]
    assert notes["data"]["name"] == "digits"
    assert notes["data"]["fingerprint"] == digits.fingerprint()
    assert notes["classes"] == [str(digit) for digit in range(10)]
    assert notes["bounds"] == [0.0, 1.0]
    assert notes["preparation"] is None
    assert otad.load(workshop / "body-model").notes["feature_names"] == ["age", "sex", "bmi", "bp"]
    with torch.no_grad():
        trace = model.trace(digits.test_x)
        by_net = TrainedNet.read(workshop / "digits-net").net(digits.test_x)
    for name, outputs in (("net", by_net), ("otad", trace.outputs)):
        right = (outputs.argmax(1) == digits.test_y).double().mean()
        assert metrics[name] == pytest.approx(float(right))
    used = trace.solution.smoothness
    assert metrics["share_raised"] == pytest.approx(float((used > 2).double().mean()))
    assert metrics["smoothness"]["most"] == pytest.approx(float(used.max()))
    assert metrics["rows"] == sum(metrics["status"].values()) == len(digits.test_x)


def test_options_reach_the_model(terminal: Terminal, workshop: Path) -> None:
    result = terminal.succeed(
        "defend", workshop / "digits-net", "--out", "model", "--json",
        "--neighbors", 4, "--smoothness", 1.5, "--strong-convexity", -0.1, "--mode", "paper",
        "--climb", "0.2,0.1", "--max-smoothness", 3, "--spares", 2, "--bank-dtype", "float16",
        "--per-class", 6, "--seed", 1,
    )  # fmt: skip
    record = json.loads(result.stdout)
    assert record["bank_points"] == 60
    assert record["metric"] == "accuracy"
    model = otad.load(record["model"])
    assert (model.n_neighbors, model.smoothness, model.strong_convexity) == (4, 1.5, -0.1)
    solver = model.solver
    assert (solver.mode, solver.climb, solver.max_smoothness) == ("paper", (0.2, 0.1), 3.0)
    assert (solver.spares, solver.on_failure) == (2, "fallback")
    assert model.bank_inputs.dtype == torch.float16
    assert model.bank_labels.bincount().tolist() == [6] * 10


def test_a_global_map(terminal: Terminal, workshop: Path, digits: Dataset) -> None:
    """Made, shown, and then read from the model by the commands that use it."""
    arguments = ("defend", workshop / "digits-net", "--scope", "global")
    record = terminal.json(*arguments, "--out", "model", "--json")
    model = otad.load("model")
    assert (record["scope"], model.scope) == ("global", "global")
    potential = record["potential"]
    assert potential["smoothness"] == model.smoothness == record["smoothness"]["most"]
    assert (potential["sweeps"], potential["left_out"]) == (model.potential.sweeps, [])
    assert record["status"] == {"solved": 40}
    assert (record["share_raised"], record["largest_residual"] < 1e-11) == (0.0, True)
    less = f"{0.99 * model.smoothness:.4f}"
    shown = terminal.succeed(*arguments, "--out", "less", "--smoothness", less).stdout
    left_out = otad.load("less").potential.left_out.tolist()
    assert f"{len(left_out)} contradicting points: rows {left_out[0]}" in shown
    assert f"L = {float(less):.4g}, " in shown
    assert "sweeps" in shown
    assert "L raised" not in shown
    terminal.succeed("predict", "model", "test", "--out", "answers.csv")
    answers = Path("answers.csv").read_text().splitlines()[1:]
    predicted = model(digits.test_x).argmax(1).tolist()
    assert [int(line.split(",")[1]) for line in answers] == predicted
    explained = terminal.succeed("explain", "model", "test", "--row", 3, "--json").stdout
    assert json.loads(explained)["scope"] == "global"


def test_data_may_move_or_be_replaced(terminal: Terminal, workshop: Path) -> None:
    shutil.copy(workshop / "body.csv", "moved.csv")
    result = terminal.succeed("defend", workshop / "body-net", "moved.csv", "--out", "model")
    assert "not the data" not in result.stderr
    assert otad.load("model").notes["metrics"]["metric"] == "mse"
    write_digits(Path("more.npz"), 300)
    result = terminal.succeed("defend", workshop / "digits-net", "more.npz", "--out", "model")
    assert "more.npz is not the data the net was trained on" in result.stderr


def test_data_of_other_classes_is_refused(terminal: Terminal, workshop: Path) -> None:
    whole = np.load(workshop / "digits.npz")
    few = whole["y"] < 5
    np.savez("few.npz", x=whole["x"][few], y=whole["y"][few])
    np.savez("flat.npz", x=whole["x"].reshape(-1, 64), y=whole["y"])
    for data, expected in (("few.npz", "classes ['0', '1'"), ("flat.npz", "input_shape [1, 8, 8]")):
        message = terminal.refuse("defend", workshop / "digits-net", data, "--out", "model")
        assert f"data: expected {expected}" in message


def test_a_folder_without_a_whole_net_is_refused(terminal: Terminal, workshop: Path) -> None:
    Path("empty").mkdir()
    assert "got no net.safetensors" in terminal.refuse("defend", "empty", "--out", "model")
    shutil.copytree(workshop / "digits-net", "cut")
    Path("cut/net.safetensors").write_bytes(Path("cut/checkpoint.safetensors").read_bytes())
    message = terminal.refuse("defend", "cut", "--out", "model")
    assert "expected a net with its config" in message


def test_a_card_of_the_users_own_is_not_replaced(terminal: Terminal, workshop: Path) -> None:
    Path("mine").mkdir()
    Path("mine/card.json").write_text("{}")
    for command, source in (("defend", "digits-net"), ("imitate", "digits-model")):
        message = terminal.refuse(command, workshop / source, "--out", "mine")
        assert "card.json: expected no file, or the card of a model to replace" in message
        assert [path.name for path in Path("mine").iterdir()] == ["card.json"]
    assert Path("mine/card.json").read_text() == "{}"
