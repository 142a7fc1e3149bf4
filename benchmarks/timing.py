"""Times solvers side by side: each repeat runs all of them, so a busy machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from peers import Array, Found, Peer, Solve
from threadpoolctl import threadpool_limits
from torch import Tensor

MOST_PASSES = 500  # the most calls of a fast solver in one repeat
Result = TypeVar("Result")


@dataclass
class Timing:
    """The measurements of one solver on one instance.

    Each repeat is `passes` calls on `rows` queries. `seconds` and `own_seconds` are per query, with
    one entry per repeat. `failed` counts results that are not finite. `difference` is the largest
    deviation of the finite ones from ours, relative to our largest entry, or None without any.
    """

    rows: int
    passes: int
    repeats: int
    queries: int
    seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    failed: int = 0
    difference: float | None = None

    @staticmethod
    def plan(
        peer: Peer, solve: Solve, batch: int, budget: float, repeats: int, device: torch.device
    ) -> Timing:
        """Warm up, then choose rows, passes and repeats that fill the budget."""
        least = batch if peer.batched else 1
        _, seconds = timed(lambda: solve(slice(0, least)), device)
        if seconds < budget / repeats:  # the first call includes one-time costs
            _, seconds = timed(lambda: solve(slice(0, least)), device)
        fit = max(1, int(budget / repeats / seconds))  # the number of such calls in a repeat
        rows = min(fit * least, batch)
        repeats = min(repeats, max(2, int(budget / seconds)))
        passes = min(max(1, fit * least // rows), MOST_PASSES)
        return Timing(rows, passes, repeats, min(batch, rows * repeats))

    def add(self, repeat: int, solve: Solve, ours: Array, device: torch.device) -> None:
        start = min(repeat * self.rows, len(ours) - self.rows)
        rows = slice(start, start + self.rows)
        (found, own_seconds), seconds = timed(lambda: self._last_of_passes(solve, rows), device)
        self.seconds.append(seconds / (self.passes * self.rows))
        if own_seconds is not None:
            self.own_seconds.append(own_seconds / self.rows)
        values = found.double().cpu().numpy() if isinstance(found, Tensor) else found
        finite = np.isfinite(values).all(1)
        self.failed += int((~finite).sum())
        if finite.any():
            gap = np.abs(values[finite] - ours[rows][finite]).max() / np.abs(ours).max()
            self.difference = max(self.difference or 0.0, float(gap))

    def _last_of_passes(self, solve: Solve, rows: slice) -> Found:
        for _ in range(self.passes - 1):
            solve(rows)  # nothing is kept, so that memory is used again
        return solve(rows)

    def to_dict(self) -> dict[str, object]:
        own = statistics.median(self.own_seconds) if self.own_seconds else None
        return {
            "seconds": statistics.median(self.seconds),
            "repeat_seconds": self.seconds,
            "own_seconds": own,
            "queries": self.queries,
            "failed": self.failed,
            "difference": self.difference,
        }


def measure(
    contenders: Sequence[tuple[Peer, Solve]],
    ours: Array,
    *,
    budget: float,
    repeats: int,
    device: torch.device,
) -> list[Timing]:
    """Time all solvers on one instance, each for about `budget` seconds in total.

    A solver that loops over queries gets as many of them as its budget allows, different ones in
    each repeat if there are enough. A solver that is still too slow gets fewer repeats, but at
    least two.
    """
    timings = [Timing.plan(*one, len(ours), budget, repeats, device) for one in contenders]
    for repeat in range(repeats):
        for (_, solve), timing in zip(contenders, timings, strict=True):
            if repeat < timing.repeats:
                timing.add(repeat, solve, ours, device)
    return timings


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """Return the result, and the seconds until the device has finished its work."""
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return result, time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Limit torch and the BLAS of NumPy to `count` threads within the context."""
    before = torch.get_num_threads()
    with threadpool_limits(limits=count):
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)
