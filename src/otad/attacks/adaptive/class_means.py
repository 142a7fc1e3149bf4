"""The soft vote of the bank points of one class for each input, against those of another class."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood

ALIGNED = 8  # points: rows of scores then begin where a GPU reads and writes them fast

Total = Callable[[Tensor], Tensor]
"""Maps embedded inputs (n,d) to the logarithms of sums (n,) of exp(-rank / width)."""


def advantage_over(bank: Neighborhood, aims: Tensor, y: Tensor, width: Tensor) -> Total:
    """Return how much more the votes for `aims` (n,) weigh than those for y (n,), as a function of
    embedded inputs (n,d).

    It is the difference (n,) of the logarithms of both sums of exp(-rank / width), with a width
    (n,1). If no point votes for one side, the other side alone gives the direction; so it does
    where the aim is y itself, because there is no other class."""
    towards, away = (_total_of(bank, classes, width) for classes in (aims, y))

    def advantage(embedded: Tensor) -> Tensor:
        totals = towards(embedded).masked_fill(aims == y, -inf), away(embedded)
        more, less = (torch.where(total.isfinite(), total, 0.0) for total in totals)
        return more - less

    return advantage


def _total_of(bank: Neighborhood, classes: Tensor, width: Tensor) -> Total:
    """Return the logarithms of the sums over the points that vote for the class of each input (n,).

    Inputs of a class are compared with its points alone, in one product for all classes, in which
    the smaller ones are filled up. All pairs are compared instead if there are fewer of them, or if
    the points would take more than twice the memory of the bank."""
    present, group, counts = classes.unique(return_inverse=True, return_counts=True)
    rows = torch.arange(len(classes), device=classes.device)
    largest = max(bank.class_sizes[0][label] for label in present.tolist())
    most = -(-largest // ALIGNED) * ALIGNED
    shape = len(present), int(counts.max())
    copied = shape[0] * most
    if shape[1] * copied >= len(rows) * len(bank.sites) or copied > 2 * len(bank.sites) + ALIGNED:
        others, everything = bank.is_wrong(classes), (bank.sites, bank.offsets)

        def total_of_all(embedded: Tensor) -> Tensor:
            scores = -bank.ranks_to(embedded, *everything) / width
            return scores.masked_fill(others, -inf).logsumexp(1)

        return total_of_all

    points, filled = bank.points_of(present, most)
    sites, offsets = bank.sites[points], bank.offsets[points]
    order = group.argsort(stable=True)
    place = torch.empty_like(order)  # of an input among those of its class
    place[order] = rows - (counts.cumsum(0) - counts)[group[order]]
    cell = group * shape[1] + place
    of_cell = rows.new_zeros(shape[0] * shape[1]).index_copy(0, cell, rows)  # the first elsewhere
    width = width[of_cell].unflatten(0, shape)

    def total_at(embedded: Tensor) -> Tensor:
        inputs = embedded.index_select(0, of_cell).unflatten(0, shape)
        scores = -bank.ranks_to(inputs, sites, offsets) / width
        sums = scores.masked_fill(filled[:, None], -inf).logsumexp(2)
        return sums.flatten().index_select(0, cell)

    return total_at
