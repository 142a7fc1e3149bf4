"""The command line: exit codes, what goes where, and the files left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from otad.bench import solver
from otad.bench.record import BenchmarkRecord
from otad.cli.main import main

TINY = replace(
    solver.PRESETS["small"],
    batches=(2,),
    neighbors=(2,),
    dims=(3,),
    base=(2, 2, 3),
    budget=0.001,
    repeats=1,
)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """A terminal in an empty folder, where the small preset is tiny."""
    monkeypatch.setitem(solver.PRESETS, "small", TINY)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_version(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"otad": "1.2.3"}.__getitem__)
    result = cli.invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "otad 1.2.3\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("demo", "bench")),
        (["bench"], ("solver",)),
        (["bench", "solver"], ("--preset", "--json", "Example: otad bench solver")),
        (["demo"], ("--out", "Example: otad demo")),
    ],
)
def test_help_teaches(cli: CliRunner, arguments: list[str], expected: tuple[str, ...]) -> None:
    result = cli.invoke(main, [*arguments, "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for text in expected:
        assert text in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "train digits --out net",
        "defend net --out model",
        "imitate model --out other",
        "attack model test --eps 1",
        "certify model test",
        "evaluate model test --eps 1",
        "reproduce mnist",
        "bench solver",
        "bench global",
    ],
)
def test_every_seed_is_one_that_generators_take(cli: CliRunner, command: str) -> None:
    for seed, bound in ((-1, "at least 0"), (2**64, f"at most {2**64 - 1}")):
        result = cli.invoke(main, [*command.split(), "--seed", str(seed)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"otad: seed: expected an integer of {bound}, got {seed}\n"


def test_an_experiment_wants_a_device_that_computes(cli: CliRunner) -> None:
    result = cli.invoke(main, ["reproduce", "mnist", "--device", "meta"])
    assert result.exit_code == 2
    assert result.stderr.startswith("otad: device: expected one that is present, got 'meta'")


def test_commands_are_listed_in_the_order_of_use(cli: CliRunner) -> None:
    shown = cli.invoke(main, ["--help"], env={"COLUMNS": "100"}).stdout
    listed = [line.strip(" │").split()[0] for line in shown.splitlines() if line.startswith("│ ")]
    expected = "demo train defend imitate predict explain attack certify evaluate reproduce bench"
    assert [word for word in listed if not word.startswith("-")] == expected.split()


@pytest.mark.parametrize("command", ["attack", "certify", "evaluate"])
def test_help_shows_an_example_to_type(cli: CliRunner, command: str) -> None:
    shown = cli.invoke(main, [command, "--help"], env={"COLUMNS": "100"}).stdout
    assert f"Example: otad {command} digits-model test" in shown
    assert "--json" in shown


def test_bench_prints_a_table_and_leaves_record_and_plot(cli: CliRunner) -> None:
    result = cli.invoke(main, ["bench", "solver", "--preset", "small", "--seed", "5"])
    assert result.exit_code == 0
    assert "ours, float32" in result.stdout
    folder = Path("results/benchmarks")
    names = {"solver-cpu-small.json", "solver-cpu-small.png", "solver-cpu-small.svg"}
    assert {path.name for path in folder.iterdir()} == names
    assert f"wrote {folder / 'solver-cpu-small.json'}" in result.stdout
    assert BenchmarkRecord.read(folder / "solver-cpu-small.json").seed == 5


def test_full_preset_takes_the_name_of_the_recorded_run(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(solver.PRESETS, "full", TINY)
    result = cli.invoke(main, ["bench", "solver", "--out", "here"])
    assert result.exit_code == 0
    assert Path("here/solver-cpu.json").is_file()


def test_json_is_all_that_is_printed(cli: CliRunner) -> None:
    arguments = ["bench", "solver", "--preset", "small", "--json", "--threads", "1", "--out", "x"]
    result = cli.invoke(main, arguments)
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["environment"]["threads"] == 1
    assert Path("x/solver-cpu-small.json").read_text() == result.stdout


def test_library_error_is_one_line_and_exit_code_2(cli: CliRunner) -> None:
    result = cli.invoke(main, ["bench", "solver", "--threads", "0"])
    assert result.exit_code == 2
    assert result.stderr == "otad: threads: expected an integer of at least 1, got 0\n"
    assert result.stdout == ""
    assert not list(Path.cwd().iterdir())


def test_other_errors_keep_their_traceback(cli: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(solver, "run_solver_benchmark", fail)
    result = cli.invoke(main, ["bench", "solver"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_wrong_option_is_exit_code_2(cli: CliRunner) -> None:
    result = cli.invoke(main, ["bench", "solver", "--preset", "huge"])
    assert result.exit_code == 2
    assert "--preset" in result.stderr


def test_commands_load_what_they_run_only_when_they_run() -> None:
    program = (
        "import sys, otad.cli.main; print(*(m for m in sys.modules if m.startswith('otad.bench')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
