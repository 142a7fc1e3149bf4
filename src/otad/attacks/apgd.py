"""Auto-PGD (Croce and Hein 2020): gradient ascent whose step sizes adapt to each example."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.attacks.base import register_attack
from otad.attacks.objectives import Objective
from otad.attacks.pgd import ModelAscent
from otad.attacks.projection import ascended, projected
from otad.attacks.row_graphs import row_wise
from otad.attacks.target import Survivors
from otad.threat import LpBall, per_row

FIRST_STEP = 2.0  # the first step size, in units of eps
MOMENTUM = 0.75  # the weight of the gradient step; the previous step has the rest
ENOUGH = 0.75  # the step size stays while at least this share of the steps raises the loss


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Apgd(ModelAscent):
    """Auto-PGD (Croce and Hein 2020): ascent with momentum and a step size for each example.

    With `z = project(x_k + step * steepest(gradient))` the next iterate is
    `project(x_k + 0.75 (z - x_k) + 0.25 (x_k - x_{k-1}))`. The step size begins at 2 eps. At every
    checkpoint it is halved, and the ascent continues from the best point so far, if fewer than 3/4
    of the steps since the last checkpoint raised the loss, or if neither the step size nor the best
    loss has changed since then.

    Parameters
    ----------
    steps, restarts, random_start, loss, substitute, targets
        As in `Pgd`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model, x, y = torch.nn.Identity().eval(), torch.eye(3), torch.arange(3)
    >>> attack, generator = otad.attacks.Apgd(steps=20), torch.Generator().manual_seed(0)
    >>> attack(model, x, y, otad.L2(0.8), generator=generator).accuracy
    0.0
    """

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
    """Return the checkpoints w_j of APGD, each with the number of steps since the previous one.

    w_j = ceil(p_j steps), p_0 = 0, p_1 = 0.22, p_{j+1} = p_j + max(p_j - p_{j-1} - 0.03, 0.06)."""
    found: dict[int, int] = {}
    before, share, width = 0, 0.22, 0.22
    while share <= 1:
        mark = math.ceil(share * steps - 1e-9)  # 1e-9: whole numbers must not be rounded up
        if mark > before:
            found[mark] = mark - before
        before, width = mark, max(width - 0.03, 0.06)
        share += width
    return found


class _Path:
    """The state of an APGD ascent: every tensor has one entry per example that is not broken."""

    def __init__(
        self, rows: Tensor, x: Tensor, start: Tensor, value: Tensor, gradient: Tensor, step: float
    ) -> None:
        self.rows, self.x = rows, x
        self.point = self.previous = self.best = start
        self.value = self.best_value = self.marked_value = value
        self.gradient = self.best_gradient = gradient
        self.step = start.new_full((len(start),), step)  # in the dtype of x, which `value` may lack
        self.raised = torch.zeros_like(rows)  # steps that raised the loss since the checkpoint
        self.step_is_old = torch.ones_like(rows, dtype=torch.bool)  # unchanged since a checkpoint

    def select(self, alive: Tensor) -> None:
        """Keep only the examples that are `alive` (bool)."""
        kept = alive.nonzero()[:, 0]
        if len(kept) < len(alive):
            for name, tensor in vars(self).items():
                setattr(self, name, tensor[kept])

    def next_point(self, ball: LpBall, momentum: float) -> Tensor:
        about = self.x, self.point, self.previous, self.step, self.gradient
        return _next_point(*about, ball=ball, momentum=momentum)

    def move(self, point: Tensor, value: Tensor, gradient: Tensor) -> None:
        best = self.best, self.best_value, self.best_gradient
        self.best, self.best_value, self.best_gradient, raised = _best_of(
            *best, self.value, point, value, gradient
        )
        self.raised = self.raised + raised
        self.previous, self.point = self.point, point
        self.value, self.gradient = value, gradient

    def adapt(self, taken: int) -> None:
        """At a checkpoint, `taken` steps after the last, halve the step size where it is due."""
        stuck = self.step_is_old & (self.best_value == self.marked_value)
        halved = (self.raised < ENOUGH * taken) | stuck
        self.step = torch.where(halved, self.step / 2, self.step)
        rows = per_row(halved, self.point)
        self.point = torch.where(rows, self.best, self.point)
        self.gradient = torch.where(rows, self.best_gradient, self.gradient)
        self.value = torch.where(halved, self.best_value, self.value)
        self.step_is_old, self.marked_value = ~halved, self.best_value
        self.raised = torch.zeros_like(self.raised)


@row_wise
def _next_point(
    x: Tensor, point: Tensor, previous: Tensor, step: Tensor, gradient: Tensor,
    *, ball: LpBall, momentum: float,
) -> Tensor:  # fmt: skip
    ahead = ascended(x, point, step, gradient, ball=ball)
    moved = point + momentum * (ahead - point) + (1 - momentum) * (point - previous)
    return projected(ball, moved, x)


def _best_of(
    best: Tensor, best_value: Tensor, best_gradient: Tensor, before: Tensor,
    point: Tensor, value: Tensor, gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the best point so far with its value and gradient, and whether the value was raised
    from the one `before`."""
    better = value > best_value
    rows = per_row(better, point)
    kept = torch.where(rows, point, best), torch.where(better, value, best_value)
    return *kept, torch.where(rows, gradient, best_gradient), value > before
