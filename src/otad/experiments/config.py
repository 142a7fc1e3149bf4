"""What an experiment consists of, as its TOML file says it.

title = "..."             what the table shows
include = "FILE.toml"     parts that several experiments share, or a list of such files, the later
                          the stronger; what no row asks for is left out
[data.NAME]               a data set of the registry, with its options
[train], [otad]           settings of every net, of every row, unless told otherwise there
[nets.NAME]               a net, trained on one of the data sets
[metrics.NAME]            a metric that rows may seek neighbors by
[surrogates.NAME]         a CIP-net that learns the answers of a row, for rows to answer with
[attacks.NAME]            an attack that rows may name in their list `attacks`, or in a table of
                          that name, with changes
[rows.NAME]               one line of the table: a method on a net, and what was published
[cost]                    or: what predictions cost against banks of several sizes
[speed]                   or: what a query costs the models of some rows
[evaluate]                or: a row under the whole suite of attacks, with certificates
[curve]                   a figure of the rows over L - l
[quick]                   what a quick run changes, to try the machinery out
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.experiments.part_specs import DataSpec, MetricSpec, NetSpec, SurrogateSpec
from otad.experiments.specs import (
    AttackSpec,
    CertifySpec,
    CostSpec,
    CurveSpec,
    EvaluateSpec,
    SpeedSpec,
    name_of,
)
from otad.io.codec import from_plain
from otad.model.answerers import SCOPES

METHODS = ("net", "otad", "mean_feature_knn", "majority_knn")
_FOLDER = Path(__file__).parent / "configs"
_SETTINGS = dict[str, Any]
_SHAPES = dict.fromkeys(("train", "otad", "quick"), _SETTINGS) | dict.fromkeys(
    ("data", "nets", "metrics", "surrogates", "attacks", "rows"), dict[str, _SETTINGS]
)


@dataclass(frozen=True)
class LipschitzSpec:
    """Around how many test points, and how far off, the local Lipschitz constant is sought."""

    radius: float
    points: int = 500
    steps: int = 20


@dataclass(frozen=True)
class RowSpec:
    """One line of a table.

    `published` and `at_least` are by metric (accuracies in percent), by the name of an attack for
    the score under it, and "certified EPS" for what is proved at a radius; `published` also "NAME
    E" and "NAME SMAPE" for the further measures of a regression; `published_in` says where, and
    what differs there. Without a `smoothness`, that of `OTAD` for the `scope`.

    Neighbors are sought by the keys of a `metric`, among `per_class` points of each class of the
    bank if that is given, random ones or, if `central`, those whose keys are nearest to the mean
    key of their class; and a `surrogate` may answer in the place of the exact solver.
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
    metric: str | None = None
    surrogate: str | None = None
    per_class: int | None = None
    central: bool = False

    def __post_init__(self) -> None:
        check_choice(self.method, "method", METHODS)
        check_choice(self.scope, "scope", SCOPES)
        if self.per_class is not None:
            check_count(self.per_class, "per_class")
        if self.central and (self.per_class is None or self.metric is None):
            raise InputError(
                "central: expected with a metric and per_class alone, got "
                f"metric={self.metric!r} and per_class={self.per_class!r}"
            )
        if self.method == "net" or self.scope == "global":
            for name in ("metric", "surrogate", "per_class"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{name}: expected where neighbors are sought, got it for "
                        f"{'the net' if self.method == 'net' else 'global scope'}"
                    )
        if self.surrogate is not None and self.method != "otad":
            raise InputError(f"surrogate: expected for otad alone, got it for {self.method}")
        if self.certify is not None and self.method != "otad":
            raise InputError(f"certify: expected for otad alone, got it for {self.method}")
        if self.lipschitz is not None and self.method not in ("net", "otad"):
            raise InputError(f"lipschitz: expected for net or otad, got it for {self.method}")


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
    metrics: dict[str, MetricSpec] = field(default_factory=dict)
    surrogates: dict[str, SurrogateSpec] = field(default_factory=dict)
    speed: SpeedSpec | None = None

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
                if self.rows[net.choose.row].metric or self.rows[net.choose.row].surrogate:
                    raise InputError(
                        f"nets.{key}.choose.row: expected one without metric or CIP-net"
                    )
        for key, metric in self.metrics.items():
            _refer(self.data, metric.data, f"metrics.{key}.data")
        for key, surrogate in self.surrogates.items():
            _refer(self.rows, surrogate.row, f"surrogates.{key}.row")
            self._check_taught(surrogate.row, f"surrogates.{key}.row")
        for key, row in self.rows.items():
            self._check_row(key, row)
        if self.cost is not None:
            _refer(self.nets, self.cost.net, "cost.net")
        if self.speed is not None:
            for name in ("rows", "published", "ratio_at_most", "gigabytes_at_most"):
                for key in getattr(self.speed, name):
                    _refer(self.rows, key, f"speed.{name}")
        if self.evaluate is not None:
            self._check_evaluated(self.evaluate)
        if self.curve is not None and all(row.method != "otad" for row in self.rows.values()):
            raise InputError("curve: expected at least one row of otad, got none")

    def _check_evaluated(self, spec: EvaluateSpec) -> None:
        for key in spec.all_rows:
            _refer(self.rows, key, "evaluate")
            check_choice(self.rows[key].method, f"rows.{key}.method", ("otad",))
            data, first = (self.nets[self.rows[one].net].data for one in (key, spec.row))
            if data != first:
                raise InputError(
                    f"evaluate: expected rows on {first} like {spec.row!r}, whose points all of "
                    f"them meet, got {key!r} on {data}"
                )

    def _check_row(self, key: str, row: RowSpec) -> None:
        _refer(self.nets, row.net, f"rows.{key}.net")
        if row.metric is not None:
            _refer(self.metrics, row.metric, f"rows.{key}.metric")
            data = self.nets[row.net].data
            if self.metrics[row.metric].data != data:
                raise InputError(
                    f"rows.{key}.metric: expected one on {data} like the net, got {row.metric}"
                )
        if row.surrogate is not None:
            _refer(self.surrogates, row.surrogate, f"rows.{key}.surrogate")
            taught = self.rows[self.surrogates[row.surrogate].row]
            if (taught.net, taught.n_neighbors) != (row.net, row.n_neighbors):
                raise InputError(
                    f"rows.{key}.surrogate: expected one for {row.net} and K = {row.n_neighbors}, "
                    f"got one that learned from {taught.net} and K = {taught.n_neighbors}"
                )

    def _check_taught(self, key: str, where: str) -> None:
        row = self.rows[key]
        if (row.method, row.scope, row.surrogate) != ("otad", "local", None):
            raise InputError(f"{where}: expected a row of otad by its exact solver, got {key!r}")

    def refuse_values(self, data: str) -> None:
        """Of a data set that turns out to have values and no classes: what needs classes."""
        asked: dict[str, tuple[str, ...]] = {}
        if self.cost is not None:
            asked["cost"] = (self.cost.net,)
        if self.speed is not None:
            asked["speed"] = tuple(self.rows[key].net for key in self.speed.rows)
        if self.evaluate is not None:
            asked["evaluate"] = (self.rows[self.evaluate.row].net,)
        for table, nets in asked.items():
            if any(self.nets[net].data == data for net in nets):
                raise InputError(f"{table}: expected data of classes, got {data}, a regression")

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
    content = _read(path)
    included = content.pop("include", ())
    listed = [included] if isinstance(included, str) else included
    for shared in reversed(from_plain(tuple[str, ...], listed, f"{path.name}.include")):
        content = _merged(_read(path.parent / shared), content)
    changes = content.pop("quick", {})
    if quick:
        content = _merged(content, _shaped(changes, f"{path.name}.quick"))
    if included:
        content = _asked_for(content)
    source = dict(content)
    train, otad = content.pop("train", {}), content.pop("otad", {})
    attacks = content.pop("attacks", {})
    if "nets" in content:
        content["nets"] = {
            key: net | {"train": train | _settings(net, "train", f"{path.name}.nets.{key}")}
            for key, net in content["nets"].items()
        }
    content["rows"] = {
        key: _with_attacks({"label": key} | otad | row, attacks, f"rows.{key}")
        for key, row in content.get("rows", {}).items()
    }
    added = {"name": path.stem, "quick": quick, "source": source}
    experiment: Experiment = from_plain(Experiment, content | added, path.name)
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a TOML file, got: {error}") from error
    return _shaped(content, path.name)


def _shaped(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The same content, whose tables are such: what they hold is looked at once all is merged."""
    for name, shape in _SHAPES.items():
        if name in content:
            from_plain(shape, content[name], f"{where}.{name}")
    return content


def _settings(table: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = from_plain(_SETTINGS, table.get(name, {}), f"{where}.{name}")
    return found


def _asked_for(content: Mapping[str, Any]) -> dict[str, Any]:
    """Nets, metrics, surrogates and data sets that some row needs, and all the rest."""
    kept = dict(content)

    def keep(table: str, names: Iterable[Any]) -> Iterable[Mapping[str, Any]]:
        wanted = set(names)
        kept[table] = {key: one for key, one in kept.get(table, {}).items() if key in wanted}
        found: Iterable[Mapping[str, Any]] = kept[table].values()
        return found

    rows = content.get("rows", {}).values()
    keep("surrogates", (row.get("surrogate") for row in rows))
    learned = [*keep("nets", (row.get("net") for row in rows))]
    learned += keep("metrics", (row.get("metric") for row in rows))
    keep("data", (one.get("data") for one in learned))
    return kept


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
    named, place = row.get("attacks", ()), f"{where}.attacks"
    if not isinstance(named, Mapping):
        named = {key: {} for key in from_plain(tuple[str, ...], named, place)}
    for key in named:
        _refer(known, key, place)
    return row | {
        "attacks": {
            key: {"label": key} | known[key] | _settings(named, key, place) for key in named
        }
    }


def _refer(table: Mapping[str, object], key: str, where: str) -> None:
    if key not in table:
        raise InputError(f"{where}: expected one of {', '.join(table)}, got {key!r}")
