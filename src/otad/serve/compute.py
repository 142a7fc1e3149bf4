"""One compute thread for all requests, which joins the rows of requests that wait.

The solver sets precision flags of torch that all threads of a process share, so only one thread may
compute. A batch costs little more than a single row, so rows that arrive while the thread computes
are computed together afterwards. Nothing waits for a batch to fill.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from otad.serve.metrics import Metrics

Answers = dict[str, Tensor]  # by name, each with one entry per row
SMOOTHING = 0.1  # of the measured seconds of a job


@dataclass(eq=False)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rows: Tensor | None = None
    future: Future[Any] = field(default_factory=Future)

    @property
    def kind(self) -> Hashable:
        """Jobs of the same kind can be joined."""
        return self.function, self.arguments

    @property
    def count(self) -> int:
        return 1 if self.rows is None else len(self.rows)


class ComputeQueue:
    """Runs functions one after the other in a thread of its own.

    At most `max_batch` rows are computed at once. After `timeout` seconds a caller gives up with
    `TimeoutError`, and what has not started by then is never computed. `metrics` count batches and
    the length of the queue."""

    def __init__(self, max_batch: int, timeout: float, metrics: Metrics) -> None:
        self.max_batch, self.timeout, self._metrics = max_batch, timeout, metrics
        self._jobs: deque[_Job] = deque()
        self._ready = Condition()
        self._thread: Thread | None = None
        self._closed = False
        self._seconds = 0.0  # of one job, smoothed

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`, computed in the compute thread."""
        (found,) = await self._results([_Job(function, arguments)])
        return found

    async def join(
        self, function: Callable[..., Answers], rows: Tensor, *arguments: Hashable
    ) -> list[Answers]:
        """Return `function(rows, *arguments)` for rows (B, ...), in parts of at most `max_batch`.

        The function is called with the rows of several callers whose arguments are equal. It
        returns tensors with one entry per row, of which each caller gets its own.
        """
        jobs = [_Job(function, arguments, part) for part in rows.split(self.max_batch)]
        return await self._results(jobs)

    @property
    def retry_after(self) -> int:
        """The seconds until what waits now is probably computed, at least 1."""
        return max(1, math.ceil(self._seconds * len(self._jobs)))

    def close(self) -> None:
        """Compute what waits, within the time that callers wait for it, and end the thread."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        if self._thread is not None:
            self._thread.join(self.timeout)

    async def _results(self, jobs: list[_Job]) -> list[Any]:
        with self._ready:
            if self._thread is None:
                self._thread = Thread(target=self._work, name="otad compute", daemon=True)
                self._thread.start()
            self._jobs.extend(jobs)
            self._metrics.queue.set(len(self._jobs))
            self._ready.notify()
        waiting = [asyncio.wrap_future(job.future) for job in jobs]
        return await asyncio.wait_for(asyncio.gather(*waiting), self.timeout)

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                batch = self._take()
                self._metrics.queue.set(len(self._jobs))
            batch = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if batch:
                start = time.perf_counter()
                self._compute(batch)
                seconds = (time.perf_counter() - start) / len(batch)
                self._seconds += SMOOTHING * (seconds - self._seconds)

    def _take(self) -> list[_Job]:
        """Remove and return the first job, with those that can be computed together with it."""
        first = self._jobs.popleft()
        batch, count, others = [first], first.count, deque[_Job]()
        for job in self._jobs:
            fits = first.rows is not None and job.rows is not None and job.kind == first.kind
            if fits and count + job.count <= self.max_batch:
                batch.append(job)
                count += job.count
            else:
                others.append(job)
        self._jobs = others
        return batch

    def _compute(self, batch: list[_Job]) -> None:
        try:
            results = self._results_of(batch)
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for job in batch:  # an error of one row must not fail the others
                self._compute([job])
            return
        for job, result in zip(batch, results, strict=True):
            job.future.set_result(result)

    def _results_of(self, batch: list[_Job]) -> list[Any]:
        first, rows = batch[0], [job.rows for job in batch if job.rows is not None]
        if not rows:
            return [first.function(*first.arguments)]
        found = first.function(torch.cat(rows), *first.arguments)
        counts = [job.count for job in batch]
        self._metrics.batch.observe(sum(counts))
        parts = {name: values.split(counts) for name, values in found.items()}
        return [{name: split[k] for name, split in parts.items()} for k in range(len(batch))]
