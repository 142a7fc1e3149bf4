"""Auto-PGD (Croce and Hein 2020): gradient ascent that sets its own step sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import Survivors, Target, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import Objective
from otad.attacks.pgd import ModelAscent
from otad.threat import LpBall, per_row

FIRST_STEP = 2.0  # in units of eps
MOMENTUM = 0.75  # weight of the gradient step, the rest is the step before
ENOUGH = 0.75  # share of steps that has to raise the loss for the step size to stay


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Apgd(ModelAscent):
    """`steps` of gradient ascent with momentum, each example with a step size of its own:

        z = project(x_k + step * steepest(gradient)),
        x_{k+1} = project(x_k + 0.75 (z - x_k) + 0.25 (x_k - x_{k-1})).

    The step begins at 2 eps. At every checkpoint it is halved, and the ascent continues from the
    best point so far, if fewer than 3/4 of the steps since the last checkpoint raised the loss, or
    if neither the step nor the best loss has changed since then.
    """

    name = "apgd"
    family = "white-box"
    needs = Needs(gradients=True)

    def climb_on(self, target: Target, x: Tensor, start: Tensor, ball: LpBall) -> Tensor:
        """One ascent from points of the ball that another attack found; the best input (B,*)."""
        survivors = Survivors(target, x, ball)
        self.climb(survivors, self.objective(target, x), start, survivors.rows)
        return survivors.inputs

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
            if k == self.steps:
                survivors.ask(moved, path.rows)
                return
            outputs, value, gradient = climbed(moved, path.rows)
            alive = survivors.judge(moved, outputs, path.rows)
            path.move(moved, value, gradient)
            path.select(alive)
            if k in intervals:
                path.adapt(intervals[k])


def checkpoints(steps: int) -> dict[int, int]:
    """Each checkpoint w_j, and the number of steps since the one before.

    w_j = ceil(p_j steps), p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06).
    """
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
        """Continue with these examples (bool) only."""
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
        """Go there, and remember the best point."""
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
