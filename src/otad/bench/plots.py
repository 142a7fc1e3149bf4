"""Cost per query against B, K and d: three panels, one figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator, StrMethodFormatter

from otad.bench.peers import MAP, OURS_32, OURS_64, POTENTIALS, STRONG_MAP
from otad.bench.record import BenchmarkRecord, Measurement

AXES = {
    "B": ("batch", "queries in a batch, B"),
    "K": ("neighbors", "neighbors of a query, K"),
    "d": ("dim", "dimension, d"),
}
INK, GRID = "#333333", "#e4e4e4"


@dataclass(frozen=True)
class Line:
    """How one solver's answers to one question are drawn."""

    label: str
    color: str
    style: str = "-"
    marker: str = "o"
    width: float = 1.6


LINES = {
    (MAP, OURS_64): Line("ours, float64", "#8cc3ee", width=5.0),  # below, and seen on both sides
    (MAP, OURS_32): Line("ours, float32", "#0b5fa5", width=2.0),
    (MAP, "ProxQP"): Line("ProxQP, the same dual in a loop", "#2a9d6f", marker="s"),
    (MAP, "CVXPY + Clarabel"): Line("CVXPY + Clarabel, as in the paper", "#c8372d", marker="D"),
    (STRONG_MAP, "POT, both bounds"): Line("POT, two bounds, l = 0.1", "#e08a1e", marker="^"),
    (POTENTIALS, OURS_64): Line("eq. (2) alone: ours, float64", "#62a8e0", "--", width=1.3),
    (POTENTIALS, "HiGHS"): Line("eq. (2) alone: HiGHS", "#8a8a8a", "--", "v", 1.3),
}


def plot_solver_benchmark(record: BenchmarkRecord, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.svg and returns both paths."""
    figure = Figure(figsize=(11, 4.9), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        _draw(panel, record, axis)
    panels[0].set_ylabel("time per query (log scale)")
    panels[0].yaxis.set_major_formatter(EngFormatter(unit="s"))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK
    )
    where = record.environment
    title = f"Convex integration on {where.device_name}, {where.threads} CPU threads"
    if record.missing:
        title += f" (not installed: {'; '.join(record.missing)})"
    figure.suptitle(title, fontsize=12, color=INK)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=160)
    return paths


def _draw(panel: Axes, record: BenchmarkRecord, axis: str) -> None:
    field, label = AXES[axis]
    on_axis = [row for row in record.measurements if axis in row.sweeps]
    for (question, peer), line in LINES.items():
        rows = [row for row in on_axis if (row.question, row.peer) == (question, peer)]
        if not rows:
            continue
        rows.sort(key=lambda row: row.cell)
        rows.sort(key=lambda row: getattr(row, field))
        panel.plot(
            [getattr(row, field) for row in rows],
            [row.seconds for row in rows],
            line.style,
            color=line.color,
            marker=line.marker,
            linewidth=line.width,
            markersize=4.5,
            label=line.label,
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    ticks = sorted({getattr(row, field) for row in on_axis})
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.set_xlabel(label)
    panel.set_title(_held_fixed(on_axis, field), fontsize=10, color=INK)
    panel.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _held_fixed(rows: list[Measurement], field: str) -> str:
    """What the cells of a panel share, e.g. "K = 10, d = 784"; a range where it varies."""
    parts = []
    for axis, (name, _) in AXES.items():
        if name != field:
            values = sorted({getattr(row, name) for row in rows})
            many = f"{values[0]:,} to {values[-1]:,}" if len(values) > 1 else f"{values[0]:,}"
            parts.append(f"{axis} = {many}")
    return ", ".join(parts)
