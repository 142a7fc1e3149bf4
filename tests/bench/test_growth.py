"""The whole-bank benchmark on tiny banks: record, table, plot, command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from otad.bench.growth import GrowthData, run_growth_benchmark, synthetic_growth_data
from otad.bench.growth_record import GrowthRecord, growth_tables, plot_growth
from otad.cip.whole_bank.potential import least_bank_smoothness
from otad.cli.main import main
from otad.errors import InputError


@pytest.fixture(scope="module")
def data() -> GrowthData:
    return synthetic_growth_data(150, 12, 20, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def record(data: GrowthData) -> GrowthRecord:
    return run_growth_benchmark(data, (120, 60, 500, 900), threads=1, seed=4)


def text_of(record: GrowthRecord) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(growth_tables(record))
    return capture.get()


def test_every_size_is_measured_once_and_no_larger_than_the_data(
    data: GrowthData, record: GrowthRecord
) -> None:
    assert [row.size for row in record.sizes] == [60, 120, 150]
    for row in record.sizes:
        assert row.queries == 20
        assert row.unsolved == 0
        assert 0 <= row.gap < 1e-9
        assert 1 <= row.support <= row.most_support <= row.size
        assert 1 <= row.rounds <= row.most_rounds
        assert row.violation < 1e-9
        assert min(row.potential_seconds, row.query_seconds, row.making_seconds) > 0
    expected = least_bank_smoothness(data.inputs[:60], data.features[:60])
    assert record.sizes[0].smoothness == pytest.approx(expected.smoothness)
    assert record.sizes[0].sweeps >= expected.sweeps


def test_the_record_survives_its_file(record: GrowthRecord, tmp_path: Path) -> None:
    record.write(tmp_path / "record.json")
    assert GrowthRecord.read(tmp_path / "record.json") == record
    with pytest.raises(InputError, match="expected a global benchmark record of format 1"):
        GrowthRecord.from_json(json.dumps({"format": 7}))


def test_sizes_beyond_the_budget_are_left_out_and_named(data: GrowthData) -> None:
    record = run_growth_benchmark(data, (50, 150), threads=1, budget=1e-9)
    assert [row.size for row in record.sizes] == [50]
    assert list(record.left_out) == ["150"]
    assert "N = 150: expected to take" in text_of(record)


def test_the_table_and_the_plot_show_every_size(record: GrowthRecord, tmp_path: Path) -> None:
    text = text_of(record)
    for row in record.sizes:
        assert f"{row.size} " in text
        assert f"{row.smoothness:.4g}" in text
    (path,) = plot_growth(record, tmp_path / "growth")
    picture = path.read_text(encoding="utf-8")
    assert path.suffix == ".svg"
    assert "<svg" in picture


def test_the_command_leaves_record_and_plot(tmp_path: Path) -> None:
    options = ["--sizes", "40,80", "--queries", "10", "--dim", "6", "--threads", "1", "--json"]
    result = CliRunner().invoke(main, ["bench", "global", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = GrowthRecord.from_json(result.stdout)
    assert [row.size for row in record.sizes] == [40, 80]
    assert record.dim == 6
    assert GrowthRecord.read(tmp_path / "global-synthetic-cpu.json") == record
    assert (tmp_path / "global-synthetic-cpu.svg").is_file()


def test_the_command_measures_the_data_of_a_net(tmp_path: Path) -> None:
    net = str(tmp_path / "net")
    trained = CliRunner().invoke(main, ["train", "digits", "--epochs", "1", "--out", net, "--json"])
    assert trained.exit_code == 0, trained.output
    options = ["--net", net, "--sizes", "100", "--queries", "30", "--threads", "1"]
    result = CliRunner().invoke(main, ["bench", "global", *options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = GrowthRecord.read(tmp_path / "global-digits-cpu.json")
    assert (record.source, record.dim, record.sizes[0].queries) == ("digits", 64, 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (1,)}, "sizes: expected an integer of at least 2"),
        ({"budget": math.nan}, "budget: expected a positive number"),
        ({"threads": 0}, "threads: expected an integer of at least 1"),
        ({"pricing": "guess"}, "pricing: expected one of"),
    ],
)
def test_refuses_bad_settings(data: GrowthData, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_growth_benchmark(data, **({"sizes": (40,), "threads": 1} | change))
