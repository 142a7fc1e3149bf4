"""Ascent on the place of an input among the bank, where no straight line leads there.

Behind a metric, or an embedding that does more than normalize, steps to bank points are not known
in closed form, but where a step leads has a gradient. Two things determine an answer: which points
are the neighbors, and what weight each has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.blocks import Block, blocks_of, polish
from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.adaptive.soft_knn import check_temperatures
from otad.attacks.apgd import Apgd
from otad.attacks.base import (
    Attack,
    Evaluated,
    Survivors,
    Target,
    register_attack,
    value_and_gradient,
)
from otad.attacks.needs import Needs
from otad.attacks.objectives import Objective, loss_for
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import L2, LpBall

LOSSES = ("rank", "vote", "joint")
SIGHT = 4.0  # the nearest wrong points weigh at least exp(-SIGHT) of the nearest right ones
UNIT = L2(1.0)


@register_attack
@dataclass(frozen=True, eq=False)
class Keys(Attack):
    """With s_i the squared distance of bank point i where neighbors are searched (its key), APGD
    climbs in turn, while the model judges every iterate:

    - "rank": the mean of s over the K/2 nearest right points less that over the K nearest points of
      a wrong class, both searched again at each step, for each of the `targets` classes that come
      nearest. Once the latter are all nearer, the answer can be no other.
    - "vote": the margin (in regression the error) of sum_i p_i outputs_i, with p the softmax of
      -s / T: points count by how clearly the head reads their features. T is a share of the K-th
      of the s where the input now is, for each share in `temperatures`, or as much as it takes to
      see the nearest wrong points.
    - "joint": the model's own margin, along its gradient at fixed neighbors and that of "vote",
      both of length 1: neighbors and their weights at a time, from the best point so far.

    From the example itself, and again from `restarts` - 1 random points. `polish`: so many steps of
    APGD with the model's own gradient continue from the best point. "rank" is for classes alone.
    """

    losses: tuple[str, ...] = LOSSES
    steps: int = 50
    targets: int = 3
    temperatures: tuple[float, ...] = (0.3, 0.05)
    restarts: int = 2
    polish: int = 50
    name = "keys"
    family = "adaptive"
    needs = Needs(bank=True, gradients=True)

    def __post_init__(self) -> None:
        for field in ("steps", "targets", "restarts"):
            check_count(getattr(self, field), field)
        check_count(self.polish, "polish", least=0)
        if not self.losses or not {*self.losses} <= {*LOSSES}:
            raise InputError(f"losses: expected some of {LOSSES}, got {self.losses}")
        check_temperatures(self.temperatures)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, climber = Survivors(target, x, ball), Apgd(steps=self.steps)
        starts = [x, *(ball.inside(x, generator) for _ in range(self.restarts - 1))]
        for block in blocks_of(survivors):
            for start, (objective, from_best) in itertools.product(starts, [*self._plans(block)]):
                rows = survivors.among(block.rows)
                if len(rows):
                    begin = survivors.inputs if from_best else start
                    climber.climb(survivors, objective, begin[rows], rows)
        return polish(survivors, self.polish)

    def _plans(self, block: Block) -> Iterator[tuple[Objective, bool]]:
        """What to climb, and whether from the best point so far."""
        for name in self.losses:
            if name != "rank":
                is_joint = name == "joint"
                for temperature in self.temperatures:
                    yield _by_vote(block, temperature, jointly=is_joint), is_joint
            elif not block.is_regression:
                with torch.no_grad():
                    ranks = block.bank.ranks(block.bank.embed(block.x))
                aims = block.bank.nearest_classes(ranks, block.y)
                for place in range(min(self.targets, aims.shape[1] - 1)):
                    yield _by_rank(block, aims[:, place]), False


def _by_rank(block: Block, aims: Tensor) -> Objective:
    """Towards a class `aims` (n,) for each example of the block."""
    bank, target = block.bank, block.target

    def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
        aim = aims[rows - block.rows[0]]  # rows of a block are consecutive

        def lead(inputs: Tensor) -> Tensor:
            embedded = bank.embed(inputs)
            with torch.no_grad():
                ranks = bank.ranks(embedded)
                right = ~bank.is_wrong(target.targets(rows))
                right_points = _first(ranks, right, max(1, bank.n_neighbors // 2))
                of_class = bank.votes[None] == aim[:, None]
                wrong_points = _first(ranks, of_class, bank.n_neighbors)
            away = _mean_rank(bank, embedded, *right_points)
            return away - _mean_rank(bank, embedded, *wrong_points)

        return Evaluated(target(moved, rows), *value_and_gradient(lead, moved))

    return evaluate


def _by_vote(block: Block, temperature: float, *, jointly: bool) -> Objective:
    """The loss of the soft vote of the bank; `jointly`: that of the model, along both gradients."""
    bank, target = block.bank, block.target
    loss = loss_for("margin", target.y)

    def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
        y = target.targets(rows)

        def voted(inputs: Tensor) -> Tensor:
            ranks = bank.ranks(bank.embed(inputs))
            width = _width(bank, ranks.detach(), temperature, y)
            return loss((-ranks / width).softmax(1) @ bank.outputs, y)

        if not jointly:
            outputs = target(moved, rows)
            return Evaluated(outputs, *value_and_gradient(voted, moved))
        own = target.evaluate(moved, loss, rows)
        _, by_keys = value_and_gradient(voted, moved)
        return own._replace(gradient=UNIT.steepest(own.gradient) + UNIT.steepest(by_keys))

    return evaluate


def _width(bank: Neighborhood, ranks: Tensor, temperature: float, y: Tensor) -> Tensor:
    """T (n,1)."""
    width = bank.width(ranks, temperature)
    if not y.is_floating_point():
        wrong = bank.is_wrong(y)
        others = ranks.masked_fill(~wrong, math.inf).amin(1, keepdim=True)
        own = ranks.masked_fill(wrong, math.inf).amin(1, keepdim=True)
        width = torch.maximum(width, ((others - own) / SIGHT).nan_to_num(0.0, 0.0, 0.0))
    return width


def _first(ranks: Tensor, allowed: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` points (n,count) first in rank (n,N) of those allowed, and which of them are."""
    found = ranks.masked_fill(~allowed, math.inf).topk(min(count, ranks.shape[1]), largest=False)
    return found.indices, found.values.isfinite()


def _mean_rank(bank: Neighborhood, embedded: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
    """Of the points (n,k) that count (n,k)."""
    ranks = bank.ranks_of(embedded, indices) * counts
    return ranks.sum(1) / counts.sum(1).clamp_min(1)
