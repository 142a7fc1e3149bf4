"""Certified radii, and the distances of adversarial examples above them."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from otad.evaluate.records import Evaluation
from otad.report.curve_plots import PROVED, WORST
from otad.report.plots import INK, SOFT, tidy


def radii_plots(evaluation: Evaluation) -> Figure:
    """A histogram of the radii, and each example between its radius and its nearest wrong input."""
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    bars, rows = figure.subplots(1, 2, width_ratios=(2, 3))
    certificate, right = evaluation.certificate, np.asarray(evaluation.clean_right, dtype=int)
    radii = np.asarray(certificate.radius if certificate else [])[right]
    found = np.asarray(evaluation.distances())[right]
    finite = radii[np.isfinite(radii)]  # the others: no bank point votes for another class
    top = max([*evaluation.eps, *finite, *found[np.isfinite(found)], 1e-9])

    bars.hist(finite, np.linspace(0, max([*finite, 1e-9]), 25).tolist(), color=PROVED, ec="white")
    bars.axvline(evaluation.headline_eps, color=INK, lw=1.2, ls=(0, (4, 3)))
    tidy(bars, "examples")
    bars.yaxis.set_major_locator(MaxNLocator(integer=True))
    more = f", {len(radii) - len(finite)} more are infinite" if len(finite) < len(radii) else ""
    bars.set_xlabel(f"certified radius{more}", color=SOFT, fontsize=9)

    order = np.lexsort((radii, found))
    place, found = np.arange(1, len(right) + 1), found[order]
    radii = np.minimum(radii[order], 1.05 * top)
    ends = np.minimum(found, 1.05 * top)
    rows.vlines(place, radii, ends, color=SOFT, alpha=0.3, lw=max(0.6, 250 / max(len(place), 80)))
    rows.plot(place, radii, "_", color=PROVED, ms=_mark(len(place)), mew=2)
    rows.plot(place, found, "o", color=WORST, ms=_mark(len(place)))
    rows.axhline(evaluation.headline_eps, color=INK, lw=1.2, ls=(0, (4, 3)))
    tidy(rows, "distance: proved, and broken")
    rows.set(ylim=(-0.02 * top, 1.05 * top))
    rows.set_xlabel("examples, by the distance found", color=SOFT, fontsize=9)
    return figure


def _mark(count: int) -> float:
    """Smaller marks for more rows."""
    return max(1.2, min(4.0, 40 / math.sqrt(max(count, 1))))
