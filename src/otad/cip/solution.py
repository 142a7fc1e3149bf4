"""What a convex integration solver returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor

from otad.short_repr import counts_text


class Status(IntEnum):
    """How one row of a problem was solved.

    - `SOLVED`: with the requested curvature and all neighbors.
    - `RAISED`: no potential exists for the requested curvature, so it was relaxed.
    - `REPAIRED`: a neighbor was left out or substituted to stay within `max_smoothness`.
    - `ESTIMATED`: a network estimated the image, without any proof.
    - `INFEASIBLE`: no potential exists for any allowed curvature.
    - `UNSOLVED`: numbers are out of range, or the pivot limit was reached.

    Examples
    --------
    >>> import otad
    >>> otad.cip.Status(1).name, int(otad.cip.Status.SOLVED)
    ('RAISED', 0)
    """

    SOLVED = 0
    RAISED = 1
    REPAIRED = 2
    ESTIMATED = 3
    INFEASIBLE = 4
    UNSOLVED = 5


@dataclass(frozen=True, eq=False)
class CipSolution:
    """The feature of each query, and how it was found.

    Attributes
    ----------
    image : Tensor (B, d)
        The features z', differentiable in the queries.
    value : Tensor (B,)
        The potential at the query.
    multipliers : Tensor (B, K)
        The weights of the neighbors: at least 0, with sum 1.
    potentials : Tensor (B, K)
        The potential at the anchors, with mean zero over the neighbors that were used and NaN at
        the others.
    smoothness, strong_convexity : Tensor (B,)
        The curvature for which the potentials were found.
    residual : Tensor (B,)
        The solver's own estimate of its KKT residual.
    status : Tensor (B,)
        A `Status` for each row.
    active : Tensor (B, K) of bool
        The neighbors that were used.
    mode : str
        Whether the map uses the curvature above ("consistent") or that of the problem ("paper").

    Everything that an estimate does not provide is NaN in an estimated row.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> points = torch.tensor([[[0.0, 0.0], [1.0, 0.0]]])
    >>> problem = otad.cip.CipProblem(torch.tensor([[0.5, 0.0]]), points, points, smoothness=2.0)
    >>> solution = otad.cip.ExactCip()(problem)
    >>> solution.status_text
    '1 solved'
    >>> [round(weight, 4) for weight in solution.multipliers[0].tolist()]
    [0.5, 0.5]
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
        """Return the solution of a method that proves nothing.

        It has images (B, d) and the weights (B, K) of the neighbors, NaN if they are unknown. A row
        that is not finite is unsolved."""
        found = image.detach().isfinite().all(1)
        image, weights = (part.masked_fill(~found[:, None], torch.nan) for part in (image, weights))
        unknown = torch.full_like(weights.detach(), torch.nan)
        high, low, residual = (unknown[:, 0].double().clone() for _ in range(3))
        status = torch.where(found, int(Status.ESTIMATED), int(Status.UNSOLVED))
        active = torch.ones_like(unknown, dtype=torch.bool)
        value = unknown[:, 0].clone()
        return cls(image, value, weights, unknown, high, low, residual, status, active, mode)

    @classmethod
    def _of(cls, **parts: Any) -> Self:
        """Return a solution of its parts; checks would cost as much as solving a row."""
        made = object.__new__(cls)
        made.__dict__.update(parts)
        return made

    @property
    def failed(self) -> Tensor:
        """Whether each row (B,) is infeasible or unsolved."""
        return self.status >= int(Status.INFEASIBLE)

    @property
    def status_text(self) -> str:
        """How many rows have each status, in words."""
        return counts_text(Status(code).name.lower() for code in self.status.tolist())

    def __repr__(self) -> str:
        (rows, dim), count = self.image.shape, self.multipliers.shape[1]
        sizes = f"{rows} rows, {count} neighbors each, dimension {dim}, {self.mode}"
        return f"CipSolution({sizes}: {self.status_text})"

    def rows(self, rows: slice) -> CipSolution:
        """Return the solution of some rows."""
        names = (name for name in self.__dataclass_fields__ if name != "mode")
        return CipSolution(**{name: getattr(self, name)[rows] for name in names}, mode=self.mode)
