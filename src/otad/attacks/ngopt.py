"""The Carlini-Wagner loss minimized without gradients, by NGOpt of nevergrad."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Target, gain_of, register_attack
from otad.attacks.library_adapters import own_randomness
from otad.attacks.needs import Needs
from otad.attacks.optimizers import SearchSettings, optimizers
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class NgOpt(Attack):
    """min over delta of weight * max(0, logit_y - max_{c != y} logit_c + confidence) + |delta|_2^2.

    Every candidate is put in the ball before it is judged. In regression the error is maximized.
    NGOpt chooses an optimizer by dimension and budget: with 850 answers, CMA for 2 to 17 features,
    and the (1+1) evolution strategy from 21. Each example has its own, and all step together.

    - `budget`: the most answers asked for each example.
    - `sigma`: the standard deviation of the first step, in units of the ball's `scale`.
    - `processes`: how many share the work of the optimizers, which is most of it for images. With
      more than one, a script of yours needs the usual `if __name__ == "__main__":`.
    """

    budget: int = 850
    sigma: float = 0.1
    weight: float = 10.0
    confidence: float = 0.0
    processes: int = 1
    name = "ngopt"
    family = "black-box"
    needs = Needs(package="nevergrad")

    def __post_init__(self) -> None:
        check_count(self.budget, "budget")
        check_count(self.processes, "processes")
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
        settings = SearchSettings(int(free.sum()), self.budget, self.sigma)
        with (
            own_randomness(generator) as seed,
            optimizers(settings, range(seed, seed + len(x)), self.processes) as searches,
        ):
            rows = survivors.rows
            for _ in range(self.budget):
                values = torch.from_numpy(searches.ask(rows.tolist()))
                moved = x[rows].clone()
                moved.flatten(1)[:, free] += values.to(x) * scale.flatten()[free]
                moved = ball.project(moved, x[rows])
                outputs = target(moved, rows)
                losses = self._losses(outputs, target.targets(rows), (moved - x[rows]) / scale)
                searches.tell(rows.tolist(), losses)
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
