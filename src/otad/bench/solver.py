"""The solver benchmark: cost per query against B, K and d, ours beside all others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from otad.bench.bank import BankCase, run_bank_case
from otad.bench.instances import Instance, random_instance
from otad.bench.measure import limited_threads, measure
from otad.bench.peers import NOT_INSTALLED, PEERS, QUESTIONS, our_answer
from otad.bench.record import BenchmarkRecord, Measurement, as_json
from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.io.environment import Environment

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Cell:
    """One size of problem, and the axes ("B", "K", "d") of the grid it lies on."""

    batch: int
    neighbors: int
    dim: int
    sweeps: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """Three lines through one base cell: B, K and d vary one at a time.

    `largest` bounds the numbers in the anchors of a cell (B K d); where d would exceed it, B is
    lowered. `bank` runs on CUDA devices only.
    """

    batches: tuple[int, ...]
    neighbors: tuple[int, ...]
    dims: tuple[int, ...]
    base: tuple[int, int, int]
    largest: int
    budget: float
    repeats: int
    bank: BankCase

    def cells(self) -> list[Cell]:
        """Every cell once, the base cell first."""
        batch, neighbors, dim = self.base
        lines = [("B", (size, neighbors, dim)) for size in self.batches]
        lines += [("K", (batch, count, dim)) for count in self.neighbors]
        lines += [("d", (self._batch_for(width), neighbors, width)) for width in self.dims]
        sweeps: dict[tuple[int, int, int], tuple[str, ...]] = {self.base: ()}
        for axis, shape in lines:
            sweeps[shape] = (*sweeps.get(shape, ()), axis)
        return [Cell(*shape, axes) for shape, axes in sweeps.items()]

    def _batch_for(self, dim: int) -> int:
        batch, neighbors, _ = self.base
        return max(1, min(batch, self.largest // (neighbors * dim)))


PRESETS = {
    "small": Grid(
        batches=(1, 30, 1_000),
        neighbors=(5, 10, 20),
        dims=(16, 64, 256),
        base=(1_000, 10, 64),
        largest=10**7,
        budget=0.1,
        repeats=3,
        bank=BankCase(2_000, 1_000, 10, 1_024, chunks=(None, 64)),
    ),
    "full": Grid(
        batches=(1, 10, 100, 1_000),
        neighbors=(5, 10, 15, 20, 30),
        dims=(16, 64, 256, 784, 3_072, 24_576),
        base=(1_000, 10, 784),
        largest=200 * 10 * 24_576,
        budget=10.0,
        repeats=5,
        bank=BankCase(50_000, 10_000, 10, 24_576),
    ),
}


Progress = Callable[[int, int, str], None]
"""Called after every step with the steps done, all steps, and what was done."""


def run_solver_benchmark(
    preset: str | Grid = "full",
    *,
    device: str = "cpu",
    threads: int = 2,
    budget: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> BenchmarkRecord:
    """Runs all installed peers on every cell and, on a GPU, the bank case.

    `budget` is the time in seconds for each solver on each cell; None takes the preset's. Solvers
    of others always run on the CPU, as they are made to.
    """
    if isinstance(preset, str):
        check_choice(preset, "preset", tuple(PRESETS))
    grid = PRESETS[preset] if isinstance(preset, str) else preset
    check_choice(device, "device", DEVICES)
    check_count(threads, "threads")
    check_count(seed, "seed", least=0)
    seconds = grid.budget if budget is None else budget
    if not 0 < seconds < math.inf:
        raise InputError(f"budget: expected a positive number of seconds, got {budget}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device: expected a CUDA device for 'cuda', got none; try 'cpu'")

    target = torch.device(device)
    environment = Environment.now(target, threads)
    start = time.perf_counter()
    cells = grid.cells()
    bank = grid.bank if device == "cuda" else None
    bank_steps = 0 if bank is None else len(bank.dtypes) * len(bank.chunks)
    steps = _Steps(progress, len(cells) * len(QUESTIONS) + bank_steps)
    measurements: list[Measurement] = []
    for cell in cells:
        for question in QUESTIONS:
            measurements += _ask(question, cell, grid.repeats, seconds, seed, target, threads)
            size = f"B = {cell.batch}, K = {cell.neighbors}, d = {cell.dim}"
            steps.done(f"{question}: {size}")
    timings = []
    if bank is not None:
        timings = run_bank_case(
            bank, device=target, seed=seed, repeats=grid.repeats, progress=steps.done
        )
    return BenchmarkRecord(
        benchmark="solver",
        config=as_json(asdict(grid) | {"budget": seconds}),
        seed=seed,
        environment=environment,
        seconds=time.perf_counter() - start,
        missing={peer.name: NOT_INSTALLED for peer in PEERS if not peer.installed},
        measurements=tuple(measurements),
        bank=tuple(timings),
    )


class _Steps:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._count, self._total = progress, 0, total

    def done(self, what: str) -> None:
        self._count += 1
        if self._progress is not None:
            self._progress(self._count, self._total, what)


def _ask(
    question: str,
    cell: Cell,
    repeats: int,
    budget: float,
    seed: int,
    device: torch.device,
    threads: int,
) -> Iterator[Measurement]:
    """One question on one cell, to everyone who answers it."""
    instance = _instance(question, cell, seed)
    peers = [peer for peer in PEERS if peer.question == question and peer.installed]
    contenders = [(peer, peer.prepare(instance, device)) for peer in peers]
    ours = our_answer(instance, question)
    with limited_threads(threads):
        timings = measure(contenders, ours, budget=budget, repeats=repeats, device=device)
    for peer, timing in zip(peers, timings, strict=True):
        yield Measurement(
            question=question,
            peer=peer.name,
            **asdict(cell),
            strong_convexity=instance.strong_convexity,
            seconds=timing.median,
            repeat_seconds=tuple(timing.seconds),
            own_seconds=timing.own_median,
            queries=timing.queries,
            failed=timing.failed,
            difference=timing.difference,
            raised=int((instance.solution.status != 0).sum()),
        )


def _instance(question: str, cell: Cell, seed: int) -> Instance:
    """The same for every solver and device, whatever else has been measured before."""
    generator = torch.Generator().manual_seed(seed)
    return random_instance(
        cell.batch,
        cell.neighbors,
        cell.dim,
        generator=generator,
        strong_convexity=QUESTIONS[question],
    )
