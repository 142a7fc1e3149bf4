"""A ratio of every pair of bank points: bounded in float32, confirmed in float64.

All N (N - 1) / 2 pairs are compared by matrix products in float32, block by block; the pairs that
may be the largest, or above a limit, are computed again from their differences in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from otad.cip.execution import blocks, full_precision
from otad.errors import SolverError

BLOCK = {"cpu": 2**11, "cuda": 2**13}  # points on each side of a block of pairs
CONFIRMED_NUMBERS = 2**26  # of the pairs that are compared in float64 at a time
FINALISTS = 64  # pairs of a block that are confirmed first
MOST_PAIRS = 2**26  # that are listed


class PairRatios(ABC):
    """Ratios of all pairs of `count` points, each of `width` numbers, on a device."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._at_once = max(1, CONFIRMED_NUMBERS // width)

    @abstractmethod
    def read(self, rows: slice) -> tuple[Tensor, ...]:
        """What `bounds` needs of a block of points, in float32."""

    @abstractmethod
    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """Upper bounds (n,m), by float32 products, of the ratios of two blocks of points."""

    @abstractmethod
    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        """The ratios of some pairs (k,) in float64."""

    def largest(self) -> float:
        """The largest ratio of all pairs, 0 if there are none."""
        largest = 0.0
        for corner, bounds in self._blocks():
            best = bounds.flatten().topk(min(FINALISTS, bounds.numel())).indices
            places = torch.stack([best // bounds.shape[1], best % bounds.shape[1]], dim=1)
            largest = self._largest_of(places + corner, largest)
            largest = self._largest_of((bounds > largest).nonzero() + corner, largest)
        return largest

    def above(self, limit: float, name: str, value: float) -> Tensor:
        """All pairs i < j (k,2) with a ratio above the limit.

        Refuses the `value` of an argument of that `name` for which there are too many to list.
        """
        found, count = [torch.zeros(0, 2, dtype=torch.int64, device=self.device)], 0
        for corner, bounds in self._blocks():
            for some in ((bounds > limit).nonzero() + corner).split(self._at_once):
                found.append(some[self.exact(*some.unbind(1)) > limit])
                count += len(found[-1])
            if count > MOST_PAIRS:
                raise SolverError(
                    f"{name}: expected one that most pairs satisfy, got {value}, which more than "
                    f"{MOST_PAIRS} pairs exceed"
                )
        return torch.cat(found)

    def _largest_of(self, pairs: Tensor, largest: float) -> float:
        for some in pairs.split(self._at_once):
            if len(some):
                largest = max(largest, float(self.exact(*some.unbind(1)).max()))
        return largest

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The first points (2,) of a block of pairs, and the bounds of these; -1 where i >= j."""
        parts = list(blocks(self.count, BLOCK.get(self.device.type, BLOCK["cpu"])))
        for number, one in enumerate(parts):
            own = self.read(one)
            for other in parts[number:]:
                with full_precision(self.device):
                    bounds = self.bounds(own, own if other is one else self.read(other))
                if other is one:
                    bounds = torch.where(torch.ones_like(bounds).triu(1) > 0, bounds, -1.0)
                yield torch.tensor([one.start, other.start], device=self.device), bounds


def vertex_cover(pairs: Tensor, count: int) -> Tensor:
    """Points (n,) of 0..count-1 such that every pair (m,2) has one: few, not always the fewest.

    The point that is in most of the remaining pairs is next; of equals, the first.
    """
    one, other = pairs.cpu().numpy().T
    points, partners = np.concatenate([one, other]), np.concatenate([other, one])
    partners = partners[points.argsort(kind="stable")]  # grouped by point
    left = np.bincount(points, minlength=count)  # in how many pairs each point is
    stops = left.cumsum()
    starts = stops - left
    chosen = np.zeros(count, dtype=bool)
    while left[worst := left.argmax()] > 0:
        left[partners[starts[worst] : stops[worst]]] -= 1
        left[worst] = 0
        chosen[worst] = True
    return torch.from_numpy(chosen.nonzero()[0]).to(pairs.device)
