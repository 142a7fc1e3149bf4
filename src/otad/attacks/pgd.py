"""Projected gradient ascent (Madry et al. 2018), also with step sizes of its own (Auto-PGD, Croce
and Hein 2020), along whatever gradient there is; and the transfer of what it finds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, Survivors, Target, check_outputs, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import Objective, asking, check_loss, loss_for, substitute_gradient
from otad.attacks.stand_in import climbable
from otad.checks import check_count, check_evaluation, check_positive, require
from otad.threat import LpBall, per_row

ALL_STEPS = 2.5  # default steps together, in units of eps: across the ball and a little further
FIRST_STEP = 2.0  # of APGD, in units of eps
MOMENTUM = 0.75  # of APGD: weight of the gradient step, the rest is the step before
ENOUGH = 0.75  # of APGD: share of steps that has to raise the loss for the step size to stay


@dataclass(frozen=True, eq=False, kw_only=True)
class Ascent(Attack):
    """`steps` of gradient ascent, from `restarts` random points of the ball or, without
    `random_start`, from the example itself. The attacked model judges every iterate, the last one
    as well; an example that is broken costs nothing more."""

    steps: int = option(100, check_count)
    restarts: int = option(1, check_count)
    random_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.restarts == 1 or self.random_start
        require(fits, "restarts", "1 without a random start", f"{self.restarts}, all the same")

    @abstractmethod
    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective: ...

    @abstractmethod
    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        """One ascent for the examples `rows` (n,) alone, from points `start` (n,*) of their balls.
        `survivors` records what it finds."""

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, objective = Survivors(target, x, ball), self.objective(target, x, ball)
        for _ in range(self.restarts):
            # For all examples: which numbers one draws does not depend on which others survive.
            start = ball.inside(x, generator) if self.random_start else x
            rows = survivors.rows
            if len(rows):
                self.climb(survivors, objective, start[rows], rows)
        return survivors.inputs


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelAscent(Ascent):
    """Ascent of a `loss` of `LOSSES` (in regression, of the squared error) of the model, or of a
    `substitute` in its place (the network behind a defense, say)."""

    loss: str = option("margin", check_loss)
    substitute: nn.Module | None = None
    family = "white-box"
    needs = Needs(gradients=True)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        loss = loss_for(self.loss, target.y)
        if self.substitute is None:
            return lambda moved, rows: target.evaluate(moved, loss, rows)
        return substitute_gradient(target, loss, self.substitute)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProjectedAscent(Ascent):
    """x <- project(x + step_size * eps * steepest(gradient)), `steps` times; `step_size` is 2.5 /
    steps by default. `last_only`: judge only the last iterate, as many papers do. Weaker."""

    step_size: float | None = option(None, check_positive)
    last_only: bool = False

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


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Apgd(ModelAscent):
    """`steps` of gradient ascent with momentum, each example with a step size of its own:

        z = project(x_k + step * steepest(gradient)),
        x_{k+1} = project(x_k + 0.75 (z - x_k) + 0.25 (x_k - x_{k-1})).

    The step begins at 2 eps. At every checkpoint it is halved, and the ascent continues from the
    best point so far, if fewer than 3/4 of the steps since the last checkpoint raised the loss, or
    if neither the step nor the best loss has changed since then."""

    name = "apgd"

    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        outputs, value, gradient = climbed(start, rows)
        ball = survivors.ball
        path = _Path(rows, survivors.x[rows], start, value, gradient, FIRST_STEP * ball.eps)
        path.select(survivors.judge(start, outputs, rows))
        intervals = checkpoints(self.steps)
        for k in range(1, self.steps + 1):
            if not len(path.rows):
                return
            moved = path.next_point(ball, MOMENTUM if k > 1 else 1.0)
            if k < self.steps:
                outputs, value, gradient = climbed(moved, path.rows)
                path.move(moved, value, gradient)
                path.select(survivors.judge(moved, outputs, path.rows))
                if k in intervals:
                    path.adapt(intervals[k])
        survivors.ask(moved, path.rows)


def checkpoints(steps: int) -> dict[int, int]:
    """Each checkpoint w_j, and the number of steps since the one before: w_j = ceil(p_j steps),
    p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)."""
    found: dict[int, int] = {}
    before, share, width = 0, 0.22, 0.22
    while share <= 1:
        mark = math.ceil(share * steps - 1e-9)  # a whole number that was rounded up stays
        if mark > before:
            found[mark] = mark - before
        before, width = mark, max(width - 0.03, 0.06)
        share += width
    return found


class _Path:
    """The state of an ascent: every tensor has one entry per example that is not broken."""

    def __init__(
        self, rows: Tensor, x: Tensor, start: Tensor, value: Tensor, gradient: Tensor, step: float
    ) -> None:
        self.rows, self.x = rows, x
        self.point = self.previous = self.best = start
        self.value = self.best_value = self.marked_value = value
        self.gradient = self.best_gradient = gradient
        self.step = start.new_full((len(start),), step)  # values of float64 targets are float64
        self.raised = torch.zeros_like(rows)  # steps that raised the loss since the checkpoint
        self.step_is_old = torch.ones_like(rows, dtype=torch.bool)  # as at the checkpoint before

    def select(self, alive: Tensor) -> None:
        if not bool(alive.all()):
            for name, tensor in vars(self).items():
                setattr(self, name, tensor[alive])

    def next_point(self, ball: LpBall, momentum: float) -> Tensor:
        step = per_row(self.step, self.point) * ball.steepest(self.gradient)
        ahead = ball.project(self.point + step, self.x)
        inertia = self.point - self.previous
        moved = self.point + momentum * (ahead - self.point) + (1 - momentum) * inertia
        return ball.project(moved, self.x)

    def move(self, point: Tensor, value: Tensor, gradient: Tensor) -> None:
        self.raised = self.raised + (value > self.value)
        self.previous, self.point = self.point, point
        self.value, self.gradient = value, gradient
        better = value > self.best_value
        rows = per_row(better, point)
        self.best = torch.where(rows, point, self.best)
        self.best_value = torch.where(better, value, self.best_value)
        self.best_gradient = torch.where(rows, gradient, self.best_gradient)

    def adapt(self, taken: int) -> None:
        """At a checkpoint, `taken` steps after the last: halve the step, go to the best."""
        stuck = self.step_is_old & (self.best_value == self.marked_value)
        halved = (self.raised < ENOUGH * taken) | stuck
        self.step = torch.where(halved, self.step / 2, self.step)
        rows = per_row(halved, self.point)
        self.point = torch.where(rows, self.best, self.point)
        self.gradient = torch.where(rows, self.best_gradient, self.gradient)
        self.value = torch.where(halved, self.best_value, self.value)
        self.step_is_old, self.marked_value = ~halved, self.best_value
        self.raised = torch.zeros_like(self.raised)


@register_attack
@dataclass(frozen=True, eq=False)
class Bpda(ProjectedAscent):
    """BPDA + PGD as in the OTAD paper: the backward pass of the original `network` at the defense's
    answers, see `substitute_gradient`. The paper takes 100 steps on MNIST and 20 elsewhere, of a
    size it does not report. Its figures are those of `last_only`."""

    network: nn.Module = field(metadata={"known": "network"})
    loss: str = option("cross_entropy", check_loss)
    name = "bpda"
    family = "white-box"
    needs = Needs(network=True)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        loss = loss_for(self.loss, target.y)
        return substitute_gradient(target, loss, self.network, straight_through=True)


@register_attack
@dataclass(frozen=True, eq=False)
class MetricAttack(ProjectedAscent):
    """The OTAD paper's attack on the metric: climbs |psi(x + delta) - psi(x)|^2, psi being the
    `metric`, the embedding (B,*) -> (B,d) in which neighbors are searched, or smoothed differences
    of it where its gradient does not say how it changes."""

    metric: Callable[[Tensor], Tensor] = field(metadata={"known": "keys"})
    name = "metric"
    version = 2
    family = "adaptive"
    needs = Needs(network=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "True, as the gradient is 0 at the example itself"
        require(self.random_start, "random_start", expected, False)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        with torch.no_grad():
            anchors = self.metric(x)
        fits = anchors.dim() >= 2 and len(anchors) == len(x)
        require(fits, "metric", f"an embedding ({len(x)}, d)", f"shape {tuple(anchors.shape)}")

        metric = climbable(self.metric, x, ball)

        def distance(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
            return (metric(inputs) - anchors[rows]).flatten(1).square().sum(1)

        return asking(target, distance)


@register_attack
@dataclass(frozen=True, eq=False)
class Transfer(Attack):
    """Run the `inner` attack on `source` (the undefended network, say), `starts` times; the model
    under attack is only asked about each result. In regression, with `Pgd` inside, this is the
    OTAD paper's non-adaptive white-box attack."""

    source: nn.Module = field(metadata={"known": "network"})
    inner: Attack = field(default_factory=Pgd)
    starts: int = option(1, check_count)
    name = "transfer"
    family = "black-box"
    needs = Needs(network=True)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        check_evaluation(self.source, "source")
        self.inner.check_inputs(x, target.y, ball)
        with torch.no_grad():
            check_outputs(self.source(x), target.y, "source")
        survivors = Survivors(target, x, ball)
        for _ in range(self.starts):
            rows = survivors.rows
            if not len(rows):
                break
            # Pushed as far as it goes: what just breaks the source seldom breaks another model.
            source = Target(self.source, target.targets(rows), breakable=False)
            examples = x[rows]
            found = self.inner.run(source, examples, ball, generator).detach()
            target.blind[rows] |= source.blind
            moved = torch.where(found.isfinite(), found, examples)
            survivors.ask(survivors.project(moved, rows), rows)
        return survivors.inputs
