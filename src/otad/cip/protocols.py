"""What a defense asks of whoever answers its problems."""

from __future__ import annotations

from typing import Protocol

from otad.cip.rows import RowProblem
from otad.cip.solution import CipSolution


class Solver(Protocol):
    """Solves the problems of a batch, like `ExactCip`, or estimates their answers, like `CipNet`.

    `mode` names the way; `spares`: how many of a problem's neighbors are substitutes, to be sought
    beyond the K asked for; `max_smoothness`: no problem may ask for an L above it.
    """

    @property
    def mode(self) -> str: ...
    @property
    def spares(self) -> int: ...
    @property
    def max_smoothness(self) -> float | None: ...
    def __call__(self, problem: RowProblem) -> CipSolution: ...
