"""From the inner products of a batch to its multipliers, step by step in torch.

`find_potentials` is eq. (2), relaxed where it must be, and `solve_qp` is eq. (3).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from otad.cip.judge import relative
from otad.cip.local.potentials import potentials_from_paths
from otad.cip.local.products import Gram
from otad.cip.local.relax import Curvature, Relaxation
from otad.cip.local.simplex_qp import maximize_on_simplex
from otad.cip.solution import Status
from otad.errors import SolverError


@dataclass(frozen=True)
class DualSolution:
    """The solution of a batch before its features are assembled: everything of size K.

    `multipliers` and `potentials` (B,K), `value` (B,) in float64 or the dtype of the query;
    `sensitivity` (B,K,K) of the multipliers to the lines, None where no gradient is needed;
    `smoothness` and `strong_convexity` (B,) of the potentials, `map_convexity` (B,) of the map;
    `active` (B,K); `residual` and `status` (B,).
    """

    multipliers: Tensor
    sensitivity: Tensor | None
    value: Tensor
    potentials: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    map_convexity: Tensor
    active: Tensor
    residual: Tensor
    status: Tensor

    def outside_inference_mode(self) -> DualSolution:
        """A copy in tensors that autograd may record."""
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            if part is not None:
                parts[name] = part.clone(memory_format=torch.contiguous_format)
        return DualSolution(**parts)

    def overwrite(self, rows: Tensor, other: DualSolution) -> None:
        """Replace some rows by the rows of another solution."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None:
                mine[rows] = theirs.to(mine.dtype)

    def with_failures_marked(
        self, on_failure: str, squared_distance: Tensor, requested_convexity: Tensor
    ) -> DualSolution:
        """NaN for everything that a failed row does not have; its multipliers by `on_failure`.

        "fallback": weight 1 on the neighbor of the least `squared_distance` (B,K).
        """
        failed = self.status >= int(Status.INFEASIBLE)
        if not bool(failed.any()):
            return self
        if on_failure == "raise":
            raise SolverError(_failure_message(self.status, failed))
        falls_back = on_failure == "fallback"
        weight = 0.0 if falls_back else torch.nan
        multipliers = self.multipliers.masked_fill(failed[:, None], weight)
        if falls_back:
            multipliers[failed, squared_distance.argmin(1)[failed]] = 1.0
        sensitivity = self.sensitivity
        if sensitivity is not None:
            sensitivity = sensitivity.masked_fill(failed[:, None, None], 0.0)
        return replace(
            self,
            multipliers=multipliers,
            sensitivity=sensitivity,
            value=self.value.masked_fill(failed, torch.nan),
            potentials=self.potentials.masked_fill(failed[:, None], torch.nan),
            smoothness=self.smoothness.masked_fill(failed, torch.nan),
            strong_convexity=self.strong_convexity.masked_fill(failed, torch.nan),
            map_convexity=torch.where(failed, requested_convexity, self.map_convexity),
            residual=self.residual.masked_fill(failed, torch.inf),
        )


@dataclass(frozen=True)
class Potentials:
    """`values` (K,B): u_i, mean zero over the active neighbors; `violation` (B,): the most by which
    they violate eq. (2); `requested` and `used`: the curvature; `status` (B,)."""

    values: Tensor
    violation: Tensor
    requested: Curvature
    used: Curvature
    status: Tensor


def solve_torch(
    gram: Gram,
    smoothness: Tensor,
    strong_convexity: Tensor,
    relaxation: Relaxation,
    rule: str,
    mode: str,
) -> DualSolution:
    """The solution for the requested curvature (B,); failures are marked by `status` alone.

    `rule` and `mode`: `potential` and `mode` of `ExactCip`.
    """
    with torch.inference_mode():  # where hundreds of small operations cost the least
        finite = gram.is_finite
        if not bool(finite.all()):  # products overflowed: give these rows harmless numbers
            gram = gram.zeroed(~finite)
        found = find_potentials(gram, smoothness, strong_convexity, relaxation, rule)
        solution = solve_qp(gram, found, mode)
        status = torch.where(finite, solution.status, int(Status.UNSOLVED))
    return replace(solution, status=status).outside_inference_mode()


def find_potentials(
    gram: Gram, smoothness: Tensor, strong_convexity: Tensor, relaxation: Relaxation, rule: str
) -> Potentials:
    """Eq. (2): potentials for the requested curvature, or for the nearest that has any."""
    used, longest, status = relaxation(gram, smoothness, strong_convexity)
    active = used.active
    shifted = potentials_from_paths(longest, active, rule)
    violation = (longest + shifted[None] - shifted[:, None]).amax((0, 1))  # paths bound their edges
    values = shifted + gram.potential_shift(used.strong_convexity)
    mean = (values * active).sum(0) / active.sum(0)
    requested = Curvature(smoothness, strong_convexity, active)
    return Potentials(values - mean, violation, requested, used, status)


def solve_qp(gram: Gram, potentials: Potentials, mode: str) -> DualSolution:
    """Eq. (3): the multipliers, by its dual over the simplex; value, sensitivity and residual."""
    used = potentials.requested if mode == "paper" else potentials.used
    active = used.active
    shifted = gram.shifted(used.strong_convexity)
    modulus = used.smoothness - used.strong_convexity
    line = potentials.values - gram.potential_shift(used.strong_convexity)
    line = line - shifted.self_cross + shifted.image_square / (2 * modulus)
    best = maximize_on_simplex(shifted.images, modulus * line, active, gram.noise)
    weight = best.weights
    pull = (shifted.images * weight[None]).sum(1)
    bound = line + ((weight * pull).sum(0) / 2 - pull) / modulus  # q_i(z')
    value = (weight * bound).sum(0)
    gap = (bound - value).masked_fill(~active, 0.0)
    offset_size, image_size = gram.sizes(used.strong_convexity, active)
    residual = relative(
        value_gap=torch.maximum(gap.amax(0), potentials.violation),
        complementarity=(weight * gap).abs().sum(0),
        stationarity=torch.zeros_like(value),  # z' is assembled from the multipliers
        multipliers=weight.mT,
        active=active.mT,
        image_size=gram.center + image_size,
        offset_size=offset_size,
        modulus=modulus,
    )
    unsolved = ~best.solved & (potentials.status < int(Status.INFEASIBLE))
    return DualSolution(
        multipliers=weight.mT,
        sensitivity=(best.sensitivity * modulus).permute(2, 0, 1),
        value=value,
        potentials=potentials.values.masked_fill(~active, torch.nan).mT,
        smoothness=potentials.used.smoothness,
        strong_convexity=potentials.used.strong_convexity,
        map_convexity=used.strong_convexity,
        active=active.mT,
        residual=residual,
        status=torch.where(unsolved, int(Status.UNSOLVED), potentials.status),
    )


def _failure_message(status: Tensor, failed: Tensor) -> str:
    rows = failed.nonzero()[:, 0]
    listed = ", ".join(f"{int(row)} ({Status(int(status[row])).name})" for row in rows[:5])
    more = ", ..." if len(rows) > 5 else ""
    return (
        f"{len(rows)} of {len(status)} rows have no solution: {listed}{more}. Set max_smoothness "
        "to leave out contradicting neighbors, or on_failure='abstain' or 'fallback'"
    )
