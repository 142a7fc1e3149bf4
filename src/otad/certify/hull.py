"""The hull rule: while all bank points that can be neighbors vote for one class, the model does.

Bank point i is harmful from max(enter_i, turn_i) on: it must be a neighbor, and vote for another
class. The radius is the least of these over the bank.

Point i is one of the K neighbors only if fewer than K rivals are closer. Of K disjoint groups of
rivals, one then has no member closer than i, so the query is in all half-spaces of that group:
enter_i is at least the distance of the nearest of these K intersections. With one rival a group it
would be the K-th largest b_ij; with more it is larger.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.certify.bisectors import ROUNDING, Bisectors, Rivals, Surroundings
from otad.certify.halfspaces import joint_distance
from otad.certify.search import least_over_bank

GROUP = 4
"""Rivals in a group: 2 make radii about 4 % larger on MNIST, 4 about 5 %, more hardly anything."""
SPARE = 30
"""Rivals to choose the groups from, beyond those they need."""


def rivals_of(sought: int, points: int) -> int:
    """How many of the nearest bank points are held against each i."""
    return min(points, GROUP * sought + SPARE)


@dataclass(frozen=True, eq=False)
class Entrance:
    """When bank points become one of the `sought` neighbors, found by holding `rivals` against
    them. Any rivals give a bound; the nearest give a good one."""

    surroundings: Surroundings
    rivals: Rivals
    sought: int

    @staticmethod
    def of(surroundings: Surroundings, sought: int) -> Entrance:
        count = rivals_of(sought, len(surroundings.inputs))
        return Entrance(surroundings, surroundings.nearest(count), sought)

    def __call__(self, rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        """|u| (r,T) before which bank points `indices` (r,T) are no neighbors of the queries `rows`
        (r,); 0 if they may be from the start. Where the K-th largest b_ij is not less than
        `below` (r,), that is enough."""
        if self.sought >= self.rivals.indices.shape[1]:  # every point of the bank is a neighbor
            return torch.zeros_like(indices, dtype=torch.float64)
        bisectors = self.surroundings.bisectors(rows, indices, self.rivals)
        entry = bisectors.distances.topk(self.sought, dim=2).values[:, :, -1]
        place, point = (entry < below[:, None]).nonzero(as_tuple=True)
        if len(place):
            joint = self._joint(bisectors, self.rivals.products[rows[place]], place, point)
            entry[place, point] = torch.maximum(entry[place, point], joint)
        return entry.clamp_min_(0)

    def _joint(
        self, bisectors: Bisectors, products: Tensor, place: Tensor, point: Tensor
    ) -> Tensor:
        """The nearest of the intersections (P,), for some of the pairs (query, bank point)."""
        distances, cross = bisectors.distances[place, point], bisectors.products[place, point]
        groups = _dealt(distances, self.sought)  # (P,K,m)
        first = distances.gather(1, groups[:, :, 0])
        pairs = torch.arange(len(groups), device=groups.device)[:, None, None]
        own, cross = bisectors.squares[place, point], cross[pairs, groups]
        others = products[pairs[..., None], groups[..., None], groups[:, :, None]]
        # <a_i - a_j, a_i - a_k>
        gram = own[:, None, None, None] - cross[..., None] - cross[:, :, None] + others
        sizes = own[:, None, None] + others.diagonal(dim1=2, dim2=3)
        heights = bisectors.leads[place, point][pairs, groups] / 2
        joint = joint_distance(gram, heights, sizes, ROUNDING)
        return torch.where(joint > first, joint, first).amin(1)


def hull_radius(entrance: Entrance, turning: Tensor, farthest: Tensor) -> Tensor:
    """|u| (B,) within which predictions cannot change. `turning` (B,N): from where on bank points
    vote for another class; `farthest` (B,): the distance of the last of the neighbors found."""
    surroundings = entrance.surroundings
    floor = torch.maximum(surroundings.entry_floor(farthest), turning)

    def harmful_from(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        return torch.maximum(entrance(rows, indices, below), turning[rows[:, None], indices])

    start = torch.full_like(farthest, torch.inf)
    return least_over_bank(floor, start, harmful_from, surroundings.rows_at_once)


def _dealt(distances: Tensor, count: int) -> Tensor:
    """The rivals (P,J) with the farthest bisectors dealt into `count` groups (P,count,m): the first
    round in falling order, the next in rising order and so on, so that groups are alike."""
    rounds = min(GROUP, distances.shape[1] // count)
    order = distances.topk(rounds * count, dim=1).indices.view(-1, rounds, count)
    order[:, 1::2] = order[:, 1::2].flip(2)
    return order.mT
