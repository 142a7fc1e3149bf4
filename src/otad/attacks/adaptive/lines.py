"""Attacks by steps towards wrong bank points that are known in closed form.

In the space where neighbors are searched, let d_i be the distance from x to bank point i. Point i
is nearer than point j to x + delta if and only if 2 <x_i - x_j, delta> > d_i^2 - d_j^2. So the
shortest step after which some wrong points are nearer than some right ones is a projection onto a
polyhedron. The tangents of a global map's potential meet in planes as well, so the same steps work
there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from otad.attacks.adaptive.class_means import BetweenClasses
from otad.attacks.adaptive.neighborhood import BankAttack, Block, Neighborhood, blocks_of, lowest
from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.projection import ascended, projected
from otad.attacks.row_graphs import repeated, row_wise
from otad.attacks.target import Survivors, Target
from otad.checks import check_count, check_positive
from otad.model.otad import OTAD
from otad.threat import LpBall

REACH = 200  # in regression, extreme values are chosen among this many nearest points
ITERATIONS = 150
OVERSHOOT = 1.02  # factor of a step: exactly on a bisector both points are equally near
STRIDE = 0.2  # the length of a step of `Pull`, as a share of the radius
FAR = 1e3  # factor of a step that is to go as far as the ball allows


@register_attack
@dataclass(frozen=True, eq=False)
class Straight(Attack):
    """Straight lines from the example towards training inputs of other classes.

    The attack aims at the nearest wrong training inputs (nearest by keys if there is a metric), and
    at the means of the nearest 3, 6, 12, ... of them: over all wrong classes, and over each of the
    two nearest ones. In regression it aims at the lowest and the highest values among the nearest
    points. For a global map the points are the nearest by distance, and then once more those with
    the largest tangents.

    Parameters
    ----------
    points : int
        How many of the nearest wrong training inputs are aimed at.
    shares : tuple of float
        The shares of the radius at which each line is tried.
    train_x : Tensor (N, *input_shape) or None
        The training inputs of the bank. They are needed where the embedding does more than
        normalize, because they cannot be computed from the bank then.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import Straight
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> generator = torch.Generator().manual_seed(0)
    >>> Straight(points=2)(model, x, y, otad.L2(1.0), generator=generator).accuracy
    0.0
    """

    points: int = option(24, check_count)
    shares: tuple[float, ...] = option((1.0, 0.75, 0.5), check_positive, most=1.0)
    train_x: Tensor | None = field(default=None, metadata={"known": "train_x"})
    name = "straight"
    family = "adaptive"
    needs = Needs(train_inputs=True)
    version = 2

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        for block in blocks_of(survivors, self.train_x):
            for aim in self._aims(block):
                for share in self.shares:
                    # The nearest point to the aim within a share of the radius: in l2 it is on the
                    # line to the aim, in l-infinity every feature goes as far as it can.
                    near = ball.with_eps(share * ball.eps)
                    block.offer(projected(near, aim, block.x))
        return survivors.inputs

    def _aims(self, block: Block) -> list[Tensor]:
        """Return inputs (n,*) to move towards."""
        bank, x, y = block.bank, block.x, block.y
        ranks = bank.ranks_at(x)
        if block.is_regression:
            near = lowest(ranks, REACH)
            order = (bank.votes[near] - y[:, None]).argsort(1)
            count = max(1, min(self.points, near.shape[1]) // 2)
            ends = torch.cat([order[:, :count], order[:, -count:]], dim=1)
            return [bank.training_inputs(i, x) for i in near.gather(1, ends).unbind(1)]
        groups = [near := lowest(ranks, self.points, bank.is_wrong(y))]
        classes = bank.nearest_classes(ranks, y)
        if classes.shape[1] > 1:
            groups += [bank.lowest_of_class(ranks, self.points, one) for one in classes[:, :2].T]
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
    """Steps across the bisector between a wrong bank point and a right one.

    Each of the nearest wrong points is compared with the nearest of the K nearest right points,
    with the farthest of them, and with their mean. The shortest step across a bisector is along
    `x_i - x_j`. The attack tries the step just across it, twice that step, and the same direction
    up to the radius.

    Parameters
    ----------
    pairs : int
        How many of the nearest wrong points are tried.
    polish : int
        The number of APGD steps with the model's own gradient at the end.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import Bisector
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> generator = torch.Generator().manual_seed(0)
    >>> Bisector(pairs=2, polish=5)(model, x, y, otad.L2(1.0), generator=generator).accuracy
    0.0
    """

    pairs: int = option(10, check_count)
    name = "bisector"
    needs = Needs(affine_keys=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        for block in blocks_of(survivors):
            bank, embedded = block.bank, block.bank.embed(block.x)
            wrong, right = _opponents(bank, block.x, block.y, self.pairs, bank.n_neighbors)
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
    """A greedy search over sets of wrong bank points that become nearer than the right ones.

    First each of the nearest wrong points alone is made nearer than the nearest right points. Then
    whole sets are: for each of the nearest wrong classes (in regression for higher and for lower
    values), the nearest few points of that class. Each set is chosen again from the input that was
    found.

    Parameters
    ----------
    singles : int
        How many wrong points are tried alone.
    classes : int
        How many of the nearest wrong classes are tried.
    sizes : tuple of int
        The sizes of the sets.
    opponents : int
        How many of the nearest right points must be farther away.
    rounds : int
        How often a set is chosen.
    polish : int
        The number of APGD steps with the model's own gradient at the end.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import Region
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> attack = Region(classes=1, sizes=(1,), opponents=1, rounds=1, polish=5)
    >>> attack(model, x, y, otad.L2(1.0), generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    singles: int = option(8, check_count, least=0)
    classes: int = option(3, check_count)
    sizes: tuple[int, ...] = (3, 6)
    opponents: int = option(20, check_count)
    rounds: int = option(3, check_count)
    name = "region"
    needs = Needs(affine_keys=True, gradients=True)
    version = 2

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        for block in blocks_of(survivors):
            if self.singles:
                wrong, right = _opponents(
                    block.bank, block.x, block.y, self.singles, self.opponents
                )
                for one in wrong.split(1, dim=1):
                    _step(block, one, right)
            for place, size in itertools.product(block.aims(self.classes), self.sizes):
                block = block.remaining()
                here = block.x
                for _ in range(self.rounds if len(block.rows) else 0):
                    about = block.bank, here, block.y, size, self.opponents, place
                    here = _step(block, *_opponents(*about))


@register_attack
@dataclass(frozen=True)
class Pull(BankAttack):
    """Steps towards the mean of near wrong bank points and away from the mean of right ones.

    In classification the wrong points vote for one class, which is chosen at the example and kept.
    The points are searched again after each step; of a class with fewer points, all are taken. From
    the last input APGD continues with the model's own gradient, for every class and size: the best
    start of an ascent is often not the input that came closest to a wrong answer.

    Parameters
    ----------
    classes : int
        How many of the nearest wrong classes are tried; in regression higher and lower values.
    sizes : tuple of int
        How many points a mean is taken over.
    steps : int
        The number of steps.
    polish : int
        The number of APGD steps with the model's own gradient after each pull.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import Pull
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> attack = Pull(classes=1, sizes=(1,), steps=10, polish=5)
    >>> attack(model, x, y, otad.L2(1.0), generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    classes: int = option(5, check_count)
    sizes: tuple[int, ...] = (1, 3, 10)
    steps: int = option(20, check_count)
    name = "pull"
    needs = Needs(affine_keys=True, gradients=True)
    version = 3

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        target, ball = survivors.target, survivors.ball
        climber = Apgd(steps=max(1, self.polish))
        objective = climber.objective(target, survivors.x, ball)
        climbs = self.polish > 0 and isinstance(target.model, OTAD)
        for block in blocks_of(survivors):
            first, classes = block.rows[0], _wrong_classes(block)
            for place, size in itertools.product(block.aims(self.classes), self.sizes):
                block = block.remaining()
                if not len(block.rows):
                    break
                here = block.x
                length = here.new_full((len(here),), STRIDE * ball.eps)
                aims = None if classes is None else classes[block.rows - first, place]
                way = repeated(_way_of(block, aims, place, size), here, self.steps)
                for _ in range(self.steps):
                    here = ascended(block.x, here, length, way(here), ball=ball)
                    block.offer(here)
                del way  # which has copies of bank points, before the next one is made
                rows = survivors.among(block.rows)
                if climbs and len(rows):
                    start = here[torch.isin(block.rows, rows)]
                    climber.climb(survivors, objective, start, rows)


def _wrong_classes(block: Block) -> Tensor | None:
    """Return the wrong classes (n,C-1), the nearest ones first; None in regression."""
    bank = block.bank
    return None if block.is_regression else bank.nearest_classes(bank.ranks_at(block.x), block.y)


def _way_of(block: Block, aims: Tensor | None, place: int, size: int) -> Callable[[Tensor], Tensor]:
    """Return the ways of inputs (n,*) towards the mean of `size` near wrong points and away from
    that of right ones. In classification the wrong points vote for `aims` (n,)."""
    bank, y = block.bank, block.y
    between = None if aims is None else BetweenClasses(bank, aims, y)

    @torch.no_grad()
    def way(here: Tensor) -> Tensor:
        embedded = bank.embed(here)
        if between is None:
            chosen = _opponents(bank, here, y, size, size, place)
            wrong, right = (bank.sites[some].mean(1) for some in chosen)
            ahead = wrong - right
        else:
            ahead = between.near(embedded, size)
        return bank.inputs(embedded + ahead, here) - here

    return way


def _step(block: Block, wrong: Tensor, right: Tensor) -> Tensor:
    """Try the shortest step after which the wrong points (n,p) are nearer than the right (n,q).

    The same direction is tried up to the radius, and the inputs (n,*) there are returned."""
    bank, embedded = block.bank, block.bank.embed(block.x)
    gaps = bank.sites[wrong][:, :, None] - bank.sites[right][:, None]
    need = bank.ranks_of(embedded, wrong)[:, :, None] - bank.ranks_of(embedded, right)[:, None]
    step = shortest_step(gaps.flatten(1, 2), need.flatten(1))
    block.try_point(embedded + OVERSHOOT * step)
    return block.try_point(embedded + FAR * step)


def shortest_step(gaps: Tensor, need: Tensor) -> Tensor:
    """Return the shortest delta (B,d) with 2 <gaps_k, delta> >= need_k for all k.

    `gaps` is (B,n,d) and `need` (B,n). The dual problem is solved by accelerated projected ascent:
    delta = 2 sum mu_k gaps_k, where mu >= 0 maximizes <need, mu> - |2 sum mu_k gaps_k|^2 / 2."""
    weight = _multipliers(4 * gaps @ gaps.mT, need)
    return 2 * (gaps.mT @ weight[:, :, None])[:, :, 0]


@row_wise
def _multipliers(gram: Tensor, need: Tensor) -> Tensor:
    """Return the mu >= 0 (B,n) that maximize <need, mu> - <mu, gram mu> / 2, gram (B,n,n)."""
    # The largest eigenvalue is bounded by the largest row sum.
    rate = 1 / gram.abs().sum(2).amax(1, keepdim=True).clamp_min(1e-12)
    weight = torch.zeros_like(need)
    ahead, momentum = weight, 1.0
    for _ in range(ITERATIONS):
        slope = need - (gram @ ahead[:, :, None])[:, :, 0]
        new = (ahead + rate * slope).clamp_min(0)
        grown = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / grown * (new - weight)
        weight, momentum = new, grown
    return weight


def _opponents(
    bank: Neighborhood, x: Tensor, y: Tensor,
    wrong_count: int, right_count: int, place: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return bank points near x (n,*) to move towards, and others to move away from.

    They are the nearest points with votes that are wrong (n,wrong_count) and right (n,right_count),
    where y (n,) are the right answers. If `place` is given, wrong votes are those for the class
    that is the place-th nearest, or for the nearest one if there are fewer. In regression they are,
    among the nearest points, those with the values farthest from y and nearest to y. With `place` 0
    they are the highest and the lowest values, with `place` 1 the lowest and the highest."""
    ranks = bank.ranks_at(x)
    if y.is_floating_point():
        near = lowest(ranks, 10 * (wrong_count + right_count))
        beyond = bank.votes[near] - y[:, None]
        beyond = beyond.abs() if place is None else (-1) ** place * beyond
        ranked = near.gather(1, beyond.argsort(1, descending=True))
        return ranked[:, :wrong_count], ranked[:, -right_count:]
    right = bank.lowest_of_class(ranks, right_count, y)
    if place is None:
        return lowest(ranks, wrong_count, bank.is_wrong(y)), right
    aims = bank.nearest_classes(ranks, y)[:, place]
    return bank.lowest_of_class(ranks, wrong_count, aims), right
