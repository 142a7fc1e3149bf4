"""The exact, batched, differentiable solver of the convex integration problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from otad.checks import check_choice, check_count
from otad.cip.local.answer import Answer
from otad.cip.local.feasibility import POTENTIALS
from otad.cip.local.gram import Gram, Products, products_of, worst_noise
from otad.cip.local.implicit import ImplicitMap, assemble
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_torch import SmallStage
from otad.cip.local.solve_triton import fits, solve_rows
from otad.cip.problem import BankProblem
from otad.cip.rows import RowProblem
from otad.cip.solution import CipSolution, Status
from otad.errors import InputError

MODES = ("consistent", "paper")
ON_FAILURE = ("raise", "abstain", "fallback")


@dataclass(frozen=True)
class ExactCip:
    """Solves a `CipProblem` or `BankProblem` exactly, all rows at once.

    Eq. (3) is a K-dimensional concave quadratic program whatever d is: the cost is one K x K Gram
    matrix per row and a few pivots on it. To solve is to take `products`, `answer` and `solution`
    of the problem `brought` to its query.

    - `mode`: with which curvature eq. (3) is solved where potentials exist only for a larger one:
      that larger one, so that the map passes through all anchors ("consistent"), or the one asked
      for, as in Algorithm 2 of the paper ("paper").
    - `climb`: steps (delta1, delta2) by which L grows and l falls until potentials exist, or None
      for the exact least L.
    - `max_smoothness`: no L above this; the neighbor on the violating cycle is left out instead.
    - `spares`: the last so many neighbors of each row take part only as substitutes for such.
    - `potential`: which feasible potentials: "canonical", or "lowest" and "highest" to measure how
      much an answer depends on the choice.
    - `on_failure`: for rows without a solution "raise" a `SolverError`, "abstain" (NaN), or answer
      with the nearest neighbor alone ("fallback"); `status` tells in every case.
    - `chunk`: rows whose neighbors are in working memory at a time; None fits the device.
    """

    mode: str = "consistent"
    climb: tuple[float, float] | None = None
    max_smoothness: float | None = None
    spares: int = 0
    potential: str = "canonical"
    on_failure: str = "raise"
    chunk: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.mode, "mode", MODES)
        check_choice(self.potential, "potential", POTENTIALS)
        check_choice(self.on_failure, "on_failure", ON_FAILURE)
        check_count(self.spares, "spares", least=0)
        if self.chunk is not None:
            check_count(self.chunk, "chunk")
        if self.climb is not None and not _are_steps(self.climb):
            raise InputError(
                "climb: expected two finite steps (delta1, delta2) of at least 0, not both 0, "
                f"got {self.climb!r}"
            )
        if self.max_smoothness is not None and not 0 < self.max_smoothness < math.inf:
            raise InputError(
                f"max_smoothness: expected a positive number or None, got {self.max_smoothness!r}"
            )

    def __call__(self, problem: RowProblem) -> CipSolution:
        _, count, _ = problem.shape
        if self.spares >= count:
            raise InputError(
                f"spares: expected fewer than the {count} neighbors of a row, got {self.spares}"
            )
        cap = self._cap
        if cap < math.inf and bool((problem.smoothness > cap).any()):
            raise InputError(
                "max_smoothness: expected at least the problem's smoothness "
                f"{problem.smoothness.max().item()}, got {cap}"
            )
        if isinstance(problem, BankProblem):
            problem = problem.brought()
        answer = self.answer(problem, self.products(problem), self.stage)
        return self.solution(problem, answer)

    @property
    def stage(self) -> SmallStage:
        """What makes an answer of products, by these settings."""
        relaxation = Relaxation(self.climb, self._cap, self.spares)
        return SmallStage(self.mode, self.potential, relaxation)

    @property
    def _cap(self) -> float:
        return math.inf if self.max_smoothness is None else self.max_smoothness

    @property
    def _falls(self) -> bool:
        """Whether the strong convexity of a row may be lowered."""
        return self.climb is not None and self.climb[1] > 0

    @torch.no_grad()
    def products(self, problem: RowProblem) -> Products:
        """The inner products of all neighbors."""
        return products_of(problem, self.chunk, bends=problem.is_bent or self._falls)

    def answer(self, problem: RowProblem, products: Products, stage: SmallStage) -> Answer:
        """Everything of size K: by one kernel as far as it goes, the rest step by step."""
        asked = problem.smoothness, problem.strong_convexity
        dtype, sensitive = problem.query.dtype, _is_differentiated(problem)
        with torch.no_grad():
            if fits(products):
                answer, outcome = solve_rows(stage, products, *asked, dtype, sensitive=sensitive)
                if bool((outcome > 0).all()):
                    return answer
                left = (outcome == 0).nonzero()[:, 0].to(asked[0].device)
                if len(left):
                    part = products.rows(left).gram()
                    answer.put(left, stage(part, *(values[left] for values in asked)))
            else:
                gram = products.gram()
                answer = stage(gram, *asked)
                self._look_again(problem, gram, stage, answer)
            squares = products.squares.sum(0)
            return answer.with_failures_marked(self.on_failure, squares, asked[1])

    def _look_again(
        self, problem: RowProblem, gram: Gram, stage: SmallStage, answer: Answer
    ) -> None:
        """Once more, in float64, rows that only the rounding of float32 products may have denied
        the curvature asked for."""
        rows = (answer.status != int(Status.SOLVED)).nonzero()[:, 0]
        if len(rows) == 0 or problem.query.dtype == torch.float64:
            return
        rough = replace(gram.columns(rows), noise=worst_noise(problem.shape[2]))
        asked = problem.smoothness[rows], problem.strong_convexity[rows]
        rows = rows[stage.relaxation.start(rough, *asked).feasible(rough)]
        if len(rows):
            again = problem.in_double(rows)
            fine = self.products(again).gram()
            answer.put(rows, stage(fine, again.smoothness, again.strong_convexity))

    def solution(self, problem: RowProblem, answer: Answer) -> CipSolution:
        """The answer in the problem's dtype, tied to the query for gradients if these are on."""
        query = problem.query
        weight, value = answer.weight.to(query.dtype), answer.value.to(query.dtype)
        bent = problem.is_bent or (self._falls and self.mode == "consistent")
        how = answer.map_convexity, self.chunk, bent
        if _is_differentiated(problem):
            image, value, weight = ImplicitMap.apply(  # type: ignore[no-untyped-call]
                query, problem, weight, value, answer.sensitivity, *how
            )
        else:
            image = assemble(problem, weight, *how)
        return CipSolution(
            image=image,
            value=value,
            multipliers=weight,
            potentials=answer.level.to(query.dtype),
            smoothness=answer.smoothness,
            strong_convexity=answer.strong_convexity,
            residual=answer.residual,
            status=answer.status,
            active=answer.active,
            mode=self.mode,
        )


def _is_differentiated(problem: RowProblem) -> bool:
    return problem.query.requires_grad and torch.is_grad_enabled()


def _are_steps(climb: object) -> bool:
    return (
        isinstance(climb, tuple)
        and len(climb) == 2
        and all(isinstance(step, (int, float)) and 0 <= step < math.inf for step in climb)
        and sum(climb) > 0
    )
