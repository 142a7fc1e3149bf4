"""Which bank points have the largest s_i + <z~_i, q>: sought in float32, certain in float64.

Whatever the order of its sums, a float32 product of d terms is off by at most about d 2^-24 times
the lengths of its factors. So the points within twice that of the largest float32 product include
the one that is largest in truth; they are few, and can be looked at in float64. Where more are as
close as were asked for, all points are gone through in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otad.cip.execution import full_precision
from otad.cip.whole_bank.pairs import Pairs

KEPT_BYTES = 2**31  # a float32 copy of the bank is kept up to this size
PRICED_AT_ONCE = {"cpu": 2**24, "cuda": 2**27}  # products of a block of points and queries
POINTS_AT_ONCE = {"cpu": 2**14, "cuda": 2**16}
GATHERED_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # numbers of bank points read one by one
CONFIRMED = 8  # points that may have to be looked at in float64 to be sure of the largest
UNIT = 2.0**-24  # relative error of one float32 operation


class Prices:
    """Products with the bank of `pairs`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.longest = pairs.image_squares.max().sqrt()
        self._kept: list[Tensor] = []  # blocks of z~ in float32, once they have been read
        self._kind = pairs.device.type if pairs.device.type in PRICED_AT_ONCE else "cpu"

    def best(self, asked: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`count` points (b,count) of the largest price for each query (b,d), the largest first.

        The one of the largest price of all is among them, and so is every one that may be it by
        float32 alone: those are `close` (b,count).
        """
        count = min(count, len(self.pairs))
        with full_precision(asked.device):
            prices, places = self._search(asked.float(), lines.float(), count, torch.float32)
        error = self._error(asked, lines)
        close = prices.double() >= prices[:, :1].double() - 2 * error[:, None]
        doubtful = ~prices[:, 0].isfinite()
        if count < len(self.pairs):
            doubtful |= close[:, -1]
        rows = doubtful.nonzero()[:, 0]
        if len(rows):
            places[rows] = self._search(asked[rows], lines, count, torch.float64)[1]
            close[rows] = torch.arange(count, device=rows.device) == 0
        return places, close

    def largest(self, asked: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """The largest price (b,) in float64, and whose it is."""
        places, close = self.best(asked, lines, CONFIRMED)
        prices = asked.new_full(places.shape, -torch.inf)
        rows, columns = close.nonzero().unbind(1)
        at_once = max(1, GATHERED_AT_ONCE[self._kind] // self.pairs.dim)
        parts = [
            (self.pairs.images(places[row, column]) * asked[row]).sum(1)
            for row, column in zip(rows.split(at_once), columns.split(at_once), strict=True)
        ]
        prices[rows, columns] = torch.cat(parts) + lines[places[rows, columns]]
        top, column = prices.max(1)
        return top, places.gather(1, column[:, None])[:, 0]

    def largest_of(self, points: Tensor, asked: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """The same among a few bank points (n,), in float64 from the start."""
        top = asked.new_full((len(asked),), -torch.inf)
        place = torch.zeros(len(asked), dtype=torch.int64, device=asked.device)
        for part in points.split(max(1, GATHERED_AT_ONCE[self._kind] // self.pairs.dim)):
            prices = torch.addmm(lines[part], asked, self.pairs.images(part).mT)
            value, where = prices.max(1)
            better = value > top
            top, place = torch.where(better, value, top), torch.where(better, part[where], place)
        return top, place

    def _error(self, asked: Tensor, lines: Tensor) -> Tensor:
        """How far a float32 price may be from the true one (b,)."""
        size = self.longest * asked.norm(dim=1)
        height = lines.masked_fill(lines.isinf(), 0.0).abs().max()
        error: Tensor = ((self.pairs.dim + 4) * size + 4 * height) * (1.01 * UNIT)
        return error

    def _search(
        self, asked: Tensor, lines: Tensor, count: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Prices (b,count) and places by products in one precision: bank blocks outside."""
        best = asked.new_full((len(asked), count), -torch.inf)
        places = torch.zeros(len(asked), count, dtype=torch.int64, device=asked.device)
        width = POINTS_AT_ONCE[self._kind]
        rows_at_once = max(1, PRICED_AT_ONCE[self._kind] // min(width, len(self.pairs)))
        for number, block in enumerate(self.pairs.blocks(width)):
            images = self._block(number, block, dtype)
            for start in range(0, len(asked), rows_at_once):
                rows = slice(start, start + rows_at_once)
                prices = torch.addmm(lines[block], asked[rows], images.mT)
                top, where = prices.topk(min(count, prices.shape[1]), dim=1)
                if number == 0 and top.shape[1] == count:
                    best[rows], places[rows] = top, where
                    continue
                merged = torch.cat([best[rows], top], dim=1)
                names = torch.cat([places[rows], where + block.start], dim=1)
                kept = merged.topk(count, dim=1)
                best[rows], places[rows] = kept.values, names.gather(1, kept.indices)
        return best, places

    def _block(self, number: int, block: slice, dtype: torch.dtype) -> Tensor:
        if dtype == torch.float64:
            return self.pairs.images(block)
        if number < len(self._kept):
            return self._kept[number]
        images = self.pairs.images(block).to(dtype)
        if 4 * len(self.pairs) * self.pairs.dim <= KEPT_BYTES:
            self._kept.append(images)
        return images
