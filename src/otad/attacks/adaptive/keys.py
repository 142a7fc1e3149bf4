"""Ascent on the place of an input among the bank, where no straight line leads there.

Behind a metric, or an embedding that does more than normalize, steps to bank points are not known
in closed form, but where a step leads has a gradient. Two things make an answer: who the neighbors
are, and what weight each has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.attacks.adaptive.polish import polish
from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack, Loss, Target, register_attack
from otad.attacks.gradients import Answer, Ask, value_and_gradient
from otad.attacks.losses import loss_for
from otad.attacks.needs import Needs
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

LOSSES = ("rank", "vote", "joint")
SIGHT = 4.0  # the nearest wrong points weigh at least exp(-SIGHT) of the nearest right ones


@register_attack
@dataclass(frozen=True, eq=False)
class Keys(Attack):
    """With s_i the squared distance of bank point i where neighbors are sought (its key), APGD
    climbs in turn, while the model judges every iterate:

    - "rank": the mean of s over the K/2 nearest right points less that over the K nearest points of
      a wrong class, both sought anew at each step, for each of the `targets` classes that come
      nearest. Once the latter are all nearer, the answer can be no other.
    - "vote": the margin (in regression the error) of sum_i p_i outputs_i, with p the softmax of
      -s / T: points count by how clearly the head reads their features. T is a share of the K-th
      of the s where the input now is, for each share in `temperatures`, or as much as it takes to
      see the nearest wrong points.
    - "joint": the model's own margin, along its gradient at fixed neighbors and that of "vote",
      both of length 1: neighbors and their weights at a time, from the best point so far.

    From the example itself, and again from `restarts` - 1 random points. `polish`: so many steps of
    APGD with the model's own gradient go on from the best point. "rank" is for classes alone.
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
        if not self.temperatures or min(self.temperatures) <= 0:
            raise InputError(
                f"temperatures: expected positive shares, at least one, got {self.temperatures}"
            )

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, climber = Survivors(target, x), Apgd(steps=self.steps)
        starts = [x, *(ball.inside(x, generator) for _ in range(self.restarts - 1))]
        for bank in Neighborhood.views(target.model, x):
            for some in torch.arange(len(x), device=x.device).split(bank.rows_at_once()):
                plans = list(self._plans(target, bank, x[some], some))
                for start, (ask, goes_on) in itertools.product(starts, plans):
                    rows = survivors.among(some)
                    if len(rows):
                        begin = survivors.inputs if goes_on else start
                        climber.climb(survivors, target, ask, begin[rows], x[rows], rows, ball)
        return polish(target, x, survivors.inputs, ball, self.polish)

    def _plans(
        self, target: Target, bank: Neighborhood, x: Tensor, some: Tensor
    ) -> Iterator[tuple[Ask, bool]]:
        """What to climb, and whether from the best point so far, for examples x (n,*), which are
        those with the numbers `some` (n,), in a row."""
        loss = loss_for("margin", target.y)
        for name in self.losses:
            if name == "vote":
                yield from ((_by_vote(target, bank, loss, t), False) for t in self.temperatures)
            elif name == "joint":
                yield from ((_jointly(target, bank, loss, t), True) for t in self.temperatures)
            elif not target.y.is_floating_point():
                with torch.no_grad():
                    ranks = bank.ranks(bank.embed(x))
                aims = bank.nearest_classes(ranks, target.targets(some))
                for place in range(min(self.targets, aims.shape[1] - 1)):
                    yield _by_rank(target, bank, aims[:, place], int(some[0])), False


def _by_rank(target: Target, bank: Neighborhood, aims: Tensor, first: int) -> Ask:
    """Towards the classes `aims` (n,) of the examples from number `first` on."""

    def ask(moved: Tensor, rows: Tensor) -> Answer:
        y, aim = target.targets(rows), aims[rows - first]

        def lead(inputs: Tensor) -> Tensor:
            embedded = bank.embed(inputs)
            with torch.no_grad():
                ranks = bank.ranks(embedded)
                right = ~bank.is_wrong(y)
                of_class = bank.votes[None] == aim[:, None]
                fled = _first(ranks, right, max(1, bank.n_neighbors // 2))
                drawn = _first(ranks, of_class, bank.n_neighbors)
            return _mean_rank(bank, embedded, *fled) - _mean_rank(bank, embedded, *drawn)

        return Answer(target(moved, rows), *value_and_gradient(lead, moved))

    return ask


def _by_vote(target: Target, bank: Neighborhood, loss: Loss, temperature: float) -> Ask:
    def ask(moved: Tensor, rows: Tensor) -> Answer:
        found = _vote_gradient(bank, loss, temperature, moved, target.targets(rows))
        return Answer(target(moved, rows), *found)

    return ask


def _jointly(target: Target, bank: Neighborhood, loss: Loss, temperature: float) -> Ask:
    def ask(moved: Tensor, rows: Tensor) -> Answer:
        y = target.targets(rows)
        outputs, own = target.gradient(moved, loss, rows)
        _, through_keys = _vote_gradient(bank, loss, temperature, moved, y)
        return Answer(outputs, loss(outputs, y), _unit(own) + _unit(through_keys))

    return ask


def _vote_gradient(
    bank: Neighborhood, loss: Loss, temperature: float, moved: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss (n,) of the soft vote of the bank, and its gradient (n,*)."""

    def value(inputs: Tensor) -> Tensor:
        ranks = bank.ranks(bank.embed(inputs))
        width = _width(bank, ranks.detach(), temperature, y)
        return loss((-ranks / width).softmax(1) @ bank.outputs, y)

    return value_and_gradient(value, moved)


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
    ranks = bank.behind(embedded, indices) * counts
    return ranks.sum(1) / counts.sum(1).clamp_min(1)


def _unit(gradient: Tensor) -> Tensor:
    """Of length 1 for each example, 0 for 0."""
    flat = gradient.flatten(1)
    largest = flat.abs().amax(1, keepdim=True)  # first, as squares of small numbers vanish
    scaled = flat / largest.masked_fill(largest == 0, 1.0)
    unit: Tensor = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True).clamp_min(0.5)
    return unit.view_as(gradient)
