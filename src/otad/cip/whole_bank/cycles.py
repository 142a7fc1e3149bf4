"""Cycles of bank points: what contradicts a potential, and what it implies for the least L.

Point j requires u~_i - u~_j >= <z~_j, x_i - x_j> + |z~_i - z~_j|^2 / (2M). Summed around a cycle
the left side is 0, so M >= sum |z~_i - z~_j|^2 / 2 over - sum <z~_j, x_i - x_j>: every cycle bounds
M from below, and the least M is the largest of these bounds. Most often a cycle of two attains it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.cip.whole_bank.pair_ratios import PairRatios
from otad.cip.whole_bank.pairs import Pairs

NEAR = 1e-4  # below this share of their squares, differences of images are lost in float32


def cycles_of(parents: Tensor) -> tuple[Tensor, ...]:
    """The cycles of the map i -> parents[i], but for points that are their own parents."""
    ancestor = parents
    for _ in range(max(1, math.ceil(math.log2(len(parents))))):
        ancestor = ancestor[ancestor]  # now at least N steps up: at a root, or on a cycle
    entries = ancestor[parents[ancestor] != ancestor].unique().tolist()
    found, seen = [], set()
    for entry in entries:
        cycle, point = [], entry
        while point not in seen:
            seen.add(point)
            cycle.append(point)
            point = int(parents[point])
        if cycle:
            found.append(torch.tensor(cycle, device=parents.device))
    return tuple(found)


def cycle_bound(pairs: Pairs, cycle: Tensor) -> float:
    """The least M that a cycle allows, where each point is raised by the next; may be infinite."""
    points, images = pairs.read(cycle)
    raiser_points, raiser_images = points.roll(-1, 0), images.roll(-1, 0)
    fall = float(((raiser_points - points) * raiser_images).sum())
    bend = float((images - raiser_images).square().sum()) / 2
    if bend == 0:
        return 0.0
    return bend / fall if fall > 0 else math.inf


def heaviest_point(pairs: Pairs, cycle: Tensor, modulus: float) -> int:
    """The point of a cycle without which the rest of it has the least weight."""
    points, images = pairs.read(cycle)
    steps = points[:, None] - points[None]  # x_i - x_j
    bends = (images[:, None] - images[None]).square().sum(2) / (2 * modulus)
    weights = (steps * images[None]).sum(2) + bends  # of j raising i
    # cycle[k + 1] is the parent of cycle[k]: it raises it
    here = torch.arange(len(cycle), device=cycle.device)
    after, before = here.roll(-1), here.roll(1)
    relief = weights[here, after] + weights[before, here] - weights[before, after]
    return int(cycle[relief.argmax()])


class PairCurvatures(PairRatios):
    """|dz|^2 / <dz, dx> of each pair: the least M that its cycle of two allows.

    Pairs that float32 cannot distinguish from equal ones count as 0, and so do points left out.
    """

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(len(pairs), 4 * pairs.dim, pairs.device)
        self.pairs = pairs

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
        # A rise of 0 or less allows no M at all, if it is confirmed in float64.
        ratio = bend / rise.clamp_min_(torch.finfo(torch.float32).tiny)
        return ratio.masked_fill_(bend <= squares.mul_(NEAR), 0.0)

    def exact(self, first: Tensor, second: Tensor) -> Tensor:
        ends = zip(self.pairs.read(first), self.pairs.read(second), strict=True)
        points, images = (one - other for one, other in ends)
        bend, rise = images.square().sum(1), (images * points).sum(1)
        ratio = torch.where(rise > 0, bend / rise, torch.inf).masked_fill(bend == 0, 0.0)
        both = self.pairs.included[first] & self.pairs.included[second]
        return ratio.masked_fill(~both, 0.0)
