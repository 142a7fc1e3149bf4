"""A module that holds a bank and searches it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_shape, check_tensor, require
from otad.io.mapped_rows import changes_of, gathered
from otad.model.bank import FeatureBank
from otad.search.neighbors import FaissSearch, Neighbors, NeighborSearch, Search, TorchSearch

SEARCHES: dict[str, type[NeighborSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}


class BankModule(nn.Module):
    """A bank with an exact neighbor search, "torch" or "faiss".

    Inputs, features and labels are buffers, so they move with the module (`to`, `state_dict`). If
    the bank is not `resident`, it stays where it is, such as in a file. `keys` (N,m) are the bank
    in the space of a metric, if neighbors are searched there.
    """

    bank_inputs: Tensor
    bank_features: Tensor
    bank_labels: Tensor
    bank_keys: Tensor | None

    def __init__(
        self, bank: FeatureBank, n_neighbors: int, search: str, resident: bool, keys: Tensor | None
    ) -> None:
        super().__init__()
        if keys is not None:
            check_tensor(keys, "keys", "N,m")
            check_shape(keys, "keys", (len(bank), keys.shape[1]), "with one key per bank point")
        self.n_neighbors = self.n_searched = n_neighbors
        self.search = check_choice(search, "search", tuple(SEARCHES))
        self.resident = resident
        self.bank_fingerprint = bank.fingerprint
        for name in ("inputs", "features", "labels"):
            if resident:
                self.register_buffer(f"bank_{name}", getattr(bank, name))
            else:
                setattr(self, f"bank_{name}", getattr(bank, name))
        self.register_buffer("bank_keys", keys)
        self._searched: tuple[Tensor, Search] | None = None
        self._given: tuple[torch.dtype, Search] | None = None
        self._seen: tuple[Tensor, int | None] | None = None  # the points, with their changes

    @property
    def bank(self) -> FeatureBank:
        """The bank on its current device, in float32 if the module is in float64."""
        inputs, features = (
            tensor.float() if tensor.dtype == torch.float64 else tensor
            for tensor in (self.bank_inputs, self.bank_features)
        )
        labels, name = self.bank_labels, self.bank_fingerprint
        return FeatureBank(inputs, features, labels, name, verify=False)

    @property
    def bank_points(self) -> Tensor:
        """The bank (N, m) in the space in which neighbors are searched."""
        return self.bank_inputs if self.bank_keys is None else self.bank_keys

    def neighbors(
        self, keys: Tensor, count: int | None = None, *, exclude: Tensor | None = None
    ) -> Neighbors:
        """Return the `count` bank points nearest to query keys (B, m), nearest first.

        If `count` is None, there are K of them and the spares of the solver. `exclude` (B,) is a
        bank row for each query that must not be its neighbor, or -1."""
        return self._search()(keys, count or self.n_searched, exclude=exclude)

    def _search(self) -> Search:
        points = self.bank_points
        self._forget_if_changed()
        if self._given is not None and self._given[0] == points.dtype:
            return self._given[1]
        if self._searched is None or self._searched[0] is not points:
            self._searched = points, SEARCHES[self.search](points)
        return self._searched[1]

    def _forget_if_changed(self) -> None:
        """Forget the searches of points that were changed in place since."""
        points, seen = self.bank_points, self._seen
        self._seen = points, changes_of(points)
        if seen is not None and seen[0] is points and seen[1] != self._seen[1]:
            self._searched = self._given = None

    @property
    def searches_exactly(self) -> bool:
        """Whether all neighbors are proved: see `Neighbors.proved`."""
        return self._given is None or self._search().exact

    def use_search(self, search: Search) -> None:
        """Find neighbors by another search over the same points, which are compared, from now on.

        It may be an `IvfSearch`, or a `ShardedSearch` over several machines. It is not saved, and
        not used by a model in another dtype or by what `replace` returns."""
        points = self.bank_points
        check_shape(points, "search", (len(search), search.dim), "of its points, like the bank")
        for rows, found in search.blocks():
            same = (gathered(points, rows) == found.to(points.device)).all(1).cpu()
            got = f"others, such as in row {rows[~same][:1].tolist()}"
            require(same.all(), "search", "the points of the bank", got)
        self._given, self._seen = (points.dtype, search), (points, changes_of(points))

    def get_extra_state(self) -> Tensor:
        """Return the bank's fingerprint, so that a state dict names the bank it belongs to."""
        return torch.tensor(list(self.bank_fingerprint.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        fingerprint = bytes(state.tolist()).decode()
        same = fingerprint == self.bank_fingerprint
        expected = f"a model with the bank {self.bank_fingerprint}, which is not resident"
        require(self.resident or same, "state_dict", expected, f"one with {fingerprint}")
        self.bank_fingerprint = fingerprint

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._searched = self._given = None  # the points may have changed in place

    def __getstate__(self) -> dict[str, Any]:
        self._forget_if_changed()
        return self.__dict__ | {"_searched": None, "_seen": None}  # a copy makes its own search
