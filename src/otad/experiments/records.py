"""The record of a run: one JSON file with its configuration, its results and where it was made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from otad.checks import require
from otad.experiments.experiment import Experiment, parse_experiment
from otad.io.codec import from_plain, read_json, to_plain, write_json
from otad.io.environment import Environment
from otad.model.account import SolverAccount
from otad.model.diagnostics import Distribution
from otad.scores import Score

FORMAT = "otad-run-2"
# Keys of configurations in earlier records: published figures, which are in layouts now, and goals.
_RETIRED = "published published_in at_least at_most ratio_at_most seconds_at_most gigabytes_at_most"


@dataclass(frozen=True)
class DataRecord:
    """A data set as it was loaded."""

    train_size: int
    test_size: int
    input_shape: tuple[int, ...]
    classes: int
    fingerprint: str
    source: str


@dataclass(frozen=True)
class Regularity:
    """How close a net's map is to optimal transport; `least_smoothness` is of the neighborhoods of
    the test points, `violations` the share of backward pairs near `violation_rows` bank points."""

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
class LearnedRecord:
    """A net, a metric, a CIP-net or a purifier. `train`: all training settings, None if not
    trained here. `results`: "train_score" (of a metric, the share of training inputs, as its
    adversary perturbs them, whose nearest key is of their class), "key_dim" and a proved
    "lipschitz" constant or None of a metric, "error" and "held_out_error" of a CIP-net, the last
    "loss" of a purifier; "device_memory" on a GPU and "resident" memory, the peaks in bytes of a
    training and of its process."""

    train: dict[str, Any] | None
    results: dict[str, Any]
    parameters: int | None
    weights: str
    seconds: float
    regularity: Regularity | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class PotentialRecord:
    """The potential of a global map; it does not pass through the bank points `left_out`."""

    smoothness: float
    strong_convexity: float
    sweeps: int
    violation: float
    left_out: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class AttackedScore:
    """The score of a row under attack, and without it (`clean`) on the same points. `distance`: of
    the inputs that turned a right answer wrong; in regression, of all. `replaced`: attacks that do
    not apply, with those run instead. `forwards`, `backwards`: model calls and gradients."""

    score: Score
    clean: Score
    metrics: dict[str, float]
    distance: Distribution | None
    threat: str
    forwards: int
    backwards: int
    seconds: float
    replaced: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRecord:
    """One row of the table; `attacks` are by name, `certified` scores by radius. Those of
    `certified_within_bounds` hold for inputs within the bounds alone, if they were asked for."""

    score: Score
    account: SolverAccount | None
    lipschitz: Distribution | None
    seconds: float
    attacks: dict[str, AttackedScore] = field(default_factory=dict)
    certified: dict[str, Score] = field(default_factory=dict)
    potential: PotentialRecord | None = None
    certified_within_bounds: dict[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class SuiteRecord:
    """An evaluation in `folder`; `certified` accuracies on the same points, by row and radius."""

    row: str
    folder: str
    certified: dict[str, dict[str, Score]]


@dataclass(frozen=True)
class CostRecord:
    """Predictions in a fresh process: the `seconds` of all `queries`, for [speed] also the median
    `milliseconds` of a query over the batches, after every batch has been answered once, their
    standard `deviation`, and the medians of its `steps`. `resident`: the peak of resident memory in
    bytes beyond that after the imports (with matrix library and GPU driver started);
    `device_memory`: the peak allocated on a GPU."""

    device: str
    bank: int
    queries: int
    load_seconds: float
    resident: int
    device_memory: int | None
    accuracy: float
    seconds: float | None = None
    milliseconds: float | None = None
    row: str | None = None
    place: str | None = None
    steps: dict[str, float] = field(default_factory=dict)
    deviation: float | None = None  # absent in earlier records

    @property
    def gigabytes(self) -> float:
        """The `resident` memory in units of 10^9 bytes."""
        return self.resident / 1e9

    @property
    def device_gigabytes(self) -> float | None:
        """The `device_memory` in units of 10^9 bytes."""
        return None if self.device_memory is None else self.device_memory / 1e9


@dataclass(frozen=True)
class RunRecord:
    """The record of a whole run, which is one JSON file.

    Attributes
    ----------
    name : str
        The name of the experiment.
    quick : bool
        Whether it ran with the small settings that test the code.
    config, seed : dict, int
        The settings and the seed.
    code : str
        A digest of the source of the library.
    environment : Environment
        The versions and the machine.
    data, nets, metrics, surrogates, purifiers : dict
        What was loaded and trained, by key.
    rows : dict of str to RowRecord
        The rows of the table, by key.
    costs, speeds, suites : tuple
        Measured costs, speeds and evaluations.
    missing : dict of str to str
        What could not be run, and why.
    seconds : dict of str to float
        The time of each part, of up to `jobs` processes at the same time.

    Examples
    --------
    >>> from pathlib import Path
    >>> from otad.experiments import RunRecord, reproduce
    >>> _ = Path("points.toml").write_text('''
    ... title = "Points"
    ... data.points = {name = "synthetic", options = {dim = 8, train_size = 100, test_size = 20}}
    ... nets.small = {data = "points", train.epochs = 1}
    ... rows.otad = {net = "small", method = "otad"}
    ... ''')
    >>> record = reproduce("points.toml", out="results")
    >>> RunRecord.read("results/points.json") == record
    True
    """

    name: str
    quick: bool
    config: dict[str, Any]
    seed: int
    code: str
    environment: Environment
    data: dict[str, DataRecord]
    nets: dict[str, LearnedRecord]
    rows: dict[str, RowRecord]
    seconds: dict[str, float]
    costs: tuple[CostRecord, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    suites: tuple[SuiteRecord, ...] = ()
    metrics: dict[str, LearnedRecord] = field(default_factory=dict)
    surrogates: dict[str, LearnedRecord] = field(default_factory=dict)
    purifiers: dict[str, LearnedRecord] = field(default_factory=dict)
    speeds: tuple[CostRecord, ...] = ()
    jobs: int = 1
    format: str = FORMAT

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment that the record's settings describe."""
        return parse_experiment(_without_retired(self.config), self.name, self.quick)

    def write(self, path: Path) -> None:
        """Write the record to a JSON file."""
        write_json(path, to_plain(self))

    @staticmethod
    def read(path: Path) -> RunRecord:
        """Read a record from a JSON file."""
        content = read_json(path)
        found = content.get("format") if isinstance(content, dict) else None
        require(found == FORMAT, str(path), f"a record of format {FORMAT}", repr(found))
        record: RunRecord = from_plain(RunRecord, content, path.name)
        return record


def _without_retired(config: dict[str, Any]) -> dict[str, Any]:
    items = ((key, value) for key, value in config.items() if key not in _RETIRED.split())
    return {k: _without_retired(value) if type(value) is dict else value for k, value in items}


def code_fingerprint() -> str:
    """Return the SHA-256 of the library's source files, for the record."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()
