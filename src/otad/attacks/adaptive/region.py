"""The shortest step that makes chosen bank points the neighbors.

Bank point i is nearer than j to x + delta iff 2 <x_i - x_j, delta> > d_i^2 - d_j^2, in the space
where neighbors are searched: a half-space of steps. So the shortest step after which each of some
wrong points is nearer than each of some right ones is a projection on a polyhedron, found in its
dual. Tangents of the potential of a global map meet in planes just as well.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.blocks import Block, blocks_of, polish
from otad.attacks.base import Attack, Survivors, Target, register_attack
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
    `polish`: so many steps of APGD continue from the best of them.
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
        survivors = Survivors(target, x, ball)
        for block in blocks_of(survivors):
            self._cross(block)
        return polish(survivors, self.polish)

    def _cross(self, block: Block) -> None:
        bank, embedded = block.bank, block.bank.embed(block.x)
        wrong, right = _opponents(block, block.x, self.pairs, bank.n_neighbors)
        ranks, mean = bank.ranks_of(embedded, right), bank.sites[right].mean(1)
        of_mean = ranks.mean(1) if bank.by_tangents else _square(embedded - mean)
        others = (
            (bank.sites[right[:, 0]], ranks[:, 0]),
            (bank.sites[right[:, -1]], ranks[:, -1]),
            (mean, of_mean),
        )
        for i in wrong.unbind(1):
            near, rank = bank.sites[i], bank.ranks_of(embedded, i[:, None])[:, 0]
            for other, before in others:
                gap = near - other
                length = ((rank - before) / (2 * _square(gap)).clamp_min(1e-12)).clamp_min(0)
                for stretch in (OVERSHOOT, 2.0, FAR):
                    step = gap * (length[:, None] * stretch if stretch < FAR else FAR)
                    block.try_point(embedded + step)


@register_attack
@dataclass(frozen=True)
class Region(Attack):
    """Greedy search over regions: sets of wrong bank points made nearer than all right ones near.

    Each of the `singles` nearest wrong points alone is made nearer than the `opponents` nearest
    right points; so are, for each of the nearest wrong classes (`classes` of them; in regression
    for higher and for lower values) and each size in `sizes`, the nearest so many points of that
    class; then, `rounds` times, the same is tried with the points that are nearest at the input so
    found. `polish`: so many steps of APGD continue from the best of them all.
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
        survivors = Survivors(target, x, ball)
        places = range(2 if target.y.is_floating_point() else self.classes)
        for block in blocks_of(survivors):
            if self.singles:
                wrong, right = _opponents(block, block.x, self.singles, self.opponents)
                for one in wrong.split(1, dim=1):
                    _step(block, one, right)
            for place, size in itertools.product(places, self.sizes):
                block = block.remaining()
                here = block.x
                for _ in range(self.rounds if len(block) else 0):
                    here = _step(block, *_opponents(block, here, size, self.opponents, place))
        return polish(survivors, self.polish)


def _step(block: Block, wrong: Tensor, right: Tensor) -> Tensor:
    """Try the shortest step after which the wrong points (n,p) are nearer than the right ones
    (n,q), and the same direction up to the radius; the inputs (n,*) there."""
    bank, embedded = block.bank, block.bank.embed(block.x)
    gaps = bank.sites[wrong][:, :, None] - bank.sites[right][:, None]
    need = bank.ranks_of(embedded, wrong)[:, :, None] - bank.ranks_of(embedded, right)[:, None]
    step = shortest_step(gaps.flatten(1, 2), need.flatten(1))
    block.try_point(embedded + OVERSHOOT * step)
    return block.try_point(embedded + FAR * step)


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
    block: Block, x: Tensor, wrong_count: int, right_count: int, place: int | None = None
) -> tuple[Tensor, Tensor]:
    """Bank points near x (n,*) to move towards (n,wrong_count), and away from (n,right_count).

    Wrong votes and right ones; with `place`, wrong votes of the class that is the place-th nearest.
    In regression, of the nearest points those with the values furthest from y, and those nearest to
    it; with `place` 0 the highest and the lowest values, with 1 the other way round.
    """
    bank, y = block.bank, block.y
    if block.is_regression:
        near = bank.nearest(x, None, 10 * (wrong_count + right_count))
        beyond = bank.votes[near] - y[:, None]
        beyond = beyond.abs() if place is None else (-1) ** place * beyond
        ranked = near.gather(1, beyond.argsort(1, descending=True))
        return ranked[:, :wrong_count], ranked[:, -right_count:]
    wrong = bank.is_wrong(y)
    allowed = wrong
    if place is not None:
        for _ in range(place + 1):
            first = bank.votes[bank.nearest(x, allowed, 1)[:, 0]]
            of_class = bank.votes[None] == first[:, None]
            chosen, allowed = allowed & of_class, allowed & ~of_class
        allowed = torch.where(chosen.any(1, keepdim=True), chosen, wrong)
    return bank.nearest(x, allowed, wrong_count), bank.nearest(x, ~wrong, right_count)


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1)
