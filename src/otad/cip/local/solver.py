"""The exact, batched, differentiable solver of the convex integration problem.

Launching the five hundred small operations of `solve_torch` would take most of the time. So
compiled code solves one row after the other, on a CPU by `solve_compiled` and on a GPU by
`solve_triton`, and leaves difficult rows to `solve_torch`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from otad.checks import check_choice, check_count, holds, require
from otad.cip.local.feature import feature
from otad.cip.local.potentials import POTENTIALS
from otad.cip.local.products import Gram, Products, products_of
from otad.cip.local.relax import Relaxation
from otad.cip.local.solve_compiled import solve_compiled
from otad.cip.local.solve_torch import DualSolution, solve_torch
from otad.cip.local.stream_triton import MOST_NEIGHBORS, launch, padded_count
from otad.cip.problem import BankProblem
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution, Status
from otad.io.environment import has_triton
from otad.threads import torch_threads

MODES = ("consistent", "paper")
ON_FAILURE = ("raise", "abstain", "fallback")
_EPS = torch.finfo(torch.float32).eps
# The stages of `row_kernel` by the padded K, with the warps of a program and the registers of a
# thread. With fewer registers a thread has to store some, but more rows are solved side by side.
STAGES = {
    16: [("both", 1, 96)],
    32: [("potentials", 2, 128), ("multipliers", 1, 168)],
    64: [("potentials", 8, 128), ("multipliers", 2, 255)],
}


@dataclass(frozen=True)
class ExactCip:
    """The exact solver of convex integration problems, for all rows of a batch at once.

    It is the paper's Algorithm 2 after the neighbors have been found. Where no potential exists for
    the requested smoothness, L is raised. The solution is differentiable in the queries.

    Parameters
    ----------
    mode : str
        Which curvature the map has where L was raised: the raised one, so that the map passes
        through all anchors ("consistent"), or the requested one as in the paper ("paper").
    climb : (float, float) or None
        Steps (delta1, delta2) by which L grows and l falls until potentials exist. If None, L is
        raised to the exact least value.
    max_smoothness : float or None
        The largest L. If it is not enough, neighbors that contradict others are left out.
    spares : int
        How many of the last neighbors of each row are used only as substitutes for those left out.
    potential : str
        "canonical", or "lowest" and "highest" to measure how much the choice matters.
    on_failure : str
        What to do about rows without a solution: "raise" a `SolverError`, "abstain" (NaN), or
        return the feature of the nearest neighbor ("fallback"). The status tells them apart.
    chunk : int or None
        How many rows have their neighbors in working memory at a time. If None, it fits the device.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> anchors = torch.tensor([[[0.0], [1.0]]])
    >>> problem = otad.cip.CipProblem(torch.tensor([[0.5]]), anchors, 3 * anchors, smoothness=2.0)
    >>> solution = otad.cip.ExactCip()(problem)
    >>> solution.status_text, round(solution.smoothness.item(), 3), round(solution.image.item(), 3)
    ('1 raised', 3.0, 1.5)
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
        steps, cap = self.climb, self.max_smoothness
        if steps is not None:
            expected = "two finite steps (delta1, delta2) of at least 0, not both 0"
            fits = isinstance(steps, tuple) and len(steps) == 2 and all(map(_is_step, steps))
            require(fits and any(steps), "climb", expected, steps)
        if cap is not None:
            require(0 < cap < math.inf, "max_smoothness", "a positive number or None", cap)

    def __call__(self, problem: RowProblem) -> CipSolution:
        """Return the solution of a `CipProblem` or `BankProblem`."""
        if self.spares:
            few = f"fewer than the {problem.shape[1]} neighbors of a row"
            require(self.spares < problem.shape[1], "spares", few, self.spares)
        if self.max_smoothness is not None:
            most = problem.smoothness.max().item()
            least = f"at least the problem's smoothness {most}"
            require(most <= self.max_smoothness, "max_smoothness", least, self.max_smoothness)
        if isinstance(problem, BankProblem):
            problem = problem.fetched()
        products = self._products(problem)
        found, outcome = self._dual(problem, products)
        solution = self._solution(problem, found)  # by kernels that run before the host waits
        if outcome is None or holds(outcome > 0):
            return solution
        del solution  # the next one may need its memory
        return self._solution(problem, self._completed(problem, products, found, outcome))

    @cached_property
    def relaxation(self) -> Relaxation:
        """How curvature is relaxed where no potential exists."""
        return Relaxation(self.climb, self.max_smoothness or math.inf, self.spares)

    @property
    def _lowers_convexity(self) -> bool:
        return self.climb is not None and self.climb[1] > 0

    def _products(self, problem: RowProblem) -> Products:
        """Return the inner products of the neighbors, the first step of a solution."""
        with_offsets = problem.has_strong_convexity or self._lowers_convexity
        return products_of(problem, self.chunk, with_offsets=with_offsets)

    def _dual(self, problem: RowProblem, products: Products) -> tuple[DualSolution, Tensor | None]:
        """Return potentials and multipliers, the second step of a solution.

        If a kernel has found them, its outcome (B,) says which rows `_completed` has to complete.
        Torch solves rows that compiled code on a CPU leaves over."""
        high, low = problem.smoothness, problem.strong_convexity
        given, dtype = (high, low, self.relaxation, self.potential, self.mode), problem.query.dtype
        sensitive = _is_sensitive(problem)
        if can_solve(products):
            return solve_triton(products, *given, dtype, sensitive=sensitive)
        if products.arrays and not self.spares:
            errors = products.noise, _worst_noise(problem)
            found, count = solve_compiled(products.arrays, *given, errors, sensitive=sensitive)
            if count == 0:
                return found, None
            left = (found.status < 0).nonzero()[:, 0]
            rest, part = problem.select(left), products.rows(left)
            found.overwrite(left, self._solve_in_torch(rest, part, sensitive))
        else:
            found = self._solve_in_torch(problem, products, sensitive)
        return self._with_failures_marked(problem, products, found), None

    def _completed(
        self, problem: RowProblem, products: Products, found: DualSolution, outcome: Tensor
    ) -> DualSolution:
        """Return what the kernel has found, with the rows that it left over solved in torch."""
        left = (outcome == 0).nonzero()[:, 0]
        if len(left):
            if isinstance(problem, BankProblem):
                problem.check_values()  # if they are wrong, the kernel leaves the row over
            high, low = problem.smoothness[left], problem.strong_convexity[left]
            gram, sensitive = products.rows(left).gram(), _is_sensitive(problem)
            found.overwrite(left, self._solve(gram, high, low, sensitive))
        return self._with_failures_marked(problem, products, found)

    def _with_failures_marked(
        self, problem: RowProblem, products: Products, found: DualSolution
    ) -> DualSolution:
        squares = products.squares.sum(0)
        return found.with_failures_marked(self.on_failure, squares, problem.strong_convexity)

    def _solve_in_torch(
        self, problem: RowProblem, products: Products, sensitive: bool
    ) -> DualSolution:
        """Return the solution without a kernel; failures are marked by their status alone."""
        gram = products.gram()
        with torch_threads(1):  # synchronizing threads would take most of the time
            found = self._solve(gram, problem.smoothness, problem.strong_convexity, sensitive)
            self._retry_in_double(problem, gram, found, sensitive)
        return found

    def _retry_in_double(
        self, problem: RowProblem, gram: Gram, found: DualSolution, sensitive: bool
    ) -> None:
        """Solve rows again in float64 if only rounding may have ruled out their curvature."""
        rows = (found.status != int(Status.SOLVED)).nonzero()[:, 0]
        if len(rows) == 0 or problem.query.dtype == torch.float64:
            return
        rough = replace(gram.columns(rows), noise=_worst_noise(problem))
        requested = problem.smoothness[rows], problem.strong_convexity[rows]
        rows = rows[self.relaxation.start(rough, *requested).feasible(rough)]
        if len(rows):
            again = problem.select(rows).in_double()
            fine, high, low = self._products(again).gram(), again.smoothness, again.strong_convexity
            found.overwrite(rows, self._solve(fine, high, low, sensitive))

    def _solve(self, gram: Gram, high: Tensor, low: Tensor, sensitive: bool) -> DualSolution:
        how = self.relaxation, self.potential, self.mode
        return solve_torch(gram, high, low, *how, sensitive=sensitive)

    def _solution(self, problem: RowProblem, found: DualSolution) -> CipSolution:
        """Return features and all else in the problem's dtype, the last step of a solution.

        They are differentiable in the query if gradients are on."""
        parts, dtype = (found.multipliers, found.value, found.potentials), problem.query.dtype
        weight, value, potentials = (one if one.dtype == dtype else one.to(dtype) for one in parts)
        lowered = self._lowers_convexity and self.mode == "consistent"
        convexity = found.map_convexity if problem.has_strong_convexity or lowered else None
        image, value, multipliers = feature(
            problem, weight, value, found.sensitivity, convexity, self.chunk
        )
        return CipSolution._of(
            image=image,
            value=value,
            multipliers=multipliers,
            potentials=potentials,
            smoothness=found.smoothness,
            strong_convexity=found.strong_convexity,
            residual=found.residual,
            status=found.status,
            active=found.active,
            mode=self.mode,
        )


def _is_sensitive(problem: RowProblem) -> bool:
    """Return whether somebody may ask for a gradient."""
    return problem.query.requires_grad and torch.is_grad_enabled()


def _is_step(step: object) -> bool:
    return isinstance(step, (int, float)) and 0 <= step < math.inf


def _worst_noise(problem: RowProblem) -> float:
    """Return the largest relative error of a sum of d products, to which nearly equal terms come
    close. It is 0 in float64, because nothing more exact could decide."""
    single = problem.query.dtype == torch.float32
    return (problem.query.shape[1] + 2) * _EPS / 2 if single else 0.0


def can_solve(products: Products) -> bool:
    return products.values.is_cuda and products.count <= MOST_NEIGHBORS and has_triton()


def solve_triton(
    products: Products,
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
    dtype: torch.dtype,
    *,
    sensitive: bool,
) -> tuple[DualSolution, Tensor]:
    """Return the solution of a batch by `row_kernel`, and the outcome (B,).

    Multipliers and value are in `dtype`. The outcome is 1 for a solved row, 0 for a row left to
    `solve_torch`, and -1 for a row without a solution."""
    from otad.cip.kernels.row import row_kernel

    values = products.values
    segments, batch, _, _ = values.shape
    total, padded = products.count, padded_count(products.count)
    climb, cap = relaxation.climb or (0.0, 0.0), relaxation.max_smoothness
    steps = _settings(products.noise, *climb, cap, device=values.device)
    multipliers = values.new_empty((batch, total), dtype=dtype)
    potentials = values.new_empty((batch, total), dtype=torch.float64)
    value = values.new_empty(batch, dtype=dtype)
    numbers = values.new_empty((4, batch), dtype=torch.float64)
    status = values.new_empty(batch, dtype=torch.int64)
    outcome = values.new_empty(batch, dtype=torch.int32)
    active = values.new_empty((batch, total), dtype=torch.int8)
    sensitivity = values.new_empty((batch, total, total) if sensitive else 0, dtype=torch.float64)
    inputs = products.squares, smoothness.contiguous(), strong_convexity.contiguous(), steps
    outputs = multipliers, potentials, value, numbers, status, active, outcome, sensitivity
    constants = {"total": total, "count": total - relaxation.spares}
    constants |= {"shifts": products.with_offsets, "climbs": relaxation.climb is not None}
    constants |= {"padded": padded, "consistent": mode == "consistent"}
    arrays = values, *inputs, *outputs, batch, segments, int(sensitive)
    for stage, warps, registers in STAGES[padded]:
        how = {"rule": rule, "stage": stage, "num_warps": warps, "maxnreg": registers}
        launch(row_kernel, (batch,), *arrays, **constants, **how)
    *curvature, residual = numbers
    slopes, included = sensitivity if sensitive else None, active.view(torch.bool)
    found = multipliers, slopes, value, potentials, *curvature, included, residual, status
    return DualSolution(*found), outcome


@cache  # for good, because a CUDA graph reads them where they are
def _settings(*numbers: float, device: torch.device) -> Tensor:
    """Return numbers for a kernel in float64; plain arguments would be rounded to float32."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)
