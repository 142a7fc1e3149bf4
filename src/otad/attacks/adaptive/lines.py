"""Steps towards wrong bank points that are known in closed form. Bank point i is nearer than j to
x + delta iff 2 <x_i - x_j, delta> > d_i^2 - d_j^2, in the space where neighbors are searched. So
the shortest step after which some wrong points are nearer than some right ones is a projection on
a polyhedron. Tangents of the potential of a global map meet in planes just as well."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import BankAttack, Block, blocks_of
from otad.attacks.base import Attack, Survivors, Target, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.pgd import Apgd
from otad.checks import check_count, check_positive
from otad.model.otad import OTAD
from otad.threat import LpBall

REACH = 200  # in regression: the nearest points among which the extreme values are chosen
ITERATIONS = 150
OVERSHOOT = 1.02  # past the bisectors, on which the right points would still be level
STRIDE = 0.2  # of the radius: the length of a pull
FAR = 1e3  # times a step: its direction, to go as far as the ball allows


@register_attack
@dataclass(frozen=True, eq=False)
class Straight(Attack):
    """Straight lines from the example to training inputs that vote against its answer, tried at the
    given `shares` of the radius.

    Aims are the inputs of the `points` nearest such bank points (with a metric: nearest by keys),
    and the means of the nearest 3, 6, 12, ... of them, over all wrong classes and over the two
    nearest; in regression, the lowest and highest values among the nearest points. For a global
    map, points are the nearest by distance, and once more those whose tangents come first. Where
    the embedding does more than normalize, `train_x` (N,*), the bank's inputs, must be given."""

    points: int = option(24, check_count)
    shares: tuple[float, ...] = option((1.0, 0.75, 0.5), check_positive, most=1.0)
    train_x: Tensor | None = field(default=None, metadata={"known": "train_x"})
    name = "straight"
    family = "adaptive"
    needs = Needs(train_inputs=True)

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
            return [bank.training_inputs(i, x) for i in near.gather(1, ends).unbind(1)]
        wrong = bank.is_wrong(y)
        near = bank.nearest(x, wrong, self.points)
        first = bank.votes[near[:, 0]][:, None]
        others = wrong & (bank.votes[None] != first)
        second = bank.votes[bank.nearest(x, others, 1)[:, 0]][:, None]
        of_class = [wrong & (bank.votes[None] == aim) for aim in (first, second)]
        groups = [near, *(bank.nearest(x, allowed, self.points) for allowed in of_class)]
        sizes = [3 * 2**k for k in range(self.points.bit_length()) if 3 * 2**k <= self.points]
        aims = [bank.training_inputs(i, x) for i in near.unbind(1)]
        for group, size in itertools.product(groups, sizes):
            total = torch.zeros_like(x)
            for i in group[:, :size].unbind(1):  # one at a time: never B*K*d numbers at once
                total += bank.training_inputs(i, x)
            aims.append(total / min(size, group.shape[1]))
        return aims


@register_attack
@dataclass(frozen=True)
class Bisector(BankAttack):
    """Across the bisector of one wrong and one right bank point, for all pairs of the `pairs`
    nearest wrong and the K nearest right points. The shortest step across a bisector is along
    x_i - x_j; steps go just across it, and on to the radius."""

    pairs: int = option(10, check_count)
    name = "bisector"
    needs = Needs(affine_keys=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        for block in blocks_of(survivors):
            bank, embedded = block.bank, block.bank.embed(block.x)
            wrong, right = _opponents(block, block.x, self.pairs, bank.n_neighbors)
            ranks, mean = bank.ranks_of(embedded, right), bank.sites[right].mean(1)
            of_mean = ranks.mean(1) if bank.by_tangents else (embedded - mean).square().sum(1)
            others = [(bank.sites[right[:, place]], ranks[:, place]) for place in (0, -1)]
            others.append((mean, of_mean))
            for i, (other, before) in itertools.product(wrong.unbind(1), others):
                gap, rank = bank.sites[i] - other, bank.ranks_of(embedded, i[:, None])[:, 0]
                square = gap.square().sum(1)
                length = ((rank - before) / (2 * square).clamp_min(1e-12)).clamp_min(0)
                for stretch in (OVERSHOOT, 2.0, FAR):
                    step = gap * (length[:, None] * stretch if stretch < FAR else FAR)
                    block.try_point(embedded + step)


@register_attack
@dataclass(frozen=True)
class Region(BankAttack):
    """Greedy search over regions: sets of wrong bank points made nearer than all right ones near.

    Each of the `singles` nearest wrong points alone is made nearer than the `opponents` nearest
    right points; so are, for each of the `classes` nearest wrong classes (in regression for higher
    and for lower values) and each size in `sizes`, the nearest so many points of that class; then,
    `rounds` times, the same is tried with the points that are nearest at the input so found."""

    singles: int = option(8, check_count, least=0)
    classes: int = option(3, check_count)
    sizes: tuple[int, ...] = (3, 6)
    opponents: int = option(20, check_count)
    rounds: int = option(3, check_count)
    name = "region"
    needs = Needs(affine_keys=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        places = range(2 if survivors.target.y.is_floating_point() else self.classes)
        for block in blocks_of(survivors):
            if self.singles:
                wrong, right = _opponents(block, block.x, self.singles, self.opponents)
                for one in wrong.split(1, dim=1):
                    _step(block, one, right)
            for place, size in itertools.product(places, self.sizes):
                block = block.remaining()
                here = block.x
                for _ in range(self.rounds if len(block.rows) else 0):
                    here = _step(block, *_opponents(block, here, size, self.opponents, place))


@register_attack
@dataclass(frozen=True)
class Pull(BankAttack):
    """Steps towards the mean of the nearest bank points of a wrong class and away from that of the
    nearest right ones, searched again after each of the `steps`; then APGD with the model's own
    gradient, for `polish` steps. So for each of the `classes` nearest wrong classes (in regression
    for higher and for lower values) and each number of points in `sizes`: the best start of an
    ascent is often not the input that came closest to a wrong answer."""

    classes: int = option(5, check_count)
    sizes: tuple[int, ...] = (1, 3, 10)
    steps: int = option(20, check_count)
    name = "pull"
    needs = Needs(affine_keys=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        target, ball = survivors.target, survivors.ball
        climber = Apgd(steps=max(1, self.polish))
        objective = climber.objective(target, survivors.x, ball)
        climbs = self.polish > 0 and isinstance(target.model, OTAD)
        places = range(2 if target.y.is_floating_point() else self.classes)
        for block in blocks_of(survivors):
            for place, size in itertools.product(places, self.sizes):
                block = block.remaining()
                if not len(block.rows):
                    break
                here, bank = block.x, block.bank
                for _ in range(self.steps):
                    wrong, right = (
                        bank.sites[some].mean(1)
                        for some in _opponents(block, here, size, size, place)
                    )
                    ahead = bank.inputs(bank.embed(here) + wrong - right, here) - here
                    stride = STRIDE * ball.eps * ball.steepest(ahead)
                    here = survivors.project(here + stride, block.rows)
                    block.offer(here)
                rows = survivors.among(block.rows)
                if climbs and len(rows):
                    start = here[torch.isin(block.rows, rows)]
                    climber.climb(survivors, objective, start, rows)


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
    """The shortest delta (B,d) with 2 <gaps_k, delta> >= need_k for all k, (B,n,d) and (B,n):
    2 sum mu_k gaps_k where mu >= 0 maximizes <need, mu> - |2 sum mu_k gaps_k|^2 / 2, by
    accelerated projected ascent."""
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
    """Bank points near x (n,*) to move towards (n,wrong_count), and away from (n,right_count): with
    wrong votes (with `place`, for the class that is the place-th nearest) and right ones. In
    regression, of the nearest points those with the values furthest from y, and those nearest to
    it; with `place` 0 the highest and the lowest values, with 1 the other way round."""
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
