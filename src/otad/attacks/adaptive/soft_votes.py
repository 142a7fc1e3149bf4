"""The soft vote of the bank points of one class for each input, against those of another class."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otad.attacks.adaptive.neighborhood import Neighborhood

Total = Callable[[Tensor], Tensor]
"""Maps embedded inputs (n,d) to the logarithms of sums (n,) of exp(-rank / width)."""


def advantage_over(bank: Neighborhood, aims: Tensor, y: Tensor, width: Tensor) -> Total:
    """Return how much more the votes for `aims` (n,) weigh than those for y (n,), as a function of
    embedded inputs (n,d).

    It is the difference (n,) of the logarithms of both sums of exp(-rank / width), with a width
    (n,1). If no point votes for one side, the other side alone gives the direction."""
    sides = [_total_of(bank, classes, width) for classes in (aims, y)]

    def advantage(embedded: Tensor) -> Tensor:
        totals = (total_at(embedded) for total_at in sides)
        more, less = (torch.where(total.isfinite(), total, 0.0) for total in totals)
        return more - less

    return advantage


def _total_of(bank: Neighborhood, classes: Tensor, width: Tensor) -> Total:
    """Return the sums over the points that vote for the class of each input (n,).

    Inputs of a class are compared with its points alone, in one product for all classes, in which
    the smaller ones are filled up. If that takes more than all pairs, all pairs are compared."""
    present, group, counts = classes.unique(return_inverse=True, return_counts=True)
    labels, most, sizes = present.tolist(), int(counts.max()), bank.class_sizes[0]
    compared = len(labels) * most * max(sizes[label] for label in labels)
    if compared >= len(classes) * len(bank.sites):
        others, everything = bank.is_wrong(classes), (bank.sites, bank.offsets)
        return lambda at: (
            (-bank.ranks_to(at, *everything) / width).masked_fill(others, -inf).logsumexp(1)
        )
    sites, offsets = (part.split(sizes) for part in (bank.sites, bank.offsets))
    sites = pad_sequence([sites[label] for label in labels], batch_first=True)
    offsets = pad_sequence(
        [offsets[label] for label in labels], batch_first=True, padding_value=inf
    )
    filled = offsets.isinf()[:, None]  # without a gradient, also where nothing is left of a class
    order = group.argsort(stable=True)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)  # of an input within its class
    place[order] = torch.arange(len(order), device=order.device) - first[group[order]]
    rows = order.new_zeros(len(present), most)  # the first input is where a class has fewer
    rows[group, place] = torch.arange(len(order), device=order.device)

    def total_at(embedded: Tensor) -> Tensor:
        scores = -bank.ranks_to(embedded[rows], sites, offsets) / width[rows]
        return scores.masked_fill(filled, -inf).logsumexp(2)[group, place]

    return total_at
