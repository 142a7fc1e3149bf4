"""Auto-PGD (Croce and Hein 2020): gradient ascent that sets its own step sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, Target, register_attack
from otad.attacks.gradients import Ask, exact, through_substitute
from otad.attacks.losses import check_loss, loss_for
from otad.attacks.needs import Needs
from otad.attacks.survivors import Survivors
from otad.checks import check_count
from otad.errors import InputError
from otad.threat import LpBall

FIRST_STEP = 2.0  # in units of eps
MOMENTUM = 0.75  # weight of the gradient step, the rest is the step before
ENOUGH = 0.75  # share of steps that has to raise the loss for the step size to stay


@register_attack
@dataclass(frozen=True, eq=False)
class Apgd(Attack):
    """`steps` of gradient ascent with momentum, each example with a step size of its own:

        z = project(x_k + step * steepest(gradient)),
        x_{k+1} = project(x_k + 0.75 (z - x_k) + 0.25 (x_k - x_{k-1})).

    The step begins at 2 eps. At every checkpoint it is halved, and the ascent goes on from the best
    point so far, if fewer than 3/4 of the steps since the last checkpoint raised the loss, or if
    neither the step nor the best loss has changed since then. The model judges every iterate.

    `loss`: one of `LOSSES`; in regression, always the squared error. A `substitute` is climbed in
    the model's place, while the model judges. Without `random_start`, from the example itself.
    """

    steps: int = 100
    loss: str = "margin"
    restarts: int = 1
    random_start: bool = True
    substitute: nn.Module | None = None
    name = "apgd"
    family = "white-box"
    needs = Needs(gradients=True)

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_count(self.restarts, "restarts")
        check_loss(self.loss)
        if self.restarts > 1 and not self.random_start:
            raise InputError(
                f"restarts: expected 1 without a random start, got {self.restarts}, all the same"
            )

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        ask = self._asker(target)
        survivors = Survivors(target, x)
        for _ in range(self.restarts):
            start = ball.inside(x, generator) if self.random_start else x
            rows = survivors.rows
            if len(rows):
                self.climb(survivors, target, ask, start[rows], x[rows], rows, ball)
        return survivors.inputs

    def climb_on(self, target: Target, x: Tensor, start: Tensor, ball: LpBall) -> Tensor:
        """One ascent from points of the ball that another attack has found; the best input (B,*)"""
        survivors = Survivors(target, x)
        rows = survivors.rows
        self.climb(survivors, target, self._asker(target), start, x, rows, ball)
        return survivors.inputs

    def _asker(self, target: Target) -> Ask:
        loss = loss_for(self.loss, target.y)
        if self.substitute is None:
            return exact(target, loss)
        return through_substitute(target, loss, self.substitute)

    def climb(
        self,
        survivors: Survivors,
        target: Target,
        ask: Ask,
        start: Tensor,
        x: Tensor,
        rows: Tensor,
        ball: LpBall,
    ) -> None:
        """One ascent of what `ask` tells, for the examples `rows` (int64) alone: from `start` (n,*)
        in the balls around x (n,*). What it finds is known to `survivors`."""
        outputs, value, gradient = ask(start, rows)
        path = _Path(rows, x, start, value, gradient, FIRST_STEP * ball.eps)
        path.keep(survivors.judge(start, outputs, rows))
        intervals = checkpoints(self.steps)
        for k in range(1, self.steps + 1):
            if not len(path.rows):
                return
            moved = path.next_point(ball, MOMENTUM if k > 1 else 1.0)
            if k == self.steps:
                survivors.judge(moved, target(moved, path.rows), path.rows)
                return
            outputs, value, gradient = ask(moved, path.rows)
            standing = survivors.judge(moved, outputs, path.rows)
            path.move(moved, value, gradient)
            path.keep(standing)
            if k in intervals:
                path.adapt(intervals[k])


def checkpoints(steps: int) -> dict[int, int]:
    """Each checkpoint w_j, and the number of steps since the one before.

    w_j = ceil(p_j steps), p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06).
    """
    found: dict[int, int] = {}
    before, share, width = 0, 0.22, 0.22
    while share <= 1:
        mark = math.ceil(share * steps - 1e-9)  # what is whole but for rounding stays
        if mark > before:
            found[mark] = mark - before
        before, width = mark, max(width - 0.03, 0.06)
        share += width
    return found


class _Path:
    """Where every row of an ascent is: all tensors have one entry per row that still stands."""

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

    def keep(self, standing: Tensor) -> None:
        """Go on with these rows (bool) only."""
        if not bool(standing.all()):
            for name, tensor in vars(self).items():
                setattr(self, name, tensor[standing])

    def next_point(self, ball: LpBall, momentum: float) -> Tensor:
        step = _per_row(self.step, self.point) * ball.steepest(self.gradient)
        ahead = ball.project(self.point + step, self.x)
        inertia = self.point - self.previous
        moved = self.point + momentum * (ahead - self.point) + (1 - momentum) * inertia
        return ball.project(moved, self.x)

    def move(self, point: Tensor, value: Tensor, gradient: Tensor) -> None:
        """Go there, and remember the best place."""
        self.raised = self.raised + (value > self.value)
        self.previous, self.point = self.point, point
        self.value, self.gradient = value, gradient
        better = value > self.best_value
        rows = _per_row(better, point)
        self.best = torch.where(rows, point, self.best)
        self.best_value = torch.where(better, value, self.best_value)
        self.best_gradient = torch.where(rows, gradient, self.best_gradient)

    def adapt(self, taken: int) -> None:
        """At a checkpoint, `taken` steps after the last: halve the step, go back to the best."""
        stuck = self.step_is_old & (self.best_value == self.marked_value)
        halved = (self.raised < ENOUGH * taken) | stuck
        self.step = torch.where(halved, self.step / 2, self.step)
        rows = _per_row(halved, self.point)
        self.point = torch.where(rows, self.best, self.point)
        self.gradient = torch.where(rows, self.best_gradient, self.gradient)
        self.value = torch.where(halved, self.best_value, self.value)
        self.step_is_old, self.marked_value = ~halved, self.best_value
        self.raised = torch.zeros_like(self.raised)


def _per_row(values: Tensor, like: Tensor) -> Tensor:
    """Values (n,) in the shape (n,1,...) that multiplies `like` (n,*)."""
    return values.view(-1, *[1] * (like.dim() - 1))
