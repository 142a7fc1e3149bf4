"""Square Attack (Andriushchenko et al. 2020), by the library of AutoAttack."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Survivors, Target, gain_of, register_attack
from otad.attacks.library_adapters import (
    LIBRARY_NORMS,
    SquareWindows,
    UnitBox,
    own_randomness,
    require,
)
from otad.attacks.needs import Needs
from otad.attacks.objectives import cross_entropy
from otad.checks import check_choice, check_count
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class Square(SquareWindows):
    """Random search over square windows of images (B,C,H,W), without gradients.

    - `queries`: the most answers asked for each example, in each restart.
    - `restarts`: how often the examples that survive are attacked.
    - `loss`: what a change must improve, "margin" or "ce" (cross-entropy). In regression, always
      the error.
    """

    queries: int = 2000
    restarts: int = 1
    loss: str = "margin"
    name = "square"
    family = "black-box"
    needs = Needs(images=True, unit_box=True, package="pyautoattack")

    def __post_init__(self) -> None:
        check_count(self.queries, "queries", least=2)
        check_count(self.restarts, "restarts")
        check_choice(self.loss, "loss", ("margin", "ce"))

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        self.check_windows(x, ball)
        box, survivors = UnitBox.of(ball), Survivors(target, x, ball)

        def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            moved = survivors.project(box.from_unit(units), rows)
            outputs = target(moved, rows)
            alive = survivors.judge(moved, outputs, rows)
            return alive.to(x) * 2 - 1, self._losses(outputs, target.targets(rows))

        engine = require("pyautoattack.square").SquareAttack(
            None,
            norm=LIBRARY_NORMS[ball.norm],
            n_queries=self.queries - 1,  # it asks once before it counts
            eps=ball.eps / box.width,
            device=x.device,
        )
        # The library only hands its labels on to this function, in step with the inputs it still
        # works on. With row numbers in their place every query is known by its example.
        engine.margin_and_loss = judge
        engine.init_hyperparam(x)
        for _ in range(self.restarts):
            rows = survivors.rows
            if len(rows):
                with own_randomness(generator):
                    engine.attack_single_run(box.to_unit(x[rows]), rows)
        return survivors.inputs

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What the attack wants small (B,)."""
        if self.loss == "ce" and not y.is_floating_point():
            losses = -cross_entropy(outputs, y)
            return losses.masked_fill(losses.isnan(), -math.inf)
        return -gain_of(outputs, y)
