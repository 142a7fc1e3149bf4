"""The Carlini-Wagner loss minimized without gradients, by NGOpt of nevergrad."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, gain_of, register_attack
from otad.attacks.library_adapters import own_randomness, require
from otad.attacks.needs import Needs
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

WEIGHT = 10.0  # of the margin against the size of the step
HISTORY = 16  # candidates that the library archives: by default all of them, in 784 dimensions


@register_attack
@dataclass(frozen=True, eq=False)
class NgOpt(Attack):
    """min over delta of 10 max(0, logit_y - max_{c != y} logit_c) + |delta|_2^2.

    Every candidate is projected into the ball before it is judged. In regression the error is
    maximized. NGOpt chooses an optimizer by dimension and budget: with 850 answers, CMA for 2 to 17
    features, and the (1+1) evolution strategy from 21. Each example has its own, and all advance
    together.

    - `budget`: the most answers asked for each example.
    - `sigma`: the standard deviation of the first step, in units of the ball's `scale`.
    - `processes`: how many share the work of the optimizers, which is most of it for images. With
      more than one, a script of yours needs the usual `if __name__ == "__main__":`.
    """

    budget: int = 850
    sigma: float = 0.1
    processes: int = 1
    name = "ngopt"
    family = "black-box"
    needs = Needs(package="nevergrad")

    def __post_init__(self) -> None:
        check_count(self.budget, "budget")
        check_count(self.processes, "processes")
        if not 0 < self.sigma < math.inf:
            raise InputError(f"sigma: expected a finite positive number, got {self.sigma!r}")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        free = ball.free_features(x)
        if not len(free):
            return x
        scale = torch.ones_like(x[0]) if ball.scale is None else ball.scale.to(x)
        settings = len(free), self.budget, self.sigma
        with (
            own_randomness(generator) as seed,
            _optimizers(settings, range(seed, seed + len(x)), self.processes) as optimizers,
        ):
            rows = survivors.rows
            for _ in range(self.budget):
                values = torch.from_numpy(optimizers.ask(rows.tolist()))
                moved = x[rows].clone()
                moved.flatten(1)[:, free] += values.to(x) * scale.flatten()[free]
                moved = survivors.project(moved, rows)
                outputs = target(moved, rows)
                losses = _losses(outputs, target.targets(rows), (moved - x[rows]) / scale)
                optimizers.tell(rows.tolist(), losses)
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    break
        return survivors.inputs


def _losses(outputs: Tensor, y: Tensor, step: Tensor) -> list[float]:
    gain = gain_of(outputs, y).double().clamp_max(1e30)
    found = -gain
    if not y.is_floating_point():
        found = WEIGHT * found.clamp_min(0.0) + step.double().flatten(1).square().sum(1)
    losses: list[float] = found.tolist()
    return losses


Settings = tuple[int, int, float]
"""Dimension, budget, and the standard deviation of the first step."""


@contextmanager
def _optimizers(
    settings: Settings, seeds: Sequence[int], processes: int
) -> Iterator[_Optimizers | _Pool]:
    """An optimizer for each seed. The number of processes makes no difference to the results."""
    require("nevergrad")
    if processes == 1:
        yield _Optimizers(settings, dict(enumerate(seeds)))
        return
    pool = _Pool(settings, seeds, min(processes, len(seeds)))
    try:
        yield pool
    finally:
        pool.close()


class _Optimizers:
    """Optimizers in this process, by row: `ask` for candidates (n,d), `tell` their losses (n,)."""

    def __init__(self, settings: Settings, seeds: dict[int, int]) -> None:
        self._optimizers = {row: _optimizer(settings, seed) for row, seed in seeds.items()}
        self._asked: dict[int, Any] = {}

    def ask(self, rows: Sequence[int]) -> NDArray[np.float64]:
        self._asked = {row: self._optimizers[row].ask() for row in rows}
        return np.stack([self._asked[row].value for row in rows])

    def tell(self, rows: Sequence[int], losses: Sequence[float]) -> None:
        for row, loss in zip(rows, losses, strict=True):
            self._optimizers[row].tell(self._asked[row], loss)


class _Pool:
    """The same in several processes: row i is in process i modulo their number, so that all have
    about as many rows left at any time."""

    def __init__(self, settings: Settings, seeds: Sequence[int], processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a GPU's driver
        self._members: list[tuple[Connection, Any]] = []
        for place in range(processes):
            ours, theirs = context.Pipe()
            own = dict(list(enumerate(seeds))[place::processes])
            process = context.Process(target=_serve, args=(theirs, settings, own), daemon=True)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def ask(self, rows: Sequence[int]) -> NDArray[np.float64]:
        shares = self._shares(rows)
        for pipe, share in shares:
            pipe.send(("ask", share))
        found = {
            row: value
            for pipe, share in shares
            for row, value in zip(share, pipe.recv(), strict=True)
        }
        return np.stack([found[row] for row in rows])

    def tell(self, rows: Sequence[int], losses: Sequence[float]) -> None:
        loss_of = dict(zip(rows, losses, strict=True))
        for pipe, share in self._shares(rows):
            pipe.send(("tell", share, [loss_of[row] for row in share]))

    def close(self) -> None:
        for pipe, process in self._members:
            pipe.close()  # which ends the process
            process.join()

    def _shares(self, rows: Sequence[int]) -> list[tuple[Connection, list[int]]]:
        """The rows of each process that has any."""
        shares: dict[int, list[int]] = {}
        for row in rows:
            shares.setdefault(row % len(self._members), []).append(row)
        return [(self._members[place][0], share) for place, share in shares.items()]


def _serve(pipe: Connection, settings: Settings, seeds: dict[int, int]) -> None:
    """What a process of a pool does until the pipe is closed."""
    own = _Optimizers(settings, seeds)
    while True:
        try:
            action, *rest = pipe.recv()
        except EOFError:
            return
        if action == "ask":
            pipe.send(own.ask(*rest))
        else:
            own.tell(*rest)


def _optimizer(settings: Settings, seed: int) -> Any:
    nevergrad = require("nevergrad")
    dimension, budget, sigma = settings
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=sigma)
    space.random_state = np.random.RandomState(seed % 2**32)
    chosen = nevergrad.optimizers.NGOpt(space, budget=budget).optim
    if isinstance(chosen, nevergrad.optimization.optimizerlib._MetaModel):
        # An optimizer inside a quadratic model, which proposes a point now and then: it needs more
        # points than the budget, or in few dimensions fails with NumPy 2.4.
        chosen = chosen._optim
    chosen.pruning = nevergrad.optimization.utils.Pruning(1, HISTORY)
    return chosen
