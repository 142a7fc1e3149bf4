"""A batch's answer before it is assembled: all but the image."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from otad.cip.solution import Status
from otad.errors import SolverError


@dataclass(frozen=True)
class Answer:
    """Everything of size K, one row per query.

    `weight` and `level` (B,K), `value` (B,): multipliers, potentials and value, in float64 or the
    dtype of the query; `sensitivity` (B,K,K) of the multipliers to the lines, None where nobody
    asks for it; `smoothness` and `strong_convexity` (B,) of the potentials, `map_convexity` (B,) of
    the map; `active` (B,K); `residual` and `status` (B,).
    """

    weight: Tensor
    sensitivity: Tensor | None
    value: Tensor
    level: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    map_convexity: Tensor
    active: Tensor
    residual: Tensor
    status: Tensor

    def ordinary(self) -> Answer:
        """A copy in tensors that autograd may record, whatever mode these were made in."""
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, part in parts.items():
            if part is not None:
                parts[name] = part.clone(memory_format=torch.contiguous_format)
        return Answer(**parts)

    def put(self, rows: Tensor, other: Answer) -> None:
        """Overwrite some rows by the rows of another answer."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is not None:
                mine[rows] = theirs.to(mine.dtype)

    def with_failures_marked(
        self, on_failure: str, squared_distance: Tensor, asked_convexity: Tensor
    ) -> Answer:
        """NaN wherever a failed row has nothing true to say; its image by `on_failure`.

        "fallback" answers with the neighbor of the least `squared_distance` (B,K).
        """
        failed = self.status >= int(Status.INFEASIBLE)
        if not bool(failed.any()):
            return self
        if on_failure == "raise":
            raise SolverError(_failure_message(self.status, failed))
        falls_back = on_failure == "fallback"
        weight = self.weight.masked_fill(failed[:, None], 0.0 if falls_back else torch.nan)
        if falls_back:
            weight[failed, squared_distance.argmin(1)[failed]] = 1.0
        sensitivity = self.sensitivity
        if sensitivity is not None:
            sensitivity = sensitivity.masked_fill(failed[:, None, None], 0.0)
        return replace(
            self,
            weight=weight,
            sensitivity=sensitivity,
            value=self.value.masked_fill(failed, torch.nan),
            level=self.level.masked_fill(failed[:, None], torch.nan),
            smoothness=self.smoothness.masked_fill(failed, torch.nan),
            strong_convexity=self.strong_convexity.masked_fill(failed, torch.nan),
            map_convexity=torch.where(failed, asked_convexity, self.map_convexity),
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
