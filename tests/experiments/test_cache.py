"""Parts and trainings are made once, by one process at a time, and resume where they stopped."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiments.toml_files import VISION, study_of, written
from torch import nn

from otad.errors import InputError
from otad.experiments.cache import UnfinishedError, WorkFolder
from otad.experiments.records import Candidate
from otad.io.codec import read_json
from otad.scores import share_score


def net(value: float) -> nn.Linear:
    made = nn.Linear(1, 1)
    nn.init.constant_(made.weight, value)
    return made


def trained(folder: WorkFolder, value: float, train: Any) -> tuple[dict[str, Any], float]:
    made = net(value)
    found = folder.trained("nets", "name", made, 2, train, lambda done, total: None)
    return found, float(made.weight.detach())


def test_weights_are_learned_once_and_their_seconds_add_up(tmp_path: Path) -> None:
    def killed(progress: Any, **saving: Any) -> tuple[int, dict[str, float]]:
        progress(SimpleNamespace(epoch=1, seconds=2.0))
        progress(SimpleNamespace(epoch=2, seconds=3.0))
        raise KeyboardInterrupt

    def learn(progress: Any, checkpoint_dir: Path, **saving: Any) -> tuple[int, dict[str, float]]:
        progress(SimpleNamespace(epoch=2, seconds=4.0))  # again, as it was not saved yet
        (checkpoint_dir / "checkpoint.safetensors").write_bytes(b"large")
        return 2, {"train_score": 0.5}

    def never(**saving: Any) -> tuple[int, dict[str, float]]:
        raise AssertionError("learned again")

    folder = WorkFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trained(folder, 1.0, killed)
    first = trained(folder, 2.0, learn)
    assert first == ({"train_score": 0.5, "seconds": 6.0}, 2.0)
    assert trained(folder, 3.0, never) == first
    (place,) = (tmp_path / "nets").iterdir()
    assert {path.name for path in place.iterdir()} == {"weights.safetensors", "seconds.json"}


HOLD = """
import sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(sys.argv[1]):
    Path("held").touch()
    time.sleep(0.5)
    Path("done").touch()
"""


def test_a_second_process_waits(tmp_path: Path) -> None:
    lock = WorkFolder(tmp_path).lock("part")
    command = [sys.executable, "-c", HOLD, lock.lock_file]
    with subprocess.Popen(command, cwd=tmp_path) as other:
        while not (tmp_path / "held").exists():
            assert other.poll() is None
            time.sleep(0.01)
        with lock:
            assert (tmp_path / "done").exists(), "in only after the other is out"


def test_of_two_at_once_one_computes(tmp_path: Path) -> None:
    folder, computed = WorkFolder(tmp_path), list[int]()

    def compute() -> Candidate:
        computed.append(1)
        time.sleep(0.3)
        return Candidate(7.0, share_score(1, 2))

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(folder.part, Candidate, "name", compute) for _ in range(2)]
        assert [one.result().value for one in asked] == [7.0, 7.0]
    assert computed == [1]
    folder.part(Candidate, "another name", compute)
    assert computed == [1, 1]


KINDS = {"net": "vit", "metric": "learned", "surrogate": "imitation"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_training_out_of_time_resumes_to_the_same_weights(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, VISION, ("epochs = 1", "epochs = 2"))
    study = study_of(path, tmp_path / "pieces")
    if kind == "surrogate":
        study.defended("exact")
    monkeypatch.setattr(study.work, "_seconds_left", lambda: 1e-6)  # enough for one epoch
    with pytest.raises(UnfinishedError, match="after epoch 1 of 2"):
        getattr(study, kind)(KINDS[kind])
    late = study_of(path, tmp_path / "late", deadline=time.time() - 1)
    with pytest.raises(UnfinishedError, match="out of time"):
        getattr(late, kind)(KINDS[kind])
    works = (tmp_path / "pieces", tmp_path / "whole")
    found = [getattr(study_of(path, work), kind)(KINDS[kind]) for work in works]
    assert found[0].identity == found[1].identity


def test_what_is_learned_is_loaded_unless_its_settings_changed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    first, second = (study_of(written(tmp_path, VISION), work) for _ in range(2))
    surrogate = first.surrogate("imitation")
    files = sorted(work.rglob("*.safetensors"))
    assert [file.parent.parent.name for file in files] == ["metrics", "nets", "surrogates"]
    times = [file.stat().st_mtime_ns for file in files]
    again = second.surrogate("imitation")
    assert (again.identity, again.record) == (surrogate.identity, surrogate.record)
    assert surrogate.record.seconds > 0
    assert surrogate.record.results["held_out_error"] is not None
    assert [file.stat().st_mtime_ns for file in files] == times
    assert len(read_json(files[0].parent / "seconds.json")) == 2, "one entry an epoch"
    for old, new in (("bors = 3", "bors = 3\nsmoothness = 5.0"), ("steps = 1", "steps = 2")):
        study_of(written(tmp_path, VISION, (old, new)), work).surrogate("imitation")
    names = [file.parent.parent.name for file in work.rglob("weights.safetensors")]
    assert Counter(names) == {"nets": 1, "metrics": 2, "surrogates": 3}


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


def test_prototypes_drawn_differently_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path, PROTOTYPES)
    shared = study_of(path, tmp_path / "shared")
    found = {key: shared.net(key).identity["weights"] for key in ("near", "far")}
    assert found["near"] != found["far"]
    alone = study_of(path, tmp_path / "alone").net("far")
    assert alone.identity["weights"] == found["far"]


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("epochs = 1,", "epoch = 1,", "net", "train: .*epoch"),
        ("patch = 4,", "path = 4,", "net", "options: .*'vit'.*path"),
        ("batch_size = 64,", "size = 64,", "metric", "train: .*size"),
        ("steps = 1", "step = 1", "metric", "train: .*step"),
        ("key_dim = 4", "keys = 4", "metric", "options: .*'cnn'.*keys"),
        ("epochs = 2, warmup", "epoch = 2, warmup", "surrogate", "train: .*epoch"),
        ("heads = 2, blocks", "head = 2, blocks", "surrogate", "options: .*head"),
    ],
)
def test_unknown_settings(tmp_path: Path, old: str, new: str, kind: str, message: str) -> None:
    study = study_of(written(tmp_path, VISION, (old, new)), tmp_path / "work")
    with pytest.raises(InputError, match=message):
        getattr(study, kind)(KINDS[kind])
