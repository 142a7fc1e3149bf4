"""What a prediction costs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from otad.model.otad import OTAD
from otad.report.blocks import KeyNumber, Section, Table

_SINGLES = 20


@dataclass(frozen=True)
class Cost:
    """Seconds for `rows` predictions in one batch and for one alone, bytes on disk, threads."""

    rows: int
    batch_seconds: float
    single_seconds: float
    disk_bytes: int
    threads: int


@torch.no_grad()
def measure_cost(model: OTAD, x: Tensor, folder: Path) -> Cost:
    """Predicts x in one batch, then a few of its rows alone; `folder` is that of the model."""
    model(x)  # once unmeasured: the search prepares itself
    started = time.perf_counter()
    model(x)
    batch = time.perf_counter() - started
    singles = []
    for row in x[:_SINGLES].split(1):
        started = time.perf_counter()
        model(row)
        singles.append(time.perf_counter() - started)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Cost(len(x), batch, statistics.median(singles), size, torch.get_num_threads())


def cost_number(cost: Cost) -> KeyNumber:
    return KeyNumber(
        duration(cost.batch_seconds / cost.rows), "per prediction", f"in a batch of {cost.rows:,}"
    )


def cost_section(cost: Cost) -> Section:
    together = duration(cost.batch_seconds), duration(cost.batch_seconds / cost.rows)
    alone = duration(cost.single_seconds), duration(cost.single_seconds)
    rows = [(f"{cost.rows:,} inputs in one batch", *together), ("one input alone", *alone)]
    return Section(
        "cost",
        "Cost of a prediction",
        f"Embedding, exact neighbor search, convex integration and head, on "
        f"{threads(cost.threads)}; the model folder takes {cost.disk_bytes / 1e6:.1f} MB.",
        [Table(("", "in all", "per input"), rows)],
    )


def threads(count: int) -> str:
    return "one CPU thread" if count == 1 else f"{count} CPU threads"


def duration(seconds: float) -> str:
    """Three digits and the unit that suits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
