"""The large case: queries whose neighbors are gathered from a half-precision bank.

No solver can be faster than reading the neighbors once, so the time is set against that floor:
the bytes of the gathered pairs over the bandwidth measured for a copy on the same device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from otad.bench.instances import SMOOTHNESS, BankInstance, random_bank
from otad.bench.measure import wait_for
from otad.cip import BankProblem, CipSolution, ExactCip

_COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}


@dataclass(frozen=True)
class BankCase:
    """N pairs in the bank, B queries with K neighbors in R^d, and the chunks to try."""

    size: int
    batch: int
    neighbors: int
    dim: int
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    chunks: tuple[int | None, ...] = (None, 64, 256, 1024)


@dataclass(frozen=True)
class BankTiming:
    """One precision and one `chunk` (None: the solver's own choice).

    `extra_bytes` is the peak beyond what was allocated before, the answer itself (`answer_bytes`)
    included; None where the device does not tell. `residual` is the largest KKT residual.
    """

    dtype: str
    chunk: int | None
    seconds: float
    repeat_seconds: tuple[float, ...]
    bandwidth: float
    gathered_bytes: int
    floor_seconds: float
    extra_bytes: int | None
    answer_bytes: int
    residual: float
    raised: int

    @property
    def ratio(self) -> float:
        """Time over the memory-traffic floor."""
        return self.seconds / self.floor_seconds


def run_bank_case(
    case: BankCase,
    *,
    device: torch.device,
    seed: int,
    repeats: int,
    progress: Callable[[str], None],
) -> list[BankTiming]:
    """All precisions and chunks of a case. From indices to z', the checks included."""
    bandwidth = copy_bandwidth(device, repeats)
    timings = []
    for dtype in case.dtypes:
        generator = torch.Generator(device).manual_seed(seed)
        bank = random_bank(
            case.size,
            case.batch,
            case.neighbors,
            case.dim,
            dtype=getattr(torch, dtype),
            generator=generator,
        )
        for chunk in case.chunks:
            timings.append(_time(bank, ExactCip(chunk=chunk), dtype, bandwidth, repeats))
            progress(f"bank of {case.size}, {dtype}, chunk {chunk or 'auto'}")
    return timings


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = _repeat(lambda: target.copy_(source), repeats, device)
    return 2 * source.numel() / statistics.median(seconds)


def _time(
    bank: BankInstance, solver: ExactCip, dtype: str, bandwidth: float, repeats: int
) -> BankTiming:
    device = bank.query.device

    def solve() -> CipSolution:
        return solver(problem())

    def problem() -> BankProblem:
        return BankProblem(bank.query, bank.inputs, bank.features, bank.indices, SMOOTHNESS)

    extra = None
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        solve()
        extra = torch.cuda.max_memory_allocated(device) - before
    seconds = _repeat(solve, repeats, device)
    solution = solve()
    pair_bytes = 2 * bank.inputs.shape[1] * bank.inputs.element_size()
    gathered = bank.indices.numel() * pair_bytes
    return BankTiming(
        dtype=dtype,
        chunk=solver.chunk,
        seconds=statistics.median(seconds),
        repeat_seconds=tuple(seconds),
        bandwidth=bandwidth,
        gathered_bytes=gathered,
        floor_seconds=gathered / bandwidth,
        extra_bytes=extra,
        answer_bytes=solution.image.numel() * solution.image.element_size(),
        residual=float(problem().residual(solution).max()),
        raised=int((solution.status != 0).sum()),
    )


def _repeat(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of every run after one that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds
