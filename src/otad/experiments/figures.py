"""Figures of a record: costs against the size of the bank, rows over L - l."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otad.experiments.records import CostRecord, RunRecord
from otad.io.files import replacing

if TYPE_CHECKING:  # matplotlib takes a second to import, and most runs draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIGABYTE = 1e9
SVG: Any = {"svg.hashsalt": "otad", "svg.fonttype": "none"}  # reproducible, with searchable text


def draw_costs(costs: Sequence[CostRecord], threads: int, path: Path) -> None:
    """Draw time and memory against the size of the bank, a line for each device, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure((8.0, 3.4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    for device in dict.fromkeys(cost.device for cost in costs):
        part = sorted((cost for cost in costs if cost.device == device), key=attrgetter("bank"))
        banks = [cost.bank for cost in part]
        name = f"{device}, {threads} threads" if device == "cpu" else device
        seconds.plot(banks, [cost.seconds or 0.0 for cost in part], marker="o", label=name)
        resident = [cost.resident / GIGABYTE for cost in part]
        memory.plot(banks, resident, marker="o", label=f"{name}, resident")
        on_device = [cost.device_memory / GIGABYTE for cost in part if cost.device_memory]
        if len(on_device) == len(banks):
            memory.plot(banks, on_device, marker="s", linestyle="--", label=f"{name}, on it")
    for axes, title in ((seconds, "seconds"), (memory, "gigabytes beyond the imports")):
        axes.set(xscale="log", yscale="log", xlabel="points in the bank", title=title)
    _save(figure, f"{costs[0].queries:,} predictions", path)


def draw_curve(record: RunRecord, title: str, path: Path) -> None:
    """Draw rows of OTAD over L - l, as SVG."""
    from matplotlib.figure import Figure

    specs = record.experiment.rows
    curvature = {
        key: spec.smoothness - spec.strong_convexity
        for key, spec in specs.items()
        if spec.method == "otad" and spec.smoothness
    }
    rows = {key: record.rows[key] for key in sorted(curvature, key=curvature.__getitem__)}
    figure = Figure((11.0, 3.6), layout="constrained")
    accuracy, lipschitz, error = figure.subplots(1, 3)

    def plot(axes: Axes, label: str, marker: str, value: str, points: Mapping[str, Any]) -> None:
        known = {key: attrgetter(value)(one) for key, one in points.items() if one is not None}
        axes.plot([curvature[key] for key in known], [*known.values()], marker=marker, label=label)

    for name in dict.fromkeys(name for row in rows.values() for name in row.attacks):
        found = {key: row.attacks[name] for key, row in rows.items() if name in row.attacks}
        label = specs[next(iter(found))].attacks[name].label
        plot(accuracy, label, "s", "score.value", found)
    plot(accuracy, "clean", "o", "score.value", rows)
    local = {key: row.lipschitz for key, row in rows.items()}
    plot(lipschitz, "median", "o", "median", local)
    plot(lipschitz, "99 %", "o", "quantile_99", local)
    accounts = {key: row.account for key, row in rows.items() if row.account is not None}
    plot(error, "mean", "o", "mean", {key: one.relative_error for key, one in accounts.items()})
    titles = ("accuracy %", "local Lipschitz constant", "relative error")
    for axes, name in zip((accuracy, lipschitz, error), titles, strict=True):
        axes.set(xlabel="L - l", title=name)
    _save(figure, title, path)


def _save(figure: Figure, title: str, path: Path) -> None:
    import matplotlib

    for axes in figure.axes:
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    with matplotlib.rc_context(SVG), replacing(path) as partial:
        figure.savefig(partial, format="svg", metadata={"Date": None})
