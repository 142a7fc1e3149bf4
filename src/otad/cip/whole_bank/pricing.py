"""Finds the bank points with the largest price s_i + <z~_i, q>.

It is exact by the products of `otad.search.confirmed_product`, or approximate by an index of
FAISS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.cip.execution import full_precision
from otad.cip.whole_bank.pairs import Pairs
from otad.errors import import_extra
from otad.search.confirmed_product import shortlist

CACHE_BYTES = 2**31  # a float32 copy of the bank is cached up to this size
PRODUCTS_AT_ONCE = {"cpu": 2**24, "cuda": 2**27}  # products of a block of points and queries
POINTS_AT_ONCE = {"cpu": 2**14, "cuda": 2**16}
GATHERED_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # numbers of bank points that are read one by one
CONFIRMED = 8  # points that are priced in float64 to be sure of the largest

# Settings of the index of FAISS:
FEWEST_FOR_CELLS = 4_096  # with fewer points, all of them are in one cell
POINTS_PER_CELL = 256
PROBED_CELLS = 8
TRAINING_ROWS = 64  # per cell


class Prices:
    """Exact prices of the points of `pairs`."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._norms = pairs.image_squares.sqrt()
        self._cache: list[Tensor] = []  # blocks of z~ in float32 that have been read
        self._kind = pairs.device.type if pairs.device.type in POINTS_AT_ONCE else "cpu"
        self._gathered = max(1, GATHERED_AT_ONCE[self._kind] // pairs.dim)

    def best(self, queries: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` points (b,count) of the largest prices for queries q (b,d), largest first.

        The second result (b,count) says which of them may have the largest price, by float32 alone.
        No other point may."""
        at_once = PRODUCTS_AT_ONCE[self._kind]
        with full_precision(queries.device):
            blocks = self._blocks(torch.float32)
            found = shortlist(queries, blocks, self._norms, lines, count, at_once)
        indices, close = found.indices, found.bounds >= found.floor[:, None]
        doubtful = (~(found.ceiling < found.floor)).nonzero()[:, 0]
        if len(doubtful):
            asked, blocks = queries[doubtful], self._blocks(torch.float64)
            again = shortlist(asked, blocks, self._norms, lines, count, at_once, torch.float64)
            indices[doubtful] = again.indices
            close[doubtful] = torch.arange(indices.shape[1], device=indices.device) == 0
        return indices, close

    def largest(self, queries: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest price (b,) in float64, and the point that has it (b,)."""
        indices, close = self.best(queries, lines, CONFIRMED)
        prices = queries.new_full(indices.shape, -torch.inf)
        rows, columns = close.nonzero().unbind(1)
        some = zip(*(part.split(self._gathered) for part in (rows, columns)), strict=True)
        parts = [(self.pairs.images(indices[i, j]) * queries[i]).sum(1) for i, j in some]
        prices[rows, columns] = torch.cat(parts) + lines[indices[rows, columns]]
        top, column = prices.max(1)
        return top, indices.gather(1, column[:, None])[:, 0]

    def largest_of(self, points: Tensor, queries: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest price among a few bank points (n,), all in float64."""
        top = queries.new_full((len(queries),), -torch.inf)
        place = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
        for part in points.split(self._gathered):
            prices = torch.addmm(lines[part], queries, self.pairs.images(part).mT)
            value, where = prices.max(1)
            better = value > top
            top, place = torch.where(better, value, top), torch.where(better, part[where], place)
        return top, place

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, z~ (n,d)) over all points."""
        is_cached = dtype == torch.float32 and 4 * len(self.pairs) * self.pairs.dim <= CACHE_BYTES
        for number, rows in enumerate(self.pairs.blocks(POINTS_AT_ONCE[self._kind])):
            if not is_cached:
                yield rows.start, self.pairs.images(rows).to(dtype)
                continue
            if number == len(self._cache):
                self._cache.append(self.pairs.images(rows).to(dtype))
            yield rows.start, self._cache[number]


class IndexPrices:
    """An inverted-file index of the included points on the CPU, for (z~_i, s_i) and (q, 1).

    It searches a few cells only and may miss the best point, so an exact round follows."""

    def __init__(self, pairs: Pairs, lines: Tensor) -> None:
        faiss = import_extra("faiss", "index")
        self.places = pairs.included.nonzero()[:, 0]
        # The last coordinate is scaled, so that it is not much longer than the others.
        self.unit = float(lines[pairs.included].abs().max()) or 1.0
        width, count = pairs.dim + 1, len(self.places)
        cells = count // POINTS_PER_CELL
        self._index: Any = faiss.IndexFlatIP(width)
        if count >= FEWEST_FOR_CELLS:
            metric = faiss.METRIC_INNER_PRODUCT
            self._index = faiss.IndexIVFFlat(self._index, width, cells, metric)
            self._index.nprobe = PROBED_CELLS
            step = max(1, count // (TRAINING_ROWS * cells))
            self._index.train(self._rows(pairs, lines, self.places[::step]))
        for part in self.places.split(max(1, 2**26 // width)):
            self._index.add(self._rows(pairs, lines, part))

    def best(self, queries: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` points (b,count) of large price for queries (b,d); all may matter."""
        del lines  # the index was made with these lines
        rows = _array(pad(queries, (0, 1), value=self.unit))
        found = self._index.search(rows, min(count, len(self.places)))[1]
        places = torch.from_numpy(found).to(queries.device)
        places = torch.where(places < 0, places[:, :1], places)  # if the probed cells have fewer
        places = self.places[places.clamp_min(0)]
        return places, torch.ones_like(places, dtype=torch.bool)

    def _rows(self, pairs: Pairs, lines: Tensor, places: Tensor) -> np.ndarray[Any, Any]:
        heights = lines[places] / self.unit
        return _array(torch.cat([pairs.images(places), heights[:, None]], dim=1))


def _array(rows: Tensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(rows.float().cpu().numpy())
