"""Nearest neighbors in a bank of several shards, equal to those in one bank to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from otad.checks import require
from otad.search.neighbors import Candidates, Search

__all__ = ["ShardedSearch"]


class ShardedSearch(Search):
    """A search over shards, whose rows follow each other.

    Each shard gives the best points of its shortlist, and a bound on the distance of all others.
    The least bound is the bound of all shards: a row is proved as in one bank. Distances are
    computed in float64 in the same order of additions, so they are the same, and so are ties.

    Parameters
    ----------
    shards : sequence of Search
        The searches of the shards, such as `TorchSearch(bank.inputs)`. They may be on other
        machines.
    executor : concurrent.futures.Executor or None
        Where the shards are searched at the same time. If None, one after the other.

    Examples
    --------
    >>> import torch
    >>> from otad.search.neighbors import TorchSearch
    >>> from otad.search.sharded import ShardedSearch
    >>> points = torch.arange(10.0)[:, None]
    >>> search = ShardedSearch([TorchSearch(points[:3]), TorchSearch(points[3:])])
    >>> found = search(torch.tensor([[3.2]]), 4)
    >>> found.indices.tolist(), found.proved.tolist()
    ([[3, 4, 2, 5]], [True])
    """

    def __init__(self, shards: Sequence[Search], executor: Executor | None = None) -> None:
        require(len(shards) > 0, "shards", "at least one search", "none")
        dims = {shard.dim for shard in shards}
        require(len(dims) == 1, "shards", "points of one dimension", sorted(dims))
        self.shards, self.dim = tuple(shards), shards[0].dim
        *self._starts, self._count = accumulate((len(shard) for shard in shards), initial=0)
        self.exact = all(shard.exact for shard in shards)
        self._map = map if executor is None else executor.map

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_map": map}  # a copy in another process has no executor

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start, shard in zip(self._starts, self.shards, strict=True):
            for indices, points in shard.blocks():
                yield indices + start, points

    def candidates(self, queries: Tensor, k: int, size: int, exclude: Tensor) -> Candidates:
        def ask(start: int, shard: Search) -> Candidates:
            own = exclude - start
            own = own.masked_fill((own < 0) | (own >= len(shard)), -1)
            found = shard.candidates(queries, min(k, len(shard)), size, own)
            return found._replace(indices=found.indices + start)

        parts = list(self._map(ask, self._starts, self.shards))
        indices, distances = (
            torch.cat([getattr(part, name) for part in parts], dim=1)
            for name in ("indices", "distances")
        )
        # Shards are in the order of indices, which a stable sort keeps among equal distances.
        distances, order = distances.sort(dim=1, stable=True)
        beyond = torch.stack([part.beyond for part in parts]).amin(0)
        return Candidates(indices.gather(1, order[:, :k]), distances[:, :k].contiguous(), beyond)
