"""Several processes, of a pool or of a local Ray cluster, give the records of one, whoever is
killed; and they share the memory of a model."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import factories
import numpy as np
import processes
import pytest
import torch
from evaluate.small import Deadly, Plane, Walk, Wander, timeless, two_sides
from typer.testing import CliRunner

import otad
from otad.cli.main import main
from otad.cluster import RayExecutor, cluster_search
from otad.errors import InputError, OtadError
from otad.evaluate import Evaluation, flags, runner, undefended
from otad.evaluate.certificate_check import certificate_holds
from otad.io.mapped_rows import JoinedRows, in_file
from otad.io.sharing import Sharing, pack, unpack
from otad.model.bank import FeatureBank
from otad.model.bank_shards import shard_name
from otad.nets import fc_resnet
from otad.search.neighbors import TorchSearch
from otad.workers import Workers, working

CHECKS = [flags.gradient_share, flags.batch_independence, certificate_holds]
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def pool(fork_server: None) -> Iterator[Executor]:
    """What a user may bring: it does not recover from a kill."""
    with ProcessPoolExecutor(2, CONTEXT) as made:
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[Executor]:
    """A cluster of this machine with two workers."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            with RayExecutor() as made:
                yield made
            assert ray.is_initialized(), "it was not connected here"
        finally:
            ray.shutdown()


@pytest.fixture(params=["pool", "cluster"])
def executor(request: pytest.FixtureRequest) -> Executor:
    made: Executor = request.getfixturevalue(request.param)
    return made


def assess_defense(**options: Any) -> Evaluation:
    """Attacks, certificates and flags of a model with a bank, and its network alone."""
    model, x, y = two_sides(examples=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "CHECKS", dict.fromkeys(CHECKS, lambda model: True))
        patch.setattr(undefended, "APGD", {"steps": 2})
        attacks = [Walk(direction=(1.0, 0.0)), Wander()]
        how = {"attacks": attacks, "skip_proved": ["wander"], "batch_size": 5} | options
        return otad.evaluate(model, x, y, otad.L2(0.3), **how)


@pytest.fixture(scope="module")
def record() -> Evaluation:
    """Of one process."""
    return assess_defense()


def test_records_do_not_depend_on_the_workers(executor: Executor, record: Evaluation) -> None:
    lines: list[tuple[int, int]] = []
    watch = lambda label, done, total, worst: lines.append((done, total))  # noqa: E731
    many = assess_defense(executor=executor, progress=watch)
    assert timeless(many) == timeless(record)
    assert None not in (many.undefended, many.certificate)
    assert len(many.flags) == len(CHECKS)
    assert [done for done, _ in lines] == sorted(done for done, _ in lines)
    assert lines[-1][0] == lines[-1][1]


def test_all_checks_can_be_sent_to_processes() -> None:
    """By the plain pickler, which is that of an executor given as a number."""
    for one in flags.CHECKS:
        assert unpack(pack(one)) is one


def test_predictions_and_certificates_do_not_depend_on_the_workers(executor: Executor) -> None:
    model, x, _ = two_sides()
    how: dict[str, Any] = {"batch_size": 7, "executor": executor}
    assert torch.equal(otad.predict(model, x, **how), otad.predict(model, x, batch_size=7))
    one, many = otad.certify(model, x, batch_size=7), otad.certify(model, x, **how)
    assert torch.equal(one.radius, many.radius)
    assert torch.equal(one.prediction, many.prediction)
    assert (one.rules, one.assumptions) == (many.rules, many.assumptions)
    values, x, _ = two_sides(task="regression")
    one, many = (
        otad.certify_values(values, x, 0.1, batch_size=7),
        otad.certify_values(values, x, 0.1, **how),
    )
    assert torch.equal(one.low, many.low)
    assert torch.equal(one.high, many.high)
    assert one.assumptions == many.assumptions


@pytest.mark.parametrize("kind", ["processes", "cluster"])
def test_a_killed_worker_is_replaced(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    executor = 2 if kind == "processes" else request.getfixturevalue(kind)
    mark = tmp_path / "mark"
    attacks = [*processes.ATTACKS, Deadly(mark=str(mark))]
    killed = processes.assess(attacks=attacks, executor=executor)
    assert mark.exists()
    assert timeless(killed) == timeless(processes.assess(attacks=attacks))


def test_kills_that_are_no_accident(tmp_path: Path) -> None:
    others = {*multiprocessing.active_children()}
    deadly = Deadly(mark=str(tmp_path / "never"), spared=False)
    folder, attacks = tmp_path / "folder", [*processes.ATTACKS, deadly]
    reasons = {
        2: "3 times in a row.*smaller batches.*below `if __name__",
        None: "give a new ProcessPoolExecutor",
    }
    for given, reason in reasons.items():
        with ProcessPoolExecutor(2, CONTEXT) as own:
            how = {"attacks": attacks, "executor": given or own, "eps": None, "folder": folder}
            with pytest.raises(OtadError, match=f"killed.*{reason}.*saved"):
                processes.assess(**how)
    saved = sorted(folder.glob("parts/*"))
    processes.assess(folder=folder, eps=None)
    assert saved == sorted(folder.glob("parts/*")), "what was finished was saved"
    assert {*multiprocessing.active_children()} == others


def test_a_killed_caller_resumes_with_other_workers(tmp_path: Path, pool: Executor) -> None:
    folder, shared = tmp_path / "evaluation", tmp_path / "shared"
    shared.mkdir()
    caller = CONTEXT.Process(target=processes.assess_until, args=(5, folder, shared))
    caller.start()
    caller.join(300)
    assert caller.exitcode == -9
    begun = {path: path.stat().st_mtime_ns for path in folder.glob("parts/*")}
    assert not (folder / "evaluation.json").exists()
    resumed = processes.assess(folder=folder, executor=pool)
    assert timeless(resumed) == timeless(processes.assess())
    assert 5 <= len(begun) < len([*folder.glob("parts/*")])
    assert begun == {path: path.stat().st_mtime_ns for path in begun}, "they were used"
    until = time.monotonic() + 300
    while [*shared.iterdir()] and time.monotonic() < until:
        time.sleep(0.1)
    assert not [*shared.iterdir()], "its processes ended, and removed what it had shared"


def test_workers_hold_no_copy_of_a_model(executor: Executor, tmp_path: Path) -> None:
    model = processes.Large()
    with working(executor) as workers:
        found = workers.all(processes.read_all, (model,), [(2, tmp_path)] * 2, lambda done: None)
    size = model.bank.nbytes
    assert len({process for *_, process in found}) == 2
    for total, own, _ in found:
        assert total == len(model.bank)
        assert own < size / 4
    assert model.counter.tolist() == [0, 0, 0]


def test_a_mapped_bank_is_named_and_not_copied(tmp_path: Path) -> None:
    model = factories.model()
    model.save(tmp_path)
    mapped = otad.load(tmp_path, resident=False)
    sizes: list[int] = []

    def share(arrays: Any) -> Any:
        sizes.extend(array.nbytes for array in arrays)
        return lambda: arrays

    shared = Sharing(share)(mapped)
    again = shared.open()
    assert shared.open() is again
    assert in_file(again.bank_inputs) is not None
    weights = sum(one.nbytes for one in (*mapped.parameters(), *mapped.buffers()))
    assert sum(sizes) <= weights + mapped.bank_labels.nbytes
    x = factories.queries(model)
    assert torch.equal(again(x), model(x))
    model.bank.save(tmp_path / "shards", shards=3)
    bank = FeatureBank.load(tmp_path / "shards")
    sharded = Sharing(share)(mapped.replace(bank=bank)).open()
    assert isinstance(sharded.bank_inputs, JoinedRows)
    assert torch.equal(sharded(x), model(x))
    assert max(sizes) < model.bank.inputs.nbytes, "no part of a bank was copied"
    (bank,) = tmp_path.glob("bank-*")
    os.utime(bank, ns=(1, 1))
    with pytest.raises(OtadError, match=f"unchanged, at .*{bank.name}, got one that was changed"):
        unpack(shared.structure, shared.openers)
    bank.unlink()
    with pytest.raises(OtadError, match=f"{bank.name}.*No such file"):
        unpack(shared.structure, shared.openers)


def test_a_slice_is_sent_without_the_rest() -> None:
    whole = torch.rand(10_000)
    content = pack(whole[5:8])
    assert len(content) < 1000
    assert torch.equal(unpack(content), whole[5:8])
    net = fc_resnet((3,), 2)
    twin = unpack(pack([net, net.head.weight]))[0]
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert isinstance(other, torch.nn.Parameter) is one.requires_grad


def test_warnings_and_errors_of_workers_reach_the_caller(executor: Executor) -> None:
    workers = Workers(executor)
    with pytest.warns(UserWarning, match="seven is odd"):
        assert [*workers.run(processes.complain, ("seven",), [("",)])] == [(0, None)]
    for what, kind, reason in (
        ("error", InputError, "value: expected another, got seven"),
        ("strange error", OtadError, "1 and 2"),
    ):
        with pytest.warns(UserWarning, match="odd"), pytest.raises(kind, match=reason) as caught:
            [*workers.run(processes.complain, ("seven",), [(what,)] * 9)]
        assert "in complain" in caught.value.__notes__[0]
    workers.close()


def test_refusals(pool: Executor) -> None:
    plane, x = Plane().eval(), torch.rand(4, 3)
    plane.note = lambda: None
    with pytest.raises(InputError, match=r"num_gpus: .*-1"):
        RayExecutor(num_gpus=-1)
    for given, reason in (
        (ThreadPoolExecutor(1), "expected processes, got threads"),
        (0, "executor: .*0"),
        (2000, "executor: .*2000"),
        (pool, "can be pickled.*lambda"),
        ("two", "executor: .*'two'"),
    ):
        with pytest.raises(OtadError, match=reason):
            otad.predict(plane, x, executor=given)


def test_commands_give_the_same_files(tmp_path: Path, cluster: Executor) -> None:
    model, x, y = two_sides()
    model.save(tmp_path / "model")
    np.savez(tmp_path / "x.npz", x=x.numpy(), y=y.numpy())

    def written(command: str, out: str, *options: str) -> str:
        given = [str(tmp_path / name) for name in ("model", "x.npz")]
        done = CliRunner().invoke(
            main, [command, *given, "--batch-size", "9", "--out", str(tmp_path / out), *options]
        )
        assert done.exit_code == 0, done.output
        return (tmp_path / out).read_text()

    for command in ("predict", "certify"):
        one = written(command, f"{command}-1.csv")
        assert written(command, f"{command}-2.csv", "--jobs", "2") == one
        assert written(command, f"{command}-3.csv", "--cluster", "auto") == one
    model_dir, x_file = str(tmp_path / "model"), str(tmp_path / "x.npz")
    given = ["predict", model_dir, x_file, "--out", str(tmp_path / "o.csv"), "--cluster", "auto"]
    assert "--jobs: expected" in CliRunner().invoke(main, [*given, "--jobs", "2"]).output


def test_shards_on_a_cluster(cluster: Executor, tmp_path: Path) -> None:
    """The same bits as the whole bank, also after a worker was killed; a lost file is an error."""
    model, (x, _) = factories.exact("fc"), factories.images(6, seed=5)
    model.save(tmp_path, shards=2)
    (folder,) = tmp_path.glob("bank-*")
    queries, expected, proved = model.query_keys(x), model.trace(x), otad.certify(model, x)
    search, whole = cluster_search(folder), TorchSearch(model.bank_points)
    kill = partial(pytest.importorskip("ray").kill, search.shards[1].worker, no_restart=False)
    for again in (True, False):
        for count in (1, 7, len(whole) - 1):  # the last is more than a shard has
            found, one = search(queries, count), whole(queries, count)
            assert torch.equal(found.indices, one.indices)
            assert torch.equal(found.distances, one.distances)
            assert bool(found.proved.all())
        if again:
            kill()
    model.use_search(search)
    assert torch.equal(model.trace(x).outputs, expected.outputs)
    assert torch.equal(otad.certify(model, x).radius, proved.radius)
    (folder / shard_name(2, 2)).unlink()
    kill()  # the next worker does not find the file
    with pytest.raises(OtadError, match="cannot search a shard"):
        search(queries, 1)
