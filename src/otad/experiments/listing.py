"""Which experiments there are, which tables of the paper they fill, and what is recorded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from otad.errors import InputError
from otad.experiments.experiment import names, read_experiment
from otad.experiments.pages import Figures, experiment_of, layout


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
        How many of its cells the record fills.
    cells : int
        How many cells of the tables in the documentation show one of its figures.

    Examples
    --------
    >>> from otad.experiments import ExperimentInfo
    >>> info = ExperimentInfo("mnist", "MNIST", ("tab:KNN",), ("mnist",), None, None, 0, 6)
    >>> f"{info.recorded} of {info.cells} cells are recorded"
    '0 of 6 cells are recorded'
    """

    name: str
    title: str
    labels: tuple[str, ...]
    data: tuple[str, ...]
    device: str | None
    minutes: float | None
    recorded: int
    cells: int


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
    cells: dict[str, set[str]] = {}
    for table in layout().tables:
        for name in table.experiments if table.label else ():
            labels.setdefault(name, []).append(table.label)
        for address in table.wanted:
            cells.setdefault(experiment_of(address), set()).add(address)
    order = [*labels, *(name for name in names() if name not in labels)]
    figures = Figures(Path(results))
    return [_listed(name, labels.get(name, ()), cells.get(name, set()), figures) for name in order]


def _listed(name: str, labels: Iterable[str], cells: set[str], figures: Figures) -> ExperimentInfo:
    spec, seconds = read_experiment(name), figures.look(f"{name}/seconds")
    return ExperimentInfo(
        name=name,
        title=spec.title,
        labels=tuple(labels),
        data=tuple(dict.fromkeys(one.name for one in spec.data.values())),
        device=figures.look(f"{name}/environment/device_name"),
        minutes=None if seconds is None else sum(seconds.values()) / 60,
        recorded=figures.count(cells),
        cells=len(cells),
    )


def experiments_for(asked: Iterable[str | Path]) -> list[str | Path]:
    """What names, paths of TOML files and labels of the paper ask for, each once."""
    tables = {table.label: table for table in layout().tables if table.label}
    found: list[str | Path] = []
    for one in asked:
        if str(one) not in tables:
            _check_name(str(one), [*names(), *tables])
            found.append(one)
        else:
            found += tables[str(one)].experiments
    return list(dict.fromkeys(found))


def _check_name(asked: str, known: list[str]) -> None:
    if asked in known or asked.endswith(".toml"):
        return
    near = difflib.get_close_matches(asked, known, n=3)
    guess = f" (did you mean {' or '.join(near)}?)" if near else ""
    expected = "an experiment or a label that `otad reproduce --list` shows, or a .toml file"
    raise InputError(f"names: expected {expected}, got {asked!r}{guess}")
