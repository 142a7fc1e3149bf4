"""The hull rule: while all bank points that can be neighbors vote for one class, the model does.

Bank point i is harmful from max(enter_i, turn_i) on: it must be a neighbor, and vote for another
class. The radius is the least of these over the bank.

Point i is one of the K neighbors only if fewer than K rivals are closer. Of K disjoint groups of
rivals, one then has no member closer than i, so the query is in all half-spaces of that group:
enter_i is at least the distance of the nearest of these K intersections. With one rival per group
it would be the K-th largest b_ij; with more it is larger. Within the bounds of the inputs, what
counts is the part of each intersection that is in the box."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from otad.certify.bisectors import BYTES, FIRST_BLOCK, BankBisectors, Bisectors, queries_at_once
from otad.certify.half_spaces import Box, HalfSpaces
from otad.certify.rules import PRECISION, Batch, Rule
from otad.model.otad import OTAD

GROUP = 4  # rivals: 2 make radii about 4 % larger on MNIST, 4 about 5 %, more hardly anything
SPARE = 30  # rivals to choose the groups from, beyond those they need


class Hull(Rule):
    name = "hull"
    first_block: ClassVar[int] = FIRST_BLOCK

    @staticmethod
    def rows_at_once(model: OTAD) -> int:
        points, dim = model.bank_points.shape
        rivals = min(points, GROUP * model.n_searched + SPARE)
        return queries_at_once(points, rivals, dim)

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

    def entrance(self, batch: Batch, turning: Tensor | None) -> Entrance:
        """When bank points become neighbors; `turning` (B,N): see `Votes`."""
        searched = self.model.n_searched
        # With one neighbor the rule "pieces" proves more within the bounds.
        return Entrance(batch.bisectors, searched, box=None if searched == 1 else batch.box)

    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        turning = self.reach.votes.turning(batch.embedded.double(), batch.prediction)
        entrance = self.entrance(batch, turning)
        entered = batch.bisectors.entry_floor(batch.trace.neighbors.distances[:, -1])
        floor, start = torch.maximum(entered, turning), torch.full_like(known, torch.inf)

        def harmful_from(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
            return torch.maximum(entrance(rows, indices, below), turning[rows[:, None], indices])

        return batch.bisectors.least(floor, start, harmful_from, self.first_block)

    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        """The first bank point that can be a neighbor, in the order of their votes, decides."""
        bisectors, entrance = batch.bisectors, self.entrance(batch, None)
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


class Entrance:
    """When bank points become neighbors. Any rivals give a bound; the nearest give a good one.

    `preferred` (B,N) bank points are rivals before all others. `box`: bounds of u."""

    group: ClassVar[int] = GROUP
    spare: ClassVar[int] = SPARE

    def __init__(
        self,
        bisectors: BankBisectors,
        searched: int,
        box: Box | None = None,
        preferred: Tensor | None = None,
    ) -> None:
        self.bisectors, self.searched, self.box = bisectors, searched, box
        count = min(len(bisectors.points), self.group * searched + self.spare)
        order = bisectors.distance_floor
        if preferred is not None:
            order = order.masked_fill(~preferred, torch.inf)
        nearest = order.topk(count, largest=False).indices  # about these
        self.rivals = bisectors.rivals(nearest)

    def __call__(self, rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        """|u| (r,T) before which bank points `indices` (r,T) are no neighbors of the queries `rows`
        (r,). Where the K-th largest b_ij is not less than `below` (r,), that is enough."""
        if self.searched >= self.rivals.indices.shape[1]:  # every point of the bank is a neighbor
            return torch.zeros_like(indices, dtype=torch.float64)
        found = self.bisectors.against(self.rivals, rows, indices)
        entry = found.distances.topk(self.searched, dim=2).values[:, :, -1]
        pairs = (entry < below[:, None]).nonzero()
        for place, point in (part.unbind(1) for part in pairs.split(self._pairs_at_once())):
            joint = self._joint(found, rows, indices, below, place, point)
            entry[place, point] = torch.maximum(entry[place, point], joint)
        return entry.clamp_min_(0)

    def weights(self, spaces: HalfSpaces) -> Tensor:
        return spaces.weights()

    def _pairs_at_once(self) -> int:
        """How many pairs (query, bank point) fit into the working memory."""
        rivals, dim = self.rivals.offsets.shape[1:]
        width = rivals + 4 * self.group * self.searched
        numbers = rivals * rivals if self.box is None else rivals * rivals + 4 * width * dim
        return max(1, BYTES // (16 * numbers))

    def _joint(
        self,
        found: Bisectors,
        rows: Tensor,
        indices: Tensor,
        below: Tensor,
        place: Tensor,
        point: Tensor,
    ) -> Tensor:
        """The nearest of the intersections (P,), for the pairs of the query rows[place] and the
        bank point indices[place, point]."""
        distances, cross = found.distances[place, point], found.products[place, point]
        products = self.rivals.products[rows[place]]
        # The rivals with the farthest bisectors in groups (P,K,m): the first round in falling
        # order, the next in rising order and so on, so that groups are alike.
        rounds = min(self.group, distances.shape[1] // self.searched)
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
        spaces = HalfSpaces.of(gram, heights, sizes)
        weights = self.weights(spaces)
        joint = spaces.distance(weights)
        joint = torch.where(joint > first, joint, first)
        least = joint.amin(1)
        if self.box is not None:
            some = (least < below[place]).nonzero()[:, 0]
            chosen = rows[place[some]]
            offsets = self.bisectors.offsets(chosen, indices[place[some], point[some], None])
            rivals = self.rivals.offsets[chosen[:, None, None], groups[some]]
            normals = (offsets[:, None] - rivals).flatten(0, 1)  # (P K,m,d)
            each = chosen.repeat_interleave(self.searched)
            parts = (one[some].flatten(0, 1) for one in (heights, sizes, weights))
            inside = Box(*(bound[each] for bound in self.box)).joint_distance(normals, *parts)
            inside = inside.view(-1, self.searched)
            least[some] = torch.maximum(joint[some], inside).amin(1)
        return least
