"""The Carlini-Wagner loss minimized without gradients, by NGOpt of nevergrad."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.attacks.balls import LpBall
from otad.attacks.base import Attack, Target, gain_of
from otad.attacks.foreign import own_randomness
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.errors import InputError, MissingExtraError

REMEMBERED = 16  # candidates kept for the record only: it would be all of them, in 784 dimensions


@dataclass(frozen=True, eq=False)
class NgOpt(Attack):
    """min over delta of weight * max(0, logit_y - max_{c != y} logit_c + confidence) + |delta|_2^2.

    Every candidate is put in the ball before it is judged. In regression the error is maximized.
    NGOpt chooses an optimizer by dimension and budget: with 850 answers, CMA for 2 to 17 features,
    and the (1+1) evolution strategy from 21. Each example has its own, and all step together.

    - `budget`: the most answers asked for each example.
    - `sigma`: the standard deviation of the first step, in units of the ball's `scale`.
    """

    budget: int = 850
    sigma: float = 0.1
    weight: float = 10.0
    confidence: float = 0.0
    name = "ngopt"
    family = "black-box"

    def __post_init__(self) -> None:
        check_count(self.budget, "budget")
        for name, least in (("sigma", "positive"), ("weight", "positive"), ("confidence", "")):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (least and value == 0):
                raise InputError(f"{name}: expected a finite {least} number, got {value!r}")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x)
        free = torch.ones(x[0].numel(), dtype=torch.bool, device=x.device)
        if ball.mutable is not None:
            free = ball.mutable.to(x.device).flatten()
        if not bool(free.any()):
            return x
        scale = torch.ones_like(x[0]) if ball.scale is None else ball.scale.to(x)
        with own_randomness(generator) as seed:
            optimizers = [self._optimizer(int(free.sum()), seed + row) for row in range(len(x))]
            rows = survivors.rows
            for _ in range(self.budget):
                asked = [optimizers[row].ask() for row in rows.tolist()]
                moved = x[rows].clone()
                values = torch.from_numpy(np.stack([candidate.value for candidate in asked]))
                moved.flatten(1)[:, free] += values.to(x) * scale.flatten()[free]
                moved = ball.project(moved, x[rows])
                outputs = target(moved, rows)
                losses = self._losses(outputs, target.targets(rows), (moved - x[rows]) / scale)
                for row, candidate, loss in zip(rows.tolist(), asked, losses, strict=True):
                    optimizers[row].tell(candidate, loss)
                rows = rows[survivors.judge(moved, outputs, rows)]
                if not len(rows):
                    break
        return survivors.inputs

    def _losses(self, outputs: Tensor, y: Tensor, step: Tensor) -> list[float]:
        gain = gain_of(outputs, y).double().clamp_max(1e30)
        if y.is_floating_point():
            found = -gain
        else:
            hinge = (self.confidence - gain).clamp_min(0.0)
            found = self.weight * hinge + step.double().flatten(1).square().sum(1)
        losses: list[float] = found.tolist()
        return losses

    def _optimizer(self, dimension: int, seed: int) -> Any:
        nevergrad = _nevergrad()
        space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=self.sigma)
        space.random_state = np.random.RandomState(seed % 2**32)
        chosen = nevergrad.optimizers.NGOpt(space, budget=self.budget).optim
        if isinstance(chosen, nevergrad.optimization.optimizerlib._MetaModel):
            # An optimizer inside a quadratic model, which is to propose a point now and then: it
            # needs more points than the budget, or in few dimensions fails with NumPy 2.4.
            chosen = chosen._optim
        chosen.pruning = nevergrad.optimization.utils.Pruning(1, REMEMBERED)
        return chosen


def _nevergrad() -> Any:
    try:
        return importlib.import_module("nevergrad")
    except ImportError as error:
        raise MissingExtraError("nevergrad", "attacks") from error
