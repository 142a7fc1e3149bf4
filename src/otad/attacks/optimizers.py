"""Optimizers of nevergrad, one an example, asked and told together; in one process or several."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from otad.errors import MissingExtraError

REMEMBERED = 16  # candidates kept for the record only: it would be all of them, in 784 dimensions
Array = NDArray[np.float64]


@dataclass(frozen=True)
class SearchSettings:
    """NGOpt in `dimension` numbers, with `budget` answers and first steps of size `sigma`."""

    dimension: int
    budget: int
    sigma: float


class Optimizers(Protocol):
    """`ask` for candidates (n,d) of some rows, then `tell` their losses (n,)."""

    def ask(self, rows: Sequence[int]) -> Array: ...

    def tell(self, rows: Sequence[int], losses: Sequence[float]) -> None: ...


@contextmanager
def optimizers(
    settings: SearchSettings, seeds: Sequence[int], processes: int = 1
) -> Iterator[Optimizers]:
    """One optimizer for each seed. How many processes share the work makes no other difference."""
    find_nevergrad()
    if processes == 1:
        yield _Here(settings, dict(enumerate(seeds)))
        return
    team = _Team(settings, seeds, min(processes, len(seeds)))
    try:
        yield team
    finally:
        team.dismiss()


class _Here:
    """In this process; `seeds` by row."""

    def __init__(self, settings: SearchSettings, seeds: dict[int, int]) -> None:
        self._optimizers = {row: _optimizer(settings, seed) for row, seed in seeds.items()}
        self._asked: dict[int, Any] = {}

    def ask(self, rows: Sequence[int]) -> Array:
        self._asked = {row: self._optimizers[row].ask() for row in rows}
        return np.stack([self._asked[row].value for row in rows])

    def tell(self, rows: Sequence[int], losses: Sequence[float]) -> None:
        for row, loss in zip(rows, losses, strict=True):
            self._optimizers[row].tell(self._asked[row], loss)


class _Team:
    """Rows dealt to several processes in turn, so that all have about as many left at any time."""

    def __init__(self, settings: SearchSettings, seeds: Sequence[int], processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a GPU's driver
        self._members: list[tuple[Connection, Any]] = []
        for place in range(processes):
            ours, theirs = context.Pipe()
            own = dict(list(enumerate(seeds))[place::processes])
            member = context.Process(target=_serve, args=(theirs, settings, own), daemon=True)
            member.start()
            theirs.close()
            self._members.append((ours, member))

    def ask(self, rows: Sequence[int]) -> Array:
        shares = [list(rows_of) for rows_of in self._shares(rows)]
        self._send([("ask", share) for share in shares])
        answers = [pipe.recv() for (pipe, _), share in self._pairs(shares) if share]
        by_row = {
            row: value
            for share, answer in zip(filter(None, shares), answers, strict=True)
            for row, value in zip(share, answer, strict=True)
        }
        return np.stack([by_row[row] for row in rows])

    def tell(self, rows: Sequence[int], losses: Sequence[float]) -> None:
        by_row = dict(zip(rows, losses, strict=True))
        shares = self._shares(rows)
        self._send([("tell", share, [by_row[row] for row in share]) for share in shares])

    def dismiss(self) -> None:
        for pipe, member in self._members:
            pipe.close()  # which a member takes as its leave
            member.join()

    def _shares(self, rows: Sequence[int]) -> list[list[int]]:
        count = len(self._members)
        return [[row for row in rows if row % count == place] for place in range(count)]

    def _pairs(self, shares: list[list[int]]) -> Iterator[tuple[tuple[Connection, Any], list[int]]]:
        return zip(self._members, shares, strict=True)

    def _send(self, messages: Sequence[tuple[Any, ...]]) -> None:
        for (pipe, _), message in zip(self._members, messages, strict=True):
            if message[1]:
                pipe.send(message)


def _serve(pipe: Connection, settings: SearchSettings, seeds: dict[int, int]) -> None:
    """What a process of a team does until the pipe is closed."""
    own = _Here(settings, seeds)
    while True:
        try:
            what, *rest = pipe.recv()
        except EOFError:
            return
        if what == "ask":
            pipe.send(own.ask(*rest))
        else:
            own.tell(*rest)


def _optimizer(settings: SearchSettings, seed: int) -> Any:
    nevergrad = find_nevergrad()
    space = nevergrad.p.Array(shape=(settings.dimension,)).set_mutation(sigma=settings.sigma)
    space.random_state = np.random.RandomState(seed % 2**32)
    chosen = nevergrad.optimizers.NGOpt(space, budget=settings.budget).optim
    if isinstance(chosen, nevergrad.optimization.optimizerlib._MetaModel):
        # An optimizer inside a quadratic model, which is to propose a point now and then: it
        # needs more points than the budget, or in few dimensions fails with NumPy 2.4.
        chosen = chosen._optim
    chosen.pruning = nevergrad.optimization.utils.Pruning(1, REMEMBERED)
    return chosen


def find_nevergrad() -> Any:
    try:
        return importlib.import_module("nevergrad")
    except ImportError as error:
        raise MissingExtraError("nevergrad", "attacks") from error
