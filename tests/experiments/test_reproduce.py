"""Whole runs, in small: every shipped experiment, and what a kill leaves behind."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from otad.errors import InputError, OtadError
from otad.evaluate import Evaluation
from otad.evaluate.suite import ATTACKS
from otad.experiments import RunRecord, names, reproduce
from otad.experiments import cost as cost_module
from otad.experiments import run as run_module
from otad.experiments import speed as speed_module
from otad.experiments import study as study_module
from otad.experiments import suites as suites_module
from otad.experiments.config import RowSpec, read_experiment
from otad.experiments.records import RowRecord
from otad.experiments.shifts import SMAPE, E
from otad.experiments.specs import EvaluateSpec, SpeedSpec
from otad.experiments.tables import render

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
d = { net = "one", method = "majority_knn", at_least = { accuracy = 101 } }
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", names())
def test_shipped_experiment_in_small(name: str, tmp_path: Path) -> None:
    asked = read_experiment(name, quick=True)
    runs = {run for row in asked.rows.values() for one in row.attacks.values() for run in one.runs}
    runs |= set(asked.evaluate.attacks) if asked.evaluate is not None else set()
    for package in {ATTACKS[run].needs.package for run in runs & set(ATTACKS)} - {None}:
        pytest.importorskip(package, reason="extra 'attacks'")
    lines: dict[str, tuple[int, int]] = {}
    record = reproduce(
        name,
        out=tmp_path,
        quick=True,
        progress=lambda part, done, total: lines.update({part: (done, total)}),
    )
    assert RunRecord.read(tmp_path / f"{name}-quick.json") == record
    experiment = read_experiment(name, quick=True)
    assert list(record.rows) == list(experiment.rows)
    assert list(record.nets) == list(experiment.nets)
    assert list(record.metrics) == list(experiment.metrics)
    assert list(record.surrogates) == list(experiment.surrogates)
    assert all(done == total for done, total in lines.values()), "every line reached its end"
    assert set(record.rows) <= set(record.seconds), "every part has its seconds"
    for data in record.data.values():
        assert data.train_size > 0
        assert len(data.fingerprint) == 64
    for key, row in record.rows.items():
        assert row.score.low <= row.score.value <= row.score.high
        assert (row.account is not None) == (row.method == "otad")
        if row.account is not None:
            assert sum(row.account.statuses.values()) == pytest.approx(1.0)
            spec = experiment.rows[key]
            assert (row.potential is not None) == (spec.scope == "global")
            if row.potential is None:
                assert record.nets[row.net].regularity is not None
            if spec.surrogate is None:
                assert row.account.residual is not None
                assert row.account.residual < 1e-6
            else:
                assert row.account.statuses["estimated"] == 1
        check_attacks(record, row, experiment.rows[key])
        check_certified(row, experiment.rows[key])
    if experiment.cost is not None:
        check_costs(record, experiment.cost.banks, tmp_path / f"{name}-quick.svg")
    if experiment.curve is not None:
        drawn = (tmp_path / f"{name}-quick.svg").read_text(encoding="utf-8")
        assert experiment.curve.title in drawn
    if experiment.evaluate is not None:
        check_suite(record, experiment.evaluate, tmp_path / f"{name}-quick")
        assert [one.row for one in record.beside] == list(experiment.evaluate.beside)
        for one in record.beside:
            assert (
                Evaluation.read(tmp_path / one.folder / "evaluation.json").eps
                == experiment.evaluate.eps
            )
    if experiment.speed is not None:
        check_speeds(record, experiment.speed)
    assert render(record).count("(quick run, no result)") == 1


def check_speeds(record: RunRecord, spec: SpeedSpec) -> None:
    lines = [(one.row, one.place) for one in record.speeds]
    expected = [(row, place) for row in spec.rows for place in spec.places]
    nets = [row for row in spec.rows if record.rows[row].method == "net"]
    expected = [line for line in expected if line[0] not in nets]
    assert lines == [*((row, None) for row in nets), *expected]
    accuracy = {}
    for one in record.speeds:
        assert 0 < one.milliseconds < math.inf
        assert (one.bank > 0) == (one.place is not None)
        assert all(step >= 0 for step in one.steps.values())
        assert sum(one.steps.values()) < 100 * one.milliseconds
        assert accuracy.setdefault(one.row, one.accuracy) == one.accuracy, "wherever the bank is"
        if spec.steps and one.place is not None:
            network = "surrogate" in record.rows[one.row].settings
            on_disk = {"rows"} if one.place == "disk" else set()
            exact = {"search", "products", "feasibility", "QP", "image"} | on_disk
            assert set(one.steps) == ({"search", "network"} if network else exact)


def check_attacks(record: RunRecord, row: RowRecord, spec: RowSpec) -> None:
    assert list(row.attacks) == list(spec.attacks)
    for key, found in row.attacks.items():
        assert found.score.n == found.clean.n == spec.attacks[key].points
        assert found.eps == spec.attacks[key].eps
        if found.score.metric == "accuracy":
            assert found.score.value <= found.clean.value
        else:
            assert set(found.metrics) == {E, SMAPE}
        if found.distance is not None and found.eps is not None:
            assert found.distance.most <= found.eps
        assert found.forwards > 0 or "random_step" in found.settings["attacks"]


def check_certified(row: RowRecord, spec: RowSpec) -> None:
    assert list(row.certified) == ([f"{eps:g}" for eps in spec.certify.eps] if spec.certify else [])
    proved = [score.value for score in row.certified.values()]
    if row.score.metric == "accuracy":
        assert sorted(proved, reverse=True) == proved, "less is proved at a larger radius"
        assert all(value <= row.score.value for value in proved)
    else:
        assert sorted(proved) == proved, "a larger error cannot be excluded at a larger radius"
        assert all(value >= row.score.value for value in proved)


def check_suite(record: RunRecord, spec: EvaluateSpec, folder: Path) -> None:
    assert record.suite is not None
    evaluation = Evaluation.read(folder / "evaluation.json")
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    assert evaluation.eps == tuple(line.eps for line in record.suite.lines) == spec.eps
    for line in record.suite.lines:
        assert line.worst == evaluation.worst_case(line.eps)
        if spec.row in spec.certify:
            assert line.certified[spec.row] == evaluation.certified_accuracy(line.eps)
            assert line.certified[spec.row].value <= line.worst.value
    assert [cost.attack for cost in record.suite.costs] == list(spec.attacks)
    asked = {*(("worst",) if spec.at_most else ()), *spec.at_least}
    assert {key for line in record.suite.lines for key in line.goals} == asked


def check_costs(record: RunRecord, banks: tuple[int, ...], plot: Path) -> None:
    on_cpu = [cost for cost in record.costs if cost.device == "cpu"]
    assert [cost.bank for cost in on_cpu] == list(banks)
    assert {cost.device for cost in record.costs} | set(record.missing) == {"cpu", "cuda"}
    for cost in on_cpu:
        assert 0 < cost.seconds < math.inf
        assert 2**20 < cost.resident < 2**30
        assert cost.accuracy > 10
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_record_holds_all_it_depends_on(small: Path, tmp_path: Path) -> None:
    record = reproduce(small, out=tmp_path, seed=4)
    content = json.loads((tmp_path / "small.json").read_text(encoding="utf-8"))
    assert content["seed"] == 4
    assert content["config"]["train"] == {"epochs": 3}
    assert content["environment"]["versions"]["torch"]
    assert content["environment"]["device"] == "cpu"
    assert content["data"]["wine"]["train_size"] == 142
    assert content["nets"]["one"]["train"]["seed"] == 4
    assert len(content["code"]) == 64
    assert record.rows["d"].goals == {"at least 101": False}
    assert record.rows["a"].goals == {}
    assert record.rows["b"].lipschitz is not None
    chosen = max(record.nets["two"].candidates, key=lambda candidate: candidate.score.rank)
    assert record.nets["two"].train["energy_weight"] == chosen.value
    assert record.nets["two"].train["epochs"] == 3
    assert {candidate.score.n for candidate in record.nets["two"].candidates} == {43}


class KilledError(Exception):
    pass


def without_seconds(record: RunRecord) -> dict[str, RowRecord]:
    rows = {}
    for key, row in record.rows.items():
        attacks = {name: replace(one, seconds=0.0) for name, one in row.attacks.items()}
        rows[key] = replace(row, seconds=0.0, attacks=attacks)
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "small.toml").write_text(SMALL, encoding="utf-8")
    return reproduce(folder / "small.toml", out=folder)


@pytest.mark.parametrize("moment", [1, 9, 17])
def test_a_killed_run_goes_on_to_the_same_record(
    small: Path, tmp_path: Path, whole: RunRecord, moment: int
) -> None:
    calls = 0

    def kill(part: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls > moment:
            raise KilledError

    with pytest.raises(KilledError):
        reproduce(small, out=tmp_path, progress=kill)
    assert not (tmp_path / "small.json").exists()
    again = reproduce(small, out=tmp_path)
    assert without_seconds(again) == without_seconds(whole)
    weights = [{key: net.weights for key, net in run.nets.items()} for run in (again, whole)]
    assert weights[0] == weights[1]


def test_finished_parts_are_taken_over(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reproduce(small, out=tmp_path)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(study_module, "evaluate_row", never)
    monkeypatch.setattr(study_module, "attack_row", never)
    monkeypatch.setattr(study_module, "measure_regularity", never)
    assert reproduce(small, out=tmp_path).rows == first.rows
    with pytest.raises(AssertionError, match="evaluated again"):
        reproduce(small, out=tmp_path, seed=1)
    monkeypatch.setattr(study_module, "code_fingerprint", lambda: "other source")
    with pytest.raises(AssertionError, match="evaluated again"):
        reproduce(small, out=tmp_path)


def test_experiments_share_their_nets(small: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    reproduce(small, out=tmp_path / "out", work=work)
    nets = sorted((work / "nets").iterdir())
    other = tmp_path / "other.toml"
    other.write_text(
        SMALL.replace('a = { net = "one", method = "net", attacks = ["push"] }', ""),
        encoding="utf-8",
    )
    reproduce(other, out=tmp_path / "out", work=work)
    assert sorted((work / "nets").iterdir()) == nets
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "other.json",
        "small.json",
    ]


def test_the_speed_of_a_row_is_known_by_its_present_name(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = {"milliseconds": 1.0, "load_seconds": 1.0, "resident": 1, "device_memory": None}
    probes: list[str] = []

    def probe(module: str, *args: object, **options: object) -> dict[str, Any]:
        probes.append(module)
        return cost | {"accuracy": 90.0}

    monkeypatch.setattr(speed_module, "run_probe", probe)
    text = SMALL.replace("c = {", "old = {").replace('row = "c"', 'row = "old"')
    text += '[speed]\nrows = ["old"]\nplaces = ["memory"]\n'
    for name in ("old", "new"):
        small.write_text(text.replace("old", name), encoding="utf-8")
        record = reproduce(small, out=tmp_path)
        assert [one.row for one in record.speeds] == [name]
        assert "| a query |" in render(record)
    assert len(probes) == 1


SUITE = """
[evaluate]
row = "b"
eps = [0.1]
headline = 0.1
points = 9
flags = false
attacks = { noise = {} }
"""


class _OneAtATime:
    """Calls a function slowly, and refuses to be called meanwhile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls, self.busy = function, 0, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert not self.busy, "two at once"
        self.busy, self.calls = True, self.calls + 1
        time.sleep(0.3)
        found = self.function(*args, **options)
        self.busy = False
        return found


def test_two_who_run_the_same_experiment_at_once_take_turns(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_text(SMALL + SUITE, encoding="utf-8")
    watched = _OneAtATime(suites_module.evaluate), _OneAtATime(run_module._write)
    monkeypatch.setattr(suites_module, "evaluate", watched[0])
    monkeypatch.setattr(run_module, "_write", watched[1])
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: reproduce(small, out=tmp_path / "out"), range(2))
    assert [each.calls for each in watched] == [2, 2]
    assert without_seconds(one) == without_seconds(other)


def test_progress_draws_a_line_for_each_part(
    small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reproduce(small, out=tmp_path, progress=True)
    drawn = capfd.readouterr()
    assert drawn.out == ""
    for part in ("load wine", "train one", "bank of one", "regularity of two"):
        assert part in drawn.err


def test_refusals(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown experiment"):
        reproduce("nothing", out=tmp_path)
    with pytest.raises(InputError, match="seed"):
        reproduce(small, out=tmp_path, seed=-1)
    with pytest.raises(InputError, match="'cuda:7' without CUDA"):
        reproduce(small, out=tmp_path, device="cuda:7")
    text = SMALL.replace("epochs = 3", "epochs = 3\nspeed = 9", 1)
    small.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"settings of TrainConfig.*speed"):
        reproduce(small, out=tmp_path)
    cost = '[cost]\nnet = "one"\nbanks = [143]\nqueries = 1\n'
    small.write_text(SMALL.replace("[rows]", cost + "[rows]"), encoding="utf-8")
    with pytest.raises(InputError, match="at most the 142 points"):
        reproduce(small, out=tmp_path)
    small.write_text(SMALL.replace("points = 9", "points = 37"), encoding="utf-8")
    with pytest.raises(InputError, match="points: expected at most the 36 test points, got 37"):
        reproduce(small, out=tmp_path / "other")
    assert not (tmp_path / "other" / ".work" / "nets").exists(), "refused before any training"


@pytest.mark.parametrize(
    "table",
    [
        '[cost]\nnet = "one"\nbanks = [9]\nqueries = 1\n',
        '[speed]\nrows = ["b"]\n',
        '[evaluate]\nrow = "b"\neps = [0.1]\nheadline = 0.1\npoints = 9\n',
    ],
)
def test_what_needs_classes_is_refused_for_values(small: Path, tmp_path: Path, table: str) -> None:
    text = SMALL.replace('name = "wine"', 'name = "diabetes"', 1)
    text = text.replace("[rows]", table + "[rows]")
    small.write_text(text, encoding="utf-8")
    name = table.partition("]")[0].strip("[")
    with pytest.raises(InputError, match=f"{name}: expected data of classes, got wine, a regr"):
        reproduce(small, out=tmp_path)
    assert not (tmp_path / ".work" / "nets").exists(), "refused before any training"


def test_a_failing_probe_says_why(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "otad.experiments.probe"]
        return subprocess.CompletedProcess(command, 1, "", "out of luck")

    cost = '[cost]\nnet = "one"\nbanks = [142]\nqueries = 1\ndevices = ["cpu"]\n'
    small.write_text(SMALL.replace("[rows]", cost + "[rows]"), encoding="utf-8")
    monkeypatch.setattr(cost_module.subprocess, "run", fail)
    monkeypatch.setattr(run_module.Environment, "now", lambda *where: None)
    with pytest.raises(OtadError, match="the cost failed:\nout of luck"):
        reproduce(small, out=tmp_path)
