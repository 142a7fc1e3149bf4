"""Whole runs, in small: every shipped experiment, kills, several processes, failures."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
from experiments.toml_files import VISION, WINE, written
from filelock import FileLock

from otad.errors import InputError, OtadError
from otad.experiments import RunRecord, reproduce, reproduce_together
from otad.experiments import rows as rows_module
from otad.experiments import run as run_module
from otad.experiments import study as study_module
from otad.experiments.cache import UnfinishedError
from otad.experiments.experiment import Experiment, read_experiment
from otad.experiments.run import Task, plan
from otad.workers import LocalProcesses

SMALL = """
title = "small"
[data.wine]
name = "wine"
[train]
epochs = 3
[nets.one]
data = "wine"
blocks = 1
normalize = "feature"
[nets.two]
data = "wine"
blocks = 1
normalize = "feature"
choose = { setting = "energy_weight", values = [0.0, 0.1], row = "c", validation = 0.3, epochs = 2 }
[attacks]
push = { name = "pgd", eps = 1.0, unit = "std", points = 9, options = { steps = 2 } }
[rows]
a = { net = "one", method = "net", attacks = ["push"] }
b = { net = "one", method = "otad", lipschitz = { radius = 0.1, points = 5, steps = 2 } }
c = { net = "two", method = "otad", attacks = ["push"] }
d = { net = "one", method = "majority_knn" }
"""
OTAD_WINE = WINE.replace('"net" }', '"otad" }')
SUITE = """
[evaluate]
row = "right"
eps = [0.1]
headline = 0.1
points = 9
flags = false
attacks = { noise = {} }
"""
COST = '[cost]\nnet = "right"\nbanks = [{}]\nqueries = 1\ndevices = ["cpu"]\n'
Lines = dict[str, tuple[int, int]]


def watching(lines: Lines) -> Callable[[str, int, int], None]:
    return lambda part, done, total: lines.update({part: (done, total)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Path]:
    """A whole run, and the folder it is in."""
    folder = tmp_path_factory.mktemp("whole")
    return reproduce(written(folder, SMALL), out=folder, seed=4), folder


def test_record_holds_all_it_depends_on(whole: tuple[RunRecord, Path]) -> None:
    record, folder = whole
    content = json.loads((folder / "small.json").read_text(encoding="utf-8"))
    assert content["seed"] == content["nets"]["one"]["train"]["seed"] == 4
    assert content["config"]["train"] == {"epochs": 3}
    assert content["environment"]["versions"]["torch"]
    assert content["environment"]["device"] == "cpu"
    assert content["data"]["wine"]["train_size"] == 142
    assert len(content["code"]) == 64
    assert record.rows["b"].lipschitz is not None
    two = record.nets["two"]
    chosen = max(two.candidates, key=lambda candidate: candidate.score.rank)
    assert two.train is not None
    assert (two.train["energy_weight"], two.train["epochs"]) == (chosen.value, 3)
    assert {candidate.score.n for candidate in two.candidates} == {43}


def timeless(record: RunRecord) -> object:
    """The figures of a record, without times and places."""
    rows = {}
    for key, row in record.rows.items():
        attacks = {name: replace(one, seconds=0.0) for name, one in row.attacks.items()}
        potential = None if row.potential is None else replace(row.potential, seconds=0.0)
        rows[key] = replace(row, seconds=0.0, attacks=attacks, potential=potential)
    learned = (*record.nets.items(), *record.metrics.items(), *record.surrogates.items())
    return rows, {key: one.weights for key, one in learned}, record.config, record.data


@pytest.mark.parametrize("moment", [1, 9, 17])
def test_a_killed_run_resumes_to_the_same_record(
    tmp_path: Path, whole: tuple[RunRecord, Path], moment: int
) -> None:
    small, calls = written(tmp_path, SMALL), list[str]()

    def kill(part: str, done: int, total: int) -> None:
        calls.append(part)
        if len(calls) > moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(small, out=tmp_path, seed=4, progress=kill)
    assert not (tmp_path / "small.json").exists()
    assert timeless(reproduce(small, out=tmp_path, seed=4)) == timeless(whole[0])


def test_finished_parts_are_read_by_other_experiments(
    whole: tuple[RunRecord, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, work = whole[0], whole[1] / ".work"
    nets = sorted((work / "nets").iterdir())
    for name in ("measure_row", "attack_row", "measure_regularity"):
        monkeypatch.setattr(rows_module, name, lambda *_, **__: pytest.fail("measured again"))
    other = written(tmp_path, SMALL, ("[rows]\n", "[rows]\ne = { net = 'one', method = 'net' }\n"))
    rows = reproduce(other, out=tmp_path, work=work, seed=4).rows
    assert {key: rows[key] for key in first.rows} == first.rows
    assert sorted((work / "nets").iterdir()) == nets
    assert rows["e"] == replace(rows["a"], attacks={}), "the same model by another name"
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        reproduce(other, out=tmp_path, seed=1)


@pytest.mark.usefixtures("brief_reports")
def test_two_runs_at_once_share_what_they_find_and_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Potential and row are computed by one of them, the suite (from its parts) by both."""
    busy, calls = defaultdict[str, threading.Lock](threading.Lock), list[str]()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def slowly(*args: Any, **options: Any) -> Any:
            assert busy[name].acquire(blocking=False), "two at once"
            calls.append(name)
            time.sleep(0.3)
            found = original(*args, **options)
            busy[name].release()
            return found

        monkeypatch.setattr(module, name, slowly)

    watch(study_module, "write_tensors")
    watch(rows_module, "measure_row")
    watch(run_module, "evaluate")
    path = written(tmp_path, OTAD_WINE + SUITE, ('"otad" }', '"otad", scope = "global" }'))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: reproduce(path, out=tmp_path / "out"), range(2))
    assert calls == ["write_tensors", "measure_row", "evaluate", "evaluate"]
    assert timeless(one) == timeless(other)


WRONG = 'wrong = { net = "wrong", method = "net" }\n[nets.wrong]\ndata = "wine"\nblocks = -1\n'


@pytest.mark.usefixtures("fork_server")
def test_processes_give_the_record_of_one_and_a_failure_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, broken = written(tmp_path, VISION), written(tmp_path, WINE + WRONG, name="broken")
    out, lines = tmp_path / "many", Lines()
    with pytest.raises(OtadError, match=r"\Abroken: blocks: expected.*-1\Z"):
        reproduce_together([broken, path], executor=2, out=out, progress=watching(lines))
    record = RunRecord.read(out / "small.json")
    assert not (out / "broken.json").exists()
    assert timeless(record) == timeless(reproduce(path, out=tmp_path / "one", progress=True))
    assert record.jobs == 2
    assert "small: metric learned" in lines
    assert "train metric learned" in capfd.readouterr().err
    assert all(done == total for done, total in lines.values()), "every line reached its end"


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("many", [False, True])
def test_errors_of_several_experiments(many: bool, tmp_path: Path) -> None:
    broken, small = written(tmp_path, WINE + WRONG, name="broken"), written(tmp_path, WINE)
    late, no_folder = written(tmp_path, WINE, name="late"), tmp_path / "file"
    no_folder.touch()
    with LocalProcesses(2) if many else nullcontext() as executor:
        how: dict[str, Any] = {"executor": executor, "out": tmp_path}
        with pytest.raises(OtadError, match=r"\Abroken: blocks: expected.*-1\Z"):
            reproduce_together([broken, small], **how)
        with pytest.raises(OtadError, match="Not a directory"):
            reproduce_together([small], **how, work=no_folder / "work")
        how["out"] = tmp_path / "late"
        with pytest.raises(UnfinishedError, match=r"(?s)small: out of time.*late: out of time"):
            reproduce_together([small, late], **how, max_seconds=0.0)
    assert (tmp_path / "small.json").exists()
    assert not (tmp_path / "broken.json").exists()


SLOW = WINE.replace("epochs = 1", "epochs = 1, batch_size = 1").replace("blocks = 1", "blocks = 99")


@pytest.mark.usefixtures("fork_server")
def test_nobody_waits_for_the_rest_of_a_failed_experiment(tmp_path: Path) -> None:
    failing = written(tmp_path, SLOW + WRONG)
    with pytest.raises(OtadError, match=r"blocks: expected.*-1"):
        reproduce_together([failing], executor=2, out=tmp_path)
    assert not [*tmp_path.glob(".work/nets/*/weights.safetensors")]


@pytest.mark.usefixtures("fork_server")
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    path = written(tmp_path, SLOW)
    context = multiprocessing.get_context("forkserver")
    parent = context.Process(target=processes.reproduce_with_two, args=(path, tmp_path))
    parent.start()
    try:
        while not (locks := [*tmp_path.glob(".work/locks/*.lock")]):
            assert parent.is_alive()
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.join()
    with FileLock(locks[0], timeout=10):  # raises while someone trains
        pass
    assert not [*tmp_path.glob(".work/nets/*/weights.safetensors")], "it was too quick to tell"


def test_a_worker_makes_each_bank_once_for_the_tasks_of_an_experiment() -> None:
    made: list[str] = []

    class Counted:
        def __init__(self, experiment: Experiment, report: Any) -> None:
            made.append(experiment.name)

        def row(self, key: str) -> None:
            if key == "damaged":
                raise InputError("bank: expected a whole file")

    first, second = (SimpleNamespace(name=name) for name in ("first", "second"))
    tasks = [Task(first, "row", (key,), []) for key in ("a", "damaged", "b")]
    found = [run_module._work(Counted, one) for one in (*tasks, Task(second, "row", ("a",), []))]
    assert made == ["first", "second"]
    assert [one is None for one in found] == [True, False, True, True]


def test_what_experiments_share_is_one_task() -> None:
    experiments = [read_experiment(name) for name in ("cifar10", "cifar10_nn")]
    learned, _, measured = plan(experiments)
    for method, key in (("net", "vit"), ("metric", "resnet")):
        (task,) = [task for task in learned if (task.method, task.key) == (method, (key,))]
        assert task.owners == ["cifar10", "cifar10_nn"]
    rows = [task.key for task in measured if task.method == "row"]
    assert len(rows) == sum(len(one.rows) for one in experiments)
    quick, _, _ = plan([read_experiment("cifar10", quick=True), experiments[0]])
    assert len([task for task in quick if task.method == "net"]) == 2, "other settings"


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["mnist", "nothing"], {"executor": 2}, "names: .*'nothing'"),
        (["mnist", "elsewhere/mnist.toml"], {}, r"names: .*mnist"),
        (["mnist"], {"executor": 0}, r"executor: .*0"),
        (["mnist"], {"seed": -1}, "seed"),
        (["mnist"], {"device": "cuda:7"}, "device.*'cuda:7'"),
    ],
)
def test_refusals(names: list[str], options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        reproduce_together(names, out=tmp_path, **options)


@pytest.mark.usefixtures("fork_server")
def test_processes_end_with_an_interruption_and_are_replaced_when_killed(tmp_path: Path) -> None:
    def stop(part: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    def kill(part: str, done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    path = written(tmp_path, WINE)
    with pytest.raises(KeyboardInterrupt):
        reproduce(path, executor=2, out=tmp_path, progress=stop)
    assert not multiprocessing.active_children()
    killed = reproduce(path, executor=2, out=tmp_path / "killed", progress=kill)
    assert timeless(killed) == timeless(reproduce(path, out=tmp_path / "one"))
    assert not multiprocessing.active_children()


VALUES = ('name = "wine"', 'name = "diabetes"')
PUSH = 'attacks = ["push"] }\n[attacks]\npush = { name = "pgd", eps = 1.0, points = 37 }'


@pytest.mark.parametrize(
    ("added", "changes", "message", "is_trained"),
    [
        (COST.format(143), [], r"cost.banks: .*142.*143", True),
        (COST.format(9), [VALUES], "cost: .*classes, got wine", False),
        ('[speed]\nrows = ["right"]\n', [VALUES], "speed: .*classes, got wine", False),
        (SUITE, [VALUES], "evaluate: .*classes, got wine", False),
        ("", [('"otad" }', f'"otad", {PUSH}')], "points: .*36 .*37", False),
    ],
)
def test_what_cannot_be_measured_is_refused(
    added: str, changes: Any, message: str, is_trained: bool, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        reproduce(written(tmp_path, OTAD_WINE + added, *changes), out=tmp_path)
    assert (tmp_path / ".work" / "nets").exists() == is_trained


def test_probes_that_fail_say_why_and_others_are_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, probes = subprocess.run, list[str]()
    answers = [(1, "", "out of luck")]

    def answer(command: list[str], **options: Any) -> Any:
        if "otad.experiments.probe" not in command:
            return run(command, **options)
        probes.append(command[3])
        return subprocess.CompletedProcess(command, *answers[-1])

    monkeypatch.setattr(subprocess, "run", answer)
    with pytest.raises(OtadError, match="the cost failed:\nout of luck"):
        reproduce(written(tmp_path, WINE + COST.format(142)), out=tmp_path)
    found = {"milliseconds": 1.0, "load_seconds": 1.0, "resident": 1, "device_memory": None}
    answers.append((0, json.dumps(found | {"accuracy": 90.0, "seconds": 1.0}), ""))
    for name in ("old", "new"):
        speed = f'[speed]\nrows = ["{name}"]\nplaces = ["memory"]\n'
        path = written(tmp_path, OTAD_WINE + speed, ("right = {", f"{name} = {{"))
        record = reproduce(path, out=tmp_path)
        assert [one.row for one in record.speeds] == [name]
    assert len(probes) == 2, "the speed of a renamed row is known"
