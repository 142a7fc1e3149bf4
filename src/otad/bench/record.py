"""What a benchmark leaves behind: one JSON file with the numbers and all they depend on."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from otad.bench.bank import BankTiming
from otad.errors import InputError
from otad.transport.files import replacing

FORMAT = 1
PACKAGES = ("otad", "torch", "numpy", "scipy", "cvxpy", "clarabel", "proxsuite", "POT")


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
class Environment:
    """Where and when a benchmark ran, with which versions (None: not installed)."""

    started: str
    commit: str | None
    python: str
    versions: dict[str, str | None]
    platform: str
    cpu: str
    device: str
    device_name: str
    threads: int

    @staticmethod
    def now(device: torch.device, threads: int) -> Environment:
        cpu = cpu_name()
        return Environment(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit_of(Path(__file__).parent),
            python=platform.python_version(),
            versions={name: _version(name) for name in PACKAGES},
            platform=platform.platform(),
            cpu=cpu,
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            threads=threads,
        )


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str | None:
    """The commit `folder` was checked out at, "-dirty" if changed since; None if unknown.

    A folder that merely lies inside somebody's repository (an environment, say) has no commit.
    """
    if not _output("git", "-C", str(folder), "ls-files", "."):
        return None
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40")


def cpu_name() -> str:
    for line in (_output("lscpu") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """What a command prints, None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
