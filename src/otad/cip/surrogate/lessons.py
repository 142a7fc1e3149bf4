"""What CIP-net learns from: problems, a teacher's answers to them, the network's own features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_count, check_tensor
from otad.cip.judge import map_curvature
from otad.cip.local.feature import assemble
from otad.cip.problem import BankProblem, CipProblem
from otad.cip.solution import CipSolution
from otad.cip.surrogate.net import CipNet
from otad.errors import InputError
from otad.io.mapped_rows import gathered
from otad.search.neighbors import TorchSearch
from otad.training.acceleration import precision

Problem = CipProblem | BankProblem
Teacher = Callable[[Problem], CipSolution]


def leave_one_out(
    inputs: Tensor,
    features: Tensor,
    n_neighbors: int,
    smoothness: float,
    strong_convexity: float = 0.0,
    *,
    rows: Tensor | None = None,
) -> BankProblem:
    """Points of a bank (N,d) as queries, each among its nearest neighbors other than itself.

    `rows` (M,) int64 chooses the points, all by default; `features[rows]` are then the network's
    own features of the queries. For neighbors by another metric make the `BankProblem` yourself.
    """
    check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES, finite=False)
    check_count(n_neighbors, "n_neighbors")
    if rows is None:
        rows = torch.arange(len(inputs))
    check_tensor(rows, "rows", "M", dtypes=(torch.int64,))
    query = gathered(inputs, rows).to(torch.promote_types(inputs.dtype, torch.float32))
    indices = TorchSearch(inputs)(query, n_neighbors, exclude=rows).indices
    return BankProblem(query, inputs, features, indices, smoothness, strong_convexity)


def rows_of(problem: Problem, rows: Tensor) -> Problem:
    """The problem of some rows (b,)."""
    query, high, low = (
        gathered(part, rows)
        for part in (problem.query, problem.smoothness, problem.strong_convexity)
    )
    if isinstance(problem, CipProblem):
        neighbors = gathered(problem.anchors, rows), gathered(problem.images, rows)
        return CipProblem(query, *neighbors, high, low)
    indices = gathered(problem.indices, rows)
    return BankProblem(query, problem.inputs, problem.features, indices, high, low)


class Answers:
    """The teacher's images (b,d) of some rows of a problem.

    With `cached` every row is solved once, now, and only its K multipliers are kept: the images
    are put together from the neighbors each time, which costs a small part of solving.
    """

    def __init__(
        self, teacher: Teacher, problem: Problem, batch_size: int, *, cached: bool
    ) -> None:
        self.teacher, self.problem = teacher, problem
        self._known: tuple[Tensor, Tensor] | None = None
        if cached:
            every = torch.arange(problem.shape[0]).split(batch_size)
            parts = [self._ask(rows_of(problem, rows)) for rows in every]
            weights, convexity = (torch.cat(column) for column in zip(*parts, strict=True))
            self._known = weights, convexity

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        part = rows_of(self.problem, rows)
        if self._known is None:
            weights, convexity = self._ask(part)
        else:
            weights, convexity = (known[rows.to(known.device)] for known in self._known)
        return assemble(part, weights, convexity, bool(convexity.any()))

    @torch.no_grad()
    def _ask(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Multipliers (b,K), and the strong convexity (b,) of the map they belong to."""
        solution = self.teacher(problem)
        if not bool(solution.multipliers.isfinite().all()):
            raise InputError(
                "teacher: expected one that answers every row with its multipliers, for instance "
                "ExactCip(on_failure='fallback'), got NaN"
            )
        convexity = map_curvature(problem, solution)[1]
        return solution.multipliers, torch.where(
            solution.failed, problem.strong_convexity, convexity
        )


@dataclass(frozen=True, eq=False)
class Lesson:
    """Problems with what is to be answered to them, alpha of it by the teacher.

    `unit`: the squared length in which errors are measured; `mixed_precision`: the net computes in
    bfloat16 where autocast finds it safe.
    """

    problems: Problem
    answers: Answers | None
    own_features: Tensor | None
    alpha: float
    unit: float
    mixed_precision: bool

    def objective(self, net: CipNet, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The batch means of the objective and of the error to the teacher (NaN if not asked)."""
        problem = rows_of(self.problems, rows)
        with precision(problem.query.device, mixed=self.mixed_precision):
            image = net(problem).image
        loss, error = image.new_zeros(()), image.new_full((), torch.nan)
        if self.answers is not None:
            missed = _mean_square(image - self.answers(rows)) / self.unit
            loss, error = loss + self.alpha * missed, missed.detach()
        if self.own_features is not None and self.alpha < 1:
            own = gathered(self.own_features, rows, image.device).to(image)
            loss = loss + (1 - self.alpha) * _mean_square(image - own) / self.unit
        return loss, error


def _mean_square(difference: Tensor) -> Tensor:
    return difference.square().sum(1).mean()
