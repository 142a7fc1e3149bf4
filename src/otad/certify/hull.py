"""The hull rule: while all bank points that can be neighbors vote for one class, the model does.

Bank point i is harmful from max(enter_i, turn_i) on: it must be a neighbor, and vote for another
class. The radius is the least of these over the bank.

Point i is one of the K neighbors only if fewer than K rivals are closer. Of K disjoint groups of
rivals, one then has no member closer than i, so the query is in all half-spaces of that group:
enter_i is at least the distance of the nearest of these K intersections. With one rival per group
it would be the K-th largest b_ij; with more it is larger."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.certify.bisectors import ROUNDING, TINY, BankBisectors, Bisectors, queries_at_once
from otad.certify.rules import PRECISION, Batch, Rule
from otad.model.otad import OTAD

GROUP = 4  # rivals: 2 make radii about 4 % larger on MNIST, 4 about 5 %, more hardly anything
SPARE = 30  # rivals to choose the groups from, beyond those they need
SWEEPS = 8  # of coordinate ascent


class Hull(Rule):
    name = "hull"

    @staticmethod
    def rows_at_once(model: OTAD) -> int:
        points, dim = model.bank_points.shape
        return queries_at_once(points, _count_rivals(model.n_searched, points), dim)

    def assumptions(self) -> tuple[str, ...]:
        found = (
            "a linear head reads the answer from a weighted mean over the neighbors, with weights "
            "that are not negative and sum to one",
            "neighbors are searched exactly, by l2 distance of embedded inputs or keys",
            PRECISION,
        )
        if self.model.answerer.always_answers:
            return found
        return (*found, "where the solver finds no solution it raises an error, without an answer")

    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        entrance = Entrance(batch.bisectors, self.model.n_searched)
        turning = self.reach.votes.turning(batch.embedded.double(), batch.prediction)
        entered = batch.bisectors.entry_floor(batch.trace.neighbors.distances[:, -1])
        floor, start = torch.maximum(entered, turning), torch.full_like(known, torch.inf)

        def harmful_from(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
            return torch.maximum(entrance(rows, indices, below), turning[rows[:, None], indices])

        return batch.bisectors.least(floor, start, harmful_from)

    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        """The first bank point that can be a neighbor, in the order of their votes, decides."""
        bisectors, entrance = batch.bisectors, Entrance(batch.bisectors, self.model.n_searched)
        entered = bisectors.entry_floor(batch.trace.neighbors.distances[:, -1])
        excluded = entered > reached[:, None]
        low, high = self.reach.votes.range_of_values(batch.embedded.double(), reached)

        def least(bound: Tensor) -> Tensor:
            def bound_if_reached(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
                outside = entrance(rows, indices, reached[rows]) > reached[rows][:, None]
                return bound[rows[:, None], indices].masked_fill(outside, torch.inf)

            floor = bound.masked_fill(excluded, torch.inf)
            return bisectors.least(floor, torch.full_like(reached, torch.inf), bound_if_reached)

        return least(low), -least(-high)


def _count_rivals(searched: int, points: int) -> int:
    return min(points, GROUP * searched + SPARE)


class Entrance:
    """When bank points become neighbors. Any rivals give a bound; the nearest give a good one."""

    def __init__(self, bisectors: BankBisectors, searched: int) -> None:
        self.bisectors, self.searched = bisectors, searched
        count = _count_rivals(searched, len(bisectors.points))
        nearest = bisectors.distance_floor.topk(count, largest=False).indices  # about these
        self.rivals = bisectors.rivals(nearest)

    def __call__(self, rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        """|u| (r,T) before which bank points `indices` (r,T) are no neighbors of the queries `rows`
        (r,). Where the K-th largest b_ij is not less than `below` (r,), that is enough."""
        if self.searched >= self.rivals.indices.shape[1]:  # every point of the bank is a neighbor
            return torch.zeros_like(indices, dtype=torch.float64)
        found = self.bisectors.against(self.rivals, rows, indices)
        entry = found.distances.topk(self.searched, dim=2).values[:, :, -1]
        place, point = (entry < below[:, None]).nonzero(as_tuple=True)
        if len(place):
            joint = self._joint(found, self.rivals.products[rows[place]], place, point)
            entry[place, point] = torch.maximum(entry[place, point], joint)
        return entry.clamp_min_(0)

    def _joint(self, found: Bisectors, products: Tensor, place: Tensor, point: Tensor) -> Tensor:
        """The nearest of the intersections (P,), for some of the pairs (query, bank point)."""
        distances, cross = found.distances[place, point], found.products[place, point]
        # The rivals with the farthest bisectors in groups (P,K,m): the first round in falling
        # order, the next in rising order and so on, so that groups are alike.
        rounds = min(GROUP, distances.shape[1] // self.searched)
        order = distances.topk(rounds * self.searched, dim=1).indices
        order = order.view(-1, rounds, self.searched)
        order[:, 1::2] = order[:, 1::2].flip(2)
        groups = order.mT
        first = distances.gather(1, groups[:, :, 0])
        pairs = torch.arange(len(groups), device=groups.device)[:, None, None]
        own, cross = found.squares[place, point], cross[pairs, groups]
        others = products[pairs[..., None], groups[..., None], groups[:, :, None]]
        # <a_i - a_j, a_i - a_k>
        gram = own[:, None, None, None] - cross[..., None] - cross[:, :, None] + others
        sizes = own[:, None, None] + others.diagonal(dim1=2, dim2=3)
        heights = found.leads[place, point][pairs, groups] / 2
        joint = joint_distance(gram, heights, sizes, ROUNDING)
        return torch.where(joint > first, joint, first).amin(1)


def joint_distance(gram: Tensor, heights: Tensor, sizes: Tensor, rounding: float) -> Tensor:
    """A lower bound (...) of |u| over all u with <g_k, u> >= heights_k (...,m) for every k.

    Any weights w >= 0 give one, as sum_k w_k heights_k <= |sum_k w_k g_k| |u|. They are found by a
    few sweeps of coordinate ascent on w.heights - |sum_k w_k g_k|^2 / 2, whose optimum gives the
    distance itself. `gram` (...,m,m) holds <g_j, g_k> up to the relative error `rounding` of
    sqrt(sizes_j sizes_k), sizes (...,m)."""
    gram = gram + torch.diag_embed(rounding * sizes + TINY)
    weights = torch.zeros_like(heights)
    for _ in range(SWEEPS):
        for k in range(heights.shape[-1]):
            miss = heights[..., k] - (gram[..., k, :] * weights).sum(-1)
            weights[..., k] = (weights[..., k] + miss / gram[..., k, k]).clamp_min(0)
    square = (weights * (gram @ weights[..., None])[..., 0]).sum(-1)
    square += rounding * (weights * sizes.sqrt()).sum(-1).square()
    return (weights * heights).sum(-1) / square.clamp_min(TINY).sqrt()
