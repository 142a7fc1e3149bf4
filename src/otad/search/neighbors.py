"""Exact nearest neighbors in l2, which do not depend on the batch or on the device.

A float32 product (`otad.search.confirmed_product`) picks a shortlist, whose distances are computed
in float64. A row gets a longer shortlist if its K-th neighbor is not proved to be nearer than all
other points.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otad.checks import (
    STORAGE_DTYPES,
    check_count,
    check_finite,
    check_shape,
    check_tensor,
    holds,
    require,
)
from otad.errors import import_extra
from otad.io.mapped_rows import block_of, gathered, in_file
from otad.search.confirmed_product import product_error, row_norms, shortlist
from otad.search.grouped_product import GroupedProduct
from otad.search.projection import Projection
from otad.short_repr import short_repr
from otad.threads import run_on_threads

WORKING_BYTES = 256 * 2**20
NUMBERS_AT_ONCE = 2**19  # of gathered points on the CPU, so that they stay in the cache
SPARE = 8  # how many more than K points the first shortlist has
GROWTH = 4  # how many times longer the shortlist of an unproved row becomes
OFF_ORIGIN = 0.95  # |mean| / median |point| above which centering makes the bounds much tighter
FEWEST_OF_THREAD = 256  # queries
MODERATE = 2.0**16  # lengths up to this, and down to its inverse, can be squared in float32


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The K nearest bank points of B queries, nearest first.

    `indices` (B,K) are int64 and `distances` (B,K) are float64. Equal distances are ordered by
    index. `proved` (B,) says that no other point is nearer; it is False only where a search stopped
    early, such as `otad.search.ivf.IvfSearch` with `n_probe`."""

    indices: Tensor
    distances: Tensor
    proved: Tensor = None  # type: ignore[assignment]  # by default all are
    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.proved is None:
            proved = self.indices.new_ones(len(self.indices), dtype=torch.bool)  # type: ignore[unreachable]
            object.__setattr__(self, "proved", proved)


class Candidates(NamedTuple):
    """The best points of a shortlist, nearest first, and equal distances in the order of indices.

    `indices` and `distances` (b,k), where k is at most the number of points. Every point outside
    the shortlist is proved to be farther than `beyond` (b,), which is infinite if there is none."""

    indices: Tensor
    distances: Tensor
    beyond: Tensor


class Search(ABC):
    """Finds the K nearest of N points (N,d) by shortlists, each longer than the one before.

    A row is proved once its K-th neighbor is nearer than all points outside the shortlist."""

    exact = True  # whether all rows of a result are proved
    dim: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number N of points."""

    @abstractmethod
    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        """Return the k best points of a shortlist of `size` for each query (b,d).

        `exclude` (b,) is the index of a point that gets an infinite distance, or -1."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices (n,) and their points (n,d), in blocks, until each point was given once."""

    @torch.no_grad()
    def __call__(self, queries: Tensor, k: int, *, exclude: Tensor | None = None) -> Neighbors:
        """Return the k nearest points of each query (B,d).

        `exclude` (B,) int64 is the index of a bank point for each query that must not be its
        neighbor, such as its own entry, or -1 for none."""
        self._check(queries, k, exclude)
        queries, size = queries.detach(), min(k + SPARE, len(self))
        if exclude is None:
            exclude = queries.new_full((len(queries),), -1, dtype=torch.int64)
        exclude = exclude.to(queries.device)
        indices, distances, beyond = self.candidates(queries, k, size, exclude)
        proved = distances[:, -1] < beyond
        if holds(proved):
            return Neighbors(indices, distances, proved)
        check_finite(queries, "queries")  # queries that are not finite are never proved
        if not self.exact:
            return Neighbors(indices, distances, proved)
        pending = (~proved).nonzero()[:, 0]
        while len(pending):
            expected = f"at least k = {k} bank points at a finite distance"
            got = f"fewer for {len(pending)} queries, the first at row {int(pending[0])}"
            require(size < len(self), "queries", expected, got)
            size = min(size * GROWTH, len(self))
            found = self.candidates(queries[pending], k, size, exclude[pending])
            indices[pending], distances[pending] = found.indices, found.distances
            pending = pending[~(found.distances[:, -1] < found.beyond)]
        return Neighbors(indices, distances)

    def _check(self, queries: Tensor, k: int, exclude: Tensor | None) -> None:
        # On a GPU, checking the values would make the host wait: see `__call__`.
        finite = not queries.is_cuda if isinstance(queries, Tensor) else True
        check_tensor(queries, "queries", "B,d", dtypes=STORAGE_DTYPES, finite=finite)
        check_shape(queries, "queries", (len(queries), self.dim), "like the points")
        count = available = len(self)
        if exclude is not None:
            check_tensor(exclude, "exclude", "B", dtypes=(torch.int64,))
            check_shape(exclude, "exclude", (len(queries),), "one for each query")
            low, high = int(exclude.min()), int(exclude.max())
            fits = low >= -1 and high < count
            require(fits, "exclude", f"-1 or an index below {count}", f"{low} to {high}")
            available -= high >= 0
        most = f"at most {available} (points left to find)"
        require(check_count(k, "k") <= available, "k", most, k)


class NeighborSearch(Search):
    """An exact l2 search over points (N,d), which must not change afterwards.

    The points may be on the CPU or in a file while queries are on a GPU. The result is on the
    device of the queries.

    Let c be the mean point, s a power of two, x = s (query - c) and y = s (point - c) with |y| < 1.
    Then s^2 |query - point|^2 = |x|^2 - 2 <x, y> + |y|^2. Points of moderate size around the origin
    are `plain`: they are used as they are, with c = 0 and s = 1.
    """

    def __init__(self, points: Tensor) -> None:
        check_tensor(points, "points", "N,d", dtypes=STORAGE_DTYPES, finite=False)
        self.points = points.detach() if points.requires_grad else points
        self.dim = points.shape[1]
        self._work_dtype = torch.promote_types(points.dtype, torch.float32)
        with torch.no_grad():
            self._plain = True
            mean = self._mean()
            self._center, self._exponent = torch.zeros_like(mean), 0
            self._radii = self._lengths()  # (N,) float64, |y|
            near = float(row_norms(mean[None])) <= OFF_ORIGIN * float(self._radii.median())
            self._plain = near and 1 / MODERATE <= float(self._radii.max()) <= MODERATE
            if not self._plain:
                self._center = mean
                radii = self._lengths()
                holds, radius = f"a spread that {self._work_dtype} can hold", float(radii.max())
                require(math.isfinite(radius), "points", holds, radius)
                limit = 100 if self._work_dtype == torch.float32 else 1000
                self._exponent = max(-limit, min(limit, math.frexp(radius)[1]))
                self._radii = radii * 2.0**-self._exponent
            self._radius = float(self._radii.max())

    def __len__(self) -> int:
        return self.points.shape[0]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in torch.arange(len(self)).split(self._fit(24)):
            yield indices, block_of(self.points, int(indices[0]), int(indices[-1]) + 1)

    @abstractmethod
    def _shortlist(self, x: Tensor, size: int, k: int) -> tuple[Tensor, Tensor]:
        """Return indices (b,size) of likely neighbors of x (b,d) float64, and a floor (b,).

        s^2 |query - point|^2 of every other point is proved to be at least the floor; size < N. An
        index may be N instead of that of a point which is farther than k others."""

    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        size = min(size, len(self))
        width = self._width(size)
        blocks = zip(queries.split(width), exclude.split(width), strict=True)
        return _joined([self._attempt(some, k, size, excluded) for some, excluded in blocks])

    def _width(self, size: int) -> int:
        """Return how many queries with shortlists of this size are answered at once."""
        square = math.isqrt(WORKING_BYTES // 16)  # so that a block of products is square
        return max(1, min(self._fit(48), WORKING_BYTES // (128 * size), square))

    def _scaled(self, queries: Tensor) -> Tensor:
        """Return x (b,d) for queries (b,d) in float64."""
        if self._plain:
            return queries
        return (queries - self._center.to(queries.device)).mul_(2.0**-self._exponent)

    def _attempt(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        queries = queries.double()
        x = self._scaled(queries)
        if size < len(self):
            candidates, floor = self._shortlist(x, size, k + 1)  # one more, as one may be excluded
            candidates = candidates.sort(dim=1).values  # so that a stable sort keeps index order
        else:
            candidates = torch.arange(size, device=x.device).expand(len(x), size)
            floor = x.new_full((len(x),), math.inf)
        lengths = self._distances(queries, candidates)
        lengths = lengths.masked_fill(candidates == exclude[:, None], math.inf)
        lengths, order = lengths.sort(dim=1, stable=True)
        lengths, order = lengths[:, :k].contiguous(), order[:, :k]
        least = (floor - self._room(x)).clamp_min(0) * (1 - 2e-12)
        beyond = least.sqrt() * 2.0**self._exponent
        return Candidates(candidates.gather(1, order), lengths, beyond)

    def _room(self, x: Tensor) -> Tensor:
        """Return room (b,) for rounding in float64, and for numbers that float32 flushes to 0."""
        norms = row_norms(x)
        flushed = x.shape[1] * 2.0**-120 * (1 + self._radius + norms)
        return 1e-12 * norms.square() + flushed

    def _distances(self, queries: Tensor, candidates: Tensor) -> Tensor:
        """Return |query - candidate| (b,T) for queries (b,d) in float64 and candidates (b,T).

        It is infinite where a candidate is N. These are the last ones of a row."""
        none, (count, width) = candidates == len(self), candidates.shape
        fit = self._fit(32) if queries.is_cuda else max(1, NUMBERS_AT_ONCE // self.dim)
        rows = max(1, fit // width)
        squares = queries.new_full((count, width), math.inf)
        for row in range(0, count, rows):
            asked = queries[row : row + rows, None]
            # On a GPU, counting the candidates would make the host wait.
            last = width if queries.is_cuda else int((~none[row : row + rows]).sum(1).max())
            for column in range(0, last, fit):
                part = slice(row, row + rows), slice(column, min(column + fit, last))
                indices = candidates[part].clamp_max(len(self) - 1)
                gap = gathered(self.points, indices, queries.device).double().sub_(asked)
                squares[part] = _ordered_sum(gap.square_().flatten(0, 1)).view(gap.shape[:2])
        squares.masked_fill_(none, math.inf)
        # NumPy rounds roots correctly, so their order is that of the squares. On some CPUs torch
        # does not.
        return squares.sqrt() if squares.is_cuda else torch.from_numpy(np.sqrt(squares.numpy()))

    def _scaled_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, y (n,d)) in the working dtype, over all points."""
        rows = self._fit(24)
        for start in range(0, len(self), rows):
            block = block_of(self.points, start, start + rows).to(self._work_dtype)
            if not self._plain:
                block = (block - self._center).mul_(2.0**-self._exponent)
            yield start, block

    def _mean(self) -> Tensor:
        total = torch.zeros_like(self.points[0], dtype=torch.float64)
        for start, block in self._scaled_blocks():
            check_finite(block, f"points[{start}:{start + len(block)}]")
            total += block.sum(0, dtype=torch.float64)
        return (total / len(self)).to(self._work_dtype)

    def _lengths(self) -> Tensor:
        return torch.cat([row_norms(block) for _, block in self._scaled_blocks()])

    def _fit(self, bytes_per_number: int) -> int:
        """Return how many rows of d numbers fit in the memory budget."""
        return max(1, WORKING_BYTES // (bytes_per_number * self.points.shape[1]))


class TorchSearch(NeighborSearch):
    """A search by matrix products in blocks.

    Points that have to be converted are stored in float32 if they take up to half of
    `WORKING_BYTES`. On a GPU that has many points, see `otad.search.grouped_product`."""

    def __init__(self, points: Tensor) -> None:
        super().__init__(points)
        self._ready: Tensor | None = None  # y (N,d) in float32
        as_stored = self._plain and points.dtype == torch.float32 and in_file(self.points) is None
        if not as_stored and 8 * points.numel() <= WORKING_BYTES:
            with torch.no_grad():
                self._ready = torch.cat([right for _, right in self._right_blocks()])
        self._offsets = -self._radii.square()
        ready = self.points if as_stored else self._ready
        self._projection = Projection(ready)
        self._grouped: GroupedProduct | None = None
        scaled = self.points if self._plain else ready
        if scaled is not None and GroupedProduct.covers(self.points):
            self._grouped = GroupedProduct(self.points, scaled, self._radii, self._exponent)

    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        search = super().candidates
        if not self._is_projected(queries, k, size):
            return search(queries, k, size, exclude)
        share = max(FEWEST_OF_THREAD, -(-len(queries) // torch.get_num_threads()))
        shares = list(zip(queries.split(share), exclude.split(share), strict=True))
        return _joined(run_on_threads(shares, lambda part: search(part[0], k, size, part[1])))

    def _is_projected(self, queries: Tensor, k: int, size: int) -> bool:
        """Return whether few coordinates choose the shortlist, which at first is short."""
        return size <= k + SPARE and self._projection.prepare(queries)

    def _width(self, size: int) -> int:
        width, grouped = super()._width(size), self._grouped
        if grouped is None or not grouped.holds(size):
            return width
        scores = grouped.product.dtype.itemsize * len(self)  # of a query; all are in memory
        return max(1, min(width, WORKING_BYTES // scores))

    def _attempt(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        grouped = self._grouped
        here = queries.device == self.points.device
        if grouped is None or not here or not grouped.holds(size):
            return super()._attempt(queries, k, size, exclude)
        x = self._scaled(queries.double())
        return Candidates(*grouped.candidates(queries, x, k, size, exclude))

    def _shortlist(self, x: Tensor, size: int, k: int) -> tuple[Tensor, Tensor]:
        """Return the points with the largest 2 <x, y> - |y|^2."""
        asked, offsets = 2 * x, self._offsets
        if self._is_projected(x, k - 1, size):
            listed = self._projection.shortlist(asked, self._radii, offsets, size, k)
        else:
            blocks, at_once = self._right_blocks(), WORKING_BYTES // 16
            listed = shortlist(asked, blocks, self._radii, offsets, size, at_once)
        least = listed.floors.topk(k, dim=1).values[:, -1] - self._room(x)
        indices = listed.indices.masked_fill(listed.bounds < least[:, None], len(self))
        return indices, row_norms(x).square() - listed.ceiling

    def _right_blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, y (n,d)) in float32, over all points."""
        if self._ready is not None:
            yield 0, self._ready
            return
        for start, block in self._scaled_blocks():
            yield start, block.float()


class FaissSearch(NeighborSearch):
    """A search with shortlists by FAISS on the CPU; it stores a float32 copy of the points."""

    def __init__(self, points: Tensor) -> None:
        super().__init__(points)
        self._index: Any = import_extra("faiss", "index").IndexFlatL2(points.shape[1])
        for _, block in self._scaled_blocks():
            self._index.add(block.to("cpu", torch.float32).numpy())

    def _shortlist(self, x: Tensor, size: int, k: int) -> tuple[Tensor, Tensor]:
        squares, found = self._index.search(x.to("cpu", torch.float32).numpy(), size)
        indices = torch.from_numpy(found).to(x.device)
        furthest = torch.from_numpy(squares).to(x.device, torch.float64).amax(1)
        error = product_error(x.shape[1], torch.float32, torch.device("cpu"))
        floor = furthest - error * (row_norms(x) + self._radius).square()
        missing = (indices < 0).any(1)  # FAISS marks these when distances overflow
        return indices.clamp_(min=0), floor.masked_fill(missing, -math.inf)


def _joined(parts: list[Candidates]) -> Candidates:
    if len(parts) == 1:
        return parts[0]
    return Candidates(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _ordered_sum(rows: Tensor) -> Tensor:
    """Return the sum of each row (P,d), which is overwritten.

    Halves are added to each other, so that the bits are the same in any batch, on any device and
    with any number of threads."""
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half].add_(rows[:, half:width])
        width = half
    return rows[:, 0]
