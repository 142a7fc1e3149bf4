"""How rows are attacked and models evaluated, as the TOML file of an experiment says it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.evaluate.suite import ATTACKS, PRESETS
from otad.experiments.attack_records import WORST
from otad.threat import NORMS

RANDOM_STEP = "random_step"
UNITS = ("input", "std")
VICTIMS = ("model", "net")
PLACES = ("memory", "disk")


@dataclass(frozen=True)
class AttackSpec:
    """What is done to `points` random test points of a row: the same points for every row.

    - `name`, `options`: an attack of the suite and its settings; or "random_step", a random step of
      full length eps, taken whatever it does.
    - `also`: further attacks with their options; for each point the worst of all counts.
    - `eps`: the radius in `norm`. Without it the ball covers the whole box of legal inputs.
    - `unit`: "input", or "std": each feature in the standard deviation the net divides it by.
    - `on`: "model", the row's own predictor; or "net": what is found against the undefended net is
      handed to the predictor as it is, which no longer adapts the attack to the defense.
    """

    name: str
    eps: float | None = None
    norm: str = "l2"
    points: int = 1000
    label: str = ""
    unit: str = "input"
    on: str = "model"
    options: dict[str, Any] = field(default_factory=dict)
    also: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.runs:
            check_choice(name, "attack", (RANDOM_STEP, *ATTACKS))
        check_choice(self.norm, "norm", tuple(NORMS))
        check_choice(self.unit, "unit", UNITS)
        check_choice(self.on, "on", VICTIMS)
        check_count(self.points, "points")
        if RANDOM_STEP in self.runs and len(self.runs) > 1:
            raise InputError(f"also: expected none beside {RANDOM_STEP!r}, which is no attack")
        if self.eps is not None:
            _check_radius(self.eps)
        elif self.unit != "input":
            raise InputError("eps: expected a radius where features are in units of std, got none")

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Every attack with its options, in the order they are run."""
        return {self.name: self.options} | self.also


@dataclass(frozen=True)
class CertifySpec:
    """What is proved at these radii `eps` in l2, over the first `points` test points (all: None).

    `unit` as for an attack. In regression: the mean squared error that no attack exceeds.
    """

    eps: tuple[float, ...]
    unit: str = "input"
    points: int | None = None

    def __post_init__(self) -> None:
        check_choice(self.unit, "unit", UNITS)
        if not self.eps:
            raise InputError("eps: expected at least one radius to certify at, got none")
        for radius in self.eps:
            _check_radius(radius)
        if self.points is not None:
            check_count(self.points, "points")


@dataclass(frozen=True)
class EvaluateSpec:
    """The model of `row` under the whole suite, in l2, on `points` random test points.

    - `beside`: rows whose models meet the same attacks, on the same points.
    - `eps`: the radii attacked, `headline` that of the threat model.
    - `attacks`: those to run, with their options; those of the suite called `preset` when empty.
    - `spare_proved`: attacks that are not run on points with a certificate of that radius.
    - `flags`: also look for signs that the attacks were too weak.
    - `certify`: rows whose models are certified at each eps, on the same points; with any, those
      `beside` are too.
    - `at_most`: what the worst case must not exceed, in percent, by eps; `at_least`: the certified
      accuracy asked for, in percent, by row and eps, or with "worst" for a row the worst case.
    """

    row: str
    eps: tuple[float, ...]
    headline: float
    beside: tuple[str, ...] = ()
    points: int = 1000
    batch_size: int = 1000
    flags: bool = True
    preset: str = "standard"
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    spare_proved: tuple[str, ...] = ()
    certify: tuple[str, ...] = ()
    at_most: dict[str, float] = field(default_factory=dict)
    at_least: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self.preset, "preset", tuple(PRESETS))
        for name in self.attacks:
            check_choice(name, "attack", tuple(ATTACKS))
        for name in self.spare_proved:
            check_choice(name, "spare_proved", tuple(self.attacks or ATTACKS))
        check_count(self.points, "points")
        check_count(self.batch_size, "batch_size")
        for radius in self.eps:
            _check_radius(radius)
        if list(self.eps) != sorted({*self.eps}):
            raise InputError(f"eps: expected radii in ascending order, got {list(self.eps)}")
        if self.headline not in self.eps:
            raise InputError(f"headline: expected one of eps {self.eps}, got {self.headline}")
        known = tuple(name_of(radius) for radius in self.eps)
        _check_keys(tuple(self.at_most), known, "at_most")
        _check_keys(tuple(self.at_least), (*self.certify, WORST), "at_least")
        if both := set(self.at_most) & set(self.at_least.get(WORST, {})):
            raise InputError(f"at_most: expected no bounds on both sides, got both at {min(both)}")
        for row, asked in self.at_least.items():
            _check_keys(tuple(asked), known, f"at_least.{row}")

    @property
    def all_rows(self) -> tuple[str, ...]:
        """Every row that is attacked or certified."""
        return (self.row, *self.beside, *self.certify)


@dataclass(frozen=True)
class CostSpec:
    """Predictions of the defended `net` against random banks of these sizes, on these devices.

    `seconds_at_most` and `gigabytes_at_most` (resident, beyond the imports) are for the largest.
    """

    net: str
    banks: tuple[int, ...]
    queries: int
    batch_size: int = 1000
    threads: int = 2
    devices: tuple[str, ...] = ("cpu", "cuda")
    seconds_at_most: float | None = None
    gigabytes_at_most: float | None = None

    def __post_init__(self) -> None:
        if not self.banks:
            raise InputError("banks: expected the size of one at least, got none")
        for size in self.banks:
            check_count(size, "banks")
        for name in ("queries", "batch_size", "threads"):
            check_count(getattr(self, name), name)


@dataclass(frozen=True)
class SpeedSpec:
    """What a query costs the models of `rows`, in batches, on the device of the run.

    `places`: the bank in "memory", that is on the device, or on "disk", mapped from its file; a net
    alone has none. `steps`: also the time of each step of the defense. `published`: milliseconds a
    query, by row. `ratio_at_most`: the time against that of the first row, by row, with the bank in
    memory; `gigabytes_at_most`: resident, by row, with the bank on disk.
    """

    rows: tuple[str, ...]
    queries: int = 1000
    batch_size: int = 100
    threads: int = 2
    places: tuple[str, ...] = PLACES
    steps: bool = False
    published: dict[str, float] = field(default_factory=dict)
    published_in: str = ""
    ratio_at_most: dict[str, float] = field(default_factory=dict)
    gigabytes_at_most: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("queries", "batch_size", "threads"):
            check_count(getattr(self, name), name)
        for place in self.places:
            check_choice(place, "places", PLACES)


@dataclass(frozen=True)
class CurveSpec:
    """A figure over L - l: the rows of OTAD in the order of that difference, three panels."""

    title: str


def name_of(radius: float) -> str:
    """How a radius is written as a key."""
    return f"{radius:g}"


def _check_radius(radius: float) -> None:
    if not 0 <= radius < math.inf:
        raise InputError(f"eps: expected a finite number of at least 0, got {radius}")


def _check_keys(keys: Sequence[str], known: Sequence[str], where: str) -> None:
    for key in keys:
        if key not in known:
            raise InputError(f"{where}: expected keys among {', '.join(known)}, got {key!r}")
