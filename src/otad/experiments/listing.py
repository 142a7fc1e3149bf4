"""Which experiments there are, which tables of the paper they fill, and what is recorded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from otad.errors import InputError
from otad.experiments.experiment import names, read_experiment
from otad.experiments.pages import layout
from otad.experiments.records import RunRecord


@dataclass(frozen=True)
class ExperimentInfo:
    """An experiment, and what is recorded of it.

    Attributes
    ----------
    name, title : str
        What `reproduce` calls it, and what it measures.
    labels : tuple of str
        The tables of the paper that it fills; none for our own experiments.
    data : tuple of str
        Its data sets.
    device : str or None
        The device of its record, None without a record.
    minutes : float or None
        How long the recorded run took.
    recorded : int
        How many of its rows the record has, with all their attacks.
    rows : int
        How many rows it has; an experiment on cost alone counts as one.

    Examples
    --------
    >>> from otad.experiments import ExperimentInfo
    >>> info = ExperimentInfo("mnist", "MNIST", ("tab:KNN",), ("mnist",), None, None, 0, 12)
    >>> f"{info.recorded} of {info.rows} rows are recorded"
    '0 of 12 rows are recorded'
    """

    name: str
    title: str
    labels: tuple[str, ...]
    data: tuple[str, ...]
    device: str | None
    minutes: float | None
    recorded: int
    rows: int


def list_experiments(results: str | Path = "results") -> list[ExperimentInfo]:
    """Return all experiments, those of the paper first and in its order.

    Parameters
    ----------
    results : str or Path
        The folder of the records.

    Examples
    --------
    >>> from otad.experiments import list_experiments
    >>> [one.name for one in list_experiments("results") if "tab:residual" in one.labels]
    ['plain']
    """
    labels: dict[str, list[str]] = {}
    for table in (table for table in layout().tables if table.label):
        for name in table.experiments:
            labels.setdefault(name, []).append(table.label)
    order = [*labels, *(name for name in names() if name not in labels)]
    return [_listed(name, tuple(labels.get(name, ())), Path(results)) for name in order]


def _listed(name: str, labels: tuple[str, ...], results: Path) -> ExperimentInfo:
    spec, path = read_experiment(name), results / f"{name}.json"
    data = tuple(dict.fromkeys(one.name for one in spec.data.values()))
    about, asked = (name, spec.title, labels, data), max(1, len(spec.rows))
    if not path.is_file():
        return ExperimentInfo(*about, device=None, minutes=None, recorded=0, rows=asked)
    record = RunRecord.read(path)
    found = {key: {*row.attacks} for key, row in record.rows.items()}
    made = [k for k, row in spec.rows.items() if k in found and {*row.attacks} <= found[k]]
    minutes, recorded = sum(record.seconds.values()) / 60, len(made) or int(bool(record.costs))
    return ExperimentInfo(*about, record.environment.device_name, minutes, recorded, asked)


def experiments_for(asked: Iterable[str | Path]) -> list[str | Path]:
    """What names, paths of TOML files and labels of the paper ask for, each once."""
    tables = {table.label: table for table in layout().tables if table.label}
    found: list[str | Path] = []
    for one in asked:
        if str(one) not in tables:
            _check_name(str(one), [*names(), *tables])
            found.append(one)
            continue
        needed = tables[str(one)].experiments
        if not needed:
            raise InputError(f"{one}: expected a table that an experiment fills, got none so far")
        found += needed
    return list(dict.fromkeys(found))


def _check_name(asked: str, known: list[str]) -> None:
    if asked in known or asked.endswith(".toml"):
        return
    near = difflib.get_close_matches(asked, known, n=3)
    guess = f" (did you mean {' or '.join(near)}?)" if near else ""
    expected = "an experiment or a label that `otad reproduce --list` shows, or a .toml file"
    raise InputError(f"names: expected {expected}, got {asked!r}{guess}")
