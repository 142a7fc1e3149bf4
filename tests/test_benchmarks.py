"""The benchmark scripts on tiny sizes: what is timed, compared, recorded and drawn."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import audit
import bank_size
import foreign_inputs
import ivf
import numpy as np
import peers
import pytest
import solver
import timing
import torch
import whole_bank
from instances import random_bank, random_instance
from odd_models import attention_ratios
from peers import MAP, MISSING, PEERS, QUESTIONS, Found, Peer
from torch import Tensor
from typer.testing import CliRunner

from otad.cip import ExactCip, Status
from otad.cip.whole_bank.potential import least_bank_smoothness
from otad.cli.main import main
from otad.data import Dataset

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
BANKS = solver.BankCase(20, 6, 3, 8), solver.BankCase(20, 6, 2, 8, "float32")
TINY = solver.Grid((1, 3), (2,), (4,), (3, 2, 4), largest=100, budget=0.001, repeats=2, banks=BANKS)
EXACT = {"ours, float32": 1e-5, "ours, float64": 1e-12, "ProxQP": 1e-6}
CONIC = 1e-3  # the square root of the tolerance on the objective


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.question}: {peer.name}")
def test_every_solver_finds_our_images(peer: Peer) -> None:
    if not peer.installed:
        pytest.skip(f"needs {', '.join(peer.modules)} of the extra 'reference'")
    instance = random_instance(4, 5, 7, seed=0, strong_convexity=QUESTIONS[peer.question])
    found, own_seconds = peer.prepare(instance, CPU)(slice(1, 3))
    assert found.shape == (2, 7)
    off = np.abs(np.asarray(found) - instance.solution.image[1:3].numpy()).max()
    assert off < EXACT.get(peer.name, CONIC)
    assert peer.name in EXACT or own_seconds > 0


@pytest.mark.parametrize("strong_convexity", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 10, 16), (20, 30, 16), (10, 10, 200)])
def test_instances_are_feasible_and_several_neighbors_have_weight(shape, strong_convexity) -> None:
    solution = random_instance(*shape, seed=0, strong_convexity=strong_convexity).solution
    assert (solution.status == Status.SOLVED).all()
    assert (solution.multipliers > 1e-6).sum(1).double().mean() > 2


@pytest.mark.parametrize("size", [50, 10])
def test_a_bank_is_half_precision_and_solvable(size: int, generator: torch.Generator) -> None:
    bank = random_bank(size, 200, 10, 64, torch.bfloat16, generator)
    assert bank.inputs.dtype == bank.features.dtype == torch.bfloat16
    assert all(len(set(row)) == 10 for row in bank.indices.tolist())
    assert set(bank.indices.flatten().tolist()) == set(range(size))  # all of the bank is in use
    assert bank.residual(ExactCip()(bank)).max() < 1e-5


class Fake:
    """Takes `seconds` per query (per call, if batched) of a fake clock and is off by `error`."""

    now, order = 0.0, list[float]()
    ours = np.arange(20.0).reshape(10, 2)  # ten queries, the largest entry is 19

    def __init__(self, seconds: float, *, batched: bool = False, error: float = 0.0) -> None:
        self.seconds, self.batched, self.error = seconds, batched, error
        self.calls: list[list[int]] = []

    def __call__(self, rows: slice) -> Found:
        numbers = list(range(10)[rows])
        self.calls.append(numbers)
        Fake.order.append(self.error)
        Fake.now += self.seconds * (1 if self.batched else len(numbers))
        return self.ours[rows] + self.error, 0.5 * len(numbers)


def measured(monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> list[dict[str, object]]:
    monkeypatch.setattr(time, "perf_counter", lambda: Fake.now)
    pairs = [(Peer("fake", MAP, lambda *_: None, batched=fake.batched), fake) for fake in fakes]
    found = timing.measure(pairs, Fake.ours, budget=6.0, repeats=3, device=CPU)
    return [one.to_dict() for one in found]


@pytest.mark.parametrize(
    ("fake", "calls", "seconds"),
    [
        (Fake(1.0), [[0], [0], [0, 1], [2, 3], [4, 5]], 1.0),  # two queries in each repeat
        (Fake(100.0), [[0], [0], [1]], 100.0),  # a slow loop still gets two queries
        (Fake(0.0625), [[0], [0]] + [list(range(10))] * 9, 0.0625),  # all queries, several times
        (Fake(1.0, batched=True), [list(range(10))] * 8, 0.1),  # always the whole batch
    ],
)
def test_the_budget_decides_what_is_timed(fake, calls, seconds, monkeypatch) -> None:
    (timed,) = measured(monkeypatch, fake)
    assert fake.calls == calls
    assert timed["seconds"] == pytest.approx(seconds)
    assert timed["own_seconds"] == pytest.approx(0.5)
    assert timed["queries"] == len({row for call in calls[1:] for row in call})


def test_repeats_alternate_and_a_wrong_result_shows(monkeypatch) -> None:
    Fake.order.clear()
    fakes = Fake(1.0), Fake(1.0, error=1.9), Fake(1.0, error=np.nan)
    timings = measured(monkeypatch, *fakes)
    assert list(map(str, Fake.order[6:])) == ["0.0", "1.9", "nan"] * 3
    assert [one["failed"] for one in timings] == [0, 0, 6]
    assert [one["difference"] for one in timings[:2]] == pytest.approx([0, 0.1])
    assert timings[2]["difference"] is None


def test_the_small_preset_is_recorded_beside_another_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(solver.PRESETS, "small", TINY)
    threads, loaded = torch.get_num_threads(), sys.modules["otad.cip"]
    options = ["--preset", "small", "--seed", "3", "--threads", "1", "--out", str(tmp_path)]
    solver.main([*options, "--beside", str(ROOT / "src")])
    assert torch.get_num_threads() == threads
    assert sys.modules["otad.cip"] is loaded
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [f"solver-cpu-small.{kind}" for kind in ("json", "png", "svg")]
    record = json.loads((tmp_path / written[0]).read_text())
    assert (record["format"], record["seed"], record["config"]["base"]) == (1, 3, [3, 2, 4])
    assert record["environment"]["threads"] == 1
    timed = [peer.name for peer in PEERS if peer.installed]
    timed += 2 * ["beside, float32", "beside, float64"]
    rows = record["measurements"]
    assert Counter(row["peer"] for row in rows) == Counter(2 * timed)
    for row in rows:
        assert row["seconds"] > 0
        assert row["failed"] == row["raised"] == 0
        assert row["difference"] < CONIC
    assert {row["difference"] for row in rows if row["peer"] == "beside, float64"} == {0.0}
    shown = capsys.readouterr().out
    assert all(name in shown for name in timed)
    assert max(map(len, shown.partition("wrote")[0].splitlines())) <= 80


def test_missing_solvers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    find, absent = peers.find_spec, ("proxsuite", "cvxpy")
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name in absent else find(name))
    record = solver.run(replace(TINY, batches=(3,)))
    named = ("ProxQP", "CVXPY + Clarabel", "POT, both bounds")
    assert record["missing"] == dict.fromkeys(named, MISSING)
    assert {f"{name}: {MISSING}" for name in named} <= set(map(str, solver.tables(record)))


def test_banks_are_compared_with_their_floor() -> None:
    rows = list(solver._bank_cases(BANKS, CPU, seed=0, repeats=2, copy_bytes=2**20))
    pairs = [6 * 3 * 2 * 8 * 2, 6 * 2 * 2 * 8 * 4]  # the bytes of B K pairs of d numbers
    assert [row["gathered_bytes"] for row in rows] == pairs
    for row in rows:
        assert row["floor_seconds"] * row["bandwidth"] == pytest.approx(row["gathered_bytes"])
        assert row["answer_bytes"] == 6 * 8 * 4
        assert row["residual"] < 1e-5
        assert min(row["multipliers_seconds"], row["multipliers_in_torch_seconds"]) > 0
        assert solver._bank_cells(row)["d"] == "8"


def test_the_batch_shrinks_where_the_dimension_is_large() -> None:
    sizes = solver.PRESETS["full"].sizes()
    assert next(iter(sizes.items())) == ((1000, 10, 784), ("B", "K", "d"))
    assert sizes[200, 10, 24_576] == ("d",)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_recorded_results_can_be_shown(device: str) -> None:
    folder = ROOT / "results" / "benchmarks"
    record = json.loads((folder / f"solver-{device}.json").read_text())
    assert len(list(solver.tables(record))) >= 3 + len(record["bank"][:1])
    assert len(solver.draw(record).axes) == 3
    record = json.loads((folder / f"global-mnist-{device}.json").read_text())
    assert [whole_bank.cells(row)["N"] for row in record["sizes"]][-1] == "60,000"
    assert len(whole_bank.draw(record).axes) == 1


def test_the_global_map_is_measured_at_every_size_once() -> None:
    bank = whole_bank.synthetic_bank(150, 12, 20, seed=0)
    record = whole_bank.run(bank, (120, 60, 500, 900), threads=1)
    assert [row["size"] for row in record["sizes"]] == [60, 120, 150]
    for row in record["sizes"]:
        assert (row["queries"], row["unsolved"]) == (20, 0)
        assert 0 <= max(row["gap"], row["violation"]) < 1e-9
        assert 1 <= row["support"] <= row["most_support"] <= row["size"]
        assert min(row["potential_seconds"], row["query_seconds"]) > 0
    least = least_bank_smoothness(bank[0][:60], bank[1][:60])
    assert record["sizes"][0]["smoothness"] == pytest.approx(least.smoothness)
    skipped = whole_bank.run(bank, (50, 150), threads=1, budget=1e-9)
    assert [row["size"] for row in skipped["sizes"]] == [50]
    assert list(skipped["left_out"]) == ["150"]


@pytest.mark.parametrize(("source", "dim"), [("synthetic", 6), ("digits", 64)])
def test_the_global_script_records(source: str, dim: int, tmp_path: Path) -> None:
    options = ["--sizes", "40,80", "--queries", "10", "--dim", "6", "--threads", "1"]
    if source == "digits":
        net = str(tmp_path / "net")
        trained = CliRunner().invoke(main, ["train", "digits", "--epochs", "1", "--out", net])
        assert trained.exit_code == 0, trained.output
        options += ["--net", net]
    whole_bank.main([*options, "--out", str(tmp_path)])
    record = json.loads((tmp_path / f"global-{source}-cpu.json").read_text())
    assert (record["source"], record["dim"]) == (source, dim)
    assert [row["size"] for row in record["sizes"]] == [40, 80]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--preset", "huge"), ("--threads", "0"), ("--seed", "-1"), ("--budget", str(math.nan))],
)
def test_bad_options_are_refused(option, value, capsys) -> None:
    with pytest.raises(SystemExit):
        solver.main([option, value])
    assert value in capsys.readouterr().err


def test_the_audit_catches_radii_that_are_too_large(tmp_path, monkeypatch, capsys) -> None:
    """Of 10 models, with radii 3 times as large; intervals and attention are left as they are."""
    true = audit.certify

    def planted(*given, **options):
        found = true(*given, **options)
        return replace(found, radius=3 * found.radius)

    monkeypatch.setattr(audit, "certify", planted)
    options = ["certificates", "--preset", "tiny", "--out", str(tmp_path)]
    assert audit.main(options) == 1
    record = json.loads((tmp_path / "audit-certificates-tiny.json").read_text())
    wrong = Counter(one["rule"] for one in record["found"])
    assert {"hull", "cell", "lipschitz"} == set(wrong)
    assert record["violations"] == wrong.total() < record["certified"]
    assert record["inputs"] > 3000
    tables = [record[f"by_{key}"].values() for key in ("rule", "bank", "setting")]
    assert {sum(one["inputs"] for one in table) for table in tables} == {record["inputs"]}
    again = record["found"][-1]
    repeated = audit.run_case(again["case"], record["seed"], record["queries_per_model"])
    assert {name: again[name] for name in ("row", "rule", "radius", "nearest")}.items() <= next(
        row for row in repeated["rows"] if row["row"] == again["row"]
    ).items()
    monkeypatch.setattr(audit, "certify", true)
    assert audit.main([*options, "--only", str(again["case"])]) == 0
    assert "violations: 0" in capsys.readouterr().out


def test_the_bound_of_attention_is_audited() -> None:
    bound, ratios = attention_ratios("tiny", torch.Generator().manual_seed(0), 4)
    assert 0.05 * bound < ratios.max() < bound
    assert ratios[-12:].mean() > ratios[:12].mean()  # power iteration finds what stretches more


def test_the_audit_attacks_beside_the_suite(tmp_path: Path) -> None:
    code = audit.main(["suite", "--preset", "tiny", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "audit-suite-tiny.json").read_text())
    left = {name: record[f"left_by_{name}"] for name in ("suite", "own", "both")}
    assert code == (left["suite"] > left["own"])
    assert left["suite"] - left["both"] == len(record["only_own"])
    assert left["own"] - left["both"] == len(record["only_suite"])
    assert left["both"] <= left["own"] < record["config"]["points"]
    assert record["own_parts"]["pull, then climb"] > 0
    assert record["found"] == []


def test_foreign_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Areas under the ROC curve by counting pairs; noise far from all data is always refused."""

    def drawn(name: str, **_: object) -> Dataset:
        shape = (3, 8, 8) if name in ("cifar10", "imagenette") else (1, 8, 8)
        generator = torch.Generator().manual_seed(len(name))
        y = torch.arange(120) % 3
        x = 0.1 * torch.rand(120, *shape, generator=generator)
        x[torch.arange(120), :, 2 * y] += 0.3 if name in foreign_inputs.STUDIES else 0.5
        about = "classification", "drawn", ("a", "b", "c"), (0.0, 1.0)
        return Dataset(name, x, y, x[:60] + 0.05, y[:60], *about)

    monkeypatch.setattr(foreign_inputs, "load", drawn)
    kept: list[tuple[list[float], ...]] = []
    areas = foreign_inputs.areas

    def counted(inside: dict[str, Tensor], outside: dict[str, Tensor]) -> dict[str, float]:
        kept.append(tuple(one["nearest"].tolist() for one in (inside, outside)))
        return areas(inside, outside)

    monkeypatch.setattr(foreign_inputs, "areas", counted)
    out = tmp_path / "found" / "record.json"
    with pytest.warns(UserWarning, match="defense: a Lipschitz map"):
        foreign_inputs.main(["--points", "60", "--inputs", "24", "--out", str(out)])
    record = json.loads(out.read_text())
    found = [value for row in record["rows"] for value in (row["scrambled"], row["auroc"])]
    # scrambled inputs once for each space, then one area for each foreign set
    orders = [0, 1, 2, 3, 4, 5, 4, 6, 7, 8, 7, 9]
    for value, number in zip(found, orders, strict=True):
        near, far = kept[number]
        pairs = [(b > a) + (b == a) / 2 for a in near for b in far]
        assert value == pytest.approx(sum(pairs) / len(pairs))
    assert [row["foreign"] for row in record["rows"]][2:4] == ["noise", "imagenette"]
    assert record["rows"][2]["refused_foreign"] == 1.0


def test_the_distance_was_chosen_by_scrambled_inputs() -> None:
    record = json.loads((ROOT / "results/benchmarks/foreign_inputs.json").read_text())
    # what the choice of the nearest point rests on
    assert all(row["scrambled"] > row["scrambled_kth"] for row in record["rows"])


def test_bank_sizes_and_cells_are_recorded(tmp_path: Path, monkeypatch, capsys) -> None:
    """Tiny ones. What is proved is right, and more points never take fewer bytes."""
    pytest.importorskip("faiss", reason="needs the extra 'index' (faiss-cpu)")
    monkeypatch.setattr(bank_size, "MEANS", (2,))
    monkeypatch.setattr(bank_size, "MARGINS", (0.5, 1.0))
    out = ["--out", str(tmp_path)]
    bank_size.main(["--sizes", "1", "--epochs", "1", "--points", "64", *out])
    record = json.loads((tmp_path / "bank_size.json").read_text())
    assert [row["kind"] for row in record["rows"]] == [*bank_size.KINDS, "random"]
    assert all(0 <= row["certified"] <= row["accuracy"] <= 1 for row in record["rows"])
    assert len(record["trials"]) == 3
    assert all(rate > 0 for rate in record["bytes_per_second"].values())
    stored = [row["stored_bytes"] for row in record["estimates"]]
    assert stored[:2] == [10**8 * (2 * 784 * 4 + 8), 10**9 * (2 * 784 * 4 + 8)]
    monkeypatch.delenv("OTAD_DATA", raising=False)
    monkeypatch.setattr(ivf, "PROBES", (1, None))
    monkeypatch.setattr(ivf, "KEY_DIMS", (2,))
    ivf.main(["--data-dir", str(tmp_path), "--points", "120", "--queries", "8", *out])
    record = json.loads((tmp_path / "ivf.json").read_text())
    assert (record["data"], record["points"]) == ("digits", 120)
    assert [row["proved"] for row in record["rows"] if row["n_probe"] == "all"] == [1.0, 1.0]
    assert not any(row["wrong_but_proved"] for row in record["rows"])
