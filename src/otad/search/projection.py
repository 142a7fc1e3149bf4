"""Upper bounds of <query, row> from few coordinates, so that few rows are multiplied in full.

Let V (d,m) be an orthonormal basis and r(y) = |y - V V^T y|. Then, by Cauchy and Schwarz,

    <x, y>  <=  <V^T x, V^T y> + r(x) r(y),

which is a product of m + 1 coordinates. With sqrt(r(y)^2 + e |y|^2) instead of r(y), it is larger
by at least e |x| |y|, which covers rounding. The bound is of use if rows and queries differ mostly
in the directions of V. These are the main directions of a sample of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from otad.search.confirmed_product import Shortlist, Sums, product_error

WIDTH = 128  # coordinates of a row, with its offset
FEWEST_ROWS = 2**13  # with fewer rows, full products are as fast
FEWEST_COLUMNS = 4 * WIDTH
FEWEST_QUERIES = 128  # coordinates take as long as the full products of about so many queries
SAMPLE = 1024  # rows from which the basis is estimated
ITERATIONS = 3  # of the power method for the basis
LONGER = 8  # how many times more rows may be multiplied in full than are returned
GROUP = 16  # products of which only the largest is compared with others at first
MOST_GROUPS = 256  # with a product above the floor of a query
PRODUCTS_AT_ONCE = 7 * 2**20  # less than 32 MiB, so that the C library uses the memory again
NUMBERS_AT_ONCE = 2**20  # of the rows that are multiplied in full, so that they stay in the cache
LOWEST = -1e38  # the offset of rows that are left out


class Projection:
    """The coordinates of rows (N,d), which must stay as they are, made when many queries come.

    Rows that are None, few, short, on a GPU or not in float32 get no coordinates."""

    def __init__(self, rows: Tensor | None, width: int = WIDTH) -> None:
        self.rows, self.width = rows, width
        self.pays = (
            rows is not None
            and rows.dtype == torch.float32
            and rows.device.type == "cpu"
            and len(rows) >= FEWEST_ROWS
            and rows.shape[1] >= FEWEST_COLUMNS
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
            assert self.rows is not None
            sample = self.rows[:: -(-len(self.rows) // SAMPLE)].double()
            self.basis = sample[: self.width - 2].mT
            for _ in range(ITERATIONS):
                self.basis = torch.linalg.qr(sample.mT @ (sample @ self.basis)).Q
            parts = self.rows.split(max(1, NUMBERS_AT_ONCE // self.rows.shape[1]))
            self.coordinates = torch.cat([self.coordinates_of(part.double()) for part in parts])
        return len(self.coordinates) > 0

    def _product_error(self) -> float:
        return product_error(2 * self.width, torch.float32, torch.device("cpu")) + 1e-12

    def coordinates_of(self, rows: Tensor) -> Tensor:
        """Return the coordinates (n,m+1) of rows or queries (n,d), which are in float64."""
        return self.with_rest(rows @ self.basis, rows.square().sum(1))

    def with_rest(self, inside: Tensor, squares: Tensor) -> Tensor:
        """Return the coordinates (n,m+1), given V^T y (n,m) and |y|^2 (n,) in float64."""
        rest = (squares - inside.square().sum(1)).clamp_min(0) + self.error * squares
        return torch.cat([inside, rest.sqrt()[:, None]], dim=1).float()

    def shortlist(
        self, queries: Tensor, norms: Tensor, offsets: Tensor, size: int, sure: int
    ) -> Shortlist:
        """Return rows of large <query, row> + offset, see `confirmed_product.shortlist`.

        Other rows may have larger bounds, but none exceeds the ceiling. If the ceiling of most
        queries is above their bound of place `sure`, the projection does not pay for these rows."""
        sums = Sums(queries, norms, offsets, torch.float32)
        longer = min(LONGER * size, len(self.coordinates))
        names, parts = [], []
        for _, groups in self._groups(self.coordinates_of(queries), offsets):
            width = min(longer, groups.shape[2])  # the best rows are in as many of the best groups
            first = groups.amax(1).topk(width, dim=1).indices
            values = groups.gather(2, first[:, None].expand(-1, GROUP, -1)).flatten(1)
            found = values.topk(longer, dim=1)
            column = first.gather(1, found.indices % width)
            names.append(found.indices // width * groups.shape[2] + column)
            parts.append(found.values)
        listed, rough = torch.cat(names), torch.cat(parts)
        asked = torch.arange(len(queries)).repeat_interleave(size)
        bounds = torch.full_like(rough, -torch.inf)
        full = self.full_bounds(sums, asked, listed[:, :size].flatten())
        bounds[:, :size] = full.view(-1, size)
        floors = sums.listed(listed[:, :size], bounds[:, :size], rough[:, -1]).floors
        more = rough >= floors.topk(sure, dim=1).values[:, -1:]
        more[:, :size] = False
        bounds[more] = self.full_bounds(sums, more.nonzero()[:, 0], listed[more])
        best, order = bounds.topk(size, dim=1)
        # Rows that were not multiplied in full are below their rough bounds.
        ceiling = rough.masked_fill(bounds > -torch.inf, -torch.inf).amax(1)
        ceiling = torch.maximum(ceiling, rough[:, -1])
        if len(queries) >= FEWEST_QUERIES:
            self.pays = bool((ceiling < best[:, sure - 1]).double().mean() > 0.5)
        return sums.listed(listed.gather(1, order), best, torch.maximum(ceiling, best[:, -1]))

    def above(
        self, queries: Tensor, offsets: Tensor, floors: Tensor, by: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and rows (P,) of all <query, row> + offset that may reach a floor (b,).

        Queries are given by their coordinates (b,m+1), and rows are those of `by` (n,), or all. The
        third result are the queries with too many such rows, which are not listed."""
        least = (floors - 1e-6 * floors.abs()).float()[:, None]
        asked, names, crowded = [], [], []
        for start, groups in self._groups(queries, offsets, by):
            floor = least[start : start + len(groups)]
            reached = groups.amax(1) >= floor
            many = reached.sum(1) > MOST_GROUPS
            crowded.append(many.nonzero()[:, 0] + start)
            query, row = members(groups, floor, reached & ~many[:, None])
            asked.append(query + start)
            names.append(row)
        rows = torch.cat(names)
        return torch.cat(asked), rows if by is None else by[rows], torch.cat(crowded)

    def _groups(
        self, queries: Tensor, offsets: Tensor, by: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (start, bounds (n,g,G)) of blocks of queries; row i is in group i modulo G.

        The bounds are overwritten when the next ones are asked for. Beyond the last row they are
        lower than any other."""
        right = self._with_offsets(offsets, by)
        left, space = pad(queries, (0, 1), value=1.0), queries.new_empty(0)
        at_once = max(1, PRODUCTS_AT_ONCE // len(right))
        for start in range(0, len(left), at_once):
            some = left[start : start + at_once]
            bounds = torch.mm(some, right.mT, out=space.resize_(len(some), len(right)))
            yield start, bounds.view(len(some), GROUP, -1)

    def _with_offsets(self, offsets: Tensor, by: Tensor | None) -> Tensor:
        """Return the coordinates and offsets (n,m+2) of rows, filled up to whole groups."""
        if by is None and self._joined[0] is offsets:
            return self._joined[1]
        last = offsets + self.error * offsets.abs().nan_to_num(posinf=0.0)
        last, rows = last.float().clamp_min(LOWEST)[:, None], self.coordinates
        if by is not None:
            last, rows = last[by], rows[by]
        right = pad(torch.cat([rows, last], dim=1), (0, 0, 0, -len(rows) % GROUP))
        right[len(rows) :, -1] = 2 * LOWEST
        if by is None:
            self._joined = offsets, right
        return right

    def full_bounds(self, sums: Sums, asked: Tensor, rows: Tensor) -> Tensor:
        """Return upper bounds (P,) of the scores of queries and rows (P,) by full products."""
        assert self.rows is not None
        bounds = torch.addcmul(sums.base[rows], sums.reach[asked, 0], sums.sizes[rows])
        at_once = max(1, NUMBERS_AT_ONCE // self.rows.shape[1])
        pairs = (part.split(at_once) for part in (asked, rows, bounds))
        left, right = sums.left.new_empty(0), sums.left.new_empty(0)
        for query, row, bound in zip(*pairs, strict=True):
            for space, part, chosen in ((left, sums.left, query), (right, self.rows, row)):
                space.resize_(len(chosen), part.shape[1])
                torch.index_select(part, 0, chosen, out=space)
            bound += right.mul_(left).sum(1)
        return bounds


def members(groups: Tensor, floor: Tensor, reached: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and rows (P,) of the bounds (n,g,G) from a floor (n,1) on, in some groups."""
    query, column = reached.nonzero().unbind(1)
    one, place = (groups[query, :, column] >= floor[query]).nonzero().unbind(1)
    return query[one], place * groups.shape[2] + column[one]
