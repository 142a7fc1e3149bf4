"""The solution of a batch before its features are assembled: everything of size K."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from otad.cip.solution import Status
from otad.errors import SolverError


@dataclass(frozen=True)
class DualSolution:
    """One row per query.

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


def _failure_message(status: Tensor, failed: Tensor) -> str:
    rows = failed.nonzero()[:, 0]
    listed = ", ".join(f"{int(row)} ({Status(int(status[row])).name})" for row in rows[:5])
    more = ", ..." if len(rows) > 5 else ""
    return (
        f"{len(rows)} of {len(status)} rows have no solution: {listed}{more}. Set max_smoothness "
        "to leave out contradicting neighbors, or on_failure='abstain' or 'fallback'"
    )
