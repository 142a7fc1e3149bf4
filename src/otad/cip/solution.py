"""What a convex integration solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

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

    @property
    def failed(self) -> Tensor:
        """Rows neither solved nor estimated (B,): infeasible or unsolved."""
        return self.status >= int(Status.INFEASIBLE)

    def rows(self, rows: slice) -> CipSolution:
        """The solution of some rows."""
        names = (name for name in self.__dataclass_fields__ if name != "mode")
        return CipSolution(**{name: getattr(self, name)[rows] for name in names}, mode=self.mode)
