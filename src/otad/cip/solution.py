"""What a convex integration solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Status(IntEnum):
    """How one row was solved."""

    SOLVED = 0
    """With the requested curvature and all its neighbors."""
    RAISED = 1
    """No potential exists for the requested curvature, so it was relaxed."""
    REPAIRED = 2
    """A neighbor was left out or substituted to stay within `max_smoothness`."""
    ESTIMATED = 3
    """By a network that imitates a solver: an image without any proof."""
    INFEASIBLE = 4
    """No potential exists for any allowed curvature."""
    UNSOLVED = 5
    """The numbers are out of range or the pivot limit was reached."""

    @property
    def failed(self) -> bool:
        return self >= Status.INFEASIBLE


@dataclass(frozen=True, eq=False)
class CipSolution:
    """The feature z' = `image` (B,d) of each query, and how it was found.

    `value` (B,) is the potential at the query, `potentials` (B,K) its values at the anchors (mean
    zero over the neighbors used; NaN on those left out), `multipliers` (B,K) the weights of the
    neighbors. `smoothness` and `strong_convexity` (B,) are the curvature the potentials were found
    for; `mode` says whether the map itself uses them ("consistent") or the curvature of the
    problem ("paper"). `active` (B,K) marks the neighbors that were used, `residual` (B,) is the
    solver's own estimate of its KKT residual and `status` (B,) holds a `Status` per row. An
    estimated row has NaN for all that an estimate does not provide.
    """

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
        unknown = torch.full_like(weights.detach(), torch.nan)
        no_number = unknown[:, 0].double()
        return cls(
            image=image.masked_fill(~found[:, None], torch.nan),
            value=unknown[:, 0].clone(),
            multipliers=weights.masked_fill(~found[:, None], torch.nan),
            potentials=unknown,
            smoothness=no_number,
            strong_convexity=no_number.clone(),
            residual=no_number.clone(),
            status=torch.where(found, int(Status.ESTIMATED), int(Status.UNSOLVED)),
            active=torch.ones_like(unknown, dtype=torch.bool),
            mode=mode,
        )

    @property
    def failed(self) -> Tensor:
        """Rows neither solved nor estimated (B,): infeasible or unsolved."""
        return self.status >= int(Status.INFEASIBLE)

    def rows(self, rows: slice) -> CipSolution:
        """The solution of some rows."""
        names = (name for name in self.__dataclass_fields__ if name != "mode")
        return CipSolution(**{name: getattr(self, name)[rows] for name in names}, mode=self.mode)
