"""`otad train`: the files it leaves, units, resuming, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.small import BODY, QUICK, terminal, write_body, write_cells, write_digits
from PIL import Image

import otad
from otad import data
from otad.cli.sources import DataChoice, TrainedNet, describe_data
from otad.cli.train import train_net
from otad.data import Dataset
from otad.io.tensor_files import fingerprint, read_tensors
from otad.nets import Lift
from otad.nets.adapt import UNREAD
from otad.training import TrainConfig, fit_backbone, loop, recipe
from otad.training.recipes import BACKBONES, usual_width

READING = ("body.csv", "--target", "progression", "--task", "regression")


def test_the_net_says_all_about_itself_and_the_record_is_there_to_read(
    workshop: Path, digits: Dataset
) -> None:
    trained = TrainedNet.read(workshop / "digits-net")
    record = json.loads((workshop / "digits-net" / "training.json").read_text())
    assert trained.about["data"]["fingerprint"] == digits.fingerprint()
    assert trained.about["classes"] == [str(digit) for digit in range(10)]
    assert record["data"] == trained.about["data"]
    assert [epoch["epoch"] for epoch in record["history"]] == [1, 2]
    assert record["train_config"]["energy_weight"] == 0.01
    assert record["final"]["train_accuracy"] == record["history"][-1]["train_score"]
    # One mean and one spread for all pixels, those of the train part.
    flat = digits.train_x.double()
    assert trained.net.mean.unique().tolist() == pytest.approx([float(flat.mean())])
    assert trained.net.std.unique().tolist() == pytest.approx([float(flat.std(correction=0))])
    assert trained.net.bounds == (0.0, 1.0)


def test_tables_are_standardized_by_column_and_targets_keep_their_units(workshop: Path) -> None:
    trained = TrainedNet.read(workshop / "body-net")
    dataset = trained.note.choice.load()
    assert dataset.feature_names == BODY
    torch.testing.assert_close(trained.net.mean, dataset.train_x.mean(0))
    record = json.loads((workshop / "body-net" / "training.json").read_text())
    # The error of always saying the mean is the variance: a few thousand, not about one.
    assert 500 < record["final"]["train_mse"] < 2 * float(dataset.train_y.var())
    with torch.no_grad():
        mean = float(trained.net(dataset.train_x).mean())
    assert mean == pytest.approx(float(dataset.train_y.mean()), abs=40)


def test_progress_and_validation_are_reported_in_units() -> None:
    write_body(Path("body.csv"))
    arguments = ("train", *READING, "--features", "bmi", "--out", "net", *QUICK, "--json")
    for _ in range(2):  # the second time it is read from its checkpoint
        Path("net/training.json").unlink(missing_ok=True)  # as if killed before the end
        result = terminal.succeed(*arguments)
        loss = json.loads(result.stdout)["final"]["loss"]
        assert loss > 100
        assert f"epoch 2: loss {loss:.4f}" in result.stderr
    dataset = data.load("diabetes")
    net, result = train_net(dataset, TrainConfig(epochs=1), options={"blocks": 1}, validation=0.2)
    held = data.split(dataset, 0.2, seed=0)
    with torch.no_grad():
        errors = (net(held.validation_x) - held.validation_y).square().mean()
    assert result.final.val_score == pytest.approx(float(errors), rel=1e-4)


def test_both_layers_of_a_lifted_network_have_the_width_that_is_asked_for() -> None:
    write_digits(Path("digits.npz"))
    lifted = ("train", "digits.npz", "--net", "lifted", "--hidden", 8, "--epochs", 1)
    terminal.succeed(*lifted, "--out", "net")
    assert TrainedNet.read(Path("net")).net.hidden == (8, 8)


def test_an_interrupted_training_resumes_to_the_same_net(monkeypatch: pytest.MonkeyPatch) -> None:
    write_digits(Path("digits.npz"))
    command = ("train", "digits.npz", "--epochs", 4, "--blocks", 1, "--out")
    terminal.succeed(*command, "whole")
    saved = []

    def die_at_the_third(*arguments: object) -> None:
        if len(saved) == 2:
            raise KeyboardInterrupt
        saved.append(save(*arguments))  # type: ignore[arg-type]

    save = loop.save_run
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_run", die_at_the_third)
        assert terminal.run(*command, "broken").exit_code != 0
    assert not Path("broken/net.safetensors").exists()
    epochs = []
    run_epoch = loop.Training.run_epoch
    monkeypatch.setattr(
        loop.Training, "run_epoch", lambda *args: epochs.append(args[1]) or run_epoch(*args)
    )
    terminal.succeed(*command, "broken")
    assert epochs == [3, 4]
    broken, whole = (read_tensors(Path(name, "net.safetensors")) for name in ("broken", "whole"))
    assert fingerprint(broken.tensors) == fingerprint(whole.tensors)
    assert broken.header == whole.header


def test_json_is_all_on_stdout() -> None:
    write_digits(Path("digits.npz"))
    options = ("--validation", 0.2, "--alpha", 0.5, "--seed", 3, "--hidden", 7)
    record = terminal.json("train", "digits.npz", "--out", "net", *QUICK, *options)
    assert record["net"] == str(Path("net/net.safetensors"))
    assert record["net_config"]["hidden"] == 7
    assert record["train_config"]["energy_weight"] == 0.5
    assert record["history"][0]["val_score"] is not None
    assert record["data"]["choice"] == {"data": "digits.npz", "seed": 3, "options": {}}


def test_an_image_folder() -> None:
    for name, level in (("dark", 40), ("light", 200)):
        Path("images", name).mkdir(parents=True)
        for k in range(10):
            Image.new("L", (6, 5), level + k).save(Path("images", name, f"{k}.png"))
    shown = terminal.text("train", "images", "--size", 4, "--out", "net", *QUICK)
    assert "otad defend net --out MODEL_DIR" in shown
    assert TrainedNet.read(Path("net")).net.input_shape == (1, 4, 4)
    assert TrainedNet.read(Path("net")).about["classes"] == ["dark", "light"]
    for out, reason in (("images", "overwrite"), ("images/net", "be read as part of")):
        message = terminal.refuse("train", "images", "--size", 8, "--out", out)
        assert f"got {out}, which would {reason} images" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("no-such-set", "mnist, .*'no-such-set'"),
        ("absent.csv --target a --task regression", "CSV file not found"),
        ("body.csv --task regression", "body.csv: .*--target"),
        ("body.csv --target progression", "body.csv: .*--task"),
        ("typo.csv --target y --task regression", "line 4, column 'x': .*'1,5'"),
        (" ".join(READING[:-1]) + " guessing --features age", "task: .*'guessing'"),
        ("digits.npz --target y", "NPZ file, got --target"),
        ("digits --genes 5", "test_fraction, got 'genes'"),
        ("images", "images: .*one subfolder for each class"),
        ("sizes", "sizes: .*--size.*2 sizes.*8 x 8"),
        ("single", "test_fraction: expected at most 0 of the 2 rows, so that each class .*got 1"),
        ("mnist", "--data-dir.*OTAD_DATA"),
        ("digits.npz --optimizer magic", "optimizer: .*sgd, adamw, .*got 'magic'"),
        ("digits.npz --learning-rate 1e6", "learning_rate: "),
        ("digits.npz --device cuda:99", "device: .*'cuda:99'"),
        (" ".join(READING) + " --features age --features age", "features: .*age"),
        ("digits.npz --validation 1.5", "validation: .*0 and 1.*1.5"),
        ("digits.npz --test-fraction 0", "test_fraction: .*0 and 1"),
        ("digits.npz --patch 2", "options: .*'fc_resnet', .* blocks, hidden.*got patch$"),
        ("digits.npz --net resnet --alpha 1", "alpha: .*'resnet' transports nothing.*got 1"),
        ("digits.npz --net orthogonal --alpha 1", "alpha: .*'orthogonal'.*got 1"),
        ("digits.npz --recipe soup", "recipe: .*'soup'"),
        ("digits.npz --margin 0.5", "margin: .*orthogonal.*got 0.5"),
        (" ".join(READING) + " --net orthogonal", "task: .*classification.*regression"),
        ("digits.npz --no-normalize", "got --normalize"),
    ],
)
def test_refusals_leave_no_net(arguments: str, message: str) -> None:
    write_digits(Path("digits.npz"))
    write_body(Path("body.csv"))
    Path("images").mkdir()
    for number in range(4):
        for folder in ("sizes", "single") if number < 2 else ("sizes",):
            path = Path(folder, str(number % 2), f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8 + number // 3)).save(path)
    Path("typo.csv").write_text('x,y\n1,2\n3,4\n"1,5",6\n')
    assert re.search(message, terminal.refuse("train", *arguments.split(), "--out", "net"))
    assert not Path("net/net.safetensors").exists()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # CPUs without bfloat16
def test_a_vision_transformer_by_a_recipe_in_two_runs() -> None:
    write_digits(Path("digits.npz"))
    shape = ("--net", "vit", "--patch", 4, "--width", 8, "--heads", 2, "--blocks", 1)
    changes = ("--recipe", "vit_cifar10", "--epochs", 4, "--alpha", 0.001, "--batch-size", 64)
    command = ("train", "digits.npz", "--out", "net", *shape, *changes)
    first = terminal.json(*command, "--max-seconds", 1e-6)
    assert (first["epochs_done"], first["epochs"]) == (1, 4)
    assert not Path("net/net.safetensors").exists()
    done = terminal.json(*command)
    assert [epoch["epoch"] for epoch in done["history"]] == [1, 2, 3, 4]
    settings = done["train_config"]
    assert (settings["energy_weight"], settings["epochs"], settings["ema"]) == (0.001, 4, 0.999)
    assert settings["warmup"] == 2  # not the recipe's 10 epochs of 200
    assert done["net_config"]["kind"] == "vit"
    assert TrainedNet.read(Path("net")).net.width == 8


def test_an_orthogonal_network_is_trained_for_radii_in_units_of_its_inputs() -> None:
    write_digits(Path("digits.npz"))
    shape = ("--net", "orthogonal", "--width", 16, "--blocks", 1, "--stages", 2)
    done = terminal.json("train", "digits.npz", "--out", "net", *shape, "--epochs", 8)
    settings, net = done["train_config"], TrainedNet.read(Path("net")).net
    assert (settings["optimizer"], settings["target_margin"]) == ("orthogonal_muon", 0.5)
    assert (net.stages, net.mean.unique().item(), net.std.unique().item()) == (2, 0.0, 1.0)
    terminal.succeed("defend", "net", "--out", "model", "--scope", "global")
    model = otad.load("model")
    assert isinstance(model.backbone, Lift)
    assert model.backbone.unread == UNREAD
    found = terminal.json("certify", "model", "test", "--eps", 0.1)
    assert found["certified"]["0.1"]["value"] > 10
    again = ("train", "digits.npz", "--out", "other", *shape, "--epochs", 1, "--margin", 0.2)
    changed = terminal.json(*again, "--augment", "affine")["train_config"]
    assert (changed["target_margin"], changed["augment"]) == (0.2, "affine")
    x, y = data.load("digits").train_x[:20], data.load("digits").train_y[:20]
    how = {"kind": "orthogonal", "n_outputs": 10, "options": {"width": 16, "blocks": 1}}
    assert fit_backbone((x, y), recipe("orthogonal", epochs=1), **how)[0].std.unique().item() == 1


def test_cells_may_be_normalized_already() -> None:
    values = np.random.default_rng(0).normal(size=(40, 3))
    write_cells(Path("cells.h5ad"), values, kind=["a", "b"] * 20)
    arguments = ("train", "cells.h5ad", "--label", "kind", "--out", "net", *QUICK)
    assert "--no-normalize" in terminal.refuse(*arguments)
    terminal.succeed(*arguments, "--no-normalize")
    terminal.succeed("defend", "net", "--out", "model")
    assert otad.load("model").notes["preparation"]["target_sum"] is None
    terminal.succeed("predict", "model", "test", "--out", "p.csv")


def test_gray_images_of_one_size_need_no_option_and_older_nets_keep_their_channels() -> None:
    random = np.random.default_rng(0)
    for number in range(20):
        path = Path("images", str(number % 2), f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 128, (20, 20), dtype=np.uint8) + np.uint8(100 * (number % 2))
        Image.fromarray(pixels).convert("RGB").save(path)
    result = terminal.succeed("train", "images", "--out", "net", *QUICK)
    assert "otad: note: all training images are gray" in result.stderr
    net = TrainedNet.read(Path("net")).net
    assert net.input_shape == (1, 20, 20)
    assert net.hidden == 64  # at most the rows, or 64, where the input has 400 pixels
    terminal.succeed("defend", "net", "--out", "model")
    terminal.succeed("predict", "model", "test", "--out", "p.csv")
    terminal.succeed("predict", "model", "images", "--out", "q.csv")

    dataset = data.load_image_folder(Path("images"), channels=3)
    colored, _ = train_net(dataset, TrainConfig(epochs=1), options={"blocks": 1})
    choice = DataChoice("images")
    TrainedNet(colored, describe_data(dataset, choice)).write(Path("older"), {})
    terminal.succeed("defend", "older", "--out", "older-model")
    assert otad.load("older-model").backbone.input_shape == (3, 20, 20)
    terminal.succeed("predict", "older-model", "test", "--out", "r.csv")


def test_the_help_names_every_kind_of_network() -> None:
    listed = terminal.text("train", "--help").replace(" ", "")
    assert f"Kindofnetwork:{','.join(BACKBONES)}." in listed


def test_the_width_is_that_of_the_input_where_there_are_enough_rows() -> None:
    assert usual_width((1, 28, 28), 60000) == 784
    assert usual_width((1, 28, 28), 480) == 480
    assert usual_width((3, 28, 28), 10**6) == 1024
    assert (usual_width((11,), 20), usual_width((400,), 20)) == (11, 64)


def test_a_table_with_one_feature_is_no_folder_of_gray_images(workshop: Path) -> None:
    reading = ("--target", "progression", "--task", "regression", "--features", "bmi")
    result = terminal.succeed("train", workshop / "body.csv", *reading, "--out", "net", *QUICK)
    assert "gray" not in result.stderr
