"""The whole benchmark on a tiny grid: record, table, plot, and what is not installed."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console

import otad
from otad.bench import peers
from otad.bench.bank import BankCase, run_bank_case
from otad.bench.peers import NOT_INSTALLED, PEERS, QUESTIONS
from otad.bench.plots import plot_solver_benchmark
from otad.bench.record import BenchmarkRecord
from otad.bench.solver import PRESETS, Cell, Grid, run_solver_benchmark
from otad.bench.table import format_ratio, format_seconds, solver_tables
from otad.errors import InputError
from otad.io.environment import Environment, commit_of, cpu_name

BANK = BankCase(20, 6, 3, 8, dtypes=("float16",), chunks=(None, 4))
TINY = Grid(
    batches=(1, 3),
    neighbors=(2,),
    dims=(4,),
    base=(3, 2, 4),
    largest=100,
    budget=0.001,
    repeats=2,
    bank=BANK,
)
ONE_CELL = replace(TINY, batches=(3,))


@pytest.fixture(scope="module")
def record() -> BenchmarkRecord:
    return run_solver_benchmark(TINY, threads=1, seed=3)


def text_of(record: BenchmarkRecord) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(solver_tables(record))
    return capture.get()


def test_every_installed_peer_is_measured_on_every_cell(record: BenchmarkRecord) -> None:
    cells = [(3, 2, 4), (1, 2, 4)]
    expected = [
        (cell, peer.question, peer.name)
        for cell in cells
        for question in QUESTIONS
        for peer in PEERS
        if peer.question == question and peer.installed
    ]
    assert [(row.cell, row.question, row.peer) for row in record.measurements] == expected
    for row in record.measurements:
        assert row.seconds > 0
        assert row.failed == row.raised == 0
        assert row.difference is not None
        assert row.difference < 1e-3
        assert 1 <= row.queries <= row.batch


def test_record_survives_the_file(record: BenchmarkRecord, tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    record.write(path)
    assert BenchmarkRecord.read(path) == record
    assert list(path.parent.iterdir()) == [path]
    data = json.loads(path.read_text())
    assert data["seed"] == 3
    assert data["config"]["base"] == [3, 2, 4]
    where = data["environment"]
    assert where["threads"] == 1
    assert where["python"] == platform.python_version()
    assert where["versions"]["torch"] == metadata.version("torch")
    assert where["versions"]["scipy"] == metadata.version("scipy")
    assert where["cpu"]


def test_record_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="expected a benchmark record of format 1, got None"):
        BenchmarkRecord.from_json("{}")


def test_table_names_every_peer(record: BenchmarkRecord) -> None:
    text = text_of(record)
    for peer in PEERS:
        assert peer.name in text
    assert max(map(len, text.splitlines())) <= 80


def test_missing_peer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    find = peers.find_spec
    absent = ("proxsuite", "cvxpy")
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name in absent else find(name))
    record = run_solver_benchmark(ONE_CELL)
    named = ("ProxQP", "CVXPY + Clarabel", "POT, both bounds")
    assert record.missing == dict.fromkeys(named, NOT_INSTALLED)
    assert not {row.peer for row in record.measurements} & set(named)
    text = text_of(record)
    for name in named:
        assert f"{name}: not installed (pip install 'otad[reference]')" in text


def test_plot_is_written_twice(record: BenchmarkRecord, tmp_path: Path) -> None:
    paths = plot_solver_benchmark(record, tmp_path / "new" / "solver-cpu")
    assert [path.name for path in paths] == ["solver-cpu.png", "solver-cpu.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in paths[1].read_text()


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    run_solver_benchmark(ONE_CELL, threads=before + 1)
    assert torch.get_num_threads() == before


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    run_solver_benchmark(ONE_CELL, progress=lambda done, total, what: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_grid_lowers_the_batch_where_the_dimension_is_large() -> None:
    cells = PRESETS["full"].cells()
    assert cells[0] == Cell(1000, 10, 784, ("B", "K", "d"))
    assert Cell(200, 10, 24_576, ("d",)) in cells
    assert len(cells) == len(set(cells)) == 4 + 5 + 6 - 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "preset: expected one of small, full, got 'huge'"),
        ({"device": "tpu"}, "device: expected one of cpu, cuda, got 'tpu'"),
        ({"threads": 0}, "threads: expected an integer of at least 1, got 0"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"budget": 0.0}, "budget: expected a positive number of seconds, got 0.0"),
        ({"budget": float("nan")}, "budget: expected a positive number of seconds, got nan"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        run_solver_benchmark(**changes)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="expected a CUDA device for 'cuda', got none"):
        run_solver_benchmark(ONE_CELL, device="cuda")


def test_bank_case_is_set_against_its_floor(
    record: BenchmarkRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otad.bench.bank._COPY_BYTES", {"cpu": 2**20})
    steps: list[str] = []
    timings = run_bank_case(
        BANK, device=torch.device("cpu"), seed=0, repeats=2, progress=steps.append
    )
    assert [timing.chunk for timing in timings] == [None, 4]
    assert len(steps) == 2
    for timing in timings:
        assert timing.gathered_bytes == 6 * 3 * 2 * 8 * 2  # B K pairs of d float16 numbers
        assert timing.floor_seconds * timing.bandwidth == pytest.approx(timing.gathered_bytes)
        assert timing.ratio == pytest.approx(timing.seconds / timing.floor_seconds)
        assert timing.answer_bytes == 6 * 8 * 4
        assert timing.residual < 1e-5
    with_bank = replace(record, bank=tuple(timings))
    assert BenchmarkRecord.from_json(with_bank.to_json()) == with_bank
    assert "6 queries, K = 3, d = 8, gathered from a bank of 20" in text_of(with_bank)


def test_commit_is_none_outside_a_repository_and_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(Path(otad.__file__).parent) is None
    assert cpu_name()
    assert Environment.now(torch.device("cpu"), 1).commit is None


def test_commit_is_none_in_an_untracked_folder_of_a_repository(tmp_path: Path) -> None:
    try:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    inside = tmp_path / "environment"
    inside.mkdir()
    (inside / "module.py").write_text("")
    assert commit_of(inside) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.0125, "12.5 ms"), (68.2e-6, "68.2 µs"), (5e-9, "5 ns")],
)
def test_seconds_are_read_easily(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(2181.4, "2,181x"), (2.04, "2x"), (0.033, "0.033x")])
def test_ratios_are_read_easily(ratio: float, text: str) -> None:
    assert format_ratio(ratio) == text
