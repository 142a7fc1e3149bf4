"""The simplest attack on a nearest-neighbor rule: move towards training inputs of other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from otad.attacks.adaptive.blocks import Block, blocks_of
from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.base import Attack, Survivors, Target, register_attack
from otad.attacks.needs import Knowledge, Needs
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

REACH = 200  # in regression: the nearest points among which the extreme values are chosen


@register_attack
@dataclass(frozen=True, eq=False)
class Straight(Attack):
    """Straight lines from the example to training inputs that vote against its answer.

    Aims are the inputs of the `points` nearest such bank points (with a metric: nearest by keys),
    and the means of the nearest 3, 6, 12, ... of them up to `points`, over all wrong classes and
    over the class of each of the nearest. Each line is tried at the given `shares` of the radius.
    In regression, the aims are the lowest and highest values among the nearest bank points. For a
    global map, points are the nearest by distance, and once more those whose tangents come first.
    Where the embedding does more than normalize, `train_x` (N,*), the inputs of the bank, must be
    given.
    """

    points: int = 24
    shares: tuple[float, ...] = (1.0, 0.75, 0.5)
    train_x: Tensor | None = None
    name = "straight"
    family = "adaptive"
    needs = Needs(train_inputs=True)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        return super().for_model(known, **{"train_x": known.train_x} | options)

    def __post_init__(self) -> None:
        check_count(self.points, "points")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise InputError(f"shares: expected numbers in (0, 1], got {self.shares}")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        for block in blocks_of(survivors, self.train_x):
            for aim in self._aims(block):
                for share in self.shares:
                    # Nearest to the aim within a share of the radius: in l2 on the line to it, in
                    # l-infinity every feature goes as far as it can.
                    block.offer(ball.with_eps(share * ball.eps).project(aim, block.x))
        return survivors.inputs

    def _aims(self, block: Block) -> list[Tensor]:
        """Inputs (n,*) to move towards."""
        bank, x, y = block.bank, block.x, block.y
        if block.is_regression:
            near = bank.nearest(x, None, REACH)
            order = (bank.votes[near] - y[:, None]).argsort(1)
            count = max(1, min(self.points, near.shape[1]) // 2)
            ends = torch.cat([order[:, :count], order[:, -count:]], dim=1)
            return _inputs(bank, x, near.gather(1, ends))
        wrong = bank.is_wrong(y)
        near = bank.nearest(x, wrong, self.points)
        first = bank.votes[near[:, 0]][:, None]
        others = wrong & (bank.votes[None] != first)
        second = bank.votes[bank.nearest(x, others, 1)[:, 0]][:, None]
        groups = [near]
        for aim in (first, second):
            groups.append(bank.nearest(x, wrong & (bank.votes[None] == aim), self.points))
        sizes = [3 * 2**k for k in range(self.points.bit_length()) if 3 * 2**k <= self.points]
        means = [_mean(bank, x, group[:, :size]) for group in groups for size in sizes]
        return _inputs(bank, x, near) + means


def _inputs(bank: Neighborhood, x: Tensor, indices: Tensor) -> list[Tensor]:
    return [bank.training_inputs(column, x) for column in indices.unbind(1)]


def _mean(bank: Neighborhood, x: Tensor, indices: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for column in indices.unbind(1):  # one at a time: never B*K*d numbers at once
        total += bank.training_inputs(column, x)
    return total / indices.shape[1]
