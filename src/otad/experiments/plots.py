"""Figures drawn from records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from otad.experiments.records import CostRecord, RowRecord
from otad.io.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIGABYTE = 1e9


def draw_costs(costs: Sequence[CostRecord], path: Path) -> None:
    """Time and memory against the size of the bank, a line for each device, as SVG."""
    figure = _figure(8.0, 3.4)
    time_axes, memory_axes = figure.subplots(1, 2)
    for device in dict.fromkeys(cost.device for cost in costs):
        part = sorted((cost for cost in costs if cost.device == device), key=lambda one: one.bank)
        banks = [cost.bank for cost in part]
        name = f"{device}, {part[0].threads} threads" if device == "cpu" else device
        time_axes.plot(banks, [cost.seconds for cost in part], marker="o", label=name)
        resident = [cost.resident / GIGABYTE for cost in part]
        memory_axes.plot(banks, resident, marker="o", label=f"{name}, resident")
        on_device = [cost.device_memory / GIGABYTE for cost in part if cost.device_memory]
        if len(on_device) == len(banks):
            memory_axes.plot(banks, on_device, marker="s", linestyle="--", label=f"{name}, on it")
    for axes, title in ((time_axes, "seconds"), (memory_axes, "gigabytes beyond the imports")):
        axes.set(xscale="log", yscale="log", xlabel="points in the bank", title=title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.suptitle(f"{costs[0].queries:,} predictions")
    _save(figure, path)


def draw_curve(rows: Iterable[RowRecord], title: str, path: Path) -> None:
    """Rows of OTAD over L - l: accuracy clean and under each attack, local Lipschitz constant,
    relative error."""
    lines = sorted((row for row in rows if row.method == "otad"), key=_curvature)
    steps = [_curvature(row) for row in lines]
    figure = _figure(11.0, 3.6)
    accuracy, lipschitz, error = figure.subplots(1, 3)
    for key in dict.fromkeys(key for row in lines for key in row.attacks):
        found = [(_curvature(row), row.attacks[key]) for row in lines if key in row.attacks]
        first = found[0][1]
        values = [one.score.value for _, one in found]
        accuracy.plot([x for x, _ in found], values, marker="s", label=first.label or key)
    accuracy.plot(steps, [row.score.value for row in lines], marker="o", label="clean")
    measured = [(_curvature(row), row.lipschitz) for row in lines if row.lipschitz is not None]
    for mark, label in (("median", "median"), ("quantile_99", "99 %")):
        values = [getattr(one, mark) for _, one in measured]
        lipschitz.plot([x for x, _ in measured], values, marker="o", label=label)
    errors = [row.account.relative_error if row.account else None for row in lines]
    known = [(x, one.mean) for x, one in zip(steps, errors, strict=True) if one is not None]
    error.plot([x for x, _ in known], [value for _, value in known], marker="o", label="mean")
    panels = ((accuracy, "accuracy %"), (lipschitz, "local Lipschitz constant"))
    for axes, name in (*panels, (error, "relative error")):
        axes.set(xlabel="L - l", title=name)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    _save(figure, path)


def _curvature(row: RowRecord) -> float:
    return float(row.settings["smoothness"] - row.settings["strong_convexity"])


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    """The same figure gives the same file, with words in it that can be searched."""
    import matplotlib

    with (
        matplotlib.rc_context({"svg.hashsalt": "otad", "svg.fonttype": "none"}),
        replacing(path) as partial,
    ):
        figure.savefig(partial, format="svg", metadata={"Date": None})
