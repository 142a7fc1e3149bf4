"""The seconds each attack took."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from otad.evaluate.records import Evaluation
from otad.report.attack_order import FAMILY_COLORS, OTHER_COLOR, families
from otad.report.plots import INK, plain, tidy


def seconds_bars(evaluation: Evaluation, seconds: Mapping[str, float]) -> Figure:
    """A bar for each attack, in its order, in the color of its family."""
    figure = Figure(figsize=(9.6, 1.0 + 0.27 * len(seconds)), layout="constrained")
    panel = figure.subplots()
    family = families(evaluation)
    named: set[str] = set()
    for place, (name, value) in enumerate(seconds.items()):
        kind = family[name]
        color = FAMILY_COLORS.get(kind, OTHER_COLOR)
        label = None if kind in named else plain(kind)
        named.add(kind)
        panel.barh(place, value, color=color, alpha=0.85, height=0.68, label=label)
        panel.text(value, place, f" {value:.1f} s", va="center", fontsize=8, color=INK)
    panel.set_yticks(range(len(seconds)), list(map(plain, seconds)), fontsize=8.5)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    tidy(panel, "seconds")
    panel.grid(visible=False, axis="y")
    figure.legend(
        frameon=False, fontsize=8.5, labelcolor=INK, loc="outside upper right", ncols=len(named)
    )
    return figure
