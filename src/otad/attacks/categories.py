"""A search through the categories of a table, which small gradient steps never switch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.pgd import Pgd
from otad.attacks.target import Survivors, Target, gain_of
from otad.checks import check_count
from otad.threat import LpBall, per_row, switched


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Categories(Attack):
    """A beam search through the categories of a table, with PGD on the other features.

    It tries every category of every group. From the best points so far it then switches one more
    group, as many as the ball allows. From each of these points PGD moves the numeric features.
    With a beam as wide as there are combinations of categories, no combination is missed.

    Parameters
    ----------
    beam : int
        How many of the best points of each example are continued.
    steps : int
        The number of PGD steps from each of them.

    Examples
    --------
    The columns are one-hot: the ball below lets an attacker switch the category.

    >>> import torch
    >>> import otad
    >>> model, x, y = torch.nn.Identity().eval(), torch.eye(3), torch.arange(3)
    >>> ball = otad.L2(1.5, groups=[(0, 1, 2)])
    >>> attack = otad.attacks.Categories(beam=2, steps=5)
    >>> attack(model, x, y, ball, generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    beam: int = option(8, check_count)
    steps: int = option(20, check_count)
    name = "categories"
    version = 2
    family = "adaptive"
    needs = Needs(groups=True)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        names = torch.rand(x[0].numel(), generator=generator, dtype=torch.float64).to(x.device)
        beams = [x]  # the best point of every example, then the second best of every example, ...
        for count in range(1, ball.n_switches + 1):
            tried = [point for start in beams for point in self._switched_once(start, x, ball)]
            keys = torch.stack([point.flatten(1).double() @ names for point in tried])
            gains = torch.stack([self._gain(survivors, point) for point in tried])
            beams = []
            for _ in range(min(self.beam, len(tried))):
                best, chosen = gains.argmax(0, keepdim=True), x.clone()
                for number, point in enumerate(tried):
                    chosen = torch.where(per_row(best[0] == number, x), point, chosen)
                beams.append(chosen)
                gains = gains.masked_fill(keys == keys.gather(0, best), -math.inf)
            for start in beams:
                self._climb(survivors, start, count)
        return survivors.inputs

    def _switched_once(self, start: Tensor, x: Tensor, ball: LpBall) -> list[Tensor]:
        """Return the points that have another category in one group, where that is allowed.

        Rows whose category cannot change are returned as they are."""
        found, groups = [], ball.groups or ()
        free = {*ball.free_features(x).tolist()}
        for number, group in enumerate(groups):
            own = x.flatten(1)[:, list(group)].argmax(1)
            leaves = torch.tensor([column in free for column in group], device=x.device)[own]
            for place, column in enumerate(group):
                if column in free:
                    aims = torch.full((len(x), len(groups)), place, device=x.device)
                    chosen = torch.zeros_like(aims, dtype=torch.bool)
                    chosen[:, number] = leaves
                    found.append(switched(start, groups, aims, chosen))
        return found or [start]

    def _gain(self, survivors: Survivors, point: Tensor) -> Tensor:
        """Return the gain (B,) of points (B,*), -inf for examples that are already broken."""
        rows, target = survivors.rows, survivors.target
        gain = torch.full_like(survivors.gain, -math.inf)
        if len(rows):
            outputs = target(point[rows], rows)
            survivors.judge(point[rows], outputs, rows)
            gain[rows] = gain_of(outputs, target.targets(rows)).to(gain)
        return gain

    def _climb(self, survivors: Survivors, start: Tensor, count: int) -> None:
        """Run PGD on the other features from points `start` (B,*) with `count` switched groups."""
        target, rows = survivors.target, survivors.rows
        if not len(rows):
            return
        ball = survivors.ball.without_groups(start, count)
        if ball.eps == 0 or not len(ball.free_features(start)):
            return
        inner, pgd = Survivors(target, start, ball), Pgd(steps=self.steps)
        pgd.climb(inner, pgd.objective(target, start, ball), start[rows], rows)
        survivors.offer(inner.inputs[rows], rows)
