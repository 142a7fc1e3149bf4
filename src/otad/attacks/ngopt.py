"""NGOpt of nevergrad: an optimizer without gradients for each example."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otad.attacks.autoattack import EXTRA, own_randomness
from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.target import Survivors, Target, gain_of
from otad.checks import check_count, check_positive
from otad.errors import import_extra
from otad.threat import LpBall

HISTORY = 16  # candidates that nevergrad archives; by default it archives all of them


@register_attack
@dataclass(frozen=True, eq=False)
class NgOpt(Attack):
    """NGOpt of nevergrad: black-box optimization without gradients.

    It minimizes `w max(0, logit_y - max_{c != y} logit_c) + |delta|_2^2`, with every candidate
    projected into the ball; in regression it maximizes the error. NGOpt chooses an optimizer by
    dimension and budget. Each example has its own optimizer, and all of them advance together. The
    attack needs the extra `attacks`.

    Parameters
    ----------
    budget : int
        The largest number of answers asked for each example.
    sigma : float
        The standard deviation of the first step, in units of the ball's `scale`.
    processes : int
        How many processes share the work of the optimizers, which is most of the work for images.
        With more than one, your script needs the usual `if __name__ == "__main__":`.
    margin_weight : float
        The weight w of the margin. With a small one, the search prefers short steps that fail.

    Examples
    --------
    >>> import otad
    >>> attack = otad.attacks.NgOpt(budget=200)
    >>> attack.name, attack.sigma, attack.needs.package
    ('ngopt', 0.1, 'nevergrad')
    """

    budget: int = option(850, check_count)
    sigma: float = option(0.1, check_positive)
    processes: int = option(1, check_count)
    margin_weight: float = option(10.0, check_positive)
    name = "ngopt"
    family = "black-box"
    needs = Needs(package="nevergrad")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        free = ball.free_features(x)
        if not len(free):
            return x
        scale = torch.ones_like(x[0]) if ball.scale is None else ball.scale.to(x).expand_as(x[0])
        settings, count = (len(free), self.budget, self.sigma), min(self.processes, len(x))
        import_extra("nevergrad", EXTRA)
        with own_randomness(generator) as seed, ExitStack() as stack:
            seeds = dict(enumerate(range(seed, seed + len(x))))
            made = _Optimizers(settings, seeds) if count == 1 else _Pool(settings, seeds, count)
            optimizers = stack.enter_context(closing(made))
            rows = survivors.rows
            for _ in range(self.budget):
                asked = optimizers.ask(rows.tolist())
                values = torch.from_numpy(np.stack([asked[row] for row in rows.tolist()]))
                moved = x[rows].clone()
                moved.flatten(1)[:, free] += values.to(x) * scale.flatten()[free]
                moved = survivors.project(moved, rows)
                outputs = target(moved, rows)
                step = (moved - x[rows]) / scale
                losses = _losses(outputs, target.targets(rows), step, self.margin_weight)
                optimizers.tell(dict(zip(rows.tolist(), losses, strict=True)))
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    break
        return survivors.inputs


def _losses(outputs: Tensor, y: Tensor, step: Tensor, weight: float) -> list[float]:
    found = -gain_of(outputs, y).double().clamp_max(1e30)
    if not y.is_floating_point():
        found = weight * found.clamp_min(0.0) + step.double().flatten(1).square().sum(1)
    return [float(loss) for loss in found]


Settings = tuple[int, int, float]  # dimension, budget, standard deviation of the first step


class _Optimizers:
    """The optimizers of all rows in this process: `ask` for candidates (d,), `tell` losses."""

    def __init__(self, settings: Settings, seeds: dict[int, int]) -> None:
        self._optimizers = {row: _optimizer(settings, seed) for row, seed in seeds.items()}
        self._asked: dict[int, Any] = {}

    def ask(self, rows: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        self._asked = {row: self._optimizers[row].ask() for row in rows}
        return {row: candidate.value for row, candidate in self._asked.items()}

    def tell(self, losses: dict[int, float]) -> None:
        for row, loss in losses.items():
            self._optimizers[row].tell(self._asked[row], loss)

    def close(self) -> None:
        """There is nothing to end in this process."""


class _Pool(_Optimizers):
    """The optimizers of all rows in several processes, with the same results.

    Row i is in process i modulo their number, so that all have about as many rows left at any
    time."""

    def __init__(self, settings: Settings, seeds: dict[int, int], processes: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share a GPU's driver
        self._members: list[tuple[Connection, Any]] = []
        for place in range(processes):
            ours, theirs = context.Pipe()
            own = dict(list(seeds.items())[place::processes])
            process = context.Process(target=_serve, args=(theirs, settings, own), daemon=True)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def ask(self, rows: Sequence[int]) -> dict[int, NDArray[np.float64]]:
        for place, (pipe, _) in enumerate(self._members):
            pipe.send(("ask", [row for row in rows if row % len(self._members) == place]))
        return {row: value for pipe, _ in self._members for row, value in pipe.recv().items()}

    def tell(self, losses: dict[int, float]) -> None:
        for place, (pipe, _) in enumerate(self._members):
            own = {row: losses[row] for row in losses if row % len(self._members) == place}
            pipe.send(("tell", own))

    def close(self) -> None:
        for pipe, process in self._members:
            pipe.close()  # which ends the process
            process.join()


def _serve(pipe: Connection, settings: Settings, seeds: dict[int, int]) -> None:
    own = _Optimizers(settings, seeds)
    with suppress(EOFError):
        while True:
            action, argument = pipe.recv()
            if action == "ask":
                pipe.send(own.ask(argument))
            else:
                own.tell(argument)


def _optimizer(settings: Settings, seed: int) -> Any:
    nevergrad = import_extra("nevergrad", EXTRA)
    dimension, budget, sigma = settings
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=sigma)
    space.random_state = np.random.RandomState(seed % 2**32)
    chosen = nevergrad.optimizers.NGOpt(space, budget=budget).optim
    if isinstance(chosen, nevergrad.optimization.optimizerlib._MetaModel):
        # The quadratic model around an optimizer proposes a point now and then. It needs more
        # points than the budget, or fails with NumPy 2.4 in few dimensions; so it is left out.
        chosen = chosen._optim
    chosen.pruning = nevergrad.optimization.utils.Pruning(1, HISTORY)
    return chosen
