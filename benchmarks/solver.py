"""Times the exact solver beside CVXPY + Clarabel, POT and ProxQP.

All of them solve the same random instances, their results are compared, and the repeats of all
solvers are interleaved. On a GPU, queries with neighbors from a large bank are timed too, and
compared with the time that it takes to read the neighbors once. With --beside, the solver of
another checkout of this project takes part:

    python benchmarks/solver.py --preset small --out my-benchmarks --beside ../other/src
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import output
import torch
from instances import SMOOTHNESS, random_bank, random_instance
from matplotlib.figure import Figure
from output import Record
from peers import MAP, MISSING, OURS_32, OURS_64, PEERS, QUESTIONS, STRONG_MAP, peers_beside
from rich.table import Table
from timing import limited_threads, measure, timed

from otad.checks import assuming
from otad.cip import BankProblem, CipSolution, ExactCip
from otad.cip.local.solve_torch import DualSolution, solve_torch


@dataclass(frozen=True)
class BankCase:
    """A bank of N pairs in one precision, and B queries with K neighbors in R^d."""

    size: int
    batch: int
    neighbors: int
    dim: int
    dtype: str = "float16"


@dataclass(frozen=True)
class Grid:
    """Sizes (B,K,d) around one base size, of which B, K and d vary one at a time.

    `largest` bounds the number of values in the anchors, B K d. If d would exceed it, B is reduced.
    The `banks` run on CUDA devices only.
    """

    batches: tuple[int, ...]
    neighbors: tuple[int, ...]
    dims: tuple[int, ...]
    base: tuple[int, int, int]
    largest: int
    budget: float
    repeats: int
    banks: tuple[BankCase, ...]

    def sizes(self) -> dict[tuple[int, int, int], tuple[str, ...]]:
        """Return every (B,K,d) once, the base first, with the axes ("B", "K", "d") it is on."""
        batch, neighbors, dim = self.base
        lines = [("B", (size, neighbors, dim)) for size in self.batches]
        lines += [("K", (batch, count, dim)) for count in self.neighbors]
        for width in self.dims:
            fitting = max(1, min(batch, self.largest // (neighbors * width)))
            lines.append(("d", (fitting, neighbors, width)))
        sweeps: dict[tuple[int, int, int], tuple[str, ...]] = {self.base: ()}
        for axis, shape in lines:
            sweeps[shape] = (*sweeps.get(shape, ()), axis)
        return sweeps


PRESETS = {
    "small": Grid(
        batches=(1, 30, 1_000),
        neighbors=(5, 10, 20),
        dims=(16, 64, 256),
        base=(1_000, 10, 64),
        largest=10**7,
        budget=0.1,
        repeats=3,
        banks=(BankCase(2_000, 1_000, 10, 1_024),),
    ),
    "full": Grid(
        batches=(1, 10, 100, 1_000),
        neighbors=(5, 10, 15, 20, 30),
        dims=(16, 64, 256, 784, 3_072, 24_576),
        base=(1_000, 10, 784),
        largest=200 * 10 * 24_576,
        budget=10.0,
        repeats=5,
        banks=(
            BankCase(50_000, 10_000, 10, 24_576),
            BankCase(50_000, 10_000, 10, 24_576, "bfloat16"),
            BankCase(50_000, 100, 10, 24_576),
            BankCase(50_000, 1, 10, 24_576),
            BankCase(50_000, 10_000, 10, 784, "float32"),
            BankCase(50_000, 10_000, 20, 784, "float32"),
            BankCase(50_000, 10_000, 50, 784, "float32"),
        ),
    ),
}


def run(
    grid: Grid,
    *,
    device: str = "cpu",
    threads: int = 2,
    budget: float | None = None,
    seed: int = 0,
    beside: Path | None = None,
) -> Record:
    """Measure all installed solvers on every size and, on a GPU, queries to banks.

    `budget` is the time in seconds for each solver on each size, by default the grid's. The solvers
    of other projects always run on the CPU.
    """
    target, budget = torch.device(device), grid.budget if budget is None else budget
    where, start = output.environment(target, threads), time.perf_counter()
    config = asdict(grid) | {"budget": budget}
    peers = [peer for peer in PEERS if peer.installed]
    if beside is not None:
        peers += peers_beside(beside)
        config["beside"] = str(beside)
    measurements: list[Record] = []
    for shape, sweeps in output.steps(grid.sizes().items(), "solver benchmark"):
        for question, strong_convexity in QUESTIONS.items():
            asked = [peer for peer in peers if peer.question == question]
            instance = random_instance(*shape, seed=seed, strong_convexity=strong_convexity)
            with limited_threads(threads):
                contenders = [(peer, peer.prepare(instance, target)) for peer in asked]
                ours = np.asarray(instance.solution.image)
                how = {"budget": budget, "repeats": grid.repeats, "device": target}
                timings = measure(contenders, ours, **how)
            for peer, timing in zip(asked, timings, strict=True):
                row = {"question": question, "peer": peer.name}
                row |= dict(zip(("batch", "neighbors", "dim"), shape, strict=True))
                row |= {"sweeps": sweeps, "strong_convexity": strong_convexity}
                row |= timing.to_dict()
                row["raised"] = int((instance.solution.status != 0).sum())
                measurements.append(row)
    banks = grid.banks if device == "cuda" else ()
    bank = list(_bank_cases(banks, target, seed, grid.repeats))
    return {
        "benchmark": "solver",
        "config": config,
        "seed": seed,
        "environment": where,
        "seconds": time.perf_counter() - start,
        "missing": {peer.name: MISSING for peer in PEERS if not peer.installed},
        "measurements": measurements,
        "bank": bank,
    }


def _bank_cases(
    cases: tuple[BankCase, ...],
    device: torch.device,
    seed: int,
    repeats: int,
    copy_bytes: int = 2**32,
) -> Iterator[Record]:
    """Measure the time and memory from bank indices to z', checks of the input included.

    No solver can be faster than reading the neighbors once. So the time is compared with this
    floor, the bytes of the gathered pairs divided by the bandwidth of a copy on the same device.
    """
    if not cases:
        return
    block = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    bandwidth = 2 * copy_bytes / statistics.median(_repeated(block.clone, repeats, device))
    del block
    for case in cases:
        source = torch.Generator(device).manual_seed(seed)
        shape = (case.size, case.batch, case.neighbors, case.dim)
        bank = random_bank(*shape, getattr(torch, case.dtype), source)

        def answer(bank: BankProblem = bank) -> CipSolution:
            parts = bank.query, bank.inputs, bank.features, bank.indices
            return ExactCip()(BankProblem(*parts, SMOOTHNESS))

        seconds, extra = _repeated(answer, repeats, device), None
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        solution = answer()
        if device.type == "cuda":
            extra = torch.cuda.max_memory_allocated(device) - before
        gathered = bank.indices.numel() * 2 * case.dim * bank.inputs.element_size()
        yield asdict(case) | {
            "seconds": statistics.median(seconds),
            "repeat_seconds": seconds,
            "captured_seconds": _captured_seconds(answer, repeats, device),
            **_multiplier_seconds(bank, repeats, device),
            "bandwidth": bandwidth,
            "gathered_bytes": gathered,
            "floor_seconds": gathered / bandwidth,
            "extra_bytes": extra,
            "answer_bytes": solution.image.numel() * solution.image.element_size(),
            "residual": float(bank.residual(solution).max()),
            "raised": int((solution.status != 0).sum()),
        }


def _captured_seconds(
    answer: Callable[[], CipSolution], repeats: int, device: torch.device
) -> float | None:
    """Return the time of the same work as one CUDA graph, as `otad.predict` answers batches of up
    to 1,024 rows.

    It includes the one number that says whether everything assumed on the way holds."""
    if device.type != "cuda":
        return None
    answer()  # compiles kernels
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph), assuming() as conditions:
        answer()
        proved = torch.stack([one.all() for one in conditions]).all()

    def replay() -> None:
        graph.replay()
        if not bool(proved):
            raise RuntimeError("expected rows that the kernel solves, got others")

    return statistics.median(_repeated(replay, repeats, device))


def _multiplier_seconds(bank: BankProblem, repeats: int, device: torch.device) -> Record:
    """Return the time from inner products to multipliers, as the solver does it and in torch.

    On a GPU the solver has a kernel for it, so this shows whether that kernel pays."""
    solver, curvature = ExactCip(), (bank.smoothness, bank.strong_convexity)
    products, how = solver._products(bank), (solver.relaxation, solver.potential, solver.mode)

    def in_torch() -> DualSolution:
        return solve_torch(products.gram(), *curvature, *how, sensitive=False)

    ways = {"multipliers": partial(solver._dual, bank, products), "multipliers_in_torch": in_torch}
    times = {name: _repeated(way, repeats, device) for name, way in ways.items()}
    return {f"{name}_seconds": statistics.median(found) for name, found in times.items()}


def _repeated(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of every run after a first run, which is not counted."""
    work()
    return [timed(work, device)[1] for _ in range(repeats)]


NOTES = """\
time     The median time per query. Our solver finds the potentials (eq. 2) as
         well and checks its input; other solvers use our potentials. POT
         solves two conic problems per query, for a lower and an upper bound.
         Ours takes B queries at once, others one by one: only with B = 1 do
         all of them do the same.
own      The time that the solver reports, without the modeling around it.
timed    The number of different queries that were timed.
vs f32   How many times faster our solver is in float32; vs f64: in float64.
graph    The same as one CUDA graph, as `otad.predict` answers up to 1,024 rows.
differs  The largest deviation from our float64, relative to our largest entry."""


def tables(record: Record) -> Iterator[Table | str]:
    """Yield a table for each question, the banks, and the solvers that are missing."""
    for question in (MAP, STRONG_MAP):
        rows = [row for row in record["measurements"] if row["question"] == question]
        yield output.table(f"z' by eq. (3): {question}", [_cells(row, rows) for row in rows])
    if record["bank"]:
        one = record["config"].get("bank", {})  # the sizes of all rows in older records
        cells = [_bank_cells(one | row) for row in record["bank"]]
        yield output.table("Queries with neighbors from a bank of N", cells)
    yield from (f"{name}: {reason}" for name, reason in record["missing"].items())
    yield NOTES


def _shape(row: Record) -> tuple[int, int, int]:
    return row["batch"], row["neighbors"], row["dim"]


def _cells(row: Record, rows: list[Record]) -> dict[str, str]:
    ours = {one["peer"]: one["seconds"] for one in rows if _shape(one) == _shape(row)}
    times = [row["seconds"] / ours[name] for name in (OURS_32, OURS_64)]
    own, gap = row["own_seconds"], row["difference"]
    failed = f" ({row['failed']} failed)" if row["failed"] else ""
    return {
        **{name: f"{size:,}" for name, size in zip("BKd", _shape(row), strict=True)},
        "solver": f" {row['peer']}",
        "time": output.format_seconds(row["seconds"]),
        "own": "" if own is None else output.format_seconds(own),
        "timed": f"{row['queries']:,}",
        **{f"vs f{n}": f"{x:,.3g}" for n, x in zip((32, 64), times, strict=True)},
        "differs": ("" if gap is None else f"{gap:.0e}") + failed,
    }


def _bank_cells(row: Record) -> dict[str, str]:
    extra, graph = row["extra_bytes"], row.get("captured_seconds")
    return {
        **{name: f"{size:,}" for name, size in zip("BKd", _shape(row), strict=True)},
        "N": f"{row['size']:,}",
        "bank": row["dtype"],
        "total": output.format_seconds(row["seconds"]),
        "graph": output.format_seconds(graph) if graph else "",
        "floor": output.format_seconds(row["floor_seconds"]),
        "ratio": f"{row['seconds'] / row['floor_seconds']:.2f}",
        "copy": f"{row['bandwidth'] / 1e12:.2f} TB/s",
        "extra memory": "" if extra is None else f"{extra / 2**30:.2f} GiB",
        "of it the result": f"{row['answer_bytes'] / 2**30:.2f} GiB",
        "residual": f"{row['residual']:.0e}",
    }


AXES = {"B": "batch", "K": "neighbors", "d": "dim"}
STYLES = {  # a wide line below, a narrow one on top of it
    (MAP, OURS_64): {"color": "#8cc3ee", "lw": 5.0},
    (MAP, OURS_32): {"color": "#0b5fa5", "lw": 2.0},
    (MAP, "ProxQP"): {"color": "#2a9d6f", "marker": "s"},
    (MAP, "CVXPY + Clarabel"): {"color": "#c8372d", "marker": "D"},
    (STRONG_MAP, "POT, both bounds"): {"color": "#e08a1e", "marker": "^"},
}


def draw(record: Record) -> Figure:
    """Draw the time per query against B, K and d in three panels."""
    figure = Figure(figsize=(11, 4.9), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, field) in zip(panels, AXES.items(), strict=True):
        rows = [row for row in record["measurements"] if axis in row["sweeps"]]
        for line, style in STYLES.items():
            points = [(r[field], r["seconds"]) for r in rows if (r["question"], r["peer"]) == line]
            if points:
                panel.plot(
                    *zip(*sorted(points), strict=True), **{"marker": "o", "label": line[1]} | style
                )
        output.log_axes(panel, sorted({row[field] for row in rows}), f"{field}, {axis}")
        fixed = {name: sorted({row[key] for row in rows}) for name, key in AXES.items()}
        others = (
            f"{name} = {' or '.join(f'{size:,}' for size in sizes)}"
            for name, sizes in fixed.items()
            if name != axis
        )
        panel.set_title(", ".join(others), fontsize=10)
    panels[0].set_ylabel("time per query (log scale)")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        "Convex integration on {device_name}, {threads} CPU threads".format(**record["environment"])
    )
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = output.parser_of(__doc__)
    sizes = "The sizes to measure; small takes seconds."
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full", help=sizes)
    seconds = "Seconds for each solver on each size, by default those of the preset."
    parser.add_argument("--budget", type=float, help=seconds)
    parser.add_argument("--beside", type=Path, help="The folder src of another checkout of otad.")
    given = output.checked(parser, arguments)
    how = {name: getattr(given, name) for name in ("device", "threads", "budget", "seed", "beside")}
    record = run(PRESETS[given.preset], **how)
    kind = "" if given.preset == "full" else f"-{given.preset}"
    stem = given.out / f"solver-{given.device}{kind}"
    output.finish(record, tables(record), draw(record), stem)


if __name__ == "__main__":
    main()
