"""Bounds of the products of all pairs of bank points, by `otad.search.projection`.

For q_i = x_i - z~_i / M, all pairs satisfy their inequalities with levels u~ if no price
s_j + <z~_j, q_i> is above its level u~_i - |z~_i|^2 / (2M). Two points contradict each other if
<z~_i - z~_j, q_i - q_j> < 0: this is the sum of their two inequalities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.cip.whole_bank.pairs import Pairs
from otad.search.projection import GROUP, Projection, members

ROUNDING = 1e-13  # the squared rounding error of q in float64, relative to |x|^2 + |z~|^2 / M^2
MOST_STEEP = 2**14  # pairs of a block that are confirmed one by one


class ProjectedPairs:
    """The coordinates of q_i for any M, and of z~_i, in the basis of a prepared projection."""

    def __init__(self, pairs: Pairs, projection: Projection) -> None:
        self.pairs, self.projection = pairs, projection
        parts = [
            [part @ projection.basis for part in pairs.read(rows)] for rows in pairs.blocks(2**11)
        ]
        self._points, self._images = (torch.cat(part) for part in zip(*parts, strict=True))
        self._sides: tuple[float, Tensor, Tensor] | None = None

    def queries(self, modulus: float, rows: slice) -> Tensor:
        """Return the coordinates of q_i (n,m+1) of some points."""
        pairs = self.pairs
        squares, bends = pairs.squares[rows], pairs.image_squares[rows] / modulus**2
        inside = self._points[rows] - self._images[rows] / modulus
        lengths = squares - 2 * pairs.products[rows] / modulus + bends
        room = ROUNDING * (squares + bends)
        return self.projection.with_rest(inside, lengths.clamp_min(0) + room)

    def steep(self, one: slice, other: slice, modulus: float) -> Tensor | None:
        """Return all pairs i < j (k,2) of two blocks of points that may contradict each other.

        None means that there are too many."""
        if self._sides is None or self._sides[0] != modulus:
            own = self.pairs.image_squares / modulus - self.pairs.products  # -<z~_i, q_i>
            own = (own + self.projection.error * own.abs()).float()[:, None]
            self._sides = modulus, self.queries(modulus, slice(None)), own
        _, queries, own = self._sides
        images, last = self.projection.coordinates, torch.ones_like(own)
        left = torch.cat([part[one] for part in (images, queries, own, last)], dim=1)
        right = torch.cat([part[other] for part in (queries, images, last, own)], dim=1)
        sums = left @ pad(right, (0, 0, 0, -len(right) % GROUP)).mT
        if one == other:
            sums = sums.triu_(1)
        groups = sums.view(len(sums), GROUP, -1)
        least = sums.new_full((len(sums), 1), torch.finfo(torch.float32).tiny)
        reached = (groups.amax(1) >= least).nonzero().unbind(1)
        found = torch.stack(members(groups, least, *reached), dim=1)
        if len(found) > MOST_STEEP:
            return None
        return found + torch.tensor([one.start, other.start])
