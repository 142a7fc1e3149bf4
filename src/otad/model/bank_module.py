"""A module that holds a bank: how training points move and are saved with a model.

Inputs, features and labels are buffers, so they follow the module (`to`, `state_dict`), unless the
bank is not `resident`: then it stays where it is, for instance mapped from a file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_shape, check_tensor
from otad.cip import BankProblem
from otad.errors import InputError
from otad.model.bank import FeatureBank
from otad.search.neighbors import FaissSearch, Neighbors, NeighborSearch, TorchSearch

SEARCHES: dict[str, type[NeighborSearch]] = {"torch": TorchSearch, "faiss": FaissSearch}


class BankModule(nn.Module):
    """A bank with its exact neighbor search, "torch" or "faiss".

    `n_neighbors`: K; `spares`: neighbors that are searched beyond these. `keys` (N,m): the bank in
    the space of a metric, in which neighbors are searched; without, that of the bank's inputs.
    """

    bank_inputs: Tensor
    bank_features: Tensor
    bank_labels: Tensor
    bank_keys: Tensor | None

    def __init__(
        self,
        bank: FeatureBank,
        *,
        n_neighbors: int,
        spares: int,
        search: str,
        resident: bool,
        keys: Tensor | None,
    ) -> None:
        super().__init__()
        if keys is not None:
            check_tensor(keys, "keys", "N,m")
            check_shape(keys, "keys", (len(bank), keys.shape[1]), "with one key per bank point")
        self.n_neighbors, self.n_searched = n_neighbors, n_neighbors + spares
        self.search = check_choice(search, "search", tuple(SEARCHES))
        self.resident = resident
        self.bank_fingerprint = bank.fingerprint
        for name in ("inputs", "features", "labels"):
            if resident:
                self.register_buffer(f"bank_{name}", getattr(bank, name))
            else:
                setattr(self, f"bank_{name}", getattr(bank, name))
        self.register_buffer("bank_keys", keys)
        self._searched: tuple[Tensor, NeighborSearch] | None = None

    @property
    def bank(self) -> FeatureBank:
        """The bank where it is now. Banks have at most float32: that of a float64 module, too."""
        inputs, features, labels = (
            tensor.float() if tensor.dtype == torch.float64 else tensor
            for tensor in (self.bank_inputs, self.bank_features, self.bank_labels)
        )
        return FeatureBank(inputs, features, labels, self.bank_fingerprint, verify=False)

    @property
    def bank_points(self) -> Tensor:
        """The bank (N,m) in the space in which neighbors are searched."""
        return self.bank_inputs if self.bank_keys is None else self.bank_keys

    def neighbors(
        self, keys: Tensor, count: int | None = None, *, exclude: Tensor | None = None
    ) -> Neighbors:
        """The bank points nearest to query keys (B,m), nearest first: `count`, or `n_searched`."""
        points = self.bank_points
        if self._searched is None or self._searched[0] is not points:
            self._searched = points, SEARCHES[self.search](points)
        return self._searched[1](keys, count or self.n_searched, exclude=exclude)

    def problem(
        self, embedded: Tensor, indices: Tensor, smoothness: float, strong_convexity: float
    ) -> BankProblem:
        """The convex integration problem of embedded inputs (B,d) with bank points (B,K)."""
        pairs = self.bank_inputs, self.bank_features
        return BankProblem(embedded, *pairs, indices, smoothness, strong_convexity)

    def get_extra_state(self) -> Tensor:
        """The bank's fingerprint, so that a state dict says which bank it belongs to."""
        return torch.tensor(list(self.bank_fingerprint.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        fingerprint = bytes(state.tolist()).decode()
        if not self.resident and fingerprint != self.bank_fingerprint:
            raise InputError(
                f"state_dict: expected the state of a model with the bank {self.bank_fingerprint}, "
                f"which is not resident and cannot be replaced, got one with {fingerprint}"
            )
        self.bank_fingerprint = fingerprint

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._searched = None  # the points may have changed in place

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_searched": None}  # a copy makes its own
