"""Timing side by side: every repeat lets each solver run once, so a busy machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from otad.bench.peers import Answer, Array, Peer, Solve

_MOST_PASSES = 20  # a quick solver needs no more of its budget than this


@dataclass
class Timing:
    """What was measured of one solver on one instance.

    `seconds` and `own_seconds` per query, one entry per repeat; `queries` different ones were
    timed, `failed` of the answers were not finite, and `difference` is the largest deviation of
    the others from ours, relative to our largest entry (None if there are no others).
    """

    queries: int
    seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    failed: int = 0
    difference: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def own_median(self) -> float | None:
        return statistics.median(self.own_seconds) if self.own_seconds else None


def measure(
    contenders: Sequence[tuple[Peer, Solve]],
    ours: Array,
    *,
    budget: float,
    repeats: int,
    device: torch.device,
) -> list[Timing]:
    """Times all contenders on one instance, each for about `budget` seconds in all.

    A solver that loops over queries gets as many of them as its budget allows, other ones in each
    repeat while there are others; one that is too slow even so gets fewer repeats, at least two.
    """
    runs = [
        _Run.plan(peer, solve, len(ours), budget, repeats, device) for peer, solve in contenders
    ]
    timings = [Timing(min(len(ours), run.rows * run.repeats)) for run in runs]
    scale = float(np.abs(ours).max())
    for repeat in range(repeats):
        for run, timing in zip(runs, timings, strict=True):
            if repeat >= run.repeats:
                continue
            rows = run.rows_of(repeat, len(ours))
            answer, seconds = run(rows)
            timing.seconds.append(seconds / run.rows)
            if answer.own_seconds is not None:
                timing.own_seconds.append(answer.own_seconds / run.rows)
            _compare(timing, answer.rows, ours[rows], scale)
    return timings


@dataclass(frozen=True)
class _Run:
    """`repeats` times: `passes` calls of a solver on `rows` rows."""

    solve: Solve
    rows: int
    passes: int
    repeats: int
    device: torch.device

    @staticmethod
    def plan(
        peer: Peer, solve: Solve, batch: int, budget: float, repeats: int, device: torch.device
    ) -> _Run:
        """Warms up, and fills the budget."""
        least = batch if peer.batched else 1
        run = _Run(solve, least, 1, repeats, device)
        _, seconds = run(slice(0, least))
        if seconds < budget / repeats:  # the first call is slow in its own way
            _, seconds = run(slice(0, least))
        fit = max(1, int(budget / repeats / seconds))  # such calls in a repeat
        rows = min(fit * least, batch)
        return _Run(
            solve,
            rows=rows,
            passes=min(max(1, fit * least // rows), _MOST_PASSES),
            repeats=min(repeats, max(2, int(budget / seconds))),
            device=device,
        )

    def rows_of(self, repeat: int, batch: int) -> slice:
        start = min(repeat * self.rows, batch - self.rows)
        return slice(start, start + self.rows)

    def __call__(self, rows: slice) -> tuple[Answer, float]:
        """The last answer, and the seconds of one pass."""
        wait_for(self.device)
        start = time.perf_counter()
        for _ in range(self.passes):
            answer = self.solve(rows)
        wait_for(self.device)
        return answer, (time.perf_counter() - start) / self.passes


def wait_for(device: torch.device) -> None:
    """Returns when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compare(timing: Timing, answer: Tensor | Array, ours: Array, scale: float) -> None:
    rows = answer.double().cpu().numpy() if isinstance(answer, Tensor) else answer
    finite = np.isfinite(rows).all(1)
    timing.failed += int((~finite).sum())
    if finite.any():
        gap = float(np.abs(rows[finite] - ours[finite]).max() / scale)
        timing.difference = max(timing.difference or 0.0, gap)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """At most `count` threads in torch and in the BLAS of NumPy, then as many as before."""
    before = torch.get_num_threads()
    with threadpool_limits(limits=count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
