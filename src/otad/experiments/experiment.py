"""An experiment: its TOML file, read and checked.

title = "..."             heading of its section on the page of results
include = "FILE.toml"     shared tables, or a list of such files, of which later ones win; entries
                          that no row uses are left out
[data.NAME]               a data set of the registry, with its options
[train], [otad]           default settings of all nets, of all rows
[nets.NAME]               a net, trained on one of the data sets
[metrics.NAME]            a metric by which rows may find neighbors
[surrogates.NAME]         a CIP-net that learns the answers of a row, for other rows to use
[attacks.NAME]            an attack that rows name in their list `attacks`, or in a table of that
                          name, with changes
[rows.NAME]               one row of the table: a method on a net, and what was published
[cost]                    the cost of predictions with banks of several sizes
[speed]                   the cost of a query for the models of some rows
[evaluate]                a row under the whole suite of attacks, with certificates
[curve]                   a figure of the rows over L - l
[quick]                   changes for a quick run, which tests the code and gives no result
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from otad.checks import check_choice
from otad.data import Dataset
from otad.errors import InputError
from otad.experiments.spec import (
    CostSpec,
    CurveSpec,
    DataSpec,
    EvaluateSpec,
    MetricSpec,
    NetSpec,
    RowSpec,
    SpeedSpec,
    SurrogateSpec,
)
from otad.io.codec import from_plain

_FOLDER = Path(__file__).parent / "configs"
_TABLE = dict[str, Any]
_SHAPES = dict.fromkeys(("train", "otad", "quick"), _TABLE) | dict.fromkeys(
    ("data", "nets", "metrics", "surrogates", "attacks", "rows"), dict[str, _TABLE]
)
_REFERENCES = {"data": "data", "net": "nets", "metric": "metrics", "surrogate": "surrogates"}
_REFERENCES |= dict.fromkeys(("row", "rows", "beside", "certify", "ratio_at_most"), "rows")
"""The tables whose entries a field names."""


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

    @property
    def stem(self) -> str:
        """The file name of its record; a quick run never overwrites a result."""
        return f"{self.name}-quick" if self.quick else self.name

    def __post_init__(self) -> None:
        self._check_references()
        for key, row in self.rows.items():
            data = self.nets[row.net].data
            if row.metric is not None and self.metrics[row.metric].data != data:
                raise InputError(f"rows.{key}.metric: expected one on {data}, got {row.metric!r}")
            if row.surrogate is not None:
                taught = self.rows[self.surrogates[row.surrogate].row]
                if (taught.net, taught.n_neighbors) != (row.net, row.n_neighbors):
                    raise InputError(
                        f"rows.{key}.surrogate: expected one for net {row.net} and K = "
                        f"{row.n_neighbors}, got one for {taught.net} and K = {taught.n_neighbors}"
                    )
        if self.evaluate is not None:
            data = self.nets[self.rows[self.evaluate.row].net].data
            for key in (self.evaluate.row, *self.evaluate.beside, *self.evaluate.certify):
                check_choice(self.rows[key].method, f"rows.{key}.method", ("otad",))
                found = self.nets[self.rows[key].net].data
                check_choice(found, f"evaluate: data of {key}", (data,))

    def _check_references(self) -> None:
        """Every entry that another table names exists."""
        specs = {
            f"{table}.{key}": spec
            for table in ("nets", "metrics", "surrogates", "rows")
            for key, spec in getattr(self, table).items()
        }
        specs |= {f"nets.{key}.choose": net.choose for key, net in self.nets.items()}
        specs |= {"cost": self.cost, "speed": self.speed, "evaluate": self.evaluate}
        for (where, spec), (name, table) in product(specs.items(), _REFERENCES.items()):
            value = getattr(spec, name, None)
            value = (value,) if isinstance(value, str) else value
            for key in value if isinstance(value, (tuple, dict)) else ():
                check_choice(key, f"{where}.{name}", tuple(getattr(self, table)))

    def check_data(self, key: str, data: Dataset) -> None:
        """Refuse, before anything is trained, what the loaded data set cannot give."""
        rows = [row for row in self.rows.values() if self.nets[row.net].data == key]
        points = [attack.points for row in rows for attack in row.attacks.values()]
        if self.evaluate is not None and self.rows[self.evaluate.row] in rows:
            points.append(self.evaluate.points)
        if max(points, default=0) > len(data.test_x):
            raise InputError(
                f"points: expected at most the {len(data.test_x)} test points, got {max(points)}"
            )
        for table in ("cost", "speed", "evaluate"):
            if data.task == "regression" and getattr(self, table) is not None:
                raise InputError(f"{table}: expected data with classes, got {key}, a regression")


def names() -> tuple[str, ...]:
    """The experiments that `reproduce` knows by name."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_experiment(name: str | Path, *, quick: bool = False) -> Experiment:
    """An experiment by name, or a user's TOML file by its path."""
    path = Path(name) if str(name).endswith(".toml") else _FOLDER / f"{name}.toml"
    if path.parent == _FOLDER and not path.is_file():
        raise InputError(
            f"unknown experiment {str(name)!r}, expected one of {', '.join(names())}, "
            "or the path of a .toml file"
        )
    content = _read(path)
    included = content.pop("include", ())
    listed = [included] if isinstance(included, str) else included
    for shared in reversed(from_plain(tuple[str, ...], listed, f"{path.name}.include")):
        content = _merged(_read(path.parent / shared), content)
    changes = content.pop("quick", {})
    if quick:
        content = _merged(content, changes)
    if included:
        content = _used(content)
    return parse_experiment(content, path.stem, quick)


def parse_experiment(source: Mapping[str, Any], name: str, quick: bool) -> Experiment:
    """The experiment of a TOML file's content, after includes and quick changes."""
    content = _checked(dict(source), name)
    train, otad = content.pop("train", {}), content.pop("otad", {})
    attacks = content.pop("attacks", {})
    content["nets"] = {
        key: net | {"train": train | _table(net, "train", f"{name}.nets.{key}")}
        for key, net in content.get("nets", {}).items()
    }
    content["rows"] = {
        key: _with_attacks({"label": key} | otad | row, attacks, f"{name}.rows.{key}")
        for key, row in content.get("rows", {}).items()
    }
    added = {"name": name, "quick": quick, "source": source}
    experiment: Experiment = from_plain(Experiment, content | added, name)
    return experiment


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a TOML file, got: {error}") from error
    return _checked(content, path.name)


def _checked(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The same content, in which tables are tables; their values are checked after merging."""
    for name, shape in _SHAPES.items():
        from_plain(shape, content.get(name, {}), f"{where}.{name}")
    return content


def _table(parent: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = from_plain(_TABLE, parent.get(name, {}), f"{where}.{name}")
    return found


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, table by table; but a data set is replaced as a whole."""
    merged = dict(base)
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            merged[key] = {**base[key], **value} if key == "data" else _merged(base[key], value)
        else:
            merged[key] = value
    return merged


def _used(content: Mapping[str, Any]) -> dict[str, Any]:
    """Without the nets, metrics, surrogates and data sets that no row needs."""
    used = dict(content)

    def keep(table: str, names: Iterable[Any]) -> list[Mapping[str, Any]]:
        wanted = set(names)
        used[table] = {key: one for key, one in used.get(table, {}).items() if key in wanted}
        return list(used[table].values())

    rows = content.get("rows", {}).values()
    keep("surrogates", (row.get("surrogate") for row in rows))
    learned = keep("nets", (row.get("net") for row in rows))
    learned += keep("metrics", (row.get("metric") for row in rows))
    keep("data", (one.get("data") for one in learned))
    return used


def _with_attacks(row: dict[str, Any], known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with all settings of each attack that it names."""
    named, where = row.get("attacks", ()), f"{where}.attacks"
    if not isinstance(named, Mapping):
        named = {key: {} for key in from_plain(tuple[str, ...], named, where)}
    for key in named:
        check_choice(key, where, tuple(known))
    full = {key: {"label": key} | known[key] | _table(named, key, where) for key in named}
    return row | {"attacks": full}
