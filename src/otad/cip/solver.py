"""The exact, batched, differentiable solver of the convex integration problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.checks import check_choice, check_count
from otad.cip.feasibility import POTENTIALS, potentials
from otad.cip.gram import Gram, gram_of
from otad.cip.implicit import ImplicitMap, assemble
from otad.cip.judge import relative
from otad.cip.relax import Curvature, Relaxation
from otad.cip.rows import RowProblem
from otad.cip.simplex import maximize_on_simplex
from otad.cip.solution import CipSolution, Status
from otad.errors import InputError, SolverError

MODES = ("consistent", "paper")
ON_FAILURE = ("raise", "abstain", "fallback")


@dataclass(frozen=True)
class ExactCip:
    """Solves a `CipProblem` or `BankProblem` exactly, all rows at once.

    Eq. (3) is a K-dimensional concave quadratic program whatever d is: the cost is one K x K Gram
    matrix per row and a few pivots on it.

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
        cap = math.inf if self.max_smoothness is None else self.max_smoothness
        if bool((problem.smoothness > cap).any()):
            raise InputError(
                "max_smoothness: expected at least the problem's smoothness "
                f"{problem.smoothness.max().item()}, got {cap}"
            )
        with torch.no_grad():
            falls = self.climb is not None and self.climb[1] > 0
            bends = falls or bool(problem.strong_convexity.any())
            gram = gram_of(problem, self.chunk, bends=bends)
            answer = self._answer(problem, gram, Relaxation(self.climb, cap, self.spares))
        return self._solution(problem, answer)

    def _answer(self, problem: RowProblem, gram: Gram, relaxation: Relaxation) -> _Answer:
        """Everything of size K: potentials, multipliers, value, residual."""
        finite = gram.is_finite
        if not bool(finite.all()):  # products overflowed: park these rows on harmless numbers
            gram = gram.zeroed(~finite)
        found, longest, status = relaxation(gram, problem.smoothness, problem.strong_convexity)
        active = found.active
        level, level_gap = self._levels(gram, found, longest)
        used = found
        if self.mode == "paper":
            used = Curvature(problem.smoothness, problem.strong_convexity, active)

        shifted = gram.shifted(used.strong_convexity)
        modulus = used.smoothness - used.strong_convexity
        line = level - gram.shift_of_levels(used.strong_convexity)
        line = line - shifted.self_cross + shifted.image_square / (2 * modulus)
        best = maximize_on_simplex(shifted.images, modulus * line, active, gram.noise)
        weight = best.weights
        pull = (shifted.images * weight[None]).sum(1)
        bound = line + ((weight * pull).sum(0) / 2 - pull) / modulus  # q_i(z')
        value = (weight * bound).sum(0)
        gap = (bound - value).masked_fill(~active, 0.0)
        offset_size, image_size = gram.sizes(used.strong_convexity, active)
        residual = relative(
            value_gap=torch.maximum(gap.amax(0), level_gap),
            complementarity=(weight * gap).abs().sum(0),
            stationarity=torch.zeros_like(value),  # z' is assembled from the multipliers
            multipliers=weight.mT,
            active=active.mT,
            image_size=gram.center + image_size,
            offset_size=offset_size,
            modulus=modulus,
        )
        unsolved = ~finite | (~best.solved & (status < int(Status.INFEASIBLE)))
        answer = _Answer(
            weight=weight.mT.contiguous(),
            sensitivity=(best.sensitivity * modulus).permute(2, 0, 1).contiguous(),
            value=value,
            level=level.masked_fill(~active, torch.nan).mT.contiguous(),
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
            map_convexity=used.strong_convexity,
            active=active.mT.contiguous(),
            residual=residual,
            status=torch.where(unsolved, int(Status.UNSOLVED), status),
        )
        nearest = gram.squared_distance.argmin(0)
        return self._with_failures_marked(answer, nearest, problem.strong_convexity)

    def _levels(self, gram: Gram, found: Curvature, longest: Tensor) -> tuple[Tensor, Tensor]:
        """u_i (K,B), mean zero, in the problem's own coordinates; how far they violate (2) (B,)."""
        shifted = potentials(longest, found.active, self.potential)
        gap = (longest + shifted[None] - shifted[:, None]).amax((0, 1))  # paths bound their edges
        level = shifted + gram.shift_of_levels(found.strong_convexity)
        mean = (level * found.active).sum(0) / found.active.sum(0)
        return level - mean, gap

    def _with_failures_marked(
        self, answer: _Answer, nearest: Tensor, asked_convexity: Tensor
    ) -> _Answer:
        """NaN wherever a failed row has nothing true to say; its image by `on_failure`."""
        failed = answer.status >= int(Status.INFEASIBLE)
        if not bool(failed.any()):
            return answer
        if self.on_failure == "raise":
            raise SolverError(_failure_message(answer.status, failed))
        blank = torch.nan
        if self.on_failure == "fallback":
            blank = 0.0
        weight = answer.weight.masked_fill(failed[:, None], blank)
        if self.on_failure == "fallback":
            weight[failed, nearest[failed]] = 1.0
        return replace(
            answer,
            weight=weight,
            sensitivity=answer.sensitivity.masked_fill(failed[:, None, None], 0.0),
            value=answer.value.masked_fill(failed, torch.nan),
            level=answer.level.masked_fill(failed[:, None], torch.nan),
            smoothness=answer.smoothness.masked_fill(failed, torch.nan),
            strong_convexity=answer.strong_convexity.masked_fill(failed, torch.nan),
            map_convexity=torch.where(failed, asked_convexity, answer.map_convexity),
            residual=answer.residual.masked_fill(failed, torch.inf),
        )

    def _solution(self, problem: RowProblem, answer: _Answer) -> CipSolution:
        """The answer in the problem's dtype, tied to the query for gradients if these are on."""
        query = problem.query
        weight, value = answer.weight.to(query.dtype), answer.value.to(query.dtype)
        if query.requires_grad and torch.is_grad_enabled():
            image, value, weight = ImplicitMap.apply(  # type: ignore[no-untyped-call]
                query, problem, weight, value, answer.sensitivity, answer.map_convexity, self.chunk
            )
        else:
            image = assemble(problem, weight, answer.map_convexity, self.chunk)
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


@dataclass(frozen=True)
class _Answer:
    """A batch's answer before it is assembled: all but the image, batch first, float64."""

    weight: Tensor
    sensitivity: Tensor
    value: Tensor
    level: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    map_convexity: Tensor
    active: Tensor
    residual: Tensor
    status: Tensor


def _failure_message(status: Tensor, failed: Tensor) -> str:
    rows = failed.nonzero()[:, 0]
    listed = ", ".join(f"{int(row)} ({Status(int(status[row])).name})" for row in rows[:5])
    more = ", ..." if len(rows) > 5 else ""
    return (
        f"{len(rows)} of {len(status)} rows have no solution: {listed}{more}. Set max_smoothness "
        "to leave out contradicting neighbors, or on_failure='abstain' or 'fallback'"
    )


def _are_steps(climb: object) -> bool:
    return (
        isinstance(climb, tuple)
        and len(climb) == 2
        and all(isinstance(step, (int, float)) and 0 <= step < math.inf for step in climb)
        and sum(climb) > 0
    )
