"""What a solver needs of a problem, and how a batch is cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class RowProblem(Protocol):
    """What a solver needs: sizes, curvature per row, and the neighbors of any block of rows."""

    @property
    def query(self) -> Tensor: ...
    @property
    def smoothness(self) -> Tensor: ...
    @property
    def strong_convexity(self) -> Tensor: ...
    @property
    def is_bent(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    def anchors_of(self, rows: slice) -> Tensor: ...
    def images_of(self, rows: slice) -> Tensor: ...
    def in_double(self, rows: Tensor | slice) -> RowProblem: ...


def blocks(batch: int, chunk: int) -> Iterator[slice]:
    """Consecutive blocks of at most `chunk` rows."""
    for start in range(0, batch, chunk):
        yield slice(start, min(start + chunk, batch))
