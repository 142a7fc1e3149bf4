"""What a convex integration solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from otad.short_repr import counts_text


class Status(IntEnum):
    """How one row was solved."""

    SOLVED = 0  # with the requested curvature and all its neighbors
    RAISED = 1  # no potential exists for the requested curvature, so it was relaxed
    REPAIRED = 2  # a neighbor was left out or substituted to stay within `max_smoothness`
    ESTIMATED = 3  # by a network that imitates a solver: an image without any proof
    INFEASIBLE = 4  # no potential exists for any allowed curvature
    UNSOLVED = 5  # the numbers are out of range or the pivot limit was reached


@dataclass(frozen=True, eq=False)
class CipSolution:
    """The feature z' = `image` (B,d) of each query, and how it was found.

    `value` (B,) is the potential at the query, `potentials` (B,K) its values at the anchors (mean
    zero over the neighbors used; NaN on those left out), `multipliers` (B,K) the weights of the
    neighbors. `smoothness` and `strong_convexity` (B,) are the curvature the potentials were found
    for; `mode` says whether the map itself uses them ("consistent") or the curvature of the
    problem ("paper"). `active` (B,K) marks the neighbors that were used, `residual` (B,) is the
    solver's own estimate of its KKT residual and `status` (B,) holds a `Status` per row. An
    estimated row has NaN for all that an estimate does not provide."""

    image: Tensor
    value: Tensor
    multipliers: Tensor
    potentials: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    residual: Tensor
    status: Tensor
    active: Tensor
    mode: str

    @classmethod
    def estimate(cls, image: Tensor, weights: Tensor, mode: str) -> CipSolution:
        """The solution of a method that proves nothing: images (B,d), and the weights (B,K) of the
        neighbors, NaN where they are unknown. A row that is not finite is unsolved."""
        found = image.detach().isfinite().all(1)
        image, weights = (part.masked_fill(~found[:, None], torch.nan) for part in (image, weights))
        unknown = torch.full_like(weights.detach(), torch.nan)
        high, low, residual = (unknown[:, 0].double().clone() for _ in range(3))
        status = torch.where(found, int(Status.ESTIMATED), int(Status.UNSOLVED))
        active = torch.ones_like(unknown, dtype=torch.bool)
        value = unknown[:, 0].clone()
        return cls(image, value, weights, unknown, high, low, residual, status, active, mode)

    @property
    def failed(self) -> Tensor:
        """Rows neither solved nor estimated (B,): infeasible or unsolved."""
        return self.status >= int(Status.INFEASIBLE)

    @property
    def status_text(self) -> str:
        """How many rows were solved how."""
        return counts_text(Status(code).name.lower() for code in self.status.tolist())

    def __repr__(self) -> str:
        (rows, dim), count = self.image.shape, self.multipliers.shape[1]
        sizes = f"{rows} rows, {count} neighbors each, dimension {dim}, {self.mode}"
        return f"CipSolution({sizes}: {self.status_text})"

    def rows(self, rows: slice) -> CipSolution:
        names = (name for name in self.__dataclass_fields__ if name != "mode")
        return CipSolution(**{name: getattr(self, name)[rows] for name in names}, mode=self.mode)
