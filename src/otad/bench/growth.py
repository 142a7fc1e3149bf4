"""The whole-bank benchmark: what one map through N points costs, as N grows.

For nested subsets of one bank: finding the potential of least L, then sending the same queries
through its map. Everything is timed in one run, on one device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from otad.bench.growth_record import Growth, GrowthRecord
from otad.bench.measure import limited_threads, wait_for
from otad.checks import check_count, check_shape, check_tensor
from otad.cip.whole_bank.map import WholeBank, WholeBankSolution
from otad.cip.whole_bank.potential import BankPotential, least_bank_smoothness
from otad.errors import InputError
from otad.experiments.probe import resident_now, resident_peak
from otad.io.environment import Environment

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 60_000)
Result = TypeVar("Result")
Progress = Callable[[int, int, str], None]
"""Called after every step with the steps done, all steps, and what was done."""


@dataclass(frozen=True, eq=False)
class GrowthData:
    """A bank of inputs and features (N,d) in random order, queries (B,d), and where from."""

    inputs: Tensor
    features: Tensor
    queries: Tensor
    source: str

    def __post_init__(self) -> None:
        check_tensor(self.inputs, "inputs", "N,d")
        check_shape(self.features, "features", tuple(self.inputs.shape), "like the inputs")
        check_tensor(self.queries, "queries", "B,d")
        shape = (len(self.queries), self.inputs.shape[1])
        check_shape(self.queries, "queries", shape, "like the inputs")


def synthetic_growth_data(
    size: int, dim: int, queries: int, *, generator: torch.Generator
) -> GrowthData:
    """Points near 10 centers on a flat of few dimensions, sent through the gradient of a convex
    function: z = (x + C^T softmax(C x)) / 2 with random C, plus a little noise."""
    flat = min(dim, 30)
    basis = torch.randn(flat, dim, generator=generator) / math.sqrt(flat)
    centers = 2 * torch.randn(10, flat, generator=generator)
    corners = torch.randn(10, dim, generator=generator) / math.sqrt(dim)

    def draw(count: int) -> Tensor:
        place = centers[torch.randint(10, (count,), generator=generator)]
        place = place + torch.randn(count, flat, generator=generator)
        noise = 0.1 * torch.randn(count, dim, generator=generator)
        return (place @ basis + noise) / math.sqrt(dim / flat)

    points = draw(size)
    features = (points + torch.softmax(points @ corners.T, 1) @ corners) / 2
    features += 0.01 * torch.randn(features.shape, generator=generator) / math.sqrt(dim)
    return GrowthData(points, features, draw(queries), "synthetic")


def run_growth_benchmark(
    data: GrowthData,
    sizes: Sequence[int] = SIZES,
    *,
    device: str = "cpu",
    threads: int = 2,
    budget: float = math.inf,
    pricing: str = "exact",
    seed: int = 0,
    progress: Progress | None = None,
) -> GrowthRecord:
    """Every size that the data has, ascending; larger ones become one size, all of the data.

    A size whose potential is expected to take longer than `budget` seconds, by the growth so far,
    is left out and said to be.
    """
    for size in sizes:
        check_count(size, "sizes", least=2)
    if not budget > 0:
        raise InputError(f"budget: expected a positive number of seconds, got {budget}")
    check_count(threads, "threads")
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device: expected one that is present, got {device!r}; try 'cpu'")
    environment = Environment.now(target, threads)
    start = time.perf_counter()
    wanted = sorted({min(size, len(data.inputs)) for size in sizes})
    measured: list[Growth] = []
    left_out: dict[str, str] = {}
    with limited_threads(threads):
        _warm_up(data, target, pricing)
        for done, size in enumerate(wanted, 1):
            expected = _expected_seconds(measured, size)
            if expected > budget:
                left_out[str(size)] = f"expected to take {expected:.0f} s, over {budget:.0f} s"
            else:
                measured.append(_measure(data, size, target, pricing))
            if progress is not None:
                progress(done, len(wanted), f"N = {size}")
    return GrowthRecord(
        benchmark="global",
        source=data.source,
        pricing=pricing,
        dim=data.inputs.shape[1],
        seed=seed,
        environment=environment,
        seconds=time.perf_counter() - start,
        left_out=left_out,
        sizes=tuple(measured),
    )


def _measure(data: GrowthData, size: int, device: torch.device, pricing: str) -> Growth:
    inputs, features = (part[:size].to(device) for part in (data.inputs, data.features))
    queries = data.queries.to(device)
    memory = _Memory(device)
    sweeps = 0

    def count(_: int, __: float) -> None:
        nonlocal sweeps
        sweeps += 1

    def potential_of_bank() -> BankPotential:
        return least_bank_smoothness(inputs, features, progress=count)

    potential, potential_seconds = _timed(potential_of_bank, device)
    potential_memory = memory.peak()
    memory = _Memory(device)
    made, making_seconds = _timed(
        lambda: WholeBank(inputs, features, potential, pricing=pricing), device
    )

    def answer() -> WholeBankSolution:
        with torch.no_grad():
            return made(queries)

    found, query_seconds = _timed(answer, device)
    held = (found.solution.multipliers > 0).sum(1).double()
    return Growth(
        size=size,
        queries=len(queries),
        smoothness=potential.smoothness,
        sweeps=sweeps,
        violation=potential.violation,
        potential_seconds=potential_seconds,
        making_seconds=making_seconds,
        query_seconds=query_seconds,
        rounds=float(found.rounds.double().mean()),
        most_rounds=int(found.rounds.max()),
        support=float(held.mean()),
        most_support=int(held.max()),
        gap=float(found.gap.max()),
        unsolved=int((found.solution.status != 0).sum()),
        potential_memory=potential_memory,
        query_memory=memory.peak(),
    )


def _warm_up(data: GrowthData, device: torch.device, pricing: str) -> None:
    """The first call of a matrix library is slow in its own way."""
    few = slice(0, min(64, len(data.inputs)))
    inputs, features = data.inputs[few].to(device), data.features[few].to(device)
    potential = least_bank_smoothness(inputs, features)
    WholeBank(inputs, features, potential, pricing=pricing)(data.queries[few].to(device))
    wait_for(device)


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return result, time.perf_counter() - start


def _expected_seconds(measured: list[Growth], size: int) -> float:
    """All pairs are looked at, so time grows with the square of N."""
    if not measured:
        return 0.0
    return measured[-1].potential_seconds * (size / measured[-1].size) ** 2


class _Memory:
    """Peak bytes since it was made: of the GPU beyond what was there, or of the whole process.

    A process does not forget its peak, so on the CPU a smaller step after a larger shows 0.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        else:
            self.before = resident_now()

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, resident_peak() - self.before)
