"""Black-box attacks on inputs of any shape: random points, and random search from the best one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Survivors, Target, register_attack
from otad.checks import check_count
from otad.threat import LpBall, per_row

GROWTH = 1.5  # of the step after a success; four failures undo it (the one-fifth rule)
LONGEST = 2.0  # step, in units of eps: across the ball
SHORTEST = {"l2": 2.0**-10, "linf": LONGEST}  # the best points of a cube are its corners


@register_attack
@dataclass(frozen=True, eq=False)
class RandomNoise(Attack):
    """The best of `draws` random points, in turn on the surface of the ball and within it.

    The weakest attack: a defense that noise breaks needs no adversary.
    """

    draws: int = 100
    name = "noise"
    family = "random"

    def __post_init__(self) -> None:
        check_count(self.draws, "draws")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        for draw in range(self.draws):
            rows = survivors.rows
            if not len(rows):
                break
            points = ball.inside(x, generator) if draw % 2 else ball.surface(x, generator)
            survivors.ask(points[rows], rows)
        return survivors.inputs


@register_attack
@dataclass(frozen=True, eq=False)
class RandomSearch(Attack):
    """Each query changes a few features of the best input so far, and is kept if it is better.

    How many features: log-uniform from one to all. The change is a random step in the ball's own
    norm: in l2 of a length that each example adapts by the one-fifth rule, in l-infinity from one
    face of the ball to the other. So the attack honors `scale` and `mutable` and needs no gradient,
    no bounds and no image. In regression it climbs the error.

    `queries`: the most answers asked for each example.
    """

    queries: int = 2000
    name = "random_search"
    family = "black-box"

    def __post_init__(self) -> None:
        check_count(self.queries, "queries", least=2)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        free = ball.free_features(x).cpu()
        if not len(free):
            return x
        survivors = Survivors(target, x, ball)
        rows = survivors.rows
        moved, length = x, x.new_full((len(x),), ball.eps)
        for _ in range(self.queries):
            before = survivors.gain[rows]
            alive = survivors.ask(moved, rows)
            better = survivors.gain[rows] > before
            length[rows] *= torch.where(better, GROWTH, GROWTH**-0.25).to(x)
            length.clamp_(SHORTEST[ball.norm] * ball.eps, LONGEST * ball.eps)
            rows = rows[alive]
            if not len(rows):
                break
            step = ball.steepest(_sparse_draw(x[rows], free, generator))
            moved = survivors.inputs[rows] + per_row(length[rows], x) * step
            moved = survivors.project(moved, rows)
        return survivors.inputs


def _sparse_draw(x: Tensor, free: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers (B,*) at a random choice of the free features, at least one, 0 elsewhere."""
    count = len(x)
    share = len(free) ** -torch.rand(count, 1, generator=generator)
    values = torch.randn(count, len(free), generator=generator)
    chosen = torch.rand(count, len(free), generator=generator) < share
    chosen[torch.arange(count), torch.randint(len(free), (count,), generator=generator)] = True
    drawn = torch.zeros(count, x[0].numel())
    drawn[:, free] = values * chosen
    return drawn.view(x.shape).to(x)
