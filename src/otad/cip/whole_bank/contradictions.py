"""Pairs and longer cycles of points that contradict a potential of the whole bank.

Point j requires u~_i - u~_j >= <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M). Summed around a cycle,
the left side is 0. So M is at least sum |z~_i - z~_j|^2 / 2 divided by - sum <z~_j, x_i - x_j>.
Every cycle bounds M from below, and the least M is the largest of these bounds. Most often a cycle
of two points attains it.

The ratio of a pair is bounded in float32 by matrix products. Where it may be the largest or above a
limit, it is confirmed in float64 from differences."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from otad.cip.execution import blocks, full_precision
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.projected_pairs import ProjectedPairs
from otad.errors import SolverError
from otad.processes import ALONE, Processes

BLOCK = {"cpu": 2**11, "cuda": 2**13}  # points on each side of a block of pairs
CONFIRMED_NUMBERS = 2**26  # numbers of the pairs that are compared in float64 at a time
FINALISTS = 64  # pairs of a block that are confirmed first
MOST_PAIRS = 2**26  # the most pairs that are listed
NEAR = 1e-4  # differences of images below this share of their squares are lost in float32


class PairRatios(ABC):
    """A ratio for each pair of `count` points, each of `width` numbers, on a device.

    If the program has several processes, each one compares its share of the blocks of pairs."""

    proves_bounds: ClassVar[bool] = False
    """Whether `bounds` are proved. Else rounding in float32 may hide a slightly larger ratio."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._at_once = max(1, CONFIRMED_NUMBERS // width)
        self._own: tuple[slice, tuple[Tensor, ...]] | None = None  # the block that was last read

    @abstractmethod
    def read(self, rows: slice) -> tuple[Tensor, ...]:
        """Return what `bounds` needs of a block of points, in float32."""

    @abstractmethod
    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        """Return upper bounds (n,m) of the ratios of two blocks of points, by float32 products."""

    @abstractmethod
    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the ratios of some pairs (k,) in float64."""

    def few_above(self, one: slice, other: slice, limit: float) -> Tensor | None:
        """Return pairs i < j (k,2) of two blocks, at least all with a ratio above a positive limit.

        None means that this is not known or that there are too many."""
        return None

    def largest(self) -> float:
        """Return the largest ratio of all pairs, or 0 if there are none."""
        processes = Processes.joined(self.device)
        value, is_finalist = self._largest(processes)
        if processes.count == 1:
            return value
        own = torch.tensor([[value, float(is_finalist)]], dtype=torch.float64, device=self.device)
        found = processes.gather(own, [1] * processes.count)
        value = float(found[:, 0].max())
        # One process confirms every finalist. Of the others it confirms fewer pairs than several
        # processes do, because the largest ratio so far is then the largest of more blocks.
        if self.proves_bounds or bool(found[found[:, 0] == value, 1].any()):
            return value
        return self._largest(ALONE)[0]

    def _largest(self, processes: Processes) -> tuple[float, bool]:
        """Return the largest ratio of this share of the pairs, and whether a finalist has it."""
        largest, is_finalist = 0.0, True
        for one, other in self._tiles(processes):
            few = self.few_above(one, other, largest) if largest > 0 else None
            if few is not None:
                if (found := self._largest_of(few, largest)) > largest:
                    largest, is_finalist = found, True
                continue
            corner, bounds = self._bounds(one, other)
            best = bounds.flatten().topk(min(FINALISTS, bounds.numel())).indices
            places = torch.stack([best // bounds.shape[1], best % bounds.shape[1]], dim=1)
            listed = self._largest_of(places + corner, largest)
            found = self._largest_of((bounds > listed).nonzero() + corner, listed)
            if found > largest:
                largest, is_finalist = found, found == listed
        return largest, is_finalist

    def above(self, limit: float, name: str, value: float) -> Tensor:
        """Return all pairs i < j (k,2) with a ratio above the limit.

        If there are too many, the `value` of the argument `name` is refused."""
        found, count = [torch.zeros(0, 2, dtype=torch.int64, device=self.device)], 0
        processes = Processes.joined(self.device)
        for one, other in self._tiles(processes):
            few = self.few_above(one, other, limit)
            if few is None:
                corner, bounds = self._bounds(one, other)
                few = (bounds > limit).nonzero() + corner
            for some in few.split(self._at_once):
                found.append(some[self.exact(*some.unbind(1)) > limit])
                count += len(found[-1])
            if count > MOST_PAIRS:
                break
        counts = processes.gather(torch.tensor([count], device=self.device)).tolist()
        if sum(counts) > MOST_PAIRS:
            got = f"{value}, which more than {MOST_PAIRS} pairs exceed"
            raise SolverError(f"{name}: expected one that most pairs satisfy, got {got}")
        return processes.gather(torch.cat(found), counts)

    def _largest_of(self, pairs: Tensor, largest: float) -> float:
        for some in pairs.split(self._at_once):
            if len(some):
                largest = max(largest, float(self.exact(*some.unbind(1)).max()))
        return largest

    def _tiles(self, processes: Processes) -> Sequence[tuple[slice, slice]]:
        """Return this share of the blocks of pairs."""
        parts = blocks(self.count, BLOCK.get(self.device.type, BLOCK["cpu"]))
        return processes.share(list(itertools.combinations_with_replacement(parts, 2)))

    def _bounds(self, one: slice, other: slice) -> tuple[Tensor, Tensor]:
        """Return the first points (2,) of a block of pairs, and bounds (n,m), -1 where i >= j."""
        if self._own is None or self._own[0] != one:
            self._own = one, self.read(one)
        own = self._own[1]
        with full_precision(self.device):
            bounds = self.bounds(own, own if other == one else self.read(other))
        if other == one:
            bounds = torch.where(torch.ones_like(bounds).triu(1) > 0, bounds, -1.0)
        return torch.tensor([one.start, other.start], device=self.device), bounds


class PairCurvatures(PairRatios):
    """The ratio |dz|^2 / <dz, dx> of each pair, the least M that its cycle of two allows.

    It is 0 for points that are left out, and for pairs whose images are equal in float32."""

    def __init__(self, pairs: Pairs, projected: ProjectedPairs | None = None) -> None:
        super().__init__(len(pairs), 4 * pairs.dim, pairs.device)
        self.pairs, self.projected = pairs, projected

    def few_above(self, one: slice, other: slice, limit: float) -> Tensor | None:
        if self.projected is None:
            return None
        with full_precision(self.device):
            return self.projected.steep(one, other, limit)

    def read(self, rows: slice) -> tuple[Tensor, ...]:
        squares, products = self.pairs.image_squares[rows], self.pairs.products[rows]
        return tuple(part.float() for part in (*self.pairs.read(rows), squares, products))

    def bounds(self, own: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
        points, images, near, inner = own
        other_points, other_images, far, other_inner = other
        squares = near[:, None] + far
        bend = torch.addmm(squares, images, other_images.mT, alpha=-2)
        rise = torch.addmm(inner[:, None] + other_inner, points, other_images.mT, alpha=-1)
        rise.addmm_(images, other_points.mT, alpha=-1)
        # A rise of 0 or less allows no M at all, once it is confirmed in float64.
        ratio = bend / rise.clamp_min_(torch.finfo(torch.float32).tiny)
        return ratio.masked_fill_(bend <= squares.mul_(NEAR), 0.0)

    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        ends = zip(self.pairs.read(first), self.pairs.read(second), strict=True)
        points, images = (one - other for one, other in ends)
        bend, rise = images.square().sum(1), (images * points).sum(1)
        ratio = torch.where(rise > 0, bend / rise, torch.inf).masked_fill(bend == 0, 0.0)
        both = self.pairs.included[first] & self.pairs.included[second]
        return ratio.masked_fill(~both, 0.0)


def vertex_cover(pairs: Tensor, count: int) -> Tensor:
    """Return a few points (n,) of 0..count-1 such that every pair (m,2) contains one of them.

    It is always the (first) point in most of the remaining pairs that is taken."""
    one, other = pairs.cpu().numpy().T
    points, partners = np.concatenate([one, other]), np.concatenate([other, one])
    partners = partners[points.argsort(kind="stable")]  # grouped by point
    left = np.bincount(points, minlength=count)  # the number of pairs of each point
    stops = left.cumsum()
    starts = stops - left
    chosen = np.zeros(count, dtype=bool)
    while left[worst := left.argmax()] > 0:
        left[partners[starts[worst] : stops[worst]]] -= 1
        left[worst] = 0
        chosen[worst] = True
    return torch.from_numpy(chosen.nonzero()[0]).to(pairs.device)


def cycles_of(parents: Tensor) -> tuple[Tensor, ...]:
    """Return the cycles of the map i -> parents[i], without points that are their own parents."""
    ancestor = parents
    for _ in range(max(1, math.ceil(math.log2(len(parents))))):
        ancestor = ancestor[ancestor]  # in the end at least N steps up: at a root or on a cycle
    found, seen = [], set()
    for point in ancestor[parents[ancestor] != ancestor].unique().tolist():
        cycle = []
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = int(parents[point])
        if cycle:
            found.append(torch.tensor(cycle, device=parents.device))
    return tuple(found)


def cycle_bound(pairs: Pairs, cycle: Tensor) -> float:
    """Return the least M that a cycle allows, in which each point is raised by the next.

    It may be infinite."""
    points, images = pairs.read(cycle)
    raiser_points, raiser_images = points.roll(-1, 0), images.roll(-1, 0)
    fall = float(((raiser_points - points) * raiser_images).sum())
    bend = float((images - raiser_images).square().sum()) / 2
    if bend == 0:
        return 0.0
    return bend / fall if fall > 0 else math.inf


def heaviest_point(pairs: Pairs, cycle: Tensor, modulus: float) -> int:
    """Return the point of a cycle without which the rest of the cycle has the least weight."""
    points, images = pairs.read(cycle)
    steps = points[:, None] - points[None]  # x_i - x_j
    bends = (images[:, None] - images[None]).square().sum(2) / (2 * modulus)
    weights = (steps * images[None]).sum(2) + bends  # [i, j] if j raises i, as the next point does
    here = torch.arange(len(cycle), device=cycle.device)
    after, before = here.roll(-1), here.roll(1)
    relief = weights[here, after] + weights[before, here] - weights[before, after]
    return int(cycle[relief.argmax()])
