"""A smooth stand-in for the choice of neighbors, and ascent on it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.adaptive.polish import polish
from otad.attacks.base import Attack, Best, Target, register_attack
from otad.attacks.gradients import value_and_gradient
from otad.attacks.needs import Needs
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True)
class SoftKnn(Attack):
    """Every bank point i votes with weight exp(-|e - x_i|^2 / T), e the embedded input.

    The attack climbs log(weight of the wrong votes) - log(weight of the right ones); its gradient
    points from the right neighbors to the wrong ones. In regression it climbs the weighted mean of
    the votes, and once more goes down it. T is a share of the squared distance to the K-th neighbor
    of the example, and each share in `temperatures` is tried: small ones see the nearest points
    alone, large ones the whole region. With `targets` > 0 the wrong votes count for one class at a
    time, for so many of the classes that come nearest. The model is asked every `ask_every` steps.
    `polish`: so many steps of APGD go on from the best point.

    For one map of the whole bank the same is done once more with tangents of its potential in the
    place of squared distances: their log-sum-exp is a smooth potential, whose gradient map sees all
    points where that of the model sees one.
    """

    temperatures: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    steps: int = 40
    ask_every: int = 5
    targets: int = 3
    random_start: bool = False
    polish: int = 50
    name = "soft_knn"
    family = "adaptive"
    needs = Needs(bank=True, gradients=True)

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.ask_every, "ask_every")
        check_count(self.targets, "targets", least=0)
        check_count(self.polish, "polish", least=0)
        if not self.temperatures or min(self.temperatures) <= 0:
            raise InputError(
                f"temperatures: expected positive shares, at least one, got {self.temperatures}"
            )

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        best = Best(x)
        places = range(2 if target.y.is_floating_point() else max(1, self.targets))
        for bank in Neighborhood.views(target.model, x):
            for rows in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
                for temperature, place in itertools.product(self.temperatures, places):
                    rows = rows[~target.is_done(best.gain[rows])]
                    if len(rows):
                        self._climb(
                            target, x, ball, rows, bank, temperature, place, best, generator
                        )
        return polish(target, x, best.inputs, ball, self.polish)

    def _climb(
        self,
        target: Target,
        x: Tensor,
        ball: LpBall,
        rows: Tensor,
        bank: Neighborhood,
        temperature: float,
        place: int,
        best: Best,
        generator: torch.Generator,
    ) -> None:
        start, y = x[rows], target.targets(rows)
        with torch.no_grad():
            squared = bank.ranks(bank.embed(start))
            width = bank.width(squared, temperature)
            sides = None if y.is_floating_point() else self._sides(bank, squared, y, place)

        def stand_in(inputs: Tensor) -> Tensor:
            scores = -bank.ranks(bank.embed(inputs)) / width
            if sides is not None:
                return _advantage(scores, sides)
            mean = _mean_vote(scores, bank.votes)
            return -mean if place else mean

        moved = ball.inside(start, generator) if self.random_start else start
        for step in range(1, self.steps + 1):
            _, gradient = value_and_gradient(stand_in, moved)
            # From a stride across the ball down to none: the stand-in is smooth, so few will do.
            stride = ball.eps * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2
            moved = ball.project(moved + stride * ball.steepest(gradient), start)
            if step % self.ask_every == 0 or step == self.steps:
                best.offer(moved, target.gain(moved, rows), rows)

    def _sides(self, bank: Neighborhood, squared: Tensor, y: Tensor, place: int) -> Tensor:
        """+1 for bank points (B,N) to draw near, -1 for those to get away from, 0 for others."""
        wrong = bank.is_wrong(y)
        if self.targets == 0:
            return torch.where(wrong, 1, -1)
        aims = bank.nearest_classes(squared, y)
        aim = aims[:, min(place, aims.shape[1] - 1)]
        chosen = (bank.votes[None] == aim[:, None]) & wrong
        return chosen.to(torch.int8) - (~wrong).to(torch.int8)


def _mean_vote(scores: Tensor, votes: Tensor) -> Tensor:
    """Regression: what the bank says (B,), from scores (B,N)."""
    mean: Tensor = scores.softmax(1) @ votes.to(scores)
    return mean


def _advantage(scores: Tensor, sides: Tensor) -> Tensor:
    """Classification: how much more the drawn weigh than the fled (B,), from scores (B,N)."""
    drawn = scores.masked_fill(sides != 1, -math.inf).logsumexp(1)
    fled = scores.masked_fill(sides != -1, -math.inf).logsumexp(1)
    # Without a point on one side there is nothing to compare; the other side alone still says where
    return torch.where(drawn.isfinite(), drawn, 0.0) - torch.where(fled.isfinite(), fled, 0.0)
