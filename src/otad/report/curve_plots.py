"""Accuracy, or error, against the size of the attack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from otad.evaluate.records import Evaluation
from otad.report.attack_order import colors, counted_with
from otad.report.formatting import unanswered
from otad.report.plots import INK, SOFT, plain, tidy

WORST, PROVED = "#b3122b", "#0f766e"
GRID_POINTS = 400

Array = NDArray[np.float64]


def accuracy_curves(evaluation: Evaluation) -> Figure:
    """The worst case (bold), one line per attack, the certified share beneath, the gap shaded."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panel = figure.subplots()
    eps = np.union1d(np.linspace(0, max(evaluation.eps), GRID_POINTS), evaluation.eps)
    worst = _standing(evaluation.distances(), eps)
    for name, counted in counted_with(evaluation).items():
        color, opacity = colors(evaluation)[name]
        line = _standing(evaluation.distances(counted), eps)
        panel.plot(eps, line, color=color, alpha=opacity, lw=1.1, label=plain(name))
    panel.plot(eps, worst, color=WORST, lw=3, label="worst case", zorder=4)
    at = np.asarray(evaluation.eps)
    panel.plot(
        at, np.interp(at, eps, worst), "o", color=WORST, ms=7, mec="white", mew=1.2, zorder=5
    )
    if evaluation.certificate is not None:
        right = set(evaluation.clean_right)
        radii = [r if row in right else 0.0 for row, r in enumerate(evaluation.certificate.radius)]
        proved = _standing(radii, eps)
        panel.plot(eps, proved, color=PROVED, lw=2.4, label="proved", zorder=4)
        panel.fill_between(eps, proved, worst, color=SOFT, alpha=0.13, lw=0, label="unknown")
    _mark_headline(panel, evaluation)
    tidy(panel, "share of the examples still right, in percent")
    panel.set(xlim=(0, max(evaluation.eps) * 1.02 or 1.0), ylim=(-2, 102))
    _finish(figure, panel, evaluation)
    return figure


def _standing(distances: Sequence[float], eps: Array) -> Array:
    """The percentage of rows whose distance is beyond each eps."""
    shares: Array = 100 * (np.asarray(distances)[:, None] > eps).mean(0)
    return shares


def error_curves(evaluation: Evaluation) -> Figure:
    """Regression: the mean of the largest errors found, and the rows one by one."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    panel, single = figure.subplots(1, 2, width_ratios=(3, 2))
    eps = np.asarray([0.0, *evaluation.eps])
    for name, counted in counted_with(evaluation).items():
        color, opacity = colors(evaluation)[name]
        line = [mean_worst_error(evaluation, size, counted) for size in eps]
        panel.plot(eps, line, color=color, alpha=opacity, lw=1.1, label=plain(name))
    worst = [mean_worst_error(evaluation, size) for size in eps]
    panel.plot(eps, worst, "o-", color=WORST, lw=3, ms=7, mec="white", label="worst case", zorder=4)
    found = np.asarray(evaluation.worst_errors())
    order = np.argsort(found)
    place = np.arange(1, evaluation.n + 1)
    if evaluation.certificate is not None:
        bounds = np.asarray(evaluation.certificate.worst_errors)
        at = evaluation.headline_eps
        panel.plot(
            at, bounds.mean(), "v", color=PROVED, ms=9, mec="white", label="proved", zorder=5
        )
        panel.vlines(at, found.mean(), bounds.mean(), color=SOFT, alpha=0.3, lw=7)
        single.vlines(place, found[order], bounds[order], color=SOFT, alpha=0.25, lw=2)
        single.plot(place, bounds[order], "v", color=PROVED, ms=3.5)
    single.plot(place, np.asarray(evaluation.clean_errors)[order], ".", color=SOFT, ms=4)
    single.plot(place, found[order], "o", color=WORST, ms=3.5)
    _mark_headline(panel, evaluation)
    tidy(panel, "mean over the examples of the largest |f - y|")
    tidy(single, f"each example at eps = {evaluation.headline_eps:g}")
    sorted_by = f"examples, by the largest error found{unanswered(found)}"
    single.set_xlabel(sorted_by, color=SOFT, fontsize=9)
    panel.set_xlim(0, max(evaluation.eps) * 1.03 or 1.0)
    single.xaxis.set_major_locator(MaxNLocator(integer=True))
    for each in (panel, single):
        each.set_ylim(bottom=0)
    panel.set_xlabel(f"eps ({evaluation.threat['norm']})", color=SOFT, fontsize=9)
    panel.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left")
    return figure


def mean_worst_error(
    evaluation: Evaluation, eps: float, attacks: Sequence[str] | None = None
) -> float:
    """The mean over rows of the largest |f - y| that these attacks of size at most eps found."""
    found = list(evaluation.clean_errors)
    for record in evaluation.attacks:
        if record.eps <= eps and (attacks is None or record.attack in attacks):
            for row, error in zip(record.attacked, record.errors, strict=True):
                found[row] = max(found[row], error)
    return float(np.mean(found))


def _mark_headline(panel: Axes, evaluation: Evaluation) -> None:
    at = evaluation.headline_eps
    panel.axvline(at, color=INK, lw=1.2, ls=(0, (4, 3)))
    place = panel.get_xaxis_transform()
    panel.text(at, 0.985, f" eps = {at:g}", color=INK, fontsize=9, va="top", transform=place)


def _finish(figure: Figure, panel: Axes, evaluation: Evaluation) -> None:
    panel.set_xlabel(f"eps ({evaluation.threat['norm']})", color=SOFT, fontsize=9)
    handles, names = panel.get_legend_handles_labels()
    last = [names.index(name) for name in ("worst case", "proved", "unknown") if name in names]
    order = last + [place for place in range(len(names)) if place not in last]
    figure.legend(
        [handles[place] for place in order],
        [names[place] for place in order],
        loc="outside right upper",
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
