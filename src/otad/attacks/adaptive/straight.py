"""The plainest attack on a nearest-neighbor rule: walk over to the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.base import Attack, Best, Target, register_attack
from otad.attacks.needs import Knowledge, Needs
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall


@register_attack
@dataclass(frozen=True, eq=False)
class Straight(Attack):
    """Straight lines from the example to training inputs that vote against its answer.

    Aims are the inputs of the `points` nearest such bank points (with a metric: nearest by keys),
    and the means of the nearest 3, 6, 12, ... of them up to `points`, over all wrong classes and
    over the class of each of the nearest. Each line is tried at the given `shares` of the radius.
    In regression, the aims are the bank points with the lowest and highest values among the nearest
    `reach`. For one map of the whole bank, points are the nearest by distance, and once more those
    whose tangents come first. Where the embedding does more than normalize, `train_x` (N,*), the
    inputs of the bank, has to be given.
    """

    points: int = 24
    shares: tuple[float, ...] = (1.0, 0.75, 0.5)
    reach: int = 200
    train_x: Tensor | None = None
    name = "straight"
    family = "adaptive"
    needs = Needs(train_inputs=True)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        return super().for_model(known, **{"train_x": known.train_x} | options)

    def __post_init__(self) -> None:
        check_count(self.points, "points")
        check_count(self.reach, "reach")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise InputError(f"shares: expected numbers in (0, 1], got {self.shares}")

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        best = Best(x)
        for bank in Neighborhood.views(target.model, x, self.train_x):
            for rows in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
                for aim in self._aims(bank, x[rows], target.targets(rows)):
                    for share in self.shares:
                        moved = along(x[rows], aim, ball, share)
                        best.offer(moved, target.gain(moved, rows), rows)
        return best.inputs

    def _aims(self, bank: Neighborhood, x: Tensor, y: Tensor) -> list[Tensor]:
        """Inputs (B,*) to walk to."""
        if y.is_floating_point():
            near = bank.nearest(x, None, self.reach)
            order = (bank.votes[near] - y[:, None]).argsort(1)
            count = max(1, min(self.points, near.shape[1]) // 2)
            ends = torch.cat([order[:, :count], order[:, -count:]], dim=1)
            return _inputs(bank, x, near.gather(1, ends))
        wrong = bank.is_wrong(y)
        near = bank.nearest(x, wrong, self.points)
        aims = _inputs(bank, x, near)
        sizes = _doubling(3, self.points)
        aims += [_mean(bank, x, near[:, :size]) for size in sizes]
        first = bank.votes[near[:, 0]]
        same = bank.nearest(x, wrong & (bank.votes[None] == first[:, None]), self.points)
        aims += [_mean(bank, x, same[:, :size]) for size in sizes]
        others = wrong & (bank.votes[None] != first[:, None])
        second = bank.votes[bank.nearest(x, others, 1)[:, 0]]
        same = bank.nearest(x, wrong & (bank.votes[None] == second[:, None]), self.points)
        return aims + [_mean(bank, x, same[:, :size]) for size in sizes]


def along(x: Tensor, aim: Tensor, ball: LpBall, share: float = 1.0) -> Tensor:
    """The point nearest to `aim` within a share of the radius.

    In l2 it lies on the line from x to `aim`; in l-infinity every feature goes as far as it can.
    """
    return ball.with_eps(share * ball.eps).project(aim, x)


def _inputs(bank: Neighborhood, x: Tensor, indices: Tensor) -> list[Tensor]:
    return [bank.training_inputs(column, x) for column in indices.unbind(1)]


def _mean(bank: Neighborhood, x: Tensor, indices: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for column in indices.unbind(1):  # one at a time: never B*K*d numbers at once
        total += bank.training_inputs(column, x)
    return total / indices.shape[1]


def _doubling(first: int, last: int) -> list[int]:
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= 2
    return sizes
