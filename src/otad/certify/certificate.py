"""What a certificate says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from otad.checks import check_count
from otad.errors import InputError


@dataclass(frozen=True, eq=False)
class Certificate:
    """No input closer than `radius` (B,) to its example changes the model's `prediction` (B,).

    Radii are float64, in l2, in the unit the certificate was asked for (see `certify`), and 0 where
    nothing is proved. `rules` names for each row the rule that gave its radius. `assumptions`:
    what the proof rests on, in words.
    """

    radius: Tensor
    prediction: Tensor
    rules: tuple[str, ...]
    assumptions: tuple[str, ...]
    kind: str = "proved"

    def __len__(self) -> int:
        return len(self.radius)

    def holds(self, y: Tensor, eps: float) -> Tensor:
        """Rows (B,) whose prediction is y and cannot change within l2 distance eps."""
        if y.shape != self.prediction.shape:
            raise InputError(
                f"y: expected shape {tuple(self.prediction.shape)} like the predictions, "
                f"got {tuple(y.shape)}"
            )
        return (self.prediction == y.to(self.prediction.device)) & (self.radius > eps)

    def accuracy(self, y: Tensor, eps: float) -> float:
        """Certified accuracy: the share of rows that `holds`."""
        return float(self.holds(y, eps).double().mean())

    def linf_radius(self, n_mutable: int) -> Tensor:
        """Radii (B,) in l-infinity, for attacks on so many features: |delta|_2 is at most
        sqrt(n_mutable) |delta|_inf. Both are measured in the same unit."""
        return self.radius / math.sqrt(check_count(n_mutable, "n_mutable"))


@dataclass(frozen=True, eq=False)
class Interval:
    """Every input within l2 distance `eps` of its example is answered in [low, high] (B,)."""

    low: Tensor
    high: Tensor
    eps: float
    assumptions: tuple[str, ...]
    kind: str = "proved"
