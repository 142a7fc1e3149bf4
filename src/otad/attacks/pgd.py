"""Projected gradient ascent (Madry et al. 2018) along whatever gradient there is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, Target, register_attack
from otad.attacks.gradients import (
    Answer,
    Ask,
    exact,
    straight_through,
    through_substitute,
    value_and_gradient,
)
from otad.attacks.losses import check_loss, loss_for
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

TRAVEL = 2.5  # all default steps together, in units of eps: across the ball and a little further


@dataclass(frozen=True, eq=False, kw_only=True)
class Ascent(Attack):
    """x <- project(x + step_size * eps * steepest(gradient)), `steps` times.

    Every iterate is judged by the attacked model, the last one as well, and the best is kept; an
    example that is broken costs nothing more. So each restart asks for at most steps + 1 answers.

    - `step_size`: in units of eps, 2.5 / steps by default.
    - `restarts`: how often to begin, each time at random in the ball.
    - `random_start`: begin at the example itself if False.
    - `last_only`: judge the last iterate of each restart only, as many papers do. Weaker.
    """

    steps: int = 100
    step_size: float | None = None
    restarts: int = 1
    random_start: bool = True
    last_only: bool = False

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.restarts, "restarts")
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise InputError(
                f"step_size: expected a positive number or None, got {self.step_size!r}"
            )
        if self.restarts > 1 and not self.random_start:
            raise InputError(
                f"restarts: expected 1 without a random start, got {self.restarts}, all the same"
            )

    @abstractmethod
    def asker(self, target: Target, x: Tensor) -> Ask:
        """What to climb."""

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x)
        ask = self.asker(target, x)
        for _ in range(self.restarts):
            # Drawn for all rows: what one example meets does not depend on the luck of others.
            start = ball.inside(x, generator) if self.random_start else x
            self._climb(survivors, target, ask, start, x, ball)
        return survivors.inputs

    def _climb(
        self,
        survivors: Survivors,
        target: Target,
        ask: Ask,
        start: Tensor,
        x: Tensor,
        ball: LpBall,
    ) -> None:
        length = ball.eps * (TRAVEL / self.steps if self.step_size is None else self.step_size)
        rows = survivors.rows
        moved = start[rows]
        for _ in range(self.steps):
            if not len(rows):
                return  # all broken
            outputs, _, gradient = ask(moved, rows)
            if not self.last_only:
                standing = survivors.judge(moved, outputs, rows)
                rows, moved, gradient = rows[standing], moved[standing], gradient[standing]
            moved = ball.project(moved + length * ball.steepest(gradient), x[rows])
        if len(rows):
            survivors.judge(moved, target(moved, rows), rows)


@register_attack
@dataclass(frozen=True, eq=False)
class Pgd(Ascent):
    """PGD with the model's own gradient, or with that of a `substitute`.

    `loss`: one of `LOSSES`; in regression, always the squared error. A `substitute` (the network
    behind a defense, say) is climbed in the model's place, while the model judges every iterate.
    """

    loss: str = "margin"
    substitute: nn.Module | None = None
    name = "pgd"
    family = "white-box"
    needs = Needs(gradients=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss(self.loss)

    def asker(self, target: Target, x: Tensor) -> Ask:
        loss = loss_for(self.loss, target.y)
        if self.substitute is None:
            return exact(target, loss)
        return through_substitute(target, loss, self.substitute)


@register_attack
@dataclass(frozen=True, eq=False)
class Bpda(Ascent):
    """BPDA + PGD as in the OTAD paper: the network's backward pass under the defense's answers.

    The paper approximates the back-propagation of the convex integration by the original
    `network`, see `gradients.straight_through`, and takes 100 steps on MNIST and 20 elsewhere.
    Its step size is not told. Its figures are those of `last_only`.
    """

    network: nn.Module
    loss: str = "cross_entropy"
    name = "bpda"
    family = "white-box"
    needs = Needs(network=True)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        return super().for_model(known, **{"network": known.network} | options)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss(self.loss)

    def asker(self, target: Target, x: Tensor) -> Ask:
        return straight_through(target, loss_for(self.loss, target.y), self.network)


@register_attack
@dataclass(frozen=True, eq=False)
class MetricAttack(Ascent):
    """The OTAD paper's attack on the metric: push an input away from where its neighbors are.

    Climbs |psi(x + delta) - psi(x)|^2, psi being the `metric`, the embedding (B,*) -> (B,d) in
    which neighbors are searched. The labels play no part in it; the model judges every iterate.
    """

    metric: Callable[[Tensor], Tensor]
    name = "metric"
    family = "adaptive"
    needs = Needs(network=True)

    @classmethod
    def for_model(cls, known: Knowledge, **options: Any) -> Self:
        return super().for_model(known, **{"metric": known.keys} | options)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.random_start:
            raise InputError(
                "random_start: expected True, got False: at the example itself the gradient is 0"
            )

    def asker(self, target: Target, x: Tensor) -> Ask:
        with torch.no_grad():
            anchors = self.metric(x)
        if anchors.dim() < 2 or len(anchors) != len(x):
            raise InputError(
                f"metric: expected an embedding ({len(x)}, d), got shape {tuple(anchors.shape)}"
            )

        def ask(moved: Tensor, rows: Tensor) -> Answer:
            def distance(inputs: Tensor) -> Tensor:
                return (self.metric(inputs) - anchors[rows]).flatten(1).square().sum(1)

            return Answer(target(moved, rows), *value_and_gradient(distance, moved))

        return ask
