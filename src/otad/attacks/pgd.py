"""Projected gradient ascent (Madry et al. 2018) along whatever gradient there is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from otad.attacks.base import (
    Attack,
    Evaluated,
    Survivors,
    Target,
    register_attack,
    value_and_gradient,
)
from otad.attacks.needs import Knowledge, Needs
from otad.attacks.objectives import (
    Objective,
    check_loss,
    loss_for,
    own_gradient,
    substitute_gradient,
)
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

ALL_STEPS = 2.5  # default steps together, in units of eps: across the ball and a little further


@dataclass(frozen=True, eq=False, kw_only=True)
class Ascent(Attack):
    """`steps` of gradient ascent, from `restarts` random points of the ball.

    The attacked model judges every iterate, the last one as well; an example that is broken costs
    nothing more. Without `random_start` the ascent starts at the example itself.
    """

    steps: int = 100
    restarts: int = 1
    random_start: bool = True

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.restarts, "restarts")
        if self.restarts > 1 and not self.random_start:
            raise InputError(
                f"restarts: expected 1 without a random start, got {self.restarts}, all the same"
            )

    @abstractmethod
    def objective(self, target: Target, x: Tensor) -> Objective:
        """What to climb."""

    @abstractmethod
    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        """One ascent for the examples `rows` (n,) alone, from points `start` (n,*) of their balls.
        `survivors` records what it finds."""

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, objective = Survivors(target, x, ball), self.objective(target, x)
        for _ in range(self.restarts):
            # For all examples: which numbers one draws does not depend on which others survive.
            start = ball.inside(x, generator) if self.random_start else x
            rows = survivors.rows
            if len(rows):
                self.climb(survivors, objective, start[rows], rows)
        return survivors.inputs


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelAscent(Ascent):
    """Ascent of a loss of the model, or of a `substitute` in its place.

    `loss`: one of `LOSSES`; in regression, always the squared error. A `substitute` (the network
    behind a defense, say) is climbed in the model's place, while the model judges every iterate.
    """

    loss: str = "margin"
    substitute: nn.Module | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_loss(self.loss)

    def objective(self, target: Target, x: Tensor) -> Objective:
        loss = loss_for(self.loss, target.y)
        if self.substitute is None:
            return own_gradient(target, loss)
        return substitute_gradient(target, loss, self.substitute)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProjectedAscent(Ascent):
    """x <- project(x + step_size * eps * steepest(gradient)), `steps` times.

    - `step_size`: in units of eps, 2.5 / steps by default.
    - `last_only`: judge the last iterate of each restart only, as many papers do. Weaker.
    """

    step_size: float | None = None
    last_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise InputError(
                f"step_size: expected a positive number or None, got {self.step_size!r}"
            )

    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        moved, ball = start, survivors.ball
        length = ball.eps * (ALL_STEPS / self.steps if self.step_size is None else self.step_size)
        for _ in range(self.steps):
            outputs, _, gradient = climbed(moved, rows)
            if not self.last_only:
                alive = survivors.judge(moved, outputs, rows)
                rows, moved, gradient = rows[alive], moved[alive], gradient[alive]
                if not len(rows):
                    return
            moved = survivors.project(moved + length * ball.steepest(gradient), rows)
        survivors.ask(moved, rows)


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Pgd(ModelAscent, ProjectedAscent):
    """PGD with the model's own gradient, or with that of a `substitute`."""

    name = "pgd"
    family = "white-box"
    needs = Needs(gradients=True)


@register_attack
@dataclass(frozen=True, eq=False)
class Bpda(ProjectedAscent):
    """BPDA + PGD as in the OTAD paper: the network's backward pass at the defense's answers.

    The paper approximates the back-propagation of the convex integration by the original
    `network`, see `substitute_gradient`, and takes 100 steps on MNIST and 20 elsewhere. It does not
    report its step size. Its figures are those of `last_only`.
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

    def objective(self, target: Target, x: Tensor) -> Objective:
        loss = loss_for(self.loss, target.y)
        return substitute_gradient(target, loss, self.network, straight_through=True)


@register_attack
@dataclass(frozen=True, eq=False)
class MetricAttack(ProjectedAscent):
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

    def objective(self, target: Target, x: Tensor) -> Objective:
        with torch.no_grad():
            anchors = self.metric(x)
        if anchors.dim() < 2 or len(anchors) != len(x):
            raise InputError(
                f"metric: expected an embedding ({len(x)}, d), got shape {tuple(anchors.shape)}"
            )

        def evaluate(moved: Tensor, rows: Tensor) -> Evaluated:
            def distance(inputs: Tensor) -> Tensor:
                return (self.metric(inputs) - anchors[rows]).flatten(1).square().sum(1)

            return Evaluated(target(moved, rows), *value_and_gradient(distance, moved))

        return evaluate
