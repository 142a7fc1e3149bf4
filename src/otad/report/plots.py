"""The plots of a report. Each returns its own figure; nothing global of matplotlib is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from otad.training import EpochRecord

INK, SOFT, GRID = "#1f2a30", "#66757f", "#e6eaed"
COLORS = ("#0f766e", "#e05a33", "#7a5cc2")


def training_curves(history: Sequence[EpochRecord], metric: str) -> Figure:
    """Loss, energy and score against the epoch, side by side."""
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    loss, energy, score = figure.subplots(1, 3)
    epochs = [record.epoch for record in history]
    loss.plot(epochs, [record.loss for record in history], color=COLORS[0])
    energy.plot(epochs, [record.energy for record in history], color=COLORS[0])
    score.plot(epochs, [record.train_score for record in history], color=COLORS[0], label="train")
    watched = [(r.epoch, r.val_score) for r in history if r.val_score is not None]
    if watched:
        score.plot(*zip(*watched, strict=True), color=COLORS[1], label="validation")
        score.legend(frameon=False, fontsize=9, labelcolor=INK)
    for panel, title in ((loss, "loss"), (energy, "transport energy"), (score, metric)):
        tidy(panel, title)
        panel.set_xlabel("epoch", color=SOFT, fontsize=9)
    loss.set_yscale("log")
    return figure


def smoothness_histogram(least: Mapping[str, Tensor], asked: float) -> Figure:
    """The least L that the neighbors of each input need, for one model or several."""
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    panel = figure.subplots()
    finite = {name: values[values.isfinite()].numpy() for name, values in least.items()}
    ends = [(values.min(), values.max()) for values in finite.values() if len(values)]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    edges = np.linspace(min(low, asked) - 0.05, max(high, asked) + 0.05, 61).tolist()
    for (name, values), color in zip(finite.items(), COLORS, strict=False):
        panel.hist(values, edges, color=color, alpha=0.75, label=name, edgecolor="white", lw=0.4)
    panel.axvline(asked, color=INK, lw=1.4, ls=(0, (4, 3)))
    top = panel.get_ylim()[1]
    panel.text(asked, top, f"  L = {asked:g} asked for", color=INK, fontsize=9, va="top")
    tidy(panel, "test inputs")
    panel.set_xlabel("least smoothness L of the neighbors", color=SOFT, fontsize=9)
    if len(finite) > 1:
        panel.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def plain(label: str) -> str:
    """A label that is not taken for mathematics, nor left out of a legend."""
    return label.replace("$", r"\$").lstrip("_")


def tidy(panel: Axes, title: str) -> None:
    """The look of every panel."""
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(SOFT)
    panel.tick_params(colors=SOFT, labelsize=8.5)
    panel.grid(color=GRID, lw=0.8)
    panel.set_axisbelow(True)
