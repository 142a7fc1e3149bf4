"""Ascent on a smooth approximation of the choice of neighbors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.blocks import Block, blocks_of, polish
from otad.attacks.base import Attack, Survivors, Target, register_attack, value_and_gradient
from otad.attacks.needs import Needs
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

ASK_EVERY = 5  # steps: the smooth approximation needs no answers of the model


@register_attack
@dataclass(frozen=True)
class SoftKnn(Attack):
    """Every bank point i votes with weight exp(-|e - x_i|^2 / T), e the embedded input.

    The attack climbs log(weight of the wrong votes) - log(weight of the right ones), where wrong
    votes are those for one class at a time, for the `targets` classes that come nearest. Its
    gradient points from the right neighbors to the wrong ones. In regression it climbs the weighted
    mean of the votes, and then descends it. T is a share of the squared distance to the K-th
    neighbor of the example, and each share in `temperatures` is tried: small ones see the nearest
    points alone, large ones the whole region. `polish`: so many steps of APGD continue from the
    best point.

    For a global map the same is done once more with tangents of its potential in place of squared
    distances: their log-sum-exp is a smooth potential, whose gradient map sees all points where
    that of the model sees one.
    """

    temperatures: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    steps: int = 40
    targets: int = 3
    polish: int = 50
    name = "soft_knn"
    family = "adaptive"
    needs = Needs(bank=True, gradients=True)

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.targets, "targets")
        check_count(self.polish, "polish", least=0)
        check_temperatures(self.temperatures)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        places = range(2 if target.y.is_floating_point() else self.targets)
        for block in blocks_of(survivors):
            for temperature, place in itertools.product(self.temperatures, places):
                block = block.remaining()
                if len(block):
                    self._climb(block, temperature, place)
        return polish(survivors, self.polish)

    def _climb(self, block: Block, temperature: float, place: int) -> None:
        bank, ball, moved = block.bank, block.survivors.ball, block.x
        with torch.no_grad():
            ranks = bank.ranks(bank.embed(moved))
            width = bank.width(ranks, temperature)
            sides = None if block.is_regression else _sides(block, ranks, place)

        def smooth(inputs: Tensor) -> Tensor:
            scores = -bank.ranks(bank.embed(inputs)) / width
            if sides is not None:
                return _advantage(scores, sides)
            mean: Tensor = scores.softmax(1) @ bank.votes.to(scores)
            return -mean if place else mean

        for step in range(1, self.steps + 1):
            _, gradient = value_and_gradient(smooth, moved)
            # From a step across the ball down to none: what is climbed is smooth, so few will do.
            stride = ball.eps * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2
            moved = block.survivors.project(moved + stride * ball.steepest(gradient), block.rows)
            if step % ASK_EVERY == 0 or step == self.steps:
                block.offer(moved)


def check_temperatures(shares: tuple[float, ...]) -> None:
    if not shares or min(shares) <= 0:
        raise InputError(f"temperatures: expected positive shares, at least one, got {shares}")


def _sides(block: Block, ranks: Tensor, place: int) -> Tensor:
    """+1 for bank points (n,N) to move towards, -1 for those to move away from, 0 for others."""
    bank, wrong = block.bank, block.bank.is_wrong(block.y)
    aims = bank.nearest_classes(ranks, block.y)
    aim = aims[:, min(place, aims.shape[1] - 1)]
    chosen = (bank.votes[None] == aim[:, None]) & wrong
    return chosen.to(torch.int8) - (~wrong).to(torch.int8)


def _advantage(scores: Tensor, sides: Tensor) -> Tensor:
    """How much more the wrong points weigh than the right ones (n,), from scores (n,N)."""
    wrong = scores.masked_fill(sides != 1, -math.inf).logsumexp(1)
    right = scores.masked_fill(sides != -1, -math.inf).logsumexp(1)
    # Without a point on one side, the other side alone still says where to go.
    return torch.where(wrong.isfinite(), wrong, 0.0) - torch.where(right.isfinite(), right, 0.0)
