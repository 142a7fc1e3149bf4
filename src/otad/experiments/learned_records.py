"""What a record says of metrics and surrogates, and of what a query costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MetricRecord:
    """A metric: `train` its settings, None if it was not trained here; `train_score` the share of
    its inputs, moved by the adversary if there is one, whose nearest key is of their class;
    `lipschitz` a proved constant of its keys, where there is one."""

    data: str
    kind: str
    normalize: str
    features: str
    options: dict[str, Any]
    train: dict[str, Any] | None
    train_score: float | None
    parameters: int
    key_dim: int
    lipschitz: float | None
    weights: str
    seconds: float


@dataclass(frozen=True)
class SurrogateRecord:
    """A CIP-net that learned the answers of `row`; errors as in `CipNetResult`, at the end."""

    row: str
    alpha: float
    options: dict[str, Any]
    train: dict[str, Any]
    held_out: int
    error: float | None
    held_out_error: float | None
    parameters: int
    weights: str
    seconds: float


@dataclass(frozen=True)
class SpeedRecord:
    """What a query costs the model of a row, in a process of its own.

    `place`: where its bank is, None for a net alone. `milliseconds` a query: the median over the
    batches, from inputs in memory to outputs, after every batch has been answered once before.
    `resident`: as in `CostRecord`. `steps`: milliseconds a query, by step.
    """

    row: str
    place: str | None
    device: str
    bank: int
    queries: int
    batch_size: int
    threads: int
    milliseconds: float
    load_seconds: float
    resident: int
    device_memory: int | None
    accuracy: float
    steps: dict[str, float] = field(default_factory=dict)
