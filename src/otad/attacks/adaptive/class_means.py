"""The ways of inputs towards the mean of bank points of a class, and away from that of another."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood

ALIGNED = 8  # points: rows of scores then begin where a GPU reads and writes them fast


class BetweenClasses:
    """The ways (n,d) of embedded inputs (n,d) towards points that vote for `aims` (n,) and away
    from points that vote for y (n,).

    If no point votes for one side, the other side alone gives the way; so it does where the aim is
    y itself, because there is no other class."""

    def __init__(self, bank: Neighborhood, aims: Tensor, y: Tensor) -> None:
        self._aims, self._own = _Voters(bank, aims), _Voters(bank, y)
        self._has_aim = (aims != y)[:, None]

    def soft(self, embedded: Tensor, width: Tensor) -> Tensor:
        """Return the ways by means in which point i weighs exp(-rank_i / width), for widths (n,1).

        Times 2 / width they are the gradient of log(sum of the weights of aims) minus log(sum of
        the weights of y)."""
        ways = (side.soft(embedded, width) for side in (self._aims, self._own))
        return self._between(*ways)

    def near(self, embedded: Tensor, count: int) -> Tensor:
        """Return the ways by the means of the `count` points of least rank on each side."""
        ways = (side.near(embedded, count) for side in (self._aims, self._own))
        return self._between(*ways)

    def _between(self, to_aims: Tensor, to_own: Tensor) -> Tensor:
        return to_aims * self._has_aim - to_own


class _Voters:
    """The points that vote for the class of each input (n,).

    Inputs of a class are compared with its points alone, in one product for all g classes, in which
    the smaller ones are filled up: m inputs and N points for each. Input i is in place `cell[i]` of
    these g m places, and place c holds input `of_cell[c]`. All pairs are compared instead if there
    are fewer of them, or if the points would take more than twice the memory of the bank."""

    def __init__(self, bank: Neighborhood, classes: Tensor) -> None:
        self.bank, rows = bank, torch.arange(len(classes), device=classes.device)
        self.has_points = (bank.class_sizes[1][classes] > 0)[:, None]
        present, group, counts = classes.unique(return_inverse=True, return_counts=True)
        largest = max(bank.class_sizes[0][label] for label in present.tolist())
        most = -(-largest // ALIGNED) * ALIGNED
        self.shape = len(present), int(counts.max())
        copied, all_pairs = self.shape[0] * most, len(rows) * len(bank.sites)
        if self.shape[1] * copied >= all_pairs or copied > 2 * len(bank.sites) + ALIGNED:
            self.shape = 1, len(rows)
            self.sites, offsets = bank.sites[None], bank.offsets[None, None]
            hidden, self.cell, self.of_cell = bank.is_wrong(classes)[None], rows, rows
        else:
            points, filled = bank.points_of(present, most)
            self.sites, offsets = bank.sites[points], bank.offsets[points][:, None]
            hidden, order = filled[:, None], group.argsort(stable=True)
            place = torch.empty_like(order)  # of an input among those of its class
            place[order] = rows - (counts.cumsum(0) - counts)[group[order]]
            self.cell = group * self.shape[1] + place
            self.of_cell = rows.new_zeros(self.shape[0] * self.shape[1])
            self.of_cell.index_copy_(0, self.cell, rows)  # the first input elsewhere
        self.offsets = offsets.masked_fill(hidden, inf)

    def soft(self, embedded: Tensor, width: Tensor) -> Tensor:
        scores = self._ranks(embedded) / -self._by_class(width)
        return self._way(embedded, self._by_input(scores.softmax(2) @ self.sites))

    def near(self, embedded: Tensor, count: int) -> Tensor:
        ranks = self._ranks(embedded)
        first = ranks.topk(min(count, ranks.shape[2]), largest=False)
        chosen, group = self._by_input(first.indices), self.cell // self.shape[1]
        voting = self._by_input(first.values)[..., None].isfinite()
        points = self.sites[group[:, None], chosen].masked_fill(~voting, 0.0)
        return self._way(embedded, points.sum(1) / voting.sum(1))

    def _ranks(self, embedded: Tensor) -> Tensor:
        """Return the ranks (g,m,N) up to a number for a row, infinite where a point has no vote."""
        inputs = self._by_class(embedded)
        ranks: Tensor = torch.baddbmm(self.offsets, inputs, self.sites.mT, alpha=-2)
        return ranks

    def _by_class(self, rows: Tensor) -> Tensor:
        grouped: Tensor = rows.index_select(0, self.of_cell).unflatten(0, self.shape)
        return grouped

    def _by_input(self, cells: Tensor) -> Tensor:
        """Return the rows (n,*) of results (g,m,*) that belong to the inputs."""
        return cells.flatten(0, 1).index_select(0, self.cell)

    def _way(self, embedded: Tensor, means: Tensor) -> Tensor:
        """Return the ways (n,d) to means (n,d): half of the negative gradient of their ranks.

        For tangents, whose ranks are linear, these are the means themselves."""
        ways = means if self.bank.by_tangents else means - embedded
        return torch.where(self.has_points, ways, 0.0)
