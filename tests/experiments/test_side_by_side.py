"""Experiments by several processes: the same records, what is shared done once, failures told."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.small_vision import VISION, WINE

from otad.errors import InputError, OtadError
from otad.experiments import RunRecord, names, reproduce, reproduce_together
from otad.experiments import side_by_side as module
from otad.experiments.jobs import RECORD, Job, plan
from otad.experiments.kept import Deadline, UnfinishedError
from otad.experiments.tables import render

ATTACKED = """
[attacks]
push = { name = "pgd", eps = 0.1, points = 9, options = { steps = 2 } }
[rows]
exact = { net = "vit", method = "otad", metric = "learned", attacks = ["push"] }
estimated = { net = "vit", method = "otad", metric = "learned", surrogate = "imitation" }
"""


WRONG = """
wrong = { net = "wrong", method = "net" }
[nets.wrong]
data = "wine"
blocks = -1
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(WINE, encoding="utf-8")
    return path


@pytest.fixture
def vision(tmp_path: Path) -> Path:
    path = tmp_path / "vision.toml"
    path.write_text(VISION.partition("[rows]")[0] + ATTACKED, encoding="utf-8")
    return path


def timeless(record: RunRecord) -> object:
    """The figures of a record, without times and places."""
    rows = {
        key: (row.score, row.account, {name: one.score for name, one in row.attacks.items()})
        for key, row in record.rows.items()
    }
    nets = {key: net.weights for key, net in record.nets.items()}
    learned = [one.weights for one in (*record.metrics.values(), *record.surrogates.values())]
    return rows, nets, learned, record.config, record.data


def test_processes_give_the_record_of_one(vision: Path, tmp_path: Path) -> None:
    lines: dict[str, tuple[int, int]] = {}
    (record,) = reproduce_together(
        [vision],
        jobs=3,
        out=tmp_path / "many",
        progress=lambda part, done, total: lines.update({part: (done, total)}),
    )
    assert timeless(record) == timeless(reproduce(vision, out=tmp_path / "one"))
    assert record.jobs == 3
    assert RunRecord.read(tmp_path / "many" / "vision.json") == record
    assert "vision: train metric learned" in lines
    assert all(done == total for done, total in lines.values()), "every line reached its end"
    assert "by up to 3 processes at once" in render(record)
    assert "processes" not in render(replace(record, jobs=1))


def test_one_job_does_them_one_after_the_other_here(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", None)
    again = tmp_path / "again.toml"
    again.write_text(WINE, encoding="utf-8")
    records = reproduce_together([small, again], jobs=1, out=tmp_path)
    assert [record.name for record in records] == ["small", "again"]
    assert {record.jobs for record in records} == {1}
    assert timeless(records[0]) == timeless(records[1])


def test_a_failure_stops_only_what_needs_it(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(WINE + WRONG, encoding="utf-8")
    with pytest.raises(OtadError) as caught:
        reproduce_together([broken], jobs=2, out=tmp_path)
    told = str(caught.value).splitlines()
    assert told[0].startswith("broken net wrong: ")
    assert told[1:] == [
        "broken row wrong: needs broken net wrong, which failed",
        "broken record: needs broken net wrong, which failed",
    ]
    assert len([*(tmp_path / ".work" / "parts").glob("*.json")]) == 1, "the right row is there"
    assert not (tmp_path / "broken.json").exists()


def test_out_of_time_is_told(small: Path, tmp_path: Path) -> None:
    with pytest.raises(UnfinishedError) as caught:
        reproduce_together([small], jobs=2, out=tmp_path, max_seconds=0.0)
    told = str(caught.value).splitlines()
    assert told[0].startswith("small net right: out of time")
    assert told[1:] == [
        f"small {one}: needs small net right, which is unfinished"
        for one in ("row right", "record")
    ]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_experiment_does_not_stop_the_others(
    jobs: int, small: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(WINE.replace("blocks = 1", "blocks = -1"), encoding="utf-8")
    with pytest.raises(OtadError, match=r"\Abroken (net right|record): blocks: expected"):
        reproduce_together([broken, small], jobs=jobs, out=tmp_path)
    assert (tmp_path / "small.json").exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_files_in_the_way_are_told_in_a_line(jobs: int, small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OtadError) as caught:
        reproduce_together([small], jobs=jobs, out=tmp_path, work=tmp_path / "file" / "work")
    assert "Not a directory" in str(caught.value).splitlines()[0]
    assert "Traceback" not in str(caught.value)


SLOW = WINE.replace("epochs = 1", "epochs = 1, batch_size = 1").replace("blocks = 1", "blocks = 99")
TOGETHER = """
import sys
from otad.experiments import reproduce_together
if __name__ == "__main__":
    reproduce_together([sys.argv[1]], jobs=2, out=sys.argv[2])
"""


@pytest.mark.skipif(os.name != "posix", reason="elsewhere there are no locks")
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "slow.toml"
    path.write_text(SLOW, encoding="utf-8")
    parent = subprocess.Popen([sys.executable, "-c", TOGETHER, path, tmp_path])
    try:
        while not (locks := [*tmp_path.glob(".work/nets/*/lock")]):
            assert parent.poll() is None
            time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    time.sleep(3)
    with locks[0].open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while someone trains
    assert not [*tmp_path.glob(".work/nets/*/weights.safetensors")], "it was too quick to tell"


def die(*_: object) -> None:
    os._exit(7)


def test_a_process_that_dies_is_told(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_work", die)
    with pytest.raises(OtadError, match="small net right: its process ended with exit code 7"):
        reproduce_together([small], jobs=2, out=tmp_path)


def test_what_experiments_share_is_one_job() -> None:
    both = plan(["cifar10", "cifar10_nn"], quick=False)
    for kind, key in (("net", ("vit",)), ("metric", ("resnet",))):
        assert len([job for job in both if (job.kind, job.key) == (kind, key)]) == 1
    assert len([job for job in both if job.kind == RECORD]) == 2
    quick = {job.identity for job in plan(["cifar10"], quick=True) if job.kind == "net"}
    assert not quick & {job.identity for job in both}, "other settings, another net"


@pytest.mark.parametrize("name", names())
def test_every_job_comes_after_what_it_needs(name: str) -> None:
    jobs = plan([name], quick=False)
    seen: set[str] = set()
    for job in jobs:
        assert job.needs <= seen, job.label
        seen.add(job.identity)
    assert jobs[-1].kind == RECORD
    assert jobs[-1].needs == seen - {jobs[-1].identity}, "the record is the last"


def test_what_is_timed_waits_for_all_and_holds_up_all() -> None:
    quick, timed, late = (
        Job("x", "row", (name,), name, frozenset(), name == "timed")
        for name in ("quick", "timed", "late")
    )
    state = module._State({job.identity: job for job in (quick, timed)})
    assert state.next(5) is quick
    del state.waiting["quick"]
    state.running["quick"] = module._Hand(quick, None, None)  # type: ignore[arg-type]
    assert state.next(5) is None, "it would not be alone"
    state.running.clear()
    assert state.next(5) is timed
    del state.waiting["timed"]
    state.running["timed"] = module._Hand(timed, None, None)  # type: ignore[arg-type]
    state.waiting["late"] = late
    assert state.next(5) is None, "it would not be alone"


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown experiment 'nothing'"):
        reproduce_together(["mnist", "nothing"], jobs=2, out=tmp_path)
    with pytest.raises(InputError, match=r"names: expected distinct names, got .* once: mnist"):
        reproduce_together(["mnist", "elsewhere/mnist.toml"], jobs=2, out=tmp_path)
    with pytest.raises(InputError, match="jobs: expected"):
        reproduce_together(["mnist"], jobs=0, out=tmp_path)
    assert Deadline.after(None).at is None
    assert not any(tmp_path.iterdir())
