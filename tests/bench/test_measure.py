"""The stopwatch, on a clock of its own: what is timed, how often, and on which rows."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from otad.bench.instances import Instance
from otad.bench.measure import Timing, limited_threads, measure
from otad.bench.peers import MAP, Answer, Peer, Solve

OURS = np.arange(20.0).reshape(10, 2)  # ten queries, the largest entry is 19


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


class Fake:
    """A solver that takes `seconds` per query (or per call, if batched) and is off by `error`."""

    def __init__(self, clock: Clock, seconds: float, *, batched: bool = False, error: float = 0.0):
        self.clock, self.seconds, self.batched, self.error = clock, seconds, batched, error
        self.calls: list[list[int]] = []

    def __call__(self, rows: slice) -> Answer:
        numbers = list(range(10)[rows])
        self.calls.append(numbers)
        self.clock.now += self.seconds * (1 if self.batched else len(numbers))
        return Answer(OURS[rows] + self.error, own_seconds=0.5 * len(numbers))


def never(instance: Instance, device: torch.device) -> Solve:
    raise AssertionError("prepared before it is timed")


def run(*solvers: Fake, budget: float = 6.0, repeats: int = 3) -> list[Timing]:
    contenders = [(Peer("fake", MAP, never, batched=one.batched), one) for one in solvers]
    return measure(contenders, OURS, budget=budget, repeats=repeats, device=torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_loop_gets_the_queries_its_budget_allows(clock: Clock) -> None:
    solver = Fake(clock, 1.0)  # a budget of 6 s in 3 repeats: 2 queries in each
    (timing,) = run(solver)
    assert solver.calls == [[0], [0], [0, 1], [2, 3], [4, 5]]  # two to warm up
    assert timing.queries == 6
    assert timing.median == pytest.approx(1.0)
    assert timing.own_median == pytest.approx(0.5)


def test_a_slow_loop_still_gets_two_queries(clock: Clock) -> None:
    solver = Fake(clock, 100.0)
    (timing,) = run(solver)
    assert solver.calls == [[0], [0], [1]]  # one to warm up
    assert timing.queries == 2


def test_a_quick_loop_gets_all_queries_several_times(clock: Clock) -> None:
    solver = Fake(clock, 0.1)  # all ten take half of a repeat
    (timing,) = run(solver)
    assert solver.calls[2:] == [list(range(10))] * 6
    assert timing.queries == 10
    assert timing.median == pytest.approx(0.1)


def test_a_batched_solver_always_gets_the_batch(clock: Clock) -> None:
    solver = Fake(clock, 1.0, batched=True)
    (timing,) = run(solver)
    assert all(call == list(range(10)) for call in solver.calls)
    assert timing.median == pytest.approx(0.1)  # per query


def test_repeats_are_interleaved(clock: Clock) -> None:
    order: list[str] = []

    class Noting(Fake):
        def __call__(self, rows: slice) -> Answer:
            order.append(str(self.seconds))
            return super().__call__(rows)

    run(Noting(clock, 2.0), Noting(clock, 3.0, batched=True), budget=8.0, repeats=2)
    warm, timed = order[:4], order[4:]
    assert warm == ["2.0", "2.0", "3.0", "3.0"]
    assert timed == ["2.0", "3.0", "2.0", "3.0"]


def test_a_wrong_answer_shows(clock: Clock) -> None:
    right, wrong, broken = (
        Fake(clock, 1.0),
        Fake(clock, 1.0, error=1.9),
        Fake(clock, 1, error=np.nan),
    )
    timings = run(right, wrong, broken)
    assert [timing.failed for timing in timings] == [0, 0, 6]
    assert timings[0].difference == 0
    assert timings[1].difference == pytest.approx(0.1)  # relative to our largest entry
    assert timings[2].difference is None


def test_threads_are_limited_and_given_back() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with limited_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before
