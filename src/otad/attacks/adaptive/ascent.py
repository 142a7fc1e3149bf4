"""Ascent on the place of an input among the bank, where no straight line leads there: behind a
metric, or an embedding that does more than normalize."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import BankAttack, Block, Neighborhood, blocks_of
from otad.attacks.base import Evaluated, Survivors, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import Objective, asking, loss_for
from otad.attacks.pgd import Apgd
from otad.attacks.stand_in import Map, climbable
from otad.checks import check_count, check_positive, require
from otad.nets import only_normalizes
from otad.threat import L2

ASK_EVERY = 5  # steps: the smooth approximation needs no answers of the model
LOSSES = ("rank", "vote", "joint")
SIGHT = 4.0  # the nearest wrong points weigh at least exp(-SIGHT) of the nearest right ones
UNIT = L2(1.0)


def _check_losses(losses: tuple[str, ...], name: str) -> None:
    require(losses and {*losses} <= {*LOSSES}, name, f"some of {LOSSES}", losses)


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyAscent(BankAttack):
    """Climbs through the keys by which neighbors are searched. Where their gradient does not say
    how they change, it climbs smoothed differences of them, or the gradient of `stand_in`, a
    differentiable function (B,*) -> (B,m) in their place, if that is given."""

    stand_in: Map | None = None

    def blocks(self, survivors: Survivors) -> Iterator[Block]:
        keys: Map | None = None
        for block in blocks_of(survivors):
            owner = block.bank.owner
            is_plain = owner.metric is None and only_normalizes(owner.backbone)
            if keys is None and (self.stand_in is not None or not is_plain):
                keys = climbable(owner.query_keys, survivors.x, survivors.ball, self.stand_in)
            yield Block(survivors, replace(block.bank, keys=keys), block.rows)


@register_attack
@dataclass(frozen=True)
class SoftKnn(KeyAscent):
    """Every bank point i votes with weight exp(-|e - x_i|^2 / T), e the embedded input.

    The attack climbs log(weight of the wrong votes) - log(weight of the right ones), where wrong
    votes are those for one class at a time, for the `targets` classes that come nearest. In
    regression it climbs the weighted mean of the votes, and then descends it. T is a share of the
    squared distance to the K-th neighbor of the example, and each share in `temperatures` is tried:
    small ones see the nearest points alone, large ones the whole region. For a global map the same
    is done once more with tangents of its potential in place of squared distances: their
    log-sum-exp is a smooth potential, whose gradient map sees all points."""

    temperatures: tuple[float, ...] = option((0.3, 0.1, 0.03, 0.01), check_positive)
    steps: int = option(40, check_count)
    targets: int = option(3, check_count)
    name = "soft_knn"
    needs = Needs(bank=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        for block in self.blocks(survivors):
            for temperature in self.temperatures:
                for place in range(2 if block.is_regression else self.targets):
                    block = block.remaining()
                    if len(block.rows):
                        self._climb(block, temperature, place)

    def _climb(self, block: Block, temperature: float, place: int) -> None:
        bank, ball, moved = block.bank, block.survivors.ball, block.x
        with torch.no_grad():
            ranks = bank.ranks(bank.embed(moved))
            width, wrong = bank.width(ranks, temperature), bank.is_wrong(block.y)
            if not block.is_regression:
                aims = bank.nearest_classes(ranks, block.y)
                aim = aims[:, min(place, aims.shape[1] - 1)]
                chosen = (bank.votes[None] == aim[:, None]) & wrong

        def smooth(inputs: Tensor) -> Tensor:
            scores = -bank.ranks(bank.embed(inputs)) / width
            if not block.is_regression:
                return _advantage(scores, chosen, ~wrong)
            mean: Tensor = scores.softmax(1) @ bank.votes.to(scores)
            return -mean if place else mean

        for step in range(1, self.steps + 1):
            _, gradient = block.target.differentiate(smooth, moved, block.rows)
            # From a step across the ball down to none: what is climbed is smooth, so few will do.
            stride = ball.eps * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2
            moved = block.survivors.project(moved + stride * ball.steepest(gradient), block.rows)
            if step % ASK_EVERY == 0 or step == self.steps:
                block.offer(moved)


def _advantage(scores: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
    """How much more the wrong points weigh than the right ones (n,), from scores (n,N)."""
    sums = [scores.masked_fill(~side, -math.inf).logsumexp(1) for side in (wrong, right)]
    # Without a point on one side, the other side alone still says where to go.
    towards, away = (torch.where(total.isfinite(), total, 0.0) for total in sums)
    return towards - away


@register_attack
@dataclass(frozen=True, eq=False)
class Keys(KeyAscent):
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

    From the example itself, and from `restarts` - 1 random points. "rank" is for classes alone."""

    losses: tuple[str, ...] = option(LOSSES, _check_losses)
    steps: int = option(50, check_count)
    targets: int = option(3, check_count)
    temperatures: tuple[float, ...] = option((0.3, 0.05), check_positive)
    restarts: int = option(2, check_count)
    name = "keys"
    needs = Needs(bank=True, gradients=True)

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        climber, x, ball = Apgd(steps=self.steps), survivors.x, survivors.ball
        starts = [x, *(ball.inside(x, generator) for _ in range(self.restarts - 1))]
        for block in self.blocks(survivors):
            for start, (objective, from_best) in itertools.product(starts, [*self._plans(block)]):
                rows = survivors.among(block.rows)
                if len(rows):
                    begin = survivors.inputs if from_best else start
                    climber.climb(survivors, objective, begin[rows], rows)

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
    bank, target = block.bank, block.target

    def lead(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
        aim = aims[rows - block.rows[0]]  # rows of a block are consecutive
        embedded = bank.embed(inputs)
        ranks = bank.ranks(embedded.detach())
        of_right, of_aim = (
            ranks.masked_fill(bank.is_wrong(vote), math.inf) for vote in (target.targets(rows), aim)
        )
        away = _mean_rank(bank, embedded, of_right, max(1, bank.n_neighbors // 2))
        return away - _mean_rank(bank, embedded, of_aim, bank.n_neighbors)

    return asking(target, lead)


def _by_vote(block: Block, temperature: float, *, jointly: bool) -> Objective:
    """The loss of the soft vote of the bank; `jointly`: that of the model, along both gradients."""
    bank, target = block.bank, block.target
    loss = loss_for("margin", target.y)

    def voted(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
        ranks, y = bank.ranks(bank.embed(inputs)), target.targets(rows)
        width = bank.width(ranks.detach(), temperature)
        if not y.is_floating_point():
            wrong = bank.is_wrong(y)
            others, own = (
                ranks.detach().masked_fill(hidden, math.inf).amin(1, keepdim=True)
                for hidden in (~wrong, wrong)
            )
            width = torch.maximum(width, ((others - own) / SIGHT).nan_to_num(0.0, 0.0, 0.0))
        return loss((-ranks / width).softmax(1) @ bank.outputs, y)

    def both(moved: Tensor, rows: Tensor) -> Evaluated:
        own = target.evaluate(moved, loss, rows)
        _, by_keys = target.differentiate(lambda x: voted(x, rows, own.outputs), moved, rows)
        return own._replace(gradient=UNIT.steepest(own.gradient) + UNIT.steepest(by_keys))

    return both if jointly else asking(target, voted)


def _mean_rank(bank: Neighborhood, embedded: Tensor, ranks: Tensor, count: int) -> Tensor:
    """The mean rank (n,) of the first `count` of those with a finite rank (n,N)."""
    first = ranks.topk(min(count, ranks.shape[1]), largest=False)
    counts = first.values.isfinite()
    return (bank.ranks_of(embedded, first.indices) * counts).sum(1) / counts.sum(1).clamp_min(1)
