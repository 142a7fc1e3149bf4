"""Figures drawn from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from otad.experiments.records import CostRecord
from otad.transport.files import replacing

GIGABYTE = 1e9


def draw_costs(costs: Sequence[CostRecord], path: Path) -> None:
    """Time and memory against the size of the bank, a line for each device, as SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
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
    # The same record gives the same file, with words in it that can be searched.
    with (
        matplotlib.rc_context({"svg.hashsalt": "otad", "svg.fonttype": "none"}),
        replacing(path) as partial,
    ):
        figure.savefig(partial, format="svg", metadata={"Date": None})
