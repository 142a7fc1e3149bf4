"""The shortest step that makes chosen bank points the neighbors.

Bank point i is nearer than j to x + delta iff 2 <x_i - x_j, delta> > d_i^2 - d_j^2, in the space
where neighbors are sought: a half-space of steps. So the shortest step after which each of some
wrong points is nearer than each of some right ones is a projection on a polyhedron, found in its
dual. Tangents of the one potential of a whole bank meet in planes just as well.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.adaptive.polish import polish
from otad.attacks.base import Attack, Best, Target, register_attack
from otad.attacks.needs import Needs
from otad.checks import check_count
from otad.threat import LpBall

ITERATIONS = 150
OVERSHOOT = 1.02  # past the bisectors, on which the right points would still be level
FAR = 1e3  # times a step: its direction, to go as far as the ball allows


@register_attack
@dataclass(frozen=True)
class Bisector(Attack):
    """Across the bisector of one wrong and one right bank point, for several pairs.

    The pairs are those of the `pairs` nearest wrong and the K nearest right points. The shortest
    step across a bisector is along x_i - x_j; steps go just across it, and on to the radius.
    `polish`: so many steps of APGD go on from the best of them.
    """

    pairs: int = 10
    polish: int = 50
    name = "bisector"
    family = "adaptive"
    needs = Needs(affine_keys=True, gradients=True)

    def __post_init__(self) -> None:
        check_count(self.pairs, "pairs")
        check_count(self.polish, "polish", least=0)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        best = Best(x)
        for bank in Neighborhood.views(target.model, x):
            for rows in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
                self._cross(target, x[rows], rows, bank, ball, best)
        return polish(target, x, best.inputs, ball, self.polish)

    def _cross(
        self,
        target: Target,
        x: Tensor,
        rows: Tensor,
        bank: Neighborhood,
        ball: LpBall,
        best: Best,
    ) -> None:
        embedded = bank.embed(x)
        drawn, fled = _opponents(bank, x, target.targets(rows), self.pairs, bank.n_neighbors)
        ranks = bank.behind(embedded, fled)
        mean = bank.sites[fled].mean(1)
        middle = ranks.mean(1) if bank.by_tangents else _square(embedded - mean)
        others = (
            (bank.sites[fled[:, 0]], ranks[:, 0]),
            (bank.sites[fled[:, -1]], ranks[:, -1]),
            (mean, middle),
        )
        for i in drawn.unbind(1):
            near, rank = bank.sites[i], bank.behind(embedded, i[:, None])[:, 0]
            for other, before in others:
                gap = near - other
                length = ((rank - before) / (2 * _square(gap)).clamp_min(1e-12)).clamp_min(0)
                for stretch in (OVERSHOOT, 2.0, FAR):
                    step = gap * (length[:, None] * stretch if stretch < FAR else FAR)
                    moved = ball.project(bank.inputs(embedded + step, x), x)
                    best.offer(moved, target.gain(moved, rows), rows)


@register_attack
@dataclass(frozen=True)
class Region(Attack):
    """Greedy search over regions: sets of wrong bank points made nearer than all right ones near.

    Each of the `singles` nearest wrong points alone is to be nearer than the `opponents` nearest
    right points; so are, for each of the nearest wrong classes (`classes` of them; in regression
    for higher and for lower values) and each size in `sizes`, the nearest so many points of that
    class; then, `rounds` times, the same is asked again with the points that are nearest where this
    has led. `polish`: so many steps of APGD go on from the best of it all.
    """

    singles: int = 8
    classes: int = 3
    sizes: tuple[int, ...] = (3, 6)
    opponents: int = 20
    rounds: int = 3
    polish: int = 50
    name = "region"
    family = "adaptive"
    needs = Needs(affine_keys=True, gradients=True)

    def __post_init__(self) -> None:
        for field in ("singles", "polish"):
            check_count(getattr(self, field), field, least=0)
        for field in ("classes", "opponents", "rounds"):
            check_count(getattr(self, field), field)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        best = Best(x)
        places = range(2 if target.y.is_floating_point() else self.classes)
        for bank in Neighborhood.views(target.model, x):
            for rows in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
                self._try_singles(target, x[rows], rows, bank, ball, best)
                for place, size in itertools.product(places, self.sizes):
                    rows = rows[~target.is_done(best.gain[rows])]
                    if len(rows):
                        self._search(target, x[rows], rows, bank, ball, place, size, best)
        return polish(target, x, best.inputs, ball, self.polish)

    def _try_singles(
        self,
        target: Target,
        x: Tensor,
        rows: Tensor,
        bank: Neighborhood,
        ball: LpBall,
        best: Best,
    ) -> None:
        if self.singles:
            y = target.targets(rows)
            drawn, fled = _opponents(bank, x, y, self.singles, self.opponents)
            for one in drawn.split(1, dim=1):
                _step(target, x, rows, bank, ball, one, fled, best)

    def _search(
        self,
        target: Target,
        x: Tensor,
        rows: Tensor,
        bank: Neighborhood,
        ball: LpBall,
        place: int,
        size: int,
        best: Best,
    ) -> None:
        y, here = target.targets(rows), x
        for _ in range(self.rounds):
            drawn, fled = _opponents(bank, here, y, size, self.opponents, place)
            here = _step(target, x, rows, bank, ball, drawn, fled, best)


def _step(
    target: Target,
    x: Tensor,
    rows: Tensor,
    bank: Neighborhood,
    ball: LpBall,
    drawn: Tensor,
    fled: Tensor,
    best: Best,
) -> Tensor:
    """Try the shortest step, and the same direction up to the radius, which is returned."""
    embedded = bank.embed(x)
    gaps = bank.sites[drawn][:, :, None] - bank.sites[fled][:, None]
    need = bank.behind(embedded, drawn)[:, :, None] - bank.behind(embedded, fled)[:, None]
    step = shortest_step(gaps.flatten(1, 2), need.flatten(1))
    short = ball.project(bank.inputs(embedded + OVERSHOOT * step, x), x)
    far = ball.project(bank.inputs(embedded + FAR * step, x), x)
    for moved in (short, far):
        best.offer(moved, target.gain(moved, rows), rows)
    return far


def shortest_step(gaps: Tensor, need: Tensor) -> Tensor:
    """The shortest delta (B,d) with 2 <gaps_k, delta> >= need_k for all k, (B,n,d) and (B,n).

    delta = 2 sum mu_k gaps_k where mu >= 0 maximizes <need, mu> - |2 sum mu_k gaps_k|^2 / 2, by
    accelerated projected ascent.
    """
    gram = 4 * gaps @ gaps.mT
    # the largest eigenvalue, bounded by the largest row sum
    rate = 1 / gram.abs().sum(2).amax(1, keepdim=True).clamp_min(1e-12)
    weight = torch.zeros_like(need)
    ahead, momentum = weight, 1.0
    for _ in range(ITERATIONS):
        slope = need - (gram @ ahead[:, :, None])[:, :, 0]
        new = (ahead + rate * slope).clamp_min(0)
        grown = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / grown * (new - weight)
        weight, momentum = new, grown
    return 2 * (gaps.mT @ weight[:, :, None])[:, :, 0]


def _opponents(
    bank: Neighborhood, x: Tensor, y: Tensor, drawn: int, fled: int, place: int | None = None
) -> tuple[Tensor, Tensor]:
    """Bank points to draw near (B,drawn) and to get away from (B,fled).

    Wrong votes and right ones; with `place`, wrong votes of the class that comes so many-th. In
    regression, of the nearest points those with the values furthest from y, and those nearest to
    it; with `place` 0 the highest and the lowest values, with 1 the other way round.
    """
    if y.is_floating_point():
        near = bank.nearest(x, None, 10 * (drawn + fled))
        beyond = bank.votes[near] - y[:, None]
        beyond = beyond.abs() if place is None else (-1) ** place * beyond
        order = beyond.argsort(1, descending=True)
        ranked = near.gather(1, order)
        return ranked[:, :drawn], ranked[:, -fled:]
    wrong = bank.is_wrong(y)
    allowed = wrong
    if place is not None:
        for _ in range(place + 1):
            first = bank.votes[bank.nearest(x, allowed, 1)[:, 0]]
            of_class = bank.votes[None] == first[:, None]
            chosen, allowed = allowed & of_class, allowed & ~of_class
        allowed = torch.where(chosen.any(1, keepdim=True), chosen, wrong)
    return bank.nearest(x, allowed, drawn), bank.nearest(x, ~wrong, fled)


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1)
