"""The compute queue: one thread, joined rows, and errors that stay with their request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from serve.running import PATIENCE

from otad.serve.compute import ComputeQueue
from otad.serve.metrics import Metrics


class Doubling:
    """Doubles rows and remembers how many came at once; waits until it is allowed to start."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.allowed = threading.Event()

    def __call__(self, rows: torch.Tensor, *arguments: Any) -> dict[str, torch.Tensor]:
        assert self.allowed.wait(PATIENCE)
        self.sizes.append(len(rows))
        self.threads.add(threading.get_ident())
        if bool((rows < 0).any()):
            raise ValueError("a negative row")
        return {"twice": 2 * rows, "row": torch.arange(len(rows))}


@pytest.fixture
def queue() -> ComputeQueue:
    return ComputeQueue(max_batch=4, timeout=PATIENCE, metrics=Metrics())


def ask(queue: ComputeQueue, work: Doubling, *asked: Any) -> list[Any]:
    """What concurrent callers get for their (rows, *arguments); the first one blocks the thread
    until all others wait."""

    async def all_of_them() -> list[Any]:
        first = asyncio.create_task(queue.join(work, torch.zeros(1)))
        await asyncio.sleep(0)
        while queue._jobs:  # until the thread has taken it
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(queue.join(work, *each)) for each in asked]
        await asyncio.sleep(0)
        work.allowed.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await first
        return found

    return asyncio.run(all_of_them())


def test_waiting_rows_are_joined_and_each_caller_gets_its_own(queue: ComputeQueue) -> None:
    work = Doubling()
    rows = [torch.arange(float(n)) + 10 * n for n in (1, 2, 3, 1, 9)]
    other = torch.ones(2), "another kind"
    found = ask(queue, work, *((one,) for one in rows), other)
    for one, parts in zip([*rows, other[0]], found, strict=True):
        assert torch.equal(torch.cat([part["twice"] for part in parts]), 2 * one)
    # The first alone, then rows of the same kind up to four at once, and another kind by itself.
    assert work.sizes == [1, 4, 4, 4, 4, 2]
    assert len(work.threads) == 1
    queue.close()


def test_an_error_fails_its_own_request_alone(queue: ComputeQueue) -> None:
    found = ask(queue, Doubling(), (torch.ones(1),), (-torch.ones(1),), (torch.ones(2),))
    assert torch.equal(found[0][0]["twice"], torch.full((1,), 2.0))
    assert isinstance(found[1], ValueError)
    assert torch.equal(found[2][0]["twice"], torch.full((2,), 2.0))
    queue.close()


def test_what_nobody_waits_for_is_not_computed() -> None:
    queue, work = ComputeQueue(max_batch=4, timeout=0.05, metrics=Metrics()), Doubling()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.gather(
                queue.join(work, torch.zeros(1)), queue.join(work, torch.zeros(3), "late")
            )

    asyncio.run(give_up())
    work.allowed.set()
    queue.close()
    assert 3 not in work.sizes


def test_any_function_runs_in_the_same_thread_and_close_ends_what_waits() -> None:
    queue = ComputeQueue(max_batch=4, timeout=PATIENCE, metrics=Metrics())
    done: list[int] = []

    async def ask() -> int:
        slow = asyncio.create_task(queue.run(lambda: done.append(threading.get_ident())))
        found = await queue.run(lambda a, b: (done.append(threading.get_ident()), a + b)[1], 2, 3)
        await slow
        return int(found)

    assert asyncio.run(ask()) == 5
    assert len(set(done)) == 1
    assert done[0] != threading.get_ident()
    queue.close()
    assert queue.retry_after == 1
