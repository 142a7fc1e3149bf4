"""Every experiment that is shipped, in small."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from otad.attacks import ATTACKS, AutoAttackSuite, NgOpt, Pgd, RandomNoise
from otad.data import Dataset, load
from otad.evaluate import Evaluation
from otad.experiments import RunRecord, figures, names, probe, reproduce
from otad.experiments import study as study_module
from otad.experiments.experiment import Experiment, read_experiment
from otad.experiments.records import RowRecord
from otad.experiments.run import plan
from otad.experiments.spec import RANDOM_STEP, RowSpec


def load_few(*args: Any, **options: Any) -> Dataset:
    data = load(*args, **options)
    parts: Any = {"train_x": data.train_x[:300], "train_y": data.train_y[:300]}
    parts |= {"test_x": data.test_x[:100], "test_y": data.test_y[:100]}
    return replace(data, **parts)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What shipped experiments have in common is trained once."""
    return tmp_path_factory.mktemp("work")


# The work of another one with other settings or data.
VARIANTS = (
    "cifar10_at_l2",
    "cifar10_at_linf",
    "cifar10_at_vit_l2",
    "cifar10_at_vit_linf",
    "cifar10_cost_single",
    "cifar10_energy",
    "cifar10_metrics",
    "cifar10_pixels",
    "cifar10_plain_encoder",
    "cifar10_robust_longer",
    "cifar10_robust_moved",
    "cifar10_standard",
    "cifar10_triplets_conv",
    "fashion_prototypes",
    "global_suite_all",
    "imagenette_cost_single",
    "mnist_choices",
    "mnist_cw",
    "mnist_fgsm",
    "mnist_prototypes_10000",
    "mnist_purification",
    "synthetic_100",
    "whole_bank_small",
)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_shipped_variant_can_be_planned(name: str) -> None:
    assert any(plan([read_experiment(name, quick=True)]))


class Here:
    """Measures the speed of a row in this process, in place of one of its own."""

    @staticmethod
    def run(command: list[str], **options: Any) -> Any:
        threads = torch.get_num_threads()
        found = probe.measure(*json.loads(command[-1]))
        torch.set_num_threads(threads)
        return SimpleNamespace(returncode=0, stdout=json.dumps(found))


@pytest.mark.usefixtures("brief_reports")
@pytest.mark.parametrize("name", [name for name in names() if name not in VARIANTS])
def test_shipped_experiment_in_small(
    name: str, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, lines = read_experiment(name, quick=True), {}
    rows = experiment.rows.values()
    runs = {run for row in rows for one in row.attacks.values() for run in one.runs}
    runs |= set(experiment.evaluate.attacks) if experiment.evaluate is not None else set()
    for run in runs - {RANDOM_STEP}:
        package = ATTACKS[run].needs.package
        if package is not None and find_spec(package) is None:
            pytest.skip(f"extra 'attacks', for {run}")
    if experiment.cost is None:
        monkeypatch.setattr(study_module, "load", load_few)
    if experiment.speed is not None:
        monkeypatch.setattr(probe, "subprocess", Here)
    # These attacks and figures have tests of their own.
    monkeypatch.setattr(AutoAttackSuite, "run", lambda self, *given: Pgd(steps=3).run(*given))
    monkeypatch.setattr(NgOpt, "run", lambda self, *given: RandomNoise(draws=3).run(*given))
    monkeypatch.setattr(figures, "_save", lambda _, title, path: path.write_text(f"<svg>{title}"))
    options: Any = {"progress": lambda part, done, total: lines.update({part: (done, total)})}
    record = reproduce(name, out=tmp_path, work=work, quick=True, **options)
    assert RunRecord.read(tmp_path / f"{name}-quick.json") == record
    for table in ("rows", "nets", "metrics", "surrogates", "purifiers"):
        assert list(getattr(record, table)) == list(getattr(experiment, table))
    assert all(done == total for done, total in lines.values()), "every line reached its end"
    assert set(record.rows) <= set(record.seconds), "every part has its seconds"
    assert all(one.train_size > 0 and len(one.fingerprint) == 64 for one in record.data.values())
    for key, row in record.rows.items():
        check_row(record, row, experiment.rows[key])
    drawn = tmp_path / f"{name}-quick.svg"
    if experiment.cost is not None:
        on_cpu = [cost for cost in record.costs if cost.device == "cpu"]
        assert [cost.bank for cost in on_cpu] == list(experiment.cost.banks)
        assert {cost.device for cost in record.costs} | set(record.missing) == {"cpu", "cuda"}
        assert all(2**20 < cost.resident < 2**30 and cost.accuracy > 10 for cost in on_cpu)
        assert drawn.read_text(encoding="utf-8").endswith(" predictions")
    if experiment.curve is not None:
        assert experiment.curve.title in drawn.read_text(encoding="utf-8")
    check_suites(record, experiment, tmp_path)
    check_speeds(record, experiment)


def check_row(record: RunRecord, row: RowRecord, spec: RowSpec) -> None:
    assert row.score.low <= row.score.value <= row.score.high
    assert (row.account is not None) == (spec.method == "otad")
    if row.account is not None:
        assert (row.potential is not None) == (not spec.uses_neighbors)
        assert record.nets[spec.net].regularity is not None or row.potential is not None
        if spec.surrogate is None:
            assert row.account.residual is not None
            assert row.account.residual < 1e-6
        else:
            assert row.account.statuses["estimated"] == 1
    assert list(row.attacks) == list(spec.attacks)
    for key, found in row.attacks.items():
        asked = spec.attacks[key]
        assert found.score.n == asked.points
        assert found.score.metric == "mse" or found.score.value <= found.clean.value
        if found.distance is not None and asked.eps is not None:
            assert found.distance.most <= asked.eps
        assert found.forwards > 0 or RANDOM_STEP in asked.runs or found.clean.value == 0
    assert list(row.certified) == ([f"{eps:g}" for eps in spec.certify.eps] if spec.certify else [])
    inside = row.certified_within_bounds
    assert list(inside) == (
        list(row.certified) if spec.certify and spec.certify.within_bounds else []
    )
    assert all(score.value >= row.certified[eps].value for eps, score in inside.items())
    proved = [-score.rank for score in row.certified.values()]
    assert sorted(proved) == proved, "less is certified at a larger radius"
    assert all(value >= -row.score.rank for value in proved)


def check_suites(record: RunRecord, experiment: Experiment, out: Path) -> None:
    assert tuple(suite.row for suite in record.suites) == experiment.suites
    for suite in record.suites:
        found = Evaluation.read(out / suite.folder / "evaluation.json")
        assert "<html" in (out / suite.folder / "report.html").read_text(encoding="utf-8")
        for eps in found.eps if suite.row in suite.certified else ():
            certified = suite.certified[suite.row][f"{eps:g}"]
            assert certified == found.certified_accuracy(eps)
            assert certified.value <= found.worst_case(eps).value


def check_speeds(record: RunRecord, experiment: Experiment) -> None:
    spec, accuracy = experiment.speed, dict[str | None, float]()
    nets = [key for key, row in experiment.rows.items() if row.method == "net"]
    expected = [
        (key, place)
        for key in (spec.rows if spec else ())
        for place in ((None,) if key in nets else spec.places)
    ]
    assert [(one.row, one.place) for one in record.speeds] == expected
    for one in record.speeds:
        assert 0 < (one.milliseconds or 0) < math.inf
        assert 0 < (one.deviation or 0) < math.inf
        assert (one.bank > 0) == bool(one.steps) == (one.place is not None)
        assert accuracy.setdefault(one.row, one.accuracy) == one.accuracy, "wherever the bank is"
