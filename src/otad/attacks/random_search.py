"""Random search with an adapting step: a black-box attack on inputs of any shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, Best, Target, gain_of, register_attack
from otad.checks import check_count
from otad.threat import LpBall

GROWTH = 1.5  # of the step after a success; four failures undo it (the one-fifth rule)
LONGEST = 2.0  # step, in units of eps: across the ball
SHORTEST = {"l2": 2.0**-10, "linf": LONGEST}  # the best points of a cube are its corners


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
        free = _free_features(x, ball)
        if not len(free):
            return x
        best = Best(x)
        rows = torch.arange(len(x), device=x.device)
        moved, length = x, x.new_full((len(x),), ball.eps)
        for _ in range(self.queries):
            outputs = target(moved, rows)
            broken = target.is_broken(outputs, rows)
            gain = gain_of(outputs, target.targets(rows)).masked_fill(broken, math.inf)
            better = best.offer(moved, gain, rows)
            length[rows] *= torch.where(better, GROWTH, GROWTH**-0.25).to(x)
            length.clamp_(SHORTEST[ball.norm] * ball.eps, LONGEST * ball.eps)
            rows = rows[~broken]
            if not len(rows):
                break
            step = ball.steepest(_sparse_draw(x[rows], free, generator))
            reach = length[rows].view(-1, *[1] * (x.dim() - 1))
            moved = ball.project(best.inputs[rows] + reach * step, x[rows])
        return best.inputs


def _free_features(x: Tensor, ball: LpBall) -> Tensor:
    """The numbers of the features of a flat input that can change, on the CPU."""
    if ball.mutable is None:
        return torch.arange(x[0].numel())
    return ball.mutable.flatten().nonzero()[:, 0].cpu()


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
