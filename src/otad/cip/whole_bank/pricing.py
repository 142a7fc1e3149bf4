"""Finds the bank points with the largest price s_i + <z~_i, q>.

It is exact by the products of `otad.search.confirmed_product`, or approximate by an index of
FAISS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.cip.execution import full_precision
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.projected_pairs import ProjectedPairs
from otad.errors import import_extra
from otad.search.confirmed_product import Shortlist, Sums, shortlist
from otad.search.projection import FEWEST_QUERIES, WIDTH, Projection, places
from otad.threads import run_on_threads

CACHE_BYTES = 2**31  # a float32 copy of the bank is cached up to this size
PRODUCTS_AT_ONCE = {"cpu": 2**24, "cuda": 2**27}  # products of a block of points and queries
POINTS_AT_ONCE = {"cpu": 2**14, "cuda": 2**16}
GATHERED_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # numbers of bank points that are read one by one
PRICED_AT_ONCE = {"cpu": 2**18, "cuda": 2**27}  # the same, where they are used once
LONGER = 8  # how many times more points are compared if float32 leaves open which are the best
QUERIES_AT_ONCE = 2**10  # on a thread; all take the memory of the one with most points to compare
ENTRANTS = 16  # points that are added at a time
MOST_ROUNDS = 200  # in which points are added
CONFIRMED = 8  # points that are priced in float64 to be sure of the largest

# Settings of the index of FAISS:
FEWEST_FOR_CELLS = 4_096  # with fewer points, all of them are in one cell
POINTS_PER_CELL = 256
PROBED_CELLS = 8
TRAINING_ROWS = 64  # per cell


class Prices:
    """Exact prices of the points of `pairs`."""

    count, most_rounds = ENTRANTS, MOST_ROUNDS

    def __init__(self, pairs: Pairs, width: int = WIDTH) -> None:
        self.pairs = pairs
        self._norms = pairs.image_squares.sqrt()
        self._kind = pairs.device.type if pairs.device.type in POINTS_AT_ONCE else "cpu"
        self._gathered = max(1, GATHERED_AT_ONCE[self._kind] // pairs.dim)
        self._priced = max(1, PRICED_AT_ONCE[self._kind] // pairs.dim)
        self._images: Tensor | None = None  # z~ (N,d) in float32
        if 4 * len(pairs) * pairs.dim <= CACHE_BYTES:
            self._images = torch.empty(len(pairs), pairs.dim, device=pairs.device)
            for start, block in self._blocks(torch.float64):
                self._images[start : start + len(block)] = block
        self.projection = Projection(self._images, width)
        self._projected: ProjectedPairs | None = None

    def best(self, queries: Tensor, lines: Tensor, count: int) -> Tensor:
        """Return `count` points (b,count) of large prices for queries q (b,d), largest first."""
        return self.contenders(queries, lines, count)[0]

    def contenders(self, queries: Tensor, lines: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `best` points (b,count), and which of them may have the largest price.

        This is by float32 alone. No other point may have it."""

        def full(dtype: torch.dtype, size: int, asked: Tensor) -> Shortlist:
            at_once, blocks = PRODUCTS_AT_ONCE[self._kind], self._blocks(dtype)
            return shortlist(asked, blocks, self._norms, lines, size, at_once, dtype)

        def projected(asked: Tensor) -> Shortlist:
            return self.projection.shortlist(asked, self._norms, lines, count, 1)

        attempts: list[Callable[[Tensor], Shortlist]] = [
            *([projected] if self.projection.prepare(queries) else []),
            partial(full, torch.float32, count),
            partial(full, torch.float32, LONGER * count),
            partial(full, torch.float64, count),
        ]
        doubtful = torch.arange(len(queries), device=queries.device)
        indices = doubtful.new_zeros(len(queries), min(count, len(self.pairs)))
        close = torch.zeros_like(indices, dtype=torch.bool)
        with full_precision(queries.device):
            for attempt in attempts:
                found = attempt(queries[doubtful])
                names, nearly = found.indices, found.close
                if names.shape[1] > indices.shape[1]:
                    prices = self._prices(names, nearly, queries[doubtful], lines)
                    names = names.gather(1, prices.topk(indices.shape[1], dim=1).indices)
                    nearly = torch.arange(indices.shape[1], device=names.device) == 0
                indices[doubtful], close[doubtful] = names, nearly
                doubtful = doubtful[~found.is_complete]
                if not len(doubtful):
                    break
        return indices, close

    def entrants(
        self, queries: Tensor, lines: Tensor, count: int, floors: Tensor, current: Tensor
    ) -> Tensor:
        """Return points (b,count) of large prices that are not current (b,W).

        If a price is above the floor (b,) of its query, up to rounding, the largest of all is among
        them. Points that cannot reach the floor may be replaced by a current one."""
        if not self.projection.prepare(queries):
            return self.best(queries, lines, count)

        def work(part: tuple[Tensor, ...]) -> Tensor:
            return self._entrants(part[0], lines, count, *part[1:])

        return on_shares(work, queries, floors, current)

    def _entrants(
        self, queries: Tensor, lines: Tensor, count: int, floors: Tensor, current: Tensor
    ) -> Tensor:
        coordinates = self.projection.coordinates_of(queries)
        found = self.projection.above(coordinates, lines, floors, exclude=current)
        asked, points, crowded = found
        names = self.leading(queries, lines, count, floors, current[:, :1], asked, points)
        if len(crowded):
            names[crowded] = self.best(queries[crowded], lines, count)
        return names

    def leading(
        self,
        queries: Tensor,
        lines: Tensor,
        count: int,
        floors: Tensor,
        other: Tensor,
        asked: Tensor,
        points: Tensor,
    ) -> Tensor:
        """Return the points (b,count) of the largest prices among some points (P,).

        `asked` (P,) are their queries, in ascending order. Points that cannot reach the floor (b,)
        of their query are replaced by the `other` point (b,1)."""
        sums = Sums(queries, self._norms, lines, torch.float32)
        counts = asked.bincount(minlength=len(queries))
        bounds = self.projection.full_bounds(sums, counts, points)
        reached = bounds >= (floors - 1e-6 * floors.abs())[asked]
        asked, points = asked[reached], points[reached]
        place, longest = places(asked, len(queries))
        table = floors.new_full((len(queries), 1 + max(count, longest)), -torch.inf)
        table[asked, place] = bounds[reached].double()
        names = other.repeat(1, table.shape[1])
        names[asked, place] = points
        best, order = table.topk(count + 1, dim=1)
        listed = sums.listed(names.gather(1, order), best, best[:, -1])
        exact = (~listed.is_complete)[asked]  # float32 leaves open which points are listed
        table[asked[exact], place[exact]] = self._price(points[exact], queries, asked[exact], lines)
        return names.gather(1, table.topk(count, dim=1).indices)

    def bounds_of_pairs(self) -> ProjectedPairs | None:
        """Return bounds of the prices of bank points for each other, if they may be of use.

        Once made they are always used, so that the order of the blocks makes no difference."""
        images = self._images
        if self._projected is None and images is not None and self.projection.prepare(images):
            self._projected = ProjectedPairs(self.pairs, self.projection)
        return self._projected

    def raised(
        self, rows: slice, modulus: float, lines: Tensor, floors: Tensor, by: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the largest price (b,) for q_i of bank points i, and the point that has it (b,).

        It is the floor (b,) if none is larger, and then the point is any. If `by` is given, only
        the prices of these points (n,) count."""
        if (bounds := self.bounds_of_pairs()) is None:
            every = torch.arange(rows.start, rows.stop, device=floors.device)
            return self._largest(every, modulus, lines, by)
        own = bounds.queries(modulus, rows)
        with full_precision(floors.device):
            asked, points, crowded = self.projection.above(own, lines, floors, by)
        others = points != asked + rows.start
        asked, points = asked[others], points[others]
        top, place = floors.clone(), torch.zeros_like(floors, dtype=torch.int64)
        which, asked_place = asked.unique(return_inverse=True)
        queries = self._queries(which + rows.start, modulus)
        prices = self._price(points, queries, asked_place, lines)
        top.scatter_reduce_(0, asked, prices, "amax")
        is_top = prices == top[asked]
        place[asked[is_top]] = points[is_top]
        if len(crowded):
            found = self._largest(crowded + rows.start, modulus, lines, by)
            top[crowded], place[crowded] = found
        return top, place

    def _largest(
        self, rows: Tensor, modulus: float, lines: Tensor, by: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        queries = self._queries(rows, modulus)
        if by is None or 4 * len(by) > len(self.pairs):
            return self.largest(queries, lines)
        return self.largest_of(by, queries, lines)

    def _queries(self, rows: Tensor, modulus: float) -> Tensor:
        """Return q_i = x_i - z~_i / M (n,d) of bank points (n,)."""
        points, images = self.pairs.read(rows)
        return points - images / modulus

    def largest(self, queries: Tensor, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest price (b,) in float64, and the point that has it (b,)."""
        indices, close = self.contenders(queries, lines, CONFIRMED)
        top, column = self._prices(indices, close, queries, lines).max(1)
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

    def _prices(self, indices: Tensor, which: Tensor, queries: Tensor, lines: Tensor) -> Tensor:
        """Return the prices (b,T) of some of the points (b,T) in float64, and -inf for others."""
        prices = queries.new_full(indices.shape, -torch.inf)
        rows, columns = which.nonzero().unbind(1)
        prices[rows, columns] = self._price(indices[rows, columns], queries, rows, lines)
        return prices

    def _price(self, points: Tensor, queries: Tensor, rows: Tensor, lines: Tensor) -> Tensor:
        """Return the prices (n,) of points (n,) for the queries `rows` (n,), in float64."""
        some = zip(points.split(self._priced), rows.split(self._priced), strict=True)
        parts = [(self.pairs.images(i) * queries[row]).sum(1) for i, row in some]
        return torch.cat([lines[:0], *parts]) + lines[points]

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, z~ (n,d)) over all points."""
        for rows in self.pairs.blocks(POINTS_AT_ONCE[self._kind]):
            if dtype == torch.float32 and self._images is not None:
                yield rows.start, self._images[rows]
            else:
                yield rows.start, self.pairs.images(rows).to(dtype)


class LikelyPrices:
    """Points of large prices by a few coordinates, without a proof, so that an exact round follows.

    It needs prepared coordinates of exact prices."""

    count, most_rounds = 16, 1  # the fastest in measurements
    listed, width = 48, 64  # points that are compared in full, and coordinates that choose them

    def __init__(self, prices: Prices, lines: Tensor, alone: Tensor) -> None:
        """Prepare prices with these lines (N,), which differ if a point is `alone` (N,)."""
        self._prices, self._projection = prices, prices.projection
        self._right, self._right_alone = (
            self._projection.first_coordinates(part, self.width) for part in (lines, alone)
        )

    def best(self, queries: Tensor, lines: Tensor, count: int) -> Tensor:
        """Return points (b,count) for queries (b,d), with the lines of single points."""
        none = queries.new_empty(len(queries), 0, dtype=torch.int64)
        floors = queries.new_full((len(queries),), -torch.inf)
        return self._entrants(self._right_alone, queries, lines, count, floors, none)

    def entrants(
        self, queries: Tensor, lines: Tensor, count: int, floors: Tensor, current: Tensor
    ) -> Tensor:
        """Return points (b,count) of large prices that are not current (b,W).

        Points that cannot reach the floor (b,) of their query are replaced by a current one."""
        return self._entrants(self._right, queries, lines, count, floors, current)

    def _entrants(
        self,
        right: Tensor,
        queries: Tensor,
        lines: Tensor,
        count: int,
        floors: Tensor,
        current: Tensor,
    ) -> Tensor:
        def work(part: tuple[Tensor, ...]) -> Tensor:
            asked, floor, known = part
            points = self._projection.likely(asked, right, self.listed, known)
            other = (known if known.shape[1] else points)[:, :1]
            rows = torch.arange(len(points)).repeat_interleave(points.shape[1])
            some = floor, other, rows, points.flatten()
            return self._prices.leading(asked, lines, count, *some)

        return on_shares(work, queries, floors, current)


class IndexPrices:
    """An inverted-file index of the included points on the CPU, for (z~_i, s_i) and (q, 1).

    It searches a few cells only and may miss the best point, so an exact round follows."""

    count, most_rounds = ENTRANTS, MOST_ROUNDS

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

    def best(self, queries: Tensor, lines: Tensor, count: int) -> Tensor:
        """Return `count` points (b,count) of large price for queries (b,d)."""
        del lines  # the index was made with these lines
        rows = _array(pad(queries, (0, 1), value=self.unit))
        found = self._index.search(rows, min(count, len(self.places)))[1]
        places = torch.from_numpy(found).to(queries.device)
        places = torch.where(places < 0, places[:, :1], places)  # if the probed cells have fewer
        return self.places[places.clamp_min(0)]

    def entrants(
        self, queries: Tensor, lines: Tensor, count: int, floors: Tensor, current: Tensor
    ) -> Tensor:
        """Return `count` points (b,count) of large price, of any size."""
        del floors, current
        return self.best(queries, lines, count)

    def _rows(self, pairs: Pairs, lines: Tensor, places: Tensor) -> np.ndarray[Any, Any]:
        heights = lines[places] / self.unit
        return _array(torch.cat([pairs.images(places), heights[:, None]], dim=1))


def on_shares(work: Callable[[tuple[Tensor, ...]], Tensor], *parts: Tensor) -> Tensor:
    """Return the results (b,...) of shares of the rows of some tensors (b,...), on threads."""
    share = -(-len(parts[0]) // torch.get_num_threads())
    share = min(QUERIES_AT_ONCE, max(FEWEST_QUERIES, share))
    shares = list(zip(*(part.split(share) for part in parts), strict=True))
    with full_precision(parts[0].device):  # here, as it is a setting of all threads
        return torch.cat(run_on_threads(shares, work))


def _array(rows: Tensor) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(rows.float().cpu().numpy())
