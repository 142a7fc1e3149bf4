"""What an experiment leaves behind: one JSON file with the numbers and all they depend on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otad.errors import InputError
from otad.experiments.attack_records import AttackedScore, SuiteRecord
from otad.experiments.learned_records import MetricRecord, SpeedRecord, SurrogateRecord
from otad.io.codec import from_plain, read_json, to_plain, write_json
from otad.io.environment import Environment
from otad.model.diagnostics import Distribution
from otad.scores import Score

FORMAT = "otad-run-1"


@dataclass(frozen=True)
class DataRecord:
    """A data set as it was loaded; `fingerprint` is of its contents."""

    name: str
    options: dict[str, Any]
    train_size: int
    test_size: int
    input_shape: tuple[int, ...]
    classes: int
    fingerprint: str
    source: str


@dataclass(frozen=True)
class Regularity:
    """How close a net's map is to optimal transport (see `otad.model.diagnostics`).

    `energy` over the train part; `least_smoothness` over the neighborhoods of the test points;
    `violations` is the share of `violation_rows` bank points' neighbor pairs that go backwards.
    """

    energy: Distribution | None
    least_smoothness: Distribution | None
    violations: float
    violation_rows: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """A value tried for a training setting, with its score on the validation part."""

    value: float
    score: Score


@dataclass(frozen=True)
class NetRecord:
    """A trained net: its settings (with what `choose` chose), the train score, the seconds."""

    data: str
    blocks: int
    residual: bool
    normalize: str
    train: dict[str, Any]
    train_score: float | None
    weights: str
    seconds: float
    regularity: Regularity | None
    candidates: tuple[Candidate, ...] = ()
    kind: str = "fc"
    options: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    bank: str = "float32"
    resident: bool = True


@dataclass(frozen=True)
class Account:
    """How OTAD came to its answers.

    `statuses`: share of the rows by `otad.cip.Status`. `smoothness`: the L really used, of the rows
    that have one. `residual`: the largest KKT residual of these. `changed_by_potential`: share of
    predictions that differ between the two extreme potentials (None in regression).
    """

    statuses: dict[str, float]
    smoothness: Distribution | None
    residual: float | None
    relative_error: Distribution | None
    changed_by_potential: float | None


@dataclass(frozen=True)
class PotentialRecord:
    """The one potential of a whole bank (see `otad.cip.whole_bank.potential`), and what it took.

    `left_out`: bank points it does not pass through, by their numbers.
    """

    smoothness: float
    strong_convexity: float
    left_out: tuple[int, ...]
    sweeps: int
    violation: float
    seconds: float


@dataclass(frozen=True)
class RowRecord:
    """One line of the table: our score beside the published one, and how it was come by.

    `attacks`: what is left of it under each attack, by name. `certified`: what is proved of it, by
    radius. `potential`: of rows in global scope.
    """

    label: str
    net: str
    data: str
    method: str
    settings: dict[str, Any]
    score: Score
    published: dict[str, float]
    published_in: str
    at_least: dict[str, float]
    account: Account | None
    lipschitz: Distribution | None
    seconds: float
    attacks: dict[str, AttackedScore] = field(default_factory=dict)
    certified: dict[str, Score] = field(default_factory=dict)
    potential: PotentialRecord | None = None

    @property
    def goals(self) -> dict[str, bool]:
        """What was asked for in words, and whether it is met."""
        scores = {self.score.metric: self.score}
        scores |= {f"certified {radius}": score for radius, score in self.certified.items()}
        scores |= {name: found.score for name, found in self.attacks.items()}
        return {
            ("" if name == self.score.metric else f"{name} ") + f"at least {asked:g}": (
                name in scores and scores[name].value >= asked
            )
            for name, asked in self.at_least.items()
        }


@dataclass(frozen=True)
class CostRecord:
    """`queries` predictions in a fresh process against a bank of so many points.

    `resident` is the peak of resident memory in bytes beyond that after the imports (with the
    matrix library and, on a GPU, its driver started); `device_memory` the peak allocated on a GPU.
    """

    device: str
    bank: int
    queries: int
    batch_size: int
    threads: int
    load_seconds: float
    seconds: float
    resident: int
    device_memory: int | None
    accuracy: float


@dataclass(frozen=True)
class RunRecord:
    """A whole run. `code` is the fingerprint of the library's source, `missing` says what could
    not be run here and why, `seconds` are by part, `beside` the suites of further rows. Up to
    `jobs` processes shared the machine, though not while speed was measured."""

    name: str
    title: str
    note: str
    quick: bool
    config: dict[str, Any]
    seed: int
    code: str
    environment: Environment
    data: dict[str, DataRecord]
    nets: dict[str, NetRecord]
    rows: dict[str, RowRecord]
    seconds: dict[str, float]
    costs: tuple[CostRecord, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    suite: SuiteRecord | None = None
    beside: tuple[SuiteRecord, ...] = ()
    metrics: dict[str, MetricRecord] = field(default_factory=dict)
    surrogates: dict[str, SurrogateRecord] = field(default_factory=dict)
    speeds: tuple[SpeedRecord, ...] = ()
    jobs: int = 1
    format: str = FORMAT

    @property
    def file_stem(self) -> str:
        return stem_of(self.name, self.quick)

    def write(self, path: Path) -> None:
        """The whole file or none of it."""
        write_json(path, to_plain(self))

    @staticmethod
    def read(path: Path) -> RunRecord:
        content = read_json(path)
        if _format_of(content) != FORMAT:
            raise InputError(
                f"{path}: expected a record of format {FORMAT}, got {_format_of(content)}"
            )
        record: RunRecord = from_plain(RunRecord, content, path.name)
        return record


def stem_of(name: str, quick: bool) -> str:
    """What the files of a run are called: a quick one never takes the place of a result."""
    return f"{name}-quick" if quick else name


def read_records(folder: Path) -> list[RunRecord]:
    """The records of experiments in a folder, by name; other JSON files there are let be."""
    files = [
        path for path in sorted(folder.glob("*.json")) if _format_of(read_json(path)) == FORMAT
    ]
    return [RunRecord.read(path) for path in files]


def _format_of(content: Any) -> object:
    return content.get("format") if isinstance(content, dict) else None


def code_fingerprint() -> str:
    """SHA-256 of the library's own source files: what decides a result besides the config."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
