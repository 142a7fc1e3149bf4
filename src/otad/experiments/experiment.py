"""An experiment: its TOML file (see configs/README.md), read and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from otad.checks import check_choice, check_count, require
from otad.data import Dataset
from otad.experiments import spec
from otad.io.codec import from_plain, read_toml

_hints = cache(get_type_hints)  # which compiles every annotation
_FOLDER = Path(__file__).parent / "configs"
_TABLE = dict[str, Any]
_WITH_LIKE = ("nets", "metrics", "surrogates", "purifiers", "attacks", "rows")
_SHAPES = dict.fromkeys(("train", "otad", "quick"), _TABLE) | dict.fromkeys(
    ("data", *_WITH_LIKE), dict[str, _TABLE]
)


@dataclass(frozen=True)
class Experiment:
    """One TOML file; `source` is its content after quick changes, for the record."""

    name: str
    title: str
    quick: bool
    data: dict[str, spec.DataSpec]
    nets: dict[str, spec.NetSpec]
    rows: dict[str, spec.RowSpec]
    source: dict[str, Any]
    note: str = ""
    cost: spec.CostSpec | None = None
    evaluate: spec.EvaluateSpec | None = None
    curve: spec.CurveSpec | None = None
    metrics: dict[str, spec.MetricSpec] = field(default_factory=dict)
    surrogates: dict[str, spec.SurrogateSpec] = field(default_factory=dict)
    purifiers: dict[str, spec.PurifierSpec] = field(default_factory=dict)
    speed: spec.SpeedSpec | None = None

    @property
    def stem(self) -> str:
        """The file name of its record; a quick run never overwrites a result."""
        return f"{self.name}-quick" if self.quick else self.name

    @property
    def suites(self) -> tuple[str, ...]:
        """The rows that are evaluated with the whole suite of attacks."""
        return () if self.evaluate is None else (self.evaluate.row, *self.evaluate.beside)

    def first_metric(self, row: spec.RowSpec) -> str:
        """The name of a row's metric before it was tuned, whose keys decide which bank points are
        central."""
        name = row.metric or ""
        taught = self.metrics[name].row
        return name if taught is None else self.rows[taught].metric or ""

    def data_of(self, row: str) -> str:
        return self.nets[self.rows[row].net].data

    def __post_init__(self) -> None:
        for where, kind, value in _annotated(Experiment, self, self.name):
            if kind == "count":
                check_count(value, where)
            else:
                check_choice(value, where, tuple(getattr(self, kind)))
        for key, choice in ((key, net.choose) for key, net in self.nets.items() if net.choose):
            row, where = self.rows[choice.row], f"nets.{key}.choose"
            is_plain = row.metric is None and row.surrogate is None
            require(is_plain, f"{where}.row", "one without metric or CIP-net", choice.row)
            if choice.certified is not None:
                radii = tuple(map(spec.name_of, row.certify.eps if row.certify else ()))
                check_choice(spec.name_of(choice.certified), f"{where}.certified", radii)
        curved = any(row.method == "otad" and row.smoothness for row in self.rows.values())
        require(curved or not self.curve, "curve", "a row of otad with a smoothness", "none")
        self._check_metrics()
        for key, row in self.rows.items():
            if row.method == "net" and row.certify:
                check_choice(self.nets[row.net].kind, f"rows.{key}.certify: kind", spec.LIPSCHITZ)
            if row.unread is not None:
                kind = self.nets[row.net].kind
                check_choice(kind, f"rows.{key}.unread: kind", ("orthogonal", "soc"))
            if row.metric is not None:
                data = (self.data_of(key),)
                check_choice(self.metrics[row.metric].data, f"data of rows.{key}.metric", data)
            if row.surrogate is not None:
                taught = self.rows[self.surrogates[row.surrogate].row]
                is_taught = taught.method == "otad" and taught.uses_neighbors
                is_exact = is_taught and taught.surrogate is None
                require(is_exact, f"rows.{key}.surrogate", "one of an exact local row", taught)
                asked, known = (f"net {one.net}, K = {one.n_neighbors}" for one in (row, taught))
                require(asked == known, f"rows.{key}.surrogate", f"one for {asked}", known)
            if row.purifier is not None:
                cleaned = (self.purifiers[row.purifier].net,)
                check_choice(row.net, f"rows.{key}.net: that of its purifier", cleaned)
            if row.robust:
                name = self.metrics[self.first_metric(row)].net
                trained = name is not None and "adversary" in self.nets[name].settings
                needed = "a metric of a classifier that is trained against an adversary"
                require(trained, f"rows.{key}.robust", needed, row.metric)
        for key in self.speed.rows if self.speed else ():
            check_choice(self.rows[key].method, f"speed: method of {key}", ("net", "otad"))
        for key in (*self.suites, *(self.evaluate.certify if self.evaluate else ())):
            check_choice(self.rows[key].method, f"rows.{key}.method", ("otad",))
            expected = (self.data_of(self.suites[0]),)
            check_choice(self.data_of(key), f"evaluate: data of {key}", expected)

    def _check_metrics(self) -> None:
        for key, metric in self.metrics.items():
            where = f"metrics.{key}"
            if metric.net is not None:
                check_choice(metric.data, f"{where}.data", (self.nets[metric.net].data,))
            if metric.row is None:
                continue
            taught = self.rows[metric.row]
            fits = taught.central and self.metrics[taught.metric or ""].row is None
            require(fits, f"{where}.row", "central points by a metric that is not tuned", taught)
            users = {name: row for name, row in self.rows.items() if row.metric == key}
            for name, row in ({metric.row: taught} | users).items():
                bank, own = (
                    (one.net, one.per_class, one.central, one.robust) for one in (taught, row)
                )
                require(bank == own, f"rows.{name}", f"the bank of {metric.row}, {bank}", own)
                check_choice(metric.data, f"{where}.data", (self.data_of(name),))

    def check_data(self, key: str, data: Dataset) -> None:
        """Refuse, before anything is trained, what the loaded data set cannot give."""
        rows = {name: row for name, row in self.rows.items() if self.data_of(name) == key}
        points = [attack.points for row in rows.values() for attack in row.attacks.values()]
        if self.evaluate is not None and self.evaluate.row in rows:
            points.append(self.evaluate.points)
        most, size = max(points, default=0), len(data.test_x)
        require(most <= size, "points", f"at most the {size} test points", most)
        for table in ("cost", "speed", "evaluate"):
            is_absent = data.task != "regression" or getattr(self, table) is None
            require(is_absent, table, "data with classes", f"{key}, a regression")


def _annotated(hint: Any, value: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """The values in a value of type `hint` whose type is annotated: place, annotation, value."""
    if get_origin(hint) in (Union, UnionType):
        hint = get_args(hint)[0]
    if value is None or hint is Any:
        return
    if get_origin(hint) is Annotated:
        yield where, hint.__metadata__[0], value
    elif is_dataclass(value):
        for name, inner in _hints(hint, include_extras=True).items():
            yield from _annotated(inner, getattr(value, name), f"{where}.{name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _annotated(get_args(hint)[0], key, where)
            yield from _annotated(get_args(hint)[1], item, f"{where}.{key}")
    elif isinstance(value, tuple):
        for item in value:
            yield from _annotated(get_args(hint)[0], item, where)


def names() -> tuple[str, ...]:
    """Return the names of the experiments that `reproduce` knows.

    Examples
    --------
    >>> from otad import experiments
    >>> "mnist" in experiments.names()
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def read_experiment(name: str | Path, *, quick: bool = False) -> Experiment:
    """Return an experiment by its name, or the experiment of a TOML file by its path."""
    path = Path(name) if str(name).endswith(".toml") else _FOLDER / f"{name}.toml"
    known = f"one of {', '.join(names())}, or the path of a .toml file"
    require(path.parent != _FOLDER or path.is_file(), "experiment", known, repr(str(name)))
    content = _read(path)
    included = content.pop("include", ())
    listed = [included] if isinstance(included, str) else included
    for shared in reversed(from_plain(tuple[str, ...], listed, f"{path.name}.include")):
        inside = not Path(shared).is_absolute() and ".." not in Path(shared).parts
        require(inside, f"{path.name}.include", "a file in its own folder", shared)
        content = _merged(_read(path.parent / shared), content)
    changes = content.pop("quick", {})
    content = _checked(_merged(content, changes), path.name) if quick else content
    for table in content.keys() & {*_WITH_LIKE}:
        where, entries = f"{path.name}.{table}", content[table]
        content[table] = {key: _completed(entries, key, where) for key in entries}
    if included:
        _drop_unused(content)
    return parse_experiment(content, path.stem, quick)


def parse_experiment(source: Mapping[str, Any], name: str, quick: bool) -> Experiment:
    """The experiment of a TOML file's content, after includes and quick changes."""
    content = _checked(dict(source), name)
    train, otad, attacks = (content.pop(key, {}) for key in ("train", "otad", "attacks"))
    content["nets"] = {
        key: net | {"train": train | from_plain(_TABLE, net.get("train", {}), f"nets.{key}.train")}
        for key, net in content.get("nets", {}).items()
    }
    content["rows"] = {
        key: _with_attacks({"label": key} | otad | row, attacks, f"{name}.rows.{key}.attacks")
        for key, row in content.get("rows", {}).items()
    }
    added = {"name": name, "quick": quick, "source": source}
    experiment: Experiment = from_plain(Experiment, content | added, name)
    return experiment


def _read(path: Path) -> dict[str, Any]:
    return _checked(read_toml(path), path.name)


def _checked(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The same content, in which tables are tables; their values are checked after merging."""
    for name, shape in _SHAPES.items():
        from_plain(shape, content.get(name, {}), f"{where}.{name}")
    return content


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, table by table; but a data set is replaced as a whole."""
    merged = {**base, **changes}
    for key in base.keys() & changes.keys():
        old, new = base[key], changes[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            merged[key] = {**old, **new} if key == "data" else _merged(old, new)
    return merged


def _completed(
    entries: Mapping[str, Any], key: str, where: str, heirs: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The settings of an entry, over those of the entry that it is `like`."""
    own, heirs = dict(entries[key]), (key, *heirs)
    if "like" not in own:
        return own
    others = tuple(name for name in entries if name not in heirs)
    base = check_choice(own.pop("like"), f"{where}.{key}.like", others)
    return _merged(_completed(entries, base, where, heirs), own)


def _drop_unused(content: dict[str, Any]) -> None:
    """Remove the nets, metrics, surrogates, purifiers and data sets that no row needs."""
    for table in ("surrogates", "purifiers", "metrics", "nets", "data"):
        users = {"nets": ("rows", "metrics"), "data": ("nets", "metrics")}.get(table, ("rows",))
        entries = [entry for user in users for entry in content.get(user, {}).values()]
        used = [entry.get(table.removesuffix("s")) for entry in entries]
        content[table] = {key: one for key, one in content.get(table, {}).items() if key in used}


def _with_attacks(row: dict[str, Any], known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with all settings of each attack that it names."""
    named = row.get("attacks", ())
    if not isinstance(named, Mapping):
        named = {key: {} for key in from_plain(tuple[str, ...], named, where)}
    for key in named:
        check_choice(key, where, tuple(known))
    changes = {key: from_plain(_TABLE, one, f"{where}.{key}") for key, one in named.items()}
    full = {key: {"label": key} | known[key] | one for key, one in changes.items()}
    return row | {"attacks": full}
