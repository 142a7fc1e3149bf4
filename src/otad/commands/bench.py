"""`otad bench`: measure, print a table, and leave a record and a plot behind."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from otad.commands.console import progress_bar

if TYPE_CHECKING:
    from otad.bench.record import BenchmarkRecord

app = typer.Typer(no_args_is_help=True, help="Benchmarks, each with a table, a record and a plot.")


class Preset(StrEnum):
    small = "small"
    full = "full"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def bench() -> None:
    """Benchmarks, each with a table, a record and a plot."""


@app.command()
def solver(
    preset: Annotated[
        Preset, typer.Option(help="full: as recorded, many minutes; small: seconds.")
    ] = Preset.full,
    device: Annotated[Device, typer.Option(help="Where our solver runs.")] = Device.cpu,
    threads: Annotated[int, typer.Option(help="CPU threads for every solver.")] = 2,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds for each solver on each size; by default the preset's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random instances.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for record and plot.", file_okay=False)] = Path(
        "results/benchmarks"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of the table.")
    ] = False,
) -> None:
    """Time the exact solver beside CVXPY + Clarabel, POT, ProxQP and HiGHS.

    All solve the same random instances, and their answers are compared. A solver that is not
    installed is reported as missing, with the command that installs it.

    Example: otad bench solver --preset small --out my-benchmarks
    """
    record = run_solver(preset, device=device, threads=threads, budget=budget, seed=seed)
    paths = save_solver(record, out, preset)
    if json:
        typer.echo(record.to_json(), nl=False)
    else:
        show_solver(record)
        show_files(paths)


def run_solver(
    preset: str,
    *,
    device: str = "cpu",
    threads: int = 2,
    budget: float | None = None,
    seed: int = 0,
) -> BenchmarkRecord:
    """Runs the benchmark under a progress bar, which goes to the standard error."""
    from otad.bench.solver import run_solver_benchmark

    with progress_bar("solver benchmark") as advance:
        return run_solver_benchmark(
            preset,
            device=device,
            threads=threads,
            budget=budget,
            seed=seed,
            progress=lambda done, total, _: advance(done, total),
        )


def save_solver(record: BenchmarkRecord, folder: Path, preset: str) -> list[Path]:
    """Record and plot; only the full preset takes the name of the recorded run."""
    from otad.bench.plots import plot_solver_benchmark

    kind = "" if preset == "full" else f"-{preset}"
    name = f"solver-{record.environment.device}{kind}"
    path = folder / f"{name}.json"
    record.write(path)
    return [path, *plot_solver_benchmark(record, folder / name)]


def show_solver(record: BenchmarkRecord) -> None:
    from otad.bench.table import solver_tables

    Console().print(solver_tables(record))


def show_files(paths: list[Path]) -> None:
    for path in paths:
        typer.echo(f"wrote {path}")
