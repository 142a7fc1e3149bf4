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


def test_the_card_tells_data_reading_and_metrics(workshop: Path, digits: Dataset) -> None:
    notes = otad.load(workshop / "digits-model").notes
    assert notes["data"]["name"] == "digits"
    assert notes["data"]["fingerprint"] == digits.fingerprint()
    assert notes["classes"] == [str(digit) for digit in range(10)]
    assert notes["bounds"] == [0.0, 1.0]
    assert notes["preparation"] is None
    assert notes["metrics"]["rows"] == len(digits.test_x)
    assert otad.load(workshop / "body-model").notes["feature_names"] == ["age", "sex", "bmi", "bp"]


def test_the_metrics_are_those_of_the_saved_model(workshop: Path, digits: Dataset) -> None:
    net = TrainedNet.read(workshop / "digits-net").net
    model = otad.load(workshop / "digits-model")
    metrics = model.notes["metrics"]
    with torch.no_grad():
        trace = model.trace(digits.test_x)
        by_net = (net(digits.test_x).argmax(1) == digits.test_y).double().mean()
    right = (trace.outputs.argmax(1) == digits.test_y).double().mean()
    assert metrics["net"] == pytest.approx(float(by_net))
    assert metrics["otad"] == pytest.approx(float(right))
    used = trace.solution.smoothness
    assert metrics["share_raised"] == pytest.approx(float((used > 2).double().mean()))
    assert metrics["smoothness"]["most"] == pytest.approx(float(used.max()))
    assert sum(metrics["status"].values()) == len(digits.test_x)


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


def test_one_map_for_the_whole_bank(terminal: Terminal, workshop: Path, digits: Dataset) -> None:
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


def test_data_that_moved_is_read_as_for_the_training(terminal: Terminal, workshop: Path) -> None:
    shutil.copy(workshop / "body.csv", "moved.csv")
    result = terminal.succeed("defend", workshop / "body-net", "moved.csv", "--out", "model")
    assert "not the data" not in result.stderr
    assert otad.load("model").notes["metrics"]["metric"] == "mse"


def test_other_data_is_allowed_and_told(terminal: Terminal, workshop: Path) -> None:
    write_digits(Path("more.npz"), 300)
    result = terminal.succeed("defend", workshop / "digits-net", "more.npz", "--out", "model")
    assert "more.npz is not the data the net was trained on" in result.stderr


def test_data_of_other_classes_is_refused(terminal: Terminal, workshop: Path) -> None:
    whole = np.load(workshop / "digits.npz")
    few = whole["y"] < 5
    np.savez("few.npz", x=whole["x"][few], y=whole["y"][few])
    message = terminal.refuse("defend", workshop / "digits-net", "few.npz", "--out", "model")
    assert "expected classes ['0', '1'" in message
    np.savez("flat.npz", x=whole["x"].reshape(-1, 64), y=whole["y"])
    message = terminal.refuse("defend", workshop / "digits-net", "flat.npz", "--out", "model")
    assert "expected input_shape [1, 8, 8] like the data the net was trained on" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--climb", "0.2"], "climb: expected two numbers such as 0.2,0.2, got '0.2'"),
        (["--climb", "-1,0"], "climb: expected two finite steps"),
        (["--mode", "loose"], "mode: expected one of consistent, paper, got 'loose'"),
        (["--neighbors", "5000"], "n_neighbors: expected at most the 160 points"),
        (["--smoothness", "0"], "smoothness: expected a"),
        (["--scope", "regional"], "scope: expected one of local, global, got 'regional'"),
        (["--scope", "global", "--spares", "2"], "spares"),
        (["--scope", "global", "--smoothness", "0.01"], "of 160 bank points contradict the others"),
        (["--bank-dtype", "int8"], "bank_dtype: expected one of float32, float16, bfloat16"),
        (["--per-class", "1000"], "per_class: expected at most"),
        (["--device", "cuda:99"], "device: expected one that is present, got 'cuda:99'"),
        (["--device", "quantum"], "device: expected one that is present, got 'quantum'"),
    ],
)
def test_refusals_leave_no_model(
    terminal: Terminal, workshop: Path, options: list[str], message: str
) -> None:
    refused = terminal.refuse("defend", workshop / "digits-net", "--out", "model", *options)
    assert message in refused
    assert not Path("model").exists()


def test_a_folder_without_a_whole_net_is_refused(terminal: Terminal, workshop: Path) -> None:
    Path("empty").mkdir()
    assert "got no net.safetensors" in terminal.refuse("defend", "empty", "--out", "model")
    shutil.copytree(workshop / "digits-net", "cut")
    content = Path("cut/net.safetensors").read_bytes()
    Path("cut/net.safetensors").write_bytes(content[:-100])
    assert "expected a whole safetensors file" in terminal.refuse("defend", "cut", "--out", "model")
    Path("cut/net.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "the file is damaged" in terminal.refuse("defend", "cut", "--out", "model")
    Path("cut/net.safetensors").write_bytes(Path("cut/checkpoint.safetensors").read_bytes())
    message = terminal.refuse("defend", "cut", "--out", "model")
    assert "expected a net with its config" in message


def test_points_of_each_class_need_classes(terminal: Terminal, workshop: Path) -> None:
    options = ("--out", "model", "--per-class", 5)
    message = terminal.refuse("defend", workshop / "body-net", *options)
    assert "per_class: expected only for data with classes, got a regression" in message
    assert not Path("model").exists()


def test_a_card_of_the_users_own_is_kept(terminal: Terminal, workshop: Path) -> None:
    Path("mine").mkdir()
    Path("mine/card.json").write_text("{}")
    for command, source in (("defend", "digits-net"), ("imitate", "digits-model")):
        message = terminal.refuse(command, workshop / source, "--out", "mine")
        assert "card.json: expected no file, or the card of a model to replace" in message
        assert [path.name for path in Path("mine").iterdir()] == ["card.json"]
    assert Path("mine/card.json").read_text() == "{}"
