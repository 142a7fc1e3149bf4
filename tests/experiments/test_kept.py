"""What is learned once is kept, by one process at a time, and goes on where it was left."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from experiments.small_vision import study_of, vision
from torch import nn

from otad.errors import InputError
from otad.experiments.config import read_experiment
from otad.experiments.kept import Deadline, Tick, UnfinishedError, alone, learned_once
from otad.io.codec import read_json


def net(value: float) -> nn.Linear:
    made = nn.Linear(1, 1)
    nn.init.constant_(made.weight, value)
    return made


def test_weights_are_learned_once_and_their_seconds_add_up(tmp_path: Path) -> None:
    def killed(tick: Tick) -> dict[str, float]:
        tick(1, 2.0)
        tick(2, 3.0)
        raise KeyboardInterrupt

    def learn(tick: Tick) -> dict[str, float]:
        tick(2, 4.0)  # done again, as the kill came before it was saved
        (tmp_path / "checkpoint.safetensors").write_bytes(b"large")
        return {"train_score": 0.5}

    def never(tick: Tick) -> dict[str, float]:
        raise AssertionError("learned again")

    with pytest.raises(KeyboardInterrupt):
        learned_once(tmp_path, net(1.0), killed)
    first = learned_once(tmp_path, net(2.0), learn)
    assert (first.seconds, first.facts) == (6.0, {"train_score": 0.5})
    other = net(3.0)
    assert learned_once(tmp_path, other, never) == first
    assert float(other.weight.detach()) == 2.0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"weights.safetensors", "seconds.json", "lock"}, "no checkpoint is left"


HOLD = """
import fcntl, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "lock").open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / "held").touch()
    time.sleep(0.5)
    (folder / "done").touch()
"""


def test_a_second_process_waits(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)]) as other:
        while not (tmp_path / "held").exists():
            assert other.poll() is None
            time.sleep(0.01)
        with alone(tmp_path):
            assert (tmp_path / "done").exists(), "in only after the other is out"


def test_a_deadline_that_has_passed(tmp_path: Path) -> None:
    assert Deadline.after(None).left is None
    left = Deadline.after(1000).left
    assert left is not None
    assert 990 < left <= 1000
    with pytest.raises(UnfinishedError, match="out of time"):
        _ = Deadline(time.monotonic() - 1).left


class Soon(Deadline):
    """There is time for an epoch, and then no more."""

    @property
    def left(self) -> float:
        return 1e-6


@pytest.mark.parametrize("kind", ["net", "metric", "surrogate"])
def test_training_out_of_time_goes_on_to_the_same_weights(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = vision(tmp_path, "epochs = 1", "epochs = 2")
    key = {"net": "vit", "metric": "learned", "surrogate": "imitation"}[kind]
    if kind == "surrogate":
        study_of(experiment, tmp_path / "pieces").base(experiment.rows["exact"])
    study = study_of(experiment, tmp_path / "pieces", max_seconds=1.0)
    monkeypatch.setattr(study, "_deadline", Soon(None))
    with pytest.raises(UnfinishedError, match="out of time after epoch 1 of 2"):
        getattr(study, kind)(key)
    works = (tmp_path / "pieces", tmp_path / "whole")
    found = [getattr(study_of(experiment, work), kind)(key) for work in works]
    names = [one.identity["weights"] if kind == "net" else one.weights for one in found]
    assert names[0] == names[1]


def test_what_is_learned_is_taken_from_the_work_folder(tmp_path: Path) -> None:
    experiment = vision(tmp_path)
    first, second = (study_of(experiment, tmp_path / "work") for _ in range(2))
    surrogate = first.surrogate("imitation")
    files = sorted((tmp_path / "work").rglob("*.safetensors"))
    assert [path.parent.parent.name for path in files] == ["metrics", "nets", "surrogates"]
    times = [path.stat().st_mtime_ns for path in files]
    again = second.surrogate("imitation")
    assert (again.weights, again.seconds) == (surrogate.weights, surrogate.seconds)
    assert surrogate.seconds > 0
    assert (again.error, again.held_out_error) == (surrogate.error, surrogate.held_out_error)
    assert again.held_out_error is not None
    assert [path.stat().st_mtime_ns for path in files] == times
    assert len(read_json(files[0].parent / "seconds.json")) == 2, "one entry an epoch"
    assert torch.equal(again.net.from_input.weight, surrogate.net.from_input.weight)


def test_settings_lead_to_other_folders(tmp_path: Path) -> None:
    work = tmp_path / "work"
    study_of(vision(tmp_path), work).surrogate("imitation")
    changed = vision(tmp_path, "n_neighbors = 3", "n_neighbors = 3\nsmoothness = 5.0")
    study_of(changed, work).surrogate("imitation")
    changed = vision(tmp_path, "steps = 1", "steps = 2")
    study_of(changed, work).surrogate("imitation")
    counts = {path.name: len(list(path.iterdir())) for path in work.iterdir()}
    assert counts == {"nets": 1, "metrics": 2, "surrogates": 3}


PROTOTYPES = """
title = "prototypes"
[data.digits]
name = "digits"
options = { test_fraction = 0.9 }
[train]
epochs = 1
loss = "margin"
[nets]
near = { data = "digits", kind = "prototypes", options = { neighbors = 1, per_class = 2 } }
far = { data = "digits", kind = "prototypes", options = { neighbors = 9, per_class = 2 } }
[rows]
near = { net = "near", method = "net" }
far = { net = "far", method = "net" }
"""


def test_prototypes_drawn_in_another_way_are_not_taken_for_others(tmp_path: Path) -> None:
    path = tmp_path / "prototypes.toml"
    path.write_text(PROTOTYPES, encoding="utf-8")
    experiment = read_experiment(path)
    shared = study_of(experiment, tmp_path / "shared")
    names = {key: shared.net(key).identity["weights"] for key in ("near", "far")}
    assert names["near"] != names["far"]
    alone = study_of(experiment, tmp_path / "alone").net("far")
    assert alone.identity["weights"] == names["far"]


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("epochs = 1,", "epoch = 1,", "net", "settings of TrainConfig"),
        ("patch = 4,", "path = 4,", "net", "options: expected those of 'vit'"),
        ("batch_size = 64,", "size = 64,", "metric", "settings of MetricConfig"),
        ("steps = 1", "step = 1", "metric", "settings of MetricConfig"),
        ("key_dim = 4", "keys = 4", "metric", "options: expected those of 'cnn'"),
        ("key_dim = 4", "mean = 0.5", "metric", "options: .* multiple values for .* 'mean'"),
        ("epochs = 2, warmup", "epoch = 2, warmup", "surrogate", "settings of CipNetConfig"),
        ("heads = 2, blocks", "head = 2, blocks", "surrogate", "options: expected those of CipNet"),
    ],
)
def test_unknown_settings(tmp_path: Path, old: str, new: str, kind: str, message: str) -> None:
    study = study_of(vision(tmp_path, old, new), tmp_path / "work")
    key = {"net": "vit", "metric": "learned", "surrogate": "imitation"}[kind]
    with pytest.raises(InputError, match=message):
        getattr(study, kind)(key)


def test_two_who_ask_for_the_same_part_at_once_measure_it_once(tmp_path: Path) -> None:
    study = study_of(vision(tmp_path), tmp_path / "work")
    measured: list[int] = []

    def measure() -> int:
        measured.append(1)
        time.sleep(0.3)
        return 7

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(study.part, "part", int, {"of": "both"}, measure) for _ in range(2)]
        assert [one.result() for one in asked] == [7, 7]
    assert measured == [1]
