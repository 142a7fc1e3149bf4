"""The weakest attack: a defense that noise breaks needs no adversary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Target, register_attack
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class RandomNoise(Attack):
    """The best of `draws` random points, in turn on the surface of the ball and within it."""

    draws: int = 100
    name = "noise"
    family = "random"

    def __post_init__(self) -> None:
        check_count(self.draws, "draws")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x)
        for draw in range(self.draws):
            rows = survivors.rows
            if not len(rows):
                break
            points = ball.inside(x, generator) if draw % 2 else ball.surface(x, generator)
            survivors.judge(points[rows], target(points[rows], rows), rows)
        return survivors.inputs
