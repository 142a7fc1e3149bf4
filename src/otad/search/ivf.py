"""Nearest neighbors in banks that are too large to scan: the points in cells around centroids.

A point y of a cell with centroid c and radius r = max |y - c| is no nearer to a query q than
|q - c| - r. Cells are read from the nearest centroid on. Once the K-th neighbor is nearer than this
bound for every cell that was not read, the neighbors are proved to be exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_count, check_finite, check_tensor, refusing, require
from otad.errors import import_extra
from otad.io import tensor_files
from otad.io.files import read_settled
from otad.io.mapped_rows import block_of, gathered, remember
from otad.search.confirmed_product import product_error, row_norms
from otad.search.neighbors import WORKING_BYTES, Candidates, Neighbors, Search, TorchSearch

__all__ = ["IvfSearch", "build_lists"]

FORMAT = "otad-ivf-lists"
VERSION = "1"
PER_CELL = 64  # points that k-means learns from, for each centroid
ITERATIONS = 10
LARGEST = 1e6  # of a coordinate, where most are at most 1
_NAMES = {"centroids", "ids", "points", "radii", "starts"}


def build_lists(
    points: Tensor, path: str | Path, *, cells: int | None = None, seed: int = 0
) -> Path:
    """Sort points into cells, and write them to a safetensors file for `IvfSearch`.

    FAISS finds the centroids by k-means on a sample, and sorts the points. The lists of FAISS
    itself are not used: reading its files is not safe if they come from others.

    Parameters
    ----------
    points : Tensor (N, d)
        The points, which may be mapped from one or more files. They are read twice, in blocks.
    path : path
        The file to write. It holds a copy of the points. Earlier lists there are replaced, and
        another file is refused.
    cells : int or None
        The number of cells, by default about 4 sqrt(N).
    seed : int
        The seed of k-means.

    Returns
    -------
    Path
        The path of the file.

    Examples
    --------
    >>> import torch
    >>> from otad.search.ivf import build_lists
    >>> build_lists(torch.rand(100, 4), "lists.safetensors", cells=5).name
    'lists.safetensors'
    """
    check_tensor(points, "points", "N,d", dtypes=STORAGE_DTYPES, finite=False)
    count, dim = points.shape
    cells = min(math.ceil(4 * math.sqrt(count)), max(1, count // 8)) if cells is None else cells
    expected = f"at most {count}, the number of points"
    require(check_count(cells, "cells") <= count, "cells", expected, cells)
    tensor_files.refuse_other_file(path := Path(path), FORMAT, "path")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(count, generator=generator)[: PER_CELL * cells].sort().values
    sample = gathered(points, chosen).cpu().double()
    check_finite(sample, "points")
    center = sample.mean(0)
    scale = float((sample - center).abs().max()) or 1.0

    def scaled(rows: Tensor) -> Any:
        # FAISS needs squares that float32 can hold. Any choice of cells is correct.
        return ((rows - center) / scale).clamp_(-LARGEST, LARGEST).float().numpy()

    faiss: Any = import_extra("faiss", "index")
    kmeans = faiss.Kmeans(dim, cells, niter=ITERATIONS, seed=seed, min_points_per_centroid=1)
    kmeans.train(scaled(sample))
    centroids = torch.from_numpy(kmeans.centroids).double() * scale + center
    owners, lengths = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.float64)
    rows = max(1, WORKING_BYTES // (32 * dim))
    for start in range(0, count, rows):
        some, block = slice(start, start + rows), block_of(points, start, start + rows)
        block = block.cpu().double()
        check_finite(block, f"points[{start}:{start + len(block)}]")
        owners[some] = torch.from_numpy(kmeans.index.search(scaled(block), 1)[1][:, 0])
        lengths[some] = row_norms(block - centroids[owners[some]])
    check_finite(lengths, "points, their distances")
    ids = owners.argsort(stable=True)  # so that the points of a cell are in the order of the bank
    sizes = owners.bincount(minlength=cells)
    radii = torch.zeros(cells, dtype=torch.float64).scatter_reduce(0, owners, lengths, "amax")
    held = {
        "starts": torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        "ids": ids,
        "radii": radii * (1 + _roundoff(dim)),
        "centroids": centroids,
    }
    layout = {name: (it.dtype, tuple(it.shape)) for name, it in held.items()}
    sorted_rows = (("points", gathered(points, some)) for some in ids.split(rows))
    tensor_files.write_sealed(
        path,
        layout | {"points": (points.dtype, (count, dim))},
        {"format": FORMAT, "version": VERSION},
        (item for part in (held.items(), sorted_rows) for item in part),
    )
    return path


def _mapped(path: Path, verify: bool) -> dict[str, Tensor]:
    """Return the tensors of a file of lists, of which the points are read by position."""
    tensors, metadata = tensor_files.map_sealed(path)
    found = metadata.get("format"), metadata.get("version")
    ours = found == (FORMAT, VERSION) and set(tensors) == _NAMES
    require(ours, str(path), f"{FORMAT} of version {VERSION}", found)
    if verify:
        tensor_files.check_seal(path)
    remember(path, {"points": tensors["points"]})
    return tensors


class IvfSearch(Search):
    """A search that reads only some cells of the lists that `build_lists` wrote.

    Parameters
    ----------
    path : path
        The file of the lists, which stays on disk. Centroids and indices are in memory.
    n_probe : int or None
        Reading stops after so many cells, or after as many as hold K points. Neighbors that are not
        proved by then may be wrong: see `Neighbors.proved`. If None, cells are read until all
        neighbors are proved.
    verify : bool
        Whether the whole file is read to detect a changed byte.

    Examples
    --------
    >>> import torch
    >>> from otad.search.ivf import IvfSearch, build_lists
    >>> points = torch.arange(100.0)[:, None]
    >>> path = build_lists(points, "lists.safetensors", cells=10)
    >>> found, read = IvfSearch(path).counted(torch.tensor([[3.2]]), 2)
    >>> found.indices.tolist(), found.proved.tolist(), int(read) < 100
    ([[3, 4]], [True], True)
    """

    def __init__(
        self, path: str | Path, *, n_probe: int | None = None, verify: bool = True
    ) -> None:
        path = Path(path)
        tensors = read_settled(path, lambda: _mapped(path, verify))
        self.n_probe = None if n_probe is None else check_count(n_probe, "n_probe")
        self.exact = n_probe is None
        with refusing(f"{path}: expected whole lists"):
            self._points = tensors.pop("points")
            check_tensor(self._points, "points", "N,d", dtypes=STORAGE_DTYPES, finite=False)
            count, self.dim = self._points.shape
            held = {name: tensor.clone() for name, tensor in tensors.items()}
            self._starts, self._ids = held["starts"].tolist(), held["ids"]
            self._centroids, self._radii = held["centroids"], held["radii"]
            cells = len(self._radii)
            rising = (held["starts"].diff() >= 0).all() and len(self._starts) == cells + 1
            whole = rising and self._starts[0] == 0 and self._starts[-1] == count
            require(whole, str(path), f"cells of {count} points in all", self._starts[-1])
            known = self._ids.sort().values.equal(torch.arange(count))
            require(known, str(path), f"each index from 0 to {count - 1} once", "others")
            shape = tuple(self._centroids.shape)
            require(
                shape == (cells, self.dim), str(path), f"({cells}, {self.dim}) centroids", shape
            )
            check_finite(self._centroids, "centroids")
            check_finite(self._radii, "radii")
        self._sizes = held["starts"].diff()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self._radii)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = max(1, WORKING_BYTES // (32 * self.dim))
        for number, indices in enumerate(self._ids.split(rows)):
            yield indices, block_of(self._points, rows * number, rows * (number + 1))

    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        return self._read_all(queries, k, exclude)[0]

    @torch.no_grad()
    def counted(self, queries: Tensor, k: int) -> tuple[Neighbors, Tensor]:
        """Return the neighbors of queries (B,d), and how many points (B,) were read for each."""
        self._check(queries, k, None)
        found, read = self._read_all(queries, k, torch.full((len(queries),), -1))
        proved = found.distances[:, -1] < found.beyond
        return Neighbors(found.indices, found.distances, proved), read

    def _read_all(self, queries: Tensor, k: int, exclude: Tensor) -> tuple[Candidates, Tensor]:
        """Return the candidates of queries on any device, and how many points (B,) were read."""
        width = max(1, WORKING_BYTES // (64 * (self.cells + self.dim)))
        batches = zip(queries.cpu().split(width), exclude.cpu().split(width), strict=True)
        parts = [self._read(some.double(), k, excluded) for some, excluded in batches]
        *found, read = (torch.cat(column).to(queries.device) for column in zip(*parts, strict=True))
        return Candidates(*found), read

    def _read(self, wide: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Read cells, nearest centroid first, in rounds that double as long as a row is open."""
        distances, bounds = self._cell_bounds(wide)
        order = distances.argsort(dim=1)
        rank = order.argsort(dim=1)
        # A row needs k points, and one more if a point is excluded.
        enough = (self._sizes[order].cumsum(1) <= k).sum(1) + 1
        limit = torch.full_like(enough, self.cells)
        if self.n_probe is not None:
            limit = enough.clamp_min(self.n_probe)
        best = wide.new_full((len(wide), k), math.inf), torch.zeros(len(wide), k, dtype=torch.int64)
        unread = torch.ones_like(bounds, dtype=torch.bool)
        step = enough if self.n_probe is None else limit
        while True:
            nearer = ~(bounds > best[0][:, -1:])  # such a cell may hold a neighbor
            wanted = unread & nearer & (rank < step[:, None])
            for cell in wanted.any(0).nonzero()[:, 0].tolist():
                rows = wanted[:, cell].nonzero()[:, 0]
                self._merge(best, cell, rows, wide[rows], exclude[rows])
            unread &= ~wanted
            open_rows = (unread & nearer & (rank < limit[:, None])).any(1)
            if not bool(open_rows.any()):
                break
            step = (2 * step).minimum(limit)
        beyond = bounds.masked_fill(~unread, math.inf).amin(1)
        return best[1], best[0], beyond, (~unread * self._sizes).sum(1)

    def _merge(
        self,
        best: tuple[Tensor, Tensor],
        cell: int,
        rows: Tensor,
        queries: Tensor,
        exclude: Tensor,
    ) -> None:
        """Put the points of a cell that are nearer into the best distances and indices (B,k)."""
        start, stop = self._starts[cell], self._starts[cell + 1]
        if start == stop:
            return
        distances, indices = best
        k = distances.shape[1]
        block = TorchSearch(block_of(self._points, start, stop))
        found = block(queries, min(k + 1, len(block)))  # one more, as one may be excluded
        ids = self._ids[start:stop][found.indices]
        lengths = found.distances.masked_fill(ids == exclude[:, None], math.inf)
        lengths = torch.cat([distances[rows], lengths], dim=1)
        ids = torch.cat([indices[rows], ids], dim=1)
        # Points at an infinite distance are no points yet.
        ids, by_index = ids.masked_fill(lengths.isinf(), len(self)).sort(dim=1, stable=True)
        lengths, order = lengths.gather(1, by_index).sort(dim=1, stable=True)
        distances[rows], indices[rows] = lengths[:, :k], ids.gather(1, order[:, :k])

    def _cell_bounds(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return |q - c| (B,C) to all centroids, and a bound on the distance of their points."""
        center = self._centroids.mean(0)
        left, right = queries - center, self._centroids - center
        sizes = left.square().sum(1)[:, None] + right.square().sum(1)
        squares = torch.addmm(sizes, left, right.mT, alpha=-2)
        error = 4 * product_error(self.dim, torch.float64, queries.device) * sizes
        least = (squares - error).clamp_min(0).sqrt()
        room = _roundoff(self.dim) * (least + self._radii)  # for this difference and for neighbors
        bounds = least - self._radii - room
        return squares.clamp_min(0).sqrt(), bounds.nan_to_num(nan=-math.inf)


def _roundoff(dim: int) -> float:
    """Return the largest relative error of a distance in float64, generously."""
    return 4 * (dim + 16) * 2.0**-53
