"""A module that carries a bank: how training points travel with a model.

Inputs, features and labels are buffers, and so are, in global scope, the levels of the bank's one
potential. They move with the module (`to`, `state_dict`) unless they are not `resident`: then they
stay where they are, for instance mapped from a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError
from otad.model.bank import FeatureBank
from otad.search.neighbors import NeighborSearch


class Banked(nn.Module):
    """The part of a model that is data: a bank and the curvature (L, l) of maps through it.

    `scope` is "global" for a module with a potential; `search`: by what points are found, "torch"
    or "faiss". What answers queries, a search or the one map, is made of the bank when it is first
    asked for, and again once the bank is another.
    """

    bank_inputs: Tensor
    bank_features: Tensor
    bank_labels: Tensor
    bank_levels: Tensor | None
    _found: tuple[Tensor, NeighborSearch] | None
    _whole: tuple[tuple[Tensor, ...], WholeBank] | None

    def __init__(
        self,
        bank: FeatureBank,
        *,
        resident: bool,
        search: str,
        smoothness: float,
        strong_convexity: float,
        potential: BankPotential | None,
    ) -> None:
        super().__init__()
        self.scope = "local" if potential is None else "global"
        self.resident = resident
        self.search = search
        self.smoothness, self.strong_convexity = float(smoothness), float(strong_convexity)
        self._sweeps = 0 if potential is None else potential.sweeps
        self._violation = 0.0 if potential is None else potential.violation
        self.bank_fingerprint = bank.fingerprint
        levels = None if potential is None else _levels(potential, bank)
        parts = {"inputs": bank.inputs, "features": bank.features, "labels": bank.labels}
        for name, tensor in (parts | {"levels": levels}).items():
            if resident:
                self.register_buffer(f"bank_{name}", tensor)
            else:
                setattr(self, f"bank_{name}", tensor)
        self._found = self._whole = None

    @property
    def bank(self) -> FeatureBank:
        """The bank where it is now; of a module in float64 in float32, which is all it has."""
        pairs = (self.bank_inputs, self.bank_features)
        inputs, features = (part.float() if part.dtype == torch.float64 else part for part in pairs)
        labels = self.bank_labels
        labels = labels.float() if labels.is_floating_point() else labels
        return FeatureBank(inputs, features, labels, self.bank_fingerprint, verify=False)

    @property
    def potential(self) -> BankPotential | None:
        """In global scope the one potential of the bank, where it is now; else None."""
        levels = self.bank_levels
        if levels is None:
            return None
        left_out = levels.isnan().nonzero()[:, 0]
        curvature = self.smoothness, self.strong_convexity
        return BankPotential(levels, *curvature, left_out, self._sweeps, self._violation)

    @property
    def whole_bank(self) -> WholeBank:
        """The one map of global scope."""
        parts = self.bank_inputs, self.bank_features, self.bank_levels
        made = self._whole
        if made is None or any(old is not new for old, new in zip(made[0], parts, strict=True)):
            potential = self.potential
            if potential is None:
                raise InputError("scope: expected 'global' for one map of the bank, got 'local'")
            inputs, features = self.bank_inputs, self.bank_features
            pricing = "faiss" if self.search == "faiss" else "exact"
            whole = WholeBank(inputs, features, potential, pricing=pricing)
            self._whole = made = (inputs, features, potential.levels), whole
        return made[1]

    def get_extra_state(self) -> Tensor:
        """The bank's fingerprint, and in global scope the curvature of its levels: a state dict
        tells what it belongs to."""
        text = self.bank_fingerprint
        if self.scope == "global":
            text += "\n" + json.dumps(self._curvature())
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        fingerprint, _, rest = bytes(state.tolist()).decode().partition("\n")
        scope = "global" if rest else "local"
        if scope != self.scope:
            raise InputError(
                f"state_dict: expected that of a model of {self.scope} scope, got one of {scope}"
            )
        curvature = json.loads(rest) if rest else {}
        levels_differ = scope == "global" and curvature != self._curvature()
        if not self.resident and (fingerprint != self.bank_fingerprint or levels_differ):
            raise InputError(
                f"state_dict: expected the state of a model with the bank {self.bank_fingerprint}"
                f"{' and its levels' if levels_differ else ''}, "
                f"which is not resident and cannot be replaced, got one with {fingerprint}"
            )
        self.bank_fingerprint = fingerprint
        for name, value in curvature.items():
            setattr(self, name, value)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._found = self._whole = None  # the points of the bank may be others now

    def _curvature(self) -> dict[str, float]:
        """All of a potential but its levels."""
        names = ("smoothness", "strong_convexity", "_sweeps", "_violation")
        return {name: getattr(self, name) for name in names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Levels go where the bank goes and stay float64: they are sums along many pairs."""
        levels = self.bank_levels
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if levels is not None and self.resident:
            self.bank_levels = levels.to(self.bank_inputs.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None, "_whole": None}  # a copy makes its own


def _levels(potential: BankPotential, bank: FeatureBank) -> Tensor:
    """The levels where the bank is."""
    levels = potential.levels
    if levels.dtype != torch.float64 or tuple(levels.shape) != (len(bank),):
        raise InputError(
            f"potential: expected float64 levels of shape ({len(bank)},), one per bank point, got "
            f"{levels.dtype} of shape {tuple(levels.shape)}"
        )
    return levels.to(bank.inputs.device)
