"""`otad bench`: measure, print a table, and leave a record and a plot behind."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from otad.cli.console import progress_bar
from otad.cli.options import DataDir, seed_option
from otad.errors import InputError

if TYPE_CHECKING:
    from otad.bench.growth import GrowthData
    from otad.bench.growth_record import GrowthRecord
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
    seed: Annotated[int, seed_option("Seed of the random instances.")] = 0,
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


@app.command("global")
def whole_bank(
    net: Annotated[
        Path | None,
        typer.Option(
            help="A net written by `otad train`: its data are the bank, their test part the "
            "queries. By default synthetic pairs.",
            file_okay=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    sizes: Annotated[
        str, typer.Option(help="Bank sizes N, as far as the data go.")
    ] = "1000,2000,5000,10000,20000,60000",
    queries: Annotated[int, typer.Option(help="At most this many queries.")] = 10_000,
    dim: Annotated[int, typer.Option(help="Dimension of the synthetic pairs.")] = 784,
    pricing: Annotated[
        str, typer.Option(help="How the best points are sought: exact, or faiss.")
    ] = "exact",
    device: Annotated[Device, typer.Option(help="Where everything runs.")] = Device.cpu,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    budget: Annotated[
        float, typer.Option(help="Leave out sizes whose potential would take more seconds.")
    ] = 600.0,
    seed: Annotated[int, seed_option("Of the subsets and the synthetic pairs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for record and plot.", file_okay=False)] = Path(
        "results/benchmarks"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the record as JSON instead of the table.")
    ] = False,
) -> None:
    """Time one map through a whole bank, as the bank grows.

    For each N: seconds and sweeps for the potential of least L, then seconds, rounds, support and
    largest duality gap of the queries, and memory.

    Example: otad bench global --sizes 500,1000 --queries 200 --dim 64
    """
    from otad.bench.growth import run_growth_benchmark

    wanted = _sizes(sizes)
    given = _growth_data(net, data_dir, max(wanted), queries, dim, seed, device)
    with progress_bar("whole-bank benchmark") as advance:
        record = run_growth_benchmark(
            given,
            wanted,
            device=device,
            threads=threads,
            budget=budget,
            pricing=pricing,
            seed=seed,
            progress=lambda done, total, _: advance(done, total),
        )
    paths = save_growth(record, out)
    if json:
        typer.echo(record.to_json(), nl=False)
    else:
        show_growth(record)
        show_files(paths)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"sizes: expected whole numbers, as in 1000,2000, got {text!r}") from error


def _growth_data(
    net_dir: Path | None,
    data_dir: Path | None,
    size: int,
    queries: int,
    dim: int,
    seed: int,
    device: str,
) -> GrowthData:
    """Synthetic pairs, or the train part of a net's data in random order against its test part."""
    import torch

    from otad.bench.growth import GrowthData, synthetic_growth_data
    from otad.checks import check_count

    generator = torch.Generator().manual_seed(check_count(seed, "seed", least=0))
    check_count(queries, "queries")
    if net_dir is None:
        check_count(dim, "dim")
        return synthetic_growth_data(size, dim, queries, generator=generator)

    from otad.cli.data_choice import DataChoice
    from otad.cli.net_files import read_net

    trained = read_net(net_dir)
    about = trained.about["data"]
    dataset = DataChoice.from_json(about["choice"]).load(data_dir)
    order = torch.randperm(len(dataset.train_x), generator=generator)[:size]
    backbone = trained.net.to(device)

    def embedded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([backbone.embed(part.to(device)) for part in x.split(1000)])

    with torch.no_grad():
        inputs, asked = embedded(dataset.train_x[order]), embedded(dataset.test_x[:queries])
        features = torch.cat([backbone.transport(part)[0] for part in inputs.split(1000)])
    return GrowthData(inputs, features, asked, about["name"])


def save_growth(record: GrowthRecord, folder: Path) -> list[Path]:
    """Record and plot, named by the data and the device."""
    from otad.bench.growth_record import plot_growth

    kind = "" if record.pricing == "exact" else f"-{record.pricing}"
    name = f"global-{record.source}-{record.environment.device}{kind}"
    path = folder / f"{name}.json"
    record.write(path)
    return [path, *plot_growth(record, folder / name)]


def show_growth(record: GrowthRecord) -> None:
    from otad.bench.growth_record import growth_tables

    Console().print(growth_tables(record))


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
