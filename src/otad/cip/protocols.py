"""What a solver needs of a problem, and what a model needs of a solver."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor

from otad.cip.solution import CipSolution


class RowProblem(Protocol):
    """Sizes, curvature per row, and the neighbors of any block of rows: see `CipProblem`."""

    @property
    def query(self) -> Tensor: ...
    @property
    def smoothness(self) -> Tensor: ...
    @property
    def strong_convexity(self) -> Tensor: ...
    @property
    def has_strong_convexity(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    def anchors_of(self, rows: slice) -> Tensor: ...
    def images_of(self, rows: slice) -> Tensor: ...
    def select(self, rows: Tensor) -> Self: ...
    def in_double(self) -> Self: ...


class Solver(Protocol):
    """Solves the problems of a batch, like `ExactCip`, or estimates their solutions, like `CipNet`.

    `mode` names the method; `spares`: how many of a problem's neighbors are substitutes, to be
    searched beyond K; `max_smoothness`: the largest L that a problem may ask for.
    """

    @property
    def mode(self) -> str: ...
    @property
    def spares(self) -> int: ...
    @property
    def max_smoothness(self) -> float | None: ...
    def __call__(self, problem: RowProblem) -> CipSolution: ...
