"""What an experiment consists of, as its TOML file says it.

title = "..."             what the table shows
[data.NAME]               a data set of the registry, with its options
[train], [otad]           settings of every net, of every row, unless told otherwise there
[nets.NAME]               a net, trained on one of the data sets
[attacks.NAME]            an attack that rows may name in their list `attacks`, or in a table of
                          that name, with changes
[rows.NAME]               one line of the table: a method on a net, and what was published
[cost]                    or: what predictions cost against banks of several sizes
[evaluate]                or: a row under the whole suite of attacks, with certificates
[curve]                   a figure of the rows over L - l
[quick]                   what a quick run changes, to try the machinery out
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otad.checks import check_choice
from otad.codec import from_plain
from otad.errors import InputError
from otad.experiments.specs import AttackSpec, CertifySpec, CurveSpec, EvaluateSpec, name_of
from otad.integration import SCOPES

KINDS = ("fc", "lifted", "prototypes")
METHODS = ("net", "otad", "mean_feature_knn", "majority_knn")
_FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class DataSpec:
    """A name in the registry of data sets and the options to load it with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A training setting chosen by the score of `row` on a held-out share of the train part; or by
    what is proved of it at the radius `certified`.

    Each value is tried with `epochs` epochs on the rest; the net is then trained on all of it.
    """

    setting: str
    values: tuple[float, ...]
    row: str
    validation: float = 0.1
    epochs: int | None = None
    certified: float | None = None


@dataclass(frozen=True)
class NetSpec:
    """A net and how it is trained.

    `kind`: "fc", a fully connected net of `blocks` blocks; "lifted", such a net that writes into
    coordinates of its own; "prototypes", labeled points that are the weights of their own map, made
    of the train part. `options` are those of its maker, `train` fields of `TrainConfig`;
    `untrained` prototypes are used as they are.
    """

    data: str
    kind: str = "fc"
    blocks: int = 5
    residual: bool = True
    normalize: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    untrained: bool = False
    choose: Choice | None = None

    def __post_init__(self) -> None:
        check_choice(self.kind, "kind", KINDS)
        if self.untrained and self.kind != "prototypes":
            raise InputError(f"untrained: expected for prototypes alone, got it for {self.kind}")


@dataclass(frozen=True)
class LipschitzSpec:
    """Around how many test points, and how far off, the local Lipschitz constant is sought."""

    radius: float
    points: int = 500
    steps: int = 20


@dataclass(frozen=True)
class RowSpec:
    """One line of a table.

    `published` and `at_least` are by metric (accuracies in percent), with "certified EPS" for what
    is proved at a radius; `published` also by the name of an attack for the score under it, with
    "NAME E" and "NAME SMAPE" for the further measures of a regression; `published_in` says where,
    and what differs there. Without a `smoothness`, that of `OTAD` for the `scope`.
    """

    net: str
    method: str
    label: str = ""
    n_neighbors: int = 10
    scope: str = "local"
    smoothness: float | None = None
    strong_convexity: float = 0.0
    mode: str = "consistent"
    climb: tuple[float, float] | None = None
    lipschitz: LipschitzSpec | None = None
    certify: CertifySpec | None = None
    published: dict[str, float] = field(default_factory=dict)
    published_in: str = ""
    at_least: dict[str, float] = field(default_factory=dict)
    attacks: dict[str, AttackSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self.method, "method", METHODS)
        check_choice(self.scope, "scope", SCOPES)
        if self.certify is not None and self.method != "otad":
            raise InputError(f"certify: expected for otad alone, got it for {self.method}")
        if self.lipschitz is not None and self.method not in ("net", "otad"):
            raise InputError(f"lipschitz: expected for net or otad, got it for {self.method}")


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


@dataclass(frozen=True)
class Experiment:
    """One TOML file; `source` is its content after quick changes, for the record."""

    name: str
    title: str
    quick: bool
    data: dict[str, DataSpec]
    nets: dict[str, NetSpec]
    rows: dict[str, RowSpec]
    source: dict[str, Any]
    note: str = ""
    cost: CostSpec | None = None
    evaluate: EvaluateSpec | None = None
    curve: CurveSpec | None = None

    def __post_init__(self) -> None:
        for key, net in self.nets.items():
            _refer(self.data, net.data, f"nets.{key}.data")
            if net.choose is not None:
                _refer(self.rows, net.choose.row, f"nets.{key}.choose.row")
                proved = self.rows[net.choose.row].certify
                radii = {} if proved is None else {name_of(radius): 0 for radius in proved.eps}
                if net.choose.certified is not None:
                    where = f"nets.{key}.choose.certified"
                    _refer(radii, name_of(net.choose.certified), where)
        for key, row in self.rows.items():
            _refer(self.nets, row.net, f"rows.{key}.net")
        if self.cost is not None:
            _refer(self.nets, self.cost.net, "cost.net")
        if self.evaluate is not None:
            for key in (self.evaluate.row, *self.evaluate.beside, *self.evaluate.certify):
                _refer(self.rows, key, "evaluate")
                check_choice(self.rows[key].method, f"rows.{key}.method", ("otad",))
        if self.curve is not None and all(row.method != "otad" for row in self.rows.values()):
            raise InputError("curve: expected at least one row of otad, got none")

    def points_on(self, data: str) -> int:
        """The most test points of a data set that anything is attacked on."""
        rows = [row for row in self.rows.values() if self.nets[row.net].data == data]
        found = [attack.points for row in rows for attack in row.attacks.values()]
        if self.evaluate is not None and self.rows[self.evaluate.row] in rows:
            found.append(self.evaluate.points)
        return max(found, default=0)


def names() -> tuple[str, ...]:
    """The experiments that `reproduce` knows by name."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_experiment(name: str | Path, *, quick: bool = False) -> Experiment:
    """An experiment by name, or a TOML file of the user's by its path."""
    path = _find(name)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a TOML file, got: {error}") from error
    changes = content.pop("quick", {})
    if quick:
        content = _merged(content, changes)
    source = dict(content)
    train, otad = content.pop("train", {}), content.pop("otad", {})
    attacks = content.pop("attacks", {})
    if isinstance(content.get("nets"), Mapping):
        content["nets"] = {
            key: net | {"train": train | net.get("train", {})}
            for key, net in content["nets"].items()
        }
    content["rows"] = {
        key: _with_attacks({"label": key} | otad | row, attacks, f"rows.{key}")
        for key, row in content.get("rows", {}).items()
    }
    added = {"name": path.stem, "quick": quick, "source": source}
    experiment: Experiment = from_plain(Experiment, content | added, path.name)
    return experiment


def _find(name: str | Path) -> Path:
    if str(name).endswith(".toml"):
        return Path(name)
    if (_FOLDER / f"{name}.toml").is_file():
        return _FOLDER / f"{name}.toml"
    raise InputError(
        f"unknown experiment {str(name)!r}, expected one of {', '.join(names())}, "
        "or the path of a .toml file"
    )


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, table by table; but a data set is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            whole = key == "data"
            merged[key] = {**base[key], **value} if whole else _merged(base[key], value)
        else:
            merged[key] = value
    return merged


def _with_attacks(row: dict[str, Any], known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with the whole of each attack that it names."""
    named = row.get("attacks", ())
    changes = named if isinstance(named, Mapping) else {key: {} for key in named}
    for key in changes:
        _refer(known, key, f"{where}.attacks")
    return row | {
        "attacks": {key: {"label": key} | known[key] | change for key, change in changes.items()}
    }


def _refer(table: Mapping[str, object], key: str, where: str) -> None:
    if key not in table:
        raise InputError(f"{where}: expected one of {', '.join(table)}, got {key!r}")
