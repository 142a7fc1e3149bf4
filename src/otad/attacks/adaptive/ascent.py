"""Gradient ascent through the keys of an input towards wrong bank points.

It is needed where no straight line of inputs leads there: behind a metric, or behind an embedding
that does more than normalize."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.attacks.adaptive.class_means import BetweenClasses
from otad.attacks.adaptive.neighborhood import BankAttack, Block, Neighborhood, blocks_of
from otad.attacks.apgd import Apgd
from otad.attacks.base import option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import Objective, asking, loss_for
from otad.attacks.projection import ascended
from otad.attacks.row_graphs import repeated
from otad.attacks.stand_in import Map, climbable
from otad.attacks.target import Evaluated, Survivors
from otad.checks import check_count, check_positive, require
from otad.threat import L2

ASK_EVERY = 5  # steps between two answers of the model, which the ascent itself does not need
LOSSES = ("rank", "vote", "joint")
SIGHT = 4.0  # the nearest wrong points get at least exp(-SIGHT) of the weight of the right ones
UNIT = L2(1.0)


def _check_losses(losses: tuple[str, ...], name: str) -> None:
    require(losses and {*losses} <= {*LOSSES}, name, f"some of {LOSSES}", losses)


@dataclass(frozen=True, eq=False, kw_only=True)
class KeyAscent(BankAttack):
    """Ascent through the keys by which neighbors are searched.

    Where the gradient of the keys does not predict how they change, smoothed differences take its
    place. You can also give a `stand_in`, a differentiable function (B,*) -> (B,m) whose gradient
    is followed instead."""

    stand_in: Map | None = None

    def blocks(self, survivors: Survivors) -> Iterator[Block]:
        """Yield blocks of examples whose keys have a usable gradient."""
        keys: Map | None = None
        for block in blocks_of(survivors):
            bank = block.bank
            if keys is None and (self.stand_in is not None or not bank.is_plain):
                given = bank.owner.query_keys, survivors.x, survivors.ball
                keys = climbable(*given, self.stand_in)
            yield Block(survivors, replace(bank, keys=keys), block.rows)


@register_attack
@dataclass(frozen=True)
class SoftKnn(KeyAscent):
    """Ascent on a soft nearest-neighbor vote of all bank points.

    Every bank point i votes with weight `exp(-|e - x_i|^2 / T)`, where e is the embedded input. The
    attack maximizes log(weight of wrong votes) - log(weight of right votes). Wrong votes are those
    for one class at a time, for each of the nearest wrong classes. In regression it raises the
    weighted mean of the votes, and then lowers it. For a global map it runs once more with tangents
    of the potential in place of squared distances: their log-sum-exp is a smooth potential, whose
    gradient depends on all points.

    Parameters
    ----------
    temperatures : tuple of float
        T as shares of the squared distance to the K-th neighbor of the example. Each is tried:
        small ones see only the nearest points, large ones the whole region.
    steps : int
        The number of gradient steps.
    targets : int
        How many of the nearest wrong classes are tried.
    polish : int
        The number of APGD steps with the model's own gradient at the end.
    stand_in : callable or None
        A differentiable function (B, *input_shape) -> (B, m) in place of the keys.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import SoftKnn
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> attack = SoftKnn(temperatures=(0.3,), steps=5, targets=1, polish=5)
    >>> attack(model, x, y, otad.L2(0.5), generator=torch.Generator().manual_seed(0)).accuracy
    1.0
    """

    temperatures: tuple[float, ...] = option((0.3, 0.1, 0.03, 0.01), check_positive)
    steps: int = option(40, check_count)
    targets: int = option(3, check_count)
    name = "soft_knn"
    needs = Needs(bank=True, gradients=True)
    version = 2

    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        for block in self.blocks(survivors):
            for temperature in self.temperatures:
                for place in block.aims(self.targets):
                    block = block.remaining()
                    if len(block.rows):
                        self._climb(block, temperature, place)

    def _climb(self, block: Block, temperature: float, place: int) -> None:
        bank, ball, moved = block.bank, block.survivors.ball, block.x
        with torch.no_grad():
            ranks = bank.ranks_at(moved)
            width = bank.width(ranks, temperature)
            if not block.is_regression:
                aim = bank.nearest_classes(ranks, block.y)[:, place]
                between = BetweenClasses(bank, aim, block.y)

        def smooth(inputs: Tensor) -> Tensor:
            embedded = bank.embed(inputs)
            if not block.is_regression:  # its gradient, not its value, is along that of the vote
                return (embedded * between.soft(embedded.detach(), width)).sum(1)
            scores = -bank.ranks(embedded) / width
            mean: Tensor = scores.softmax(1) @ bank.votes.to(scores)
            return -mean if place else mean

        def slope(inputs: Tensor) -> Tensor:
            return block.target.differentiate(smooth, inputs, block.rows)[1]

        # What keys or a stand-in of a user do is not known.
        is_known = bank.is_plain and bank.keys is None
        gradient_at = repeated(slope, moved, self.steps) if is_known else slope
        for step in range(1, self.steps + 1):
            gradient = gradient_at(moved)
            # Steps shrink from the radius of the ball to 0: the function is smooth, so few suffice.
            stride = ball.eps * (1 + math.cos(math.pi * (step - 1) / self.steps)) / 2
            length = moved.new_full((len(moved),), stride)
            moved = ascended(block.x, moved, length, gradient, ball=ball)
            if step % ASK_EVERY == 0 or step == self.steps:
                block.offer(moved)


@register_attack
@dataclass(frozen=True, eq=False)
class Keys(KeyAscent):
    """APGD on three losses of the distances between the key of an input and the bank.

    Let `s_i` be the squared distance to bank point i in the space where neighbors are searched. The
    attack maximizes these losses one after another, and the model answers every iterate:

    - "rank", for classification alone: the mean of s over the K/2 nearest right points, minus the
      mean over the K nearest points of a wrong class. Both are searched again at each step. Once
      all of the latter are nearer, the answer must change.
    - "vote": the margin, in regression the error, of `sum_i p_i outputs_i`, where p is the softmax
      of `-s / T` and `outputs_i` is what the head gives for the feature of point i.
    - "joint": the model's own margin, from the best point so far. Each step adds the model's
      gradient at fixed neighbors and the gradient of "vote", both scaled to length 1.

    Parameters
    ----------
    losses : tuple of str
        Which of the three losses are used.
    steps : int
        The number of APGD steps for each loss.
    targets : int
        How many of the nearest wrong classes "rank" tries.
    temperatures : tuple of float
        T as shares of the K-th smallest s at the current input. T is larger where the nearest wrong
        points would otherwise have no weight.
    restarts : int
        How many starts: the example itself first, then random points of the ball.
    polish : int
        The number of APGD steps with the model's own gradient at the end.
    stand_in : callable or None
        A differentiable function (B, *input_shape) -> (B, m) in place of the keys.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.attacks.adaptive import Keys
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> attack = Keys(losses=("rank",), steps=5, targets=1, restarts=1, polish=5)
    >>> attack(model, x, y, otad.L2(0.5), generator=torch.Generator().manual_seed(0)).accuracy
    1.0
    """

    losses: tuple[str, ...] = option(LOSSES, _check_losses)
    steps: int = option(50, check_count)
    targets: int = option(3, check_count)
    temperatures: tuple[float, ...] = option((0.3, 0.05), check_positive)
    restarts: int = option(2, check_count)
    name = "keys"
    needs = Needs(bank=True, gradients=True)
    version = 2

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
        """Yield the objectives, each with whether it starts from the best point so far."""
        for name in self.losses:
            if name != "rank":
                is_joint = name == "joint"
                for temperature in self.temperatures:
                    yield _by_vote(block, temperature, jointly=is_joint), is_joint
            elif not block.is_regression:
                aims = block.bank.nearest_classes(block.bank.ranks_at(block.x), block.y)
                for place in block.aims(self.targets):
                    yield _by_rank(block, aims[:, place]), False


def _by_rank(block: Block, aims: Tensor) -> Objective:
    """Return the objective "rank" for the classes `aims` (n,)."""
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
    """Return the objective "vote", or with `jointly` the objective "joint"."""
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
    """Return the mean (n,) of the `count` smallest finite ranks (n,N), differentiable."""
    first = ranks.topk(min(count, ranks.shape[1]), largest=False)
    counts = first.values.isfinite()
    return (bank.ranks_of(embedded, first.indices) * counts).sum(1) / counts.sum(1).clamp_min(1)
