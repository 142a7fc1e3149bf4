"""`otad defend` and `otad imitate`: the model they save, what they measure, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import column, terminal, write_digits

import otad
from otad.cip.surrogate import CipNet
from otad.cli.sources import TrainedNet
from otad.data import Dataset

TINY = ("--width", "32", "--blocks", "1", "--heads", "2", "--epochs", "2", "--batch-size", "32")


def test_the_card_contains_data_reading_and_metrics(
    workshop: Path, digits: Dataset, digits_model: otad.OTAD, body_model: otad.OTAD
) -> None:
    notes, metrics = digits_model.notes, digits_model.notes["metrics"]
    assert notes["data"]["name"] == "digits"
    assert notes["data"]["fingerprint"] == digits.fingerprint()
    assert notes["classes"] == [str(digit) for digit in range(10)]
    assert (notes["bounds"], notes["preparation"]) == ([0.0, 1.0], None)
    assert body_model.notes["feature_names"] == ["age", "sex", "bmi", "bp"]
    with torch.no_grad():
        trace = digits_model.trace(digits.test_x)
        by_net = TrainedNet.read(workshop / "digits-net").net(digits.test_x)
    for name, outputs in (("net", by_net), ("otad", trace.outputs)):
        right = (outputs.argmax(1) == digits.test_y).double().mean()
        assert metrics[name] == pytest.approx(float(right))
    used = trace.solution.smoothness
    assert metrics["share_raised"] == pytest.approx(float((used > 2).double().mean()))
    assert metrics["smoothness"]["most"] == pytest.approx(float(used.max()))
    assert metrics["rows"] == sum(metrics["status"].values()) == len(digits.test_x)


def test_options_reach_the_model(workshop: Path) -> None:
    options = (
        "--neighbors 4 --smoothness 1.5 --strong-convexity -0.1 --mode paper --climb 0.2,0.1 "
        "--max-smoothness 3 --spares 2 --bank-dtype float16 --per-class 6 --seed 1"
    )
    record = terminal.json("defend", workshop / "digits-net", "--out", "model", *options.split())
    assert (record["bank_points"], record["metric"]) == (60, "accuracy")
    model = otad.load(record["model"])
    assert (model.n_neighbors, model.smoothness, model.strong_convexity) == (4, 1.5, -0.1)
    solver = model.solver
    assert (solver.mode, solver.climb, solver.max_smoothness) == ("paper", (0.2, 0.1), 3.0)
    assert (solver.spares, solver.on_failure) == (2, "fallback")
    assert model.bank_inputs.dtype == torch.float16
    assert model.bank_labels.bincount().tolist() == [6] * 10


def test_a_global_map(workshop: Path, digits: Dataset) -> None:
    arguments = ("defend", workshop / "digits-net", "--scope", "global")
    record = terminal.json(*arguments, "--out", "model")
    model = otad.load("model")
    assert (record["scope"], model.scope) == ("global", "global")
    potential = record["potential"]
    assert potential["smoothness"] == model.smoothness == record["smoothness"]["most"]
    assert (potential["sweeps"], potential["left_out"]) == (model.potential.sweeps, [])
    assert record["status"] == {"solved": 40}
    assert (record["share_raised"], record["largest_residual"] < 1e-11) == (0.0, True)
    less = f"{0.99 * model.smoothness:.4f}"
    shown = terminal.text(*arguments, "--out", "less", "--smoothness", less)
    left_out = otad.load("less").potential.left_out.tolist()
    assert f"{len(left_out)} points that contradict others: row {left_out[0]}" in shown
    assert f"L = {float(less):.4g}, " in shown
    assert "sweeps" in shown
    assert "L raised" not in shown
    terminal.succeed("predict", "model", "test", "--out", "answers.csv")
    predicted = model(digits.test_x).argmax(1).tolist()
    assert column("answers.csv", "prediction", int) == predicted
    assert terminal.json("explain", "model", "test", "--row", 3)["scope"] == "global"


def test_data_may_move_or_be_replaced(workshop: Path) -> None:
    shutil.copy(workshop / "body.csv", "moved.csv")
    result = terminal.succeed("defend", workshop / "body-net", "moved.csv", "--out", "model")
    assert "not the data" not in result.stderr
    assert otad.load("model").notes["metrics"]["metric"] == "mse"
    write_digits(Path("more.npz"), 300)
    result = terminal.succeed("defend", workshop / "digits-net", "more.npz", "--out", "other")
    assert "more.npz is not the data" in result.stderr


def test_a_global_map_that_does_not_exist_is_replaced_and_said(workshop: Path) -> None:
    trained = TrainedNet.read(workshop / "digits-net")
    with torch.no_grad():
        trained.net.blocks[0][-1].weight.mul_(-30)
    Path("wild").mkdir()
    trained.write(Path("wild"), {})
    done = terminal.succeed(
        "defend", "wild", "--out", "model", "--scope", "global", "--per-class", 8
    )
    assert "otad: note: The global map of least L" in done.stderr
    assert "Warning" not in done.stderr
    assert otad.load("model").notes["defense"]["path"] == "lift"


def test_commands_name_the_class_they_cannot_make() -> None:
    net = torch.nn.Sequential(torch.nn.LSTMCell(4, 3), torch.nn.Linear(3, 2))
    net.forward = lambda x: net[1](net[0](x)[0])
    x = torch.rand(20, 4, generator=torch.Generator().manual_seed(0))
    otad.defend(net, x, torch.arange(20) % 2).save("model")
    message = terminal.refuse("predict", "model", "test", "--out", "answers.csv")
    assert "torch.nn.modules.container.Sequential" in message
    assert "otad.load(folder, net=...)" in message


def test_data_of_other_classes_is_refused(workshop: Path) -> None:
    whole = np.load(workshop / "digits.npz")
    few = whole["y"] < 5
    np.savez("few.npz", x=whole["x"][few], y=whole["y"][few])
    np.savez("flat.npz", x=whole["x"].reshape(-1, 64), y=whole["y"])
    for data, expected in (("few.npz", "classes ['0', '1'"), ("flat.npz", "input_shape [1, 8, 8]")):
        message = terminal.refuse("defend", workshop / "digits-net", data, "--out", "model")
        assert f"data: expected {expected}" in message


def test_a_folder_without_a_whole_net_is_refused(workshop: Path) -> None:
    Path("empty").mkdir()
    assert "net.safetensors" in terminal.refuse("defend", "empty", "--out", "model")
    shutil.copytree(workshop / "digits-net", "cut")
    Path("cut/net.safetensors").write_bytes(Path("cut/checkpoint.safetensors").read_bytes())
    assert "cut/net.safetensors" in terminal.refuse("defend", "cut", "--out", "model")


def test_a_card_of_the_users_own_is_not_replaced(workshop: Path) -> None:
    Path("mine").mkdir()
    Path("mine/card.json").write_text("{}")
    for command, source in (("defend", "digits-net"), ("imitate", "digits-model")):
        message = terminal.refuse(command, workshop / source, "--out", "mine")
        assert "card.json: expected no file" in message
        assert [path.name for path in Path("mine").iterdir()] == ["card.json"]
    assert Path("mine/card.json").read_text() == "{}"


def test_the_imitation_is_trained_tested_and_saved(workshop: Path) -> None:
    source = workshop / "digits-model"
    arguments = ("imitate", source, "--out", "nn", *TINY, "--held-out", 20)
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
    again = terminal.json(*arguments, "--force")  # from the start
    assert again["history"][1]["loss"] == record["history"][1]["loss"]
    assert "40 estimated" in terminal.text("predict", "nn", "test", "--out", "answers.csv")
    assert "estimated by a network" in terminal.text("explain", "nn", "test")


def test_an_imitation_out_of_time_resumes_later(workshop: Path) -> None:
    arguments = ("imitate", workshop / "digits-model", "--out", "nn", *TINY, "--save-seconds", 0)
    assert "epoch 1 of 2" in terminal.text(*arguments, "--max-seconds", "0.001")
    assert not Path("nn/card.json").exists()
    terminal.succeed(*arguments)
    shown = terminal.text("imitate", workshop / "digits-model", "--out", "whole", *TINY)
    for text in ("accuracy with CIP-net", "same answers", "otad evaluate whole test --eps EPS"):
        assert text in shown
    one, other = (otad.load(name).solver.state_dict() for name in ("nn", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_regression_is_imitated(workshop: Path) -> None:
    options = (*TINY, "--readout", "hull", "--alpha", "0.5", "--solve-anew")
    shown = terminal.text("imitate", workshop / "body-model", "--out", "nn", *options)
    assert "mse with CIP-net" in shown


def test_without_its_data_a_model_is_imitated_untested(digits_model: otad.OTAD) -> None:
    digits_model.notes["data"]["choice"]["data"] = "moved.npz"
    digits_model.save("model")
    result = terminal.succeed("imitate", "model", "--out", "nn", *TINY)
    assert "not be tested: NPZ file not found" in result.stderr
    assert isinstance(otad.load("nn").solver, CipNet)
    assert "CipNet" in terminal.refuse("imitate", "nn", "--out", "twice", *TINY)
    assert "out: expected a place" in terminal.refuse("imitate", "model", "--out", "model", *TINY)
    digits_model.notes = {"data": "some digits"}
    digits_model.save("model")
    result = terminal.succeed("imitate", "model", "--out", "named", *TINY)
    assert "not name its data" in result.stderr
    assert "otad evaluate named INPUT" in " ".join(result.stdout.split())


def test_a_model_is_not_written_into_the_folder_of_its_net(workshop: Path) -> None:
    shutil.copytree(workshop / "digits-net", "net")
    before = sorted(Path("net").iterdir())
    message = terminal.refuse("defend", "net", "--out", "./net/../net")
    assert "out: expected another folder than that of the network" in message
    assert sorted(Path("net").iterdir()) == before
