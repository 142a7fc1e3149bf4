"""What a benchmark leaves behind: one JSON file with the numbers and all they depend on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from otad.bench.bank import BankTiming
from otad.errors import InputError
from otad.io.environment import Environment
from otad.io.files import replacing

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """One solver on one cell (B,K,d) of the grid; seconds are per query.

    `sweeps` names the axes of the grid the cell lies on. `own_seconds` is the time the solver
    itself claims, without the modeling around it; `raised` counts the rows of the instance whose
    smoothness had to be raised. See `Timing` for the rest.
    """

    question: str
    peer: str
    batch: int
    neighbors: int
    dim: int
    sweeps: tuple[str, ...]
    strong_convexity: float
    seconds: float
    repeat_seconds: tuple[float, ...]
    own_seconds: float | None
    queries: int
    failed: int
    difference: float | None
    raised: int

    @property
    def cell(self) -> tuple[int, int, int]:
        return self.batch, self.neighbors, self.dim


@dataclass(frozen=True)
class BenchmarkRecord:
    """`config` is what was asked for, `missing` says of every absent solver why it is."""

    benchmark: str
    config: dict[str, Any]
    seed: int
    environment: Environment
    seconds: float
    missing: dict[str, str]
    measurements: tuple[Measurement, ...]
    bank: tuple[BankTiming, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> BenchmarkRecord:
        data = json.loads(text)
        found = data.pop("format", None) if isinstance(data, dict) else None
        if found != FORMAT:
            raise InputError(f"record: expected a benchmark record of format {FORMAT}, got {found}")
        data["environment"] = Environment(**data["environment"])
        data["measurements"] = tuple(
            Measurement(**_with_tuples(row, "sweeps", "repeat_seconds"))
            for row in data["measurements"]
        )
        data["bank"] = tuple(
            BankTiming(**_with_tuples(row, "repeat_seconds")) for row in data["bank"]
        )
        return BenchmarkRecord(**data)

    def write(self, path: Path) -> None:
        """The whole file or none of it."""
        with replacing(path) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> BenchmarkRecord:
        return BenchmarkRecord.from_json(path.read_text(encoding="utf-8"))


def as_json(value: Any) -> Any:
    """What reading it back from a file would give: lists for tuples."""
    return json.loads(json.dumps(value))


def _with_tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return row | {name: tuple(row[name]) for name in names}
