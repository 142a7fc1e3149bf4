"""Upper bounds of <query, row> from few coordinates, so that few rows are multiplied in full.

Let V (d,m) be an orthonormal basis and r(y) = |y - V V^T y|. Then, by Cauchy and Schwarz,

    <x, y>  <=  <V^T x, V^T y> + r(x) r(y),

which is a product of m + 1 coordinates. With sqrt(r(y)^2 + e |y|^2) instead of r(y), it is larger
by at least e |x| |y|, which covers rounding. The bound is of use if rows and queries differ mostly
in the directions of V. These are the main directions of a sample of the rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.search.confirmed_product import SECTION, Shortlist, Sums, product_error, row_norms

WIDTH = 128  # coordinates of a row, with its offset
FEWEST_ROWS = 2**12  # with fewer rows, full products are as fast
FEWEST_COLUMNS = 4 * WIDTH
FEWEST_QUERIES = 128  # coordinates take as long as the full products of about so many queries
MOST_SECTIONS = 64  # of a long row
SAMPLE = 1024  # rows from which the basis is estimated
ITERATIONS = 3  # of the power method for the basis
GROUP = 16  # products of which only the largest is compared with others at first
MOST_GROUPS = 256  # with a product above the floor of a query
CHEAPER = 32  # how many times longer one full product takes than if all rows are multiplied
PRODUCTS_AT_ONCE = 31 * 2**18  # on a thread; less than 32 MiB, which the C library uses again
NUMBERS_AT_ONCE = 2**20  # of the rows whose coordinates are computed
LOWEST = -1e38  # the offset of rows that are left out
_MAKING = Lock()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns once that sparse tensors may change
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), device="cpu")


class Projection:
    """The coordinates of rows (N,d), which must stay as they are, made when many queries come.

    Rows that are None, few, short, on a GPU, not in float32 or not contiguous get none."""

    def __init__(self, rows: Tensor | None, width: int = WIDTH) -> None:
        self.rows, self.width = rows, width
        # Long rows are multiplied in equal sections, so that the errors of the sums stay small.
        dim = 0 if rows is None else rows.shape[1]
        numbers = range(-(-dim // SECTION), MOST_SECTIONS + 1)
        self.sections = next((n for n in numbers if n and dim % n == 0), 0)
        self.pays = (
            rows is not None
            and rows.dtype == torch.float32
            and rows.device.type == "cpu"
            and len(rows) >= FEWEST_ROWS
            and dim >= FEWEST_COLUMNS
            and self.sections > 0
            and rows.is_contiguous()
        )
        self.error = self._product_error()
        self.basis = self.coordinates = torch.empty(0)
        self._joined = self.basis, self.basis  # the last offsets, and what they were joined to

    def prepare(self, queries: Tensor) -> bool:
        """Return whether the coordinates are of use for queries (b,d)."""
        # The coordinates have room for the errors of products by the settings of their time.
        if not self.pays or queries.is_cuda or self._product_error() > self.error:
            return False
        if not len(self.coordinates) and len(queries) >= FEWEST_QUERIES:
            with _MAKING:  # several threads may ask for the same coordinates
                if not len(self.coordinates):
                    self._make()
        return len(self.coordinates) > 0

    def _make(self) -> None:
        assert self.rows is not None
        sample = self.rows[:: -(-len(self.rows) // SAMPLE)].double()
        basis = sample[: self.width - 2].mT
        for _ in range(ITERATIONS):
            basis = torch.linalg.qr(sample.mT @ (sample @ basis)).Q
        self.basis = basis
        parts = self.rows.split(max(1, NUMBERS_AT_ONCE // self.rows.shape[1]))
        self.coordinates = torch.cat([self.coordinates_of(part.double()) for part in parts])

    def _product_error(self) -> float:
        return product_error(2 * self.width, torch.float32, torch.device("cpu")) + 1e-12

    def coordinates_of(self, rows: Tensor) -> Tensor:
        """Return the coordinates (n,m+1) of rows or queries (n,d), which are in float64."""
        return self.with_rest(rows @ self.basis, row_norms(rows).square())

    def with_rest(self, inside: Tensor, squares: Tensor) -> Tensor:
        """Return the coordinates (n,m+1), given V^T y (n,m) and |y|^2 (n,) in float64."""
        rest = (squares - inside.square().sum(1)).clamp_min(0) + self.error * squares
        return torch.cat([inside, rest.sqrt()[:, None]], dim=1).float()

    def shortlist(
        self, queries: Tensor, norms: Tensor, offsets: Tensor, size: int, sure: int
    ) -> Shortlist:
        """Return rows of large <query, row> + offset, see `confirmed_product.shortlist`.

        No other row exceeds the ceiling. It is below the score of place `sure`, unless too many
        rows may reach that. If there are many of these, the projection does not pay any more."""
        sums = Sums(queries, norms, offsets, torch.float32)
        found, products = [], 0
        right = self._with_offsets(offsets)
        for start, groups in self._groups(self.coordinates_of(queries), right):
            count, own = len(groups), sums.part(slice(start, start + len(groups)))
            maxima = groups.amax(1)
            rows = leading(groups, maxima, size)
            bounds = self.full_bounds(own, rows.new_full((count,), size), rows.flatten())
            bounds = bounds.view(count, size)
            floor = own.listed(rows, bounds, bounds[:, 0]).floors.topk(sure, dim=1).values[:, -1]
            groups.flatten(1).scatter_(1, rows, 2 * LOWEST)  # they are listed already
            query, more, many = reaching(groups, maxima, floor, maxima.shape[1] // 2)
            further = self.full_bounds(own, query.bincount(minlength=count), more)
            products += len(query) + int(many.sum()) * len(norms)
            lower = floor - 5e-7 * floor.abs()  # above the bounds of all rows that are not listed
            near = (further >= lower[query]).nonzero()[:, 0]
            query, more, further = query[near], more[near], further[near]
            column, longest = places(query, count)
            rows, bounds = pad(rows, (0, longest)), pad(bounds, (0, longest), value=-torch.inf)
            rows[query, size + column], bounds[query, size + column] = more, further
            best, order = bounds.topk(size, dim=1)
            ceiling = torch.where(many, maxima.amax(1).double(), lower)
            found.append((rows.gather(1, order), best, torch.maximum(ceiling, best[:, -1])))
        if len(queries) >= FEWEST_QUERIES:
            self.pays = CHEAPER * products < len(queries) * len(norms)
        return sums.listed(*(torch.cat(part) for part in zip(*found, strict=True)))

    def above(
        self,
        queries: Tensor,
        offsets: Tensor,
        floors: Tensor,
        by: Tensor | None = None,
        exclude: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and rows (P,) of all <query, row> + offset that may reach a floor (b,).

        Queries are given by their coordinates (b,m+1), and rows are those of `by` (n,), or all but
        those in `exclude` (b,W). The third result are the queries with too many such rows, which
        are not listed."""
        asked, names, crowded = [], [], []
        most = MOST_GROUPS if exclude is None else 4 * MOST_GROUPS  # these come in smaller batches
        for start, groups in self._groups(queries, self._with_offsets(offsets, by), exclude):
            floor = floors[start : start + len(groups)]
            query, row, many = reaching(groups, groups.amax(1), floor, most)
            asked.append(query + start)
            names.append(row)
            crowded.append(many.nonzero()[:, 0] + start)
        rows = torch.cat(names)
        return torch.cat(asked), rows if by is None else by[rows], torch.cat(crowded)

    def likely(self, queries: Tensor, right: Tensor, size: int, exclude: Tensor) -> Tensor:
        """Return rows (b,size) of large <query, row> + offset by `first_coordinates` alone.

        Rows in `exclude` (b,W) are not among them."""
        inside = (queries @ self.basis[:, : len(right) - 1]).float()
        blocks = self._groups(inside, right, exclude)
        return torch.cat([leading(groups, groups.amax(1), size) for _, groups in blocks])

    def first_coordinates(self, offsets: Tensor, width: int) -> Tensor:
        """Return the first coordinates of all rows and their offsets (width,N)."""
        return join(self.coordinates[:, :-1][:, : width - 1], offsets, self.error)

    def _groups(
        self, queries: Tensor, right: Tensor, exclude: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, bounds (n,g,G)) of blocks of queries; row i is in group i modulo G.

        The bounds are overwritten when the next ones are asked for. Beyond the last row, and at the
        rows in `exclude` (b,W), they are lower than any other."""
        left, space = pad(queries, (0, 1), value=1.0), queries.new_empty(0)
        at_once = max(1, PRODUCTS_AT_ONCE // right.shape[1])
        at_once = -(-len(left) // max(1, -(-len(left) // at_once)))  # a small block costs as much
        for start in range(0, len(left), at_once):
            some = left[start : start + at_once]
            bounds = torch.mm(some, right, out=space.resize_(len(some), right.shape[1]))
            if exclude is not None:
                bounds.scatter_(1, exclude[start : start + at_once], 2 * LOWEST)
            yield start, bounds.view(len(some), GROUP, -1)

    def _with_offsets(self, offsets: Tensor, by: Tensor | None = None) -> Tensor:
        """Return the coordinates and offsets (m+2,n) of rows `by` (n,) or all."""
        if by is not None:
            return join(self.coordinates[by], offsets[by], self.error)
        known = self._joined  # another thread may replace it
        if known[0] is not offsets:
            self._joined = known = offsets, join(self.coordinates, offsets, self.error)
        return known[1]

    def full_bounds(self, sums: Sums, counts: Tensor, rows: Tensor) -> Tensor:
        """Return upper bounds (P,) of the scores of rows (P,), `counts` (b,) of them per query."""
        assert self.rows is not None
        reach, ends = sums.reach[:, 0].repeat_interleave(counts), pad(counts.cumsum(0), (1, 0))
        bounds = torch.addcmul(sums.base[rows], reach, sums.sizes[rows])
        left = sums.left.unflatten(1, (self.sections, -1))
        right = self.rows.view(self.sections * len(self.rows), -1)
        shape = len(left), len(right)
        for section in range(self.sections):
            at = rows * self.sections + section
            chosen = torch.sparse_csr_tensor(ends, at, bounds, shape, check_invariants=False)
            bounds = torch.sparse.sampled_addmm(chosen, left[:, section], right.mT).values()
        return bounds


def join(coordinates: Tensor, offsets: Tensor, error: float) -> Tensor:
    """Return coordinates (n,m) and offsets (n,) as (m+1,n), filled up to whole groups of rows."""
    last = offsets + error * offsets.abs().nan_to_num(posinf=0.0)
    last = last.float().clamp_min(LOWEST)
    right = pad(torch.cat([coordinates.mT, last[None]]), (0, -len(coordinates) % GROUP))
    right[-1, len(coordinates) :] = 2 * LOWEST
    return right


def leading(groups: Tensor, maxima: Tensor, size: int) -> Tensor:
    """Return the rows (n,size) of the largest bounds (n,g,G), given their maxima (n,G)."""
    count = min(size, maxima.shape[1])
    order = np.argpartition(maxima.numpy(), -count, axis=1)  # in half the time of torch
    first = torch.from_numpy(order[:, -count:].copy())  # they are in these groups
    values = groups.gather(2, first[:, None].expand(-1, GROUP, -1)).flatten(1)
    place = values.topk(size, dim=1).indices
    column = first.gather(1, place % first.shape[1])
    return place // first.shape[1] * maxima.shape[1] + column


def reaching(
    groups: Tensor, maxima: Tensor, floors: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and rows (P,) of bounds (n,g,G) that reach a floor (n,), given their maxima.

    The third result (n,) says which queries have such bounds in more than `most` groups. Their rows
    are not listed."""
    least = (floors - 1e-6 * floors.abs()).float()[:, None]
    place = torch.from_numpy(np.flatnonzero(maxima.numpy() >= least.numpy()))  # faster than torch
    query, column = place // maxima.shape[1], place % maxima.shape[1]
    many = query.bincount(minlength=len(floors)) > most
    few = (~many[query]).nonzero()[:, 0]
    return *members(groups, least, query[few], column[few]), many


def members(groups: Tensor, least: Tensor, query: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and rows (P,) of the bounds (n,g,G) from `least` (n,1) on, in some groups."""
    one, place = (groups[query, :, column] >= least[query]).nonzero().unbind(1)
    return query[one], place * groups.shape[2] + column[one]


def places(query: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the place of each entry among those of its query (P,), and the most that one has.

    The queries (P,) are below `count` and in ascending order."""
    counts = query.bincount(minlength=count)
    numbers = torch.arange(len(query), device=query.device)
    return numbers - (counts.cumsum(0) - counts)[query], int(counts.max())
