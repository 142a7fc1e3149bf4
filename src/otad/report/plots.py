"""Plots and pictures of a report. No global state of matplotlib is used."""

from __future__ import annotations

import base64
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from otad.evaluate.records import Evaluation
from otad.report.formatting import unanswered
from otad.training import EpochRecord

if TYPE_CHECKING:  # matplotlib takes a second to import, and most processes draw nothing
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1f2a30", "#66757f", "#e6eaed"
COLORS = ("#0f766e", "#e05a33", "#7a5cc2")
WORST, PROVED, OTHER = "#b3122b", "#0f766e", "#3f7fbf"
FAMILIES = {
    "random": "#8796a1", "black-box": "#7a5cc2", "white-box": "#dd7d1f", "adaptive": "#c2379d",
}  # fmt: skip
BARS = {"attacked": WORST, "random": SOFT}
CURVE_POINTS = 400
SMALLEST_SIDE = 96  # in pixels: Markdown cannot enlarge a picture
AMPLIFICATIONS = (100.0, 50.0, 20.0, 10.0, 5.0, 3.0, 2.0)

Style = dict[str, Any]
DASHED: Style = {"color": INK, "lw": 1.2, "ls": (0, (4, 3))}
UNDEFENDED: Style = {
    "color": INK, "lw": 2.2, "ls": (0, (1, 1)), "label": "undefended network", "zorder": 4,
}  # fmt: skip
LEGEND: Style = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}


def training_curves(history: Sequence[EpochRecord], metric: str) -> Figure:
    """Loss, energy and score against the epoch, side by side."""
    figure = _figure(2.9)
    titles = {"loss": "loss", "energy": "transport energy", "train_score": metric}
    for panel, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        values = [(record.epoch, getattr(record, name)) for record in history]
        panel.plot(*zip(*values, strict=True), color=COLORS[0], label="train")
        _style(panel, title, "epoch")
    figure.axes[0].set_yscale("log")
    validated = [(r.epoch, r.val_score) for r in history if r.val_score is not None]
    if validated:
        panel.plot(*zip(*validated, strict=True), color=COLORS[1], label="validation")
        panel.legend(**LEGEND)
    return figure


def smoothness_histogram(least: Mapping[str, Tensor], configured: float) -> Figure:
    """The least L that the neighbors of each input need, for one model or several."""
    figure = _figure(3.1)
    panel = figure.subplots()
    finite = {name: values[values.isfinite()].numpy() for name, values in least.items()}
    everything = np.concatenate([*finite.values(), [configured]])
    edges = np.linspace(everything.min() - 0.05, everything.max() + 0.05, 61).tolist()
    for (name, values), color in zip(finite.items(), COLORS, strict=False):
        panel.hist(values, edges, color=color, alpha=0.75, label=name, edgecolor="white", lw=0.4)
    _mark(panel, configured, f"L = {configured:g}")
    _style(panel, "test inputs", "least smoothness L of the neighbors")
    if len(finite) > 1:
        panel.legend(**LEGEND)
    return figure


def families(evaluation: Evaluation) -> dict[str, str]:
    return {record.attack: record.family for record in evaluation.attacks}


def skips_broken(evaluation: Evaluation) -> bool:
    """Return whether attacks skipped examples that an earlier attack had broken at the same eps."""
    broken: dict[float, set[int]] = {}
    for record in evaluation.attacks:
        seen = broken.setdefault(record.eps, set())
        if not seen.isdisjoint(record.attacked):
            return False
        seen.update(record.broken)
    return evaluation.task == "classification"


def counted_with(evaluation: Evaluation) -> dict[str, list[str]]:
    """What the line of each attack counts: itself and, if it skipped what others broke, those."""
    names, before = list(families(evaluation)), skips_broken(evaluation)
    return {name: names[0 if before else k : k + 1] for k, name in enumerate(names)}


def _attack_style(evaluation: Evaluation, name: str) -> Style:
    """The color of the family, more opaque for its later attacks."""
    family = families(evaluation)[name]
    members = [it for it, own in families(evaluation).items() if own == family]
    opacity = 0.4 + 0.6 * (members.index(name) + 1) / len(members)
    color = FAMILIES.get(family, OTHER)
    return {"color": color, "alpha": opacity, "lw": 1.1, "label": _plain(name)}


def accuracy_curves(evaluation: Evaluation) -> Figure:
    """The worst case (bold), one line per attack, certified accuracy below, the gap shaded."""
    figure = _figure(4.6)
    panel, furthest = figure.subplots(), max(evaluation.eps)
    eps = np.union1d(np.linspace(0, furthest, CURVE_POINTS), evaluation.eps)
    worst = _share_beyond(evaluation.distances(), eps)
    panel.plot(eps, worst, color=WORST, lw=3, label="worst case", zorder=4)
    dots: Style = {"ms": 7, "mec": "white", "mew": 1.2, "zorder": 5}
    panel.plot(evaluation.eps, np.interp(evaluation.eps, eps, worst), "o", **dots, c=WORST)
    if evaluation.certificate is not None:
        right = set(evaluation.clean_right)
        radii = [r if row in right else 0.0 for row, r in enumerate(evaluation.certificate.radius)]
        proved = _share_beyond(radii, eps)
        panel.plot(eps, proved, color=PROVED, lw=2.4, label="proved", zorder=4)
        panel.fill_between(eps, proved, worst, color=SOFT, alpha=0.13, lw=0, label="unknown")
    if evaluation.undefended is not None:
        alone = _share_beyond(evaluation.undefended.distances(), eps)
        panel.plot(eps, alone, **UNDEFENDED)
        panel.plot(evaluation.eps, np.interp(evaluation.eps, eps, alone), "o", **dots, c=INK)
    for name, counted in counted_with(evaluation).items():
        line = _share_beyond(evaluation.distances(counted), eps)
        panel.plot(eps, line, **_attack_style(evaluation, name))
    _mark(panel, evaluation.headline_eps, f"eps = {evaluation.headline_eps:g}")
    _style(panel, "examples still right, in percent", f"eps ({evaluation.threat['norm']})")
    panel.set(xlim=(0, furthest * 1.02 or 1.0), ylim=(-2, 102))
    figure.legend(loc="outside right upper", **LEGEND)
    return figure


def _share_beyond(distances: Sequence[float], eps: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = 100 * (np.asarray(distances)[:, None] > eps).mean(0)
    return shares


def error_curves(evaluation: Evaluation) -> Figure:
    """Regression: the mean of the largest errors found, and the rows one by one."""
    figure = _figure(4.2)
    panel, single = figure.subplots(1, 2, width_ratios=(3, 2))
    eps, at = [0.0, *evaluation.eps], evaluation.headline_eps
    bold: Style = {"mec": "white", "zorder": 4}
    worst: Style = {"marker": "o", "color": WORST, "lw": 3, "ms": 7, "label": "worst case", **bold}
    lines = [
        (counted, _attack_style(evaluation, it)) for it, counted in counted_with(evaluation).items()
    ]
    for counted, style in (*lines, (list(families(evaluation)), worst)):
        records = tuple(record for record in evaluation.attacks if record.attack in counted)
        some = replace(evaluation, attacks=records)
        panel.plot(eps, [statistics.fmean(some.worst_errors(it)) for it in eps], **style)
    if (alone := evaluation.undefended) is not None:
        panel.plot(eps, [statistics.fmean(alone.worst_errors(it)) for it in eps], **UNDEFENDED)
    found = np.asarray(evaluation.worst_errors())
    order, place = np.argsort(found), np.arange(1, evaluation.n + 1)
    if evaluation.certificate is not None:
        bounds = np.asarray(evaluation.certificate.worst_errors)
        panel.plot(at, bounds.mean(), "v", color=PROVED, ms=9, label="proved", **bold)
        panel.vlines(at, found.mean(), bounds.mean(), color=SOFT, alpha=0.3, lw=7)
        single.vlines(place, found[order], bounds[order], color=SOFT, alpha=0.25, lw=2)
        single.plot(place, bounds[order], "v", color=PROVED, ms=3.5)
    single.plot(place, np.asarray(evaluation.clean_errors)[order], ".", color=SOFT, ms=4)
    single.plot(place, found[order], "o", color=WORST, ms=3.5)
    _mark(panel, at, f"eps = {at:g}")
    _style(panel, "mean of the largest |f - y|", f"eps ({evaluation.threat['norm']})")
    sorted_by = f"examples, by the largest error found{unanswered(found)}"
    _style(single, f"each example at eps = {at:g}", sorted_by)
    panel.set(xlim=(0, max(evaluation.eps) * 1.03 or 1.0), ylim=(0, None))
    single.set_ylim(bottom=0)
    _whole_numbers(single.xaxis)
    panel.legend(loc="best", **LEGEND)
    return figure


def radii_plots(evaluation: Evaluation) -> Figure:
    """A histogram of the radii, and each example between its radius and its nearest wrong input."""
    figure = _figure(3.4)
    bars, rows = figure.subplots(1, 2, width_ratios=(2, 3))
    certificate, right = evaluation.certificate, np.asarray(evaluation.clean_right, dtype=int)
    radii = np.asarray(certificate.radius if certificate else [])[right]
    found = np.asarray(evaluation.distances())[right]
    finite = radii[np.isfinite(radii)]  # infinite where no bank point votes for another class
    top = max([*evaluation.eps, *finite, *found[np.isfinite(found)], 1e-9])

    bars.hist(finite, np.linspace(0, max([*finite, 1e-9]), 25).tolist(), color=PROVED, ec="white")
    bars.axvline(evaluation.headline_eps, **DASHED)
    more = f", {len(radii) - len(finite)} more are infinite" if len(finite) < len(radii) else ""
    _style(bars, "examples", f"certified radius{more}")
    _whole_numbers(bars.yaxis)

    order, count = np.lexsort((radii, found)), max(len(right), 1)
    place, found = np.arange(1, len(right) + 1), found[order]
    radii, ends = np.minimum(radii[order], 1.05 * top), np.minimum(found, 1.05 * top)
    size = max(1.2, min(4.0, 40 / math.sqrt(count)))  # smaller marks for more examples
    rows.vlines(place, radii, ends, color=SOFT, alpha=0.3, lw=max(0.6, 250 / max(count, 80)))
    rows.plot(place, radii, "_", color=PROVED, ms=size, mew=2)
    rows.plot(place, found, "o", color=WORST, ms=size)
    rows.axhline(evaluation.headline_eps, **DASHED)
    _style(rows, "distance: proved, and broken", "examples, by the distance found")
    rows.set(ylim=(-0.02 * top, 1.05 * top))
    return figure


def seconds_bars(evaluation: Evaluation) -> Figure:
    """A bar for the seconds of each attack over all eps, in the color of its family."""
    names = families(evaluation)
    figure = _figure(1.0 + 0.27 * len(names))
    panel = figure.subplots()
    for place, (name, family) in enumerate(names.items()):
        seconds = sum(record.seconds for record in evaluation.attacks if record.attack == name)
        look: Style = {"color": FAMILIES.get(family, OTHER), "alpha": 0.85, "height": 0.68}
        is_first = list(names.values()).index(family) == place
        panel.barh(place, seconds, label=_plain(family) if is_first else None, **look)
        panel.text(seconds, place, f" {seconds:.1f} s", va="center", fontsize=8, color=INK)
    panel.set_yticks(range(len(names)), list(map(_plain, names)), fontsize=8.5)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    _style(panel, "seconds")
    panel.grid(visible=False, axis="y")
    figure.legend(ncols=len(set(names.values())), loc="outside upper right", **LEGEND)
    return figure


def change_bars(changes: Mapping[str, Tensor], names: Sequence[str], count: int) -> Figure:
    """For each of a few rows, the `count` features of largest change: a bar for each way (m,n)."""
    first = next(iter(changes.values()))
    count = min(count, first.shape[1])
    figure = _figure(0.9 + 0.42 * count)
    panels, height = figure.subplots(1, len(first), squeeze=False)[0], 0.8 / len(changes)
    for row, panel in enumerate(panels):
        order = first[row].abs().argsort(descending=True)[:count].tolist()
        for place, (label, change) in enumerate(changes.items()):
            at = np.arange(count) + (place - (len(changes) - 1) / 2) * height
            panel.barh(at, change[row, order].tolist(), height, label=label, color=BARS[label])
        panel.set_yticks(range(count), [_plain(names[k]) for k in order], fontsize=8.5)
        panel.invert_yaxis()
        panel.axvline(0, color=SOFT, lw=0.8)
        _style(panel, f"example {row + 1}", "change")
    figure.legend(*panels[0].get_legend_handles_labels(), ncols=len(changes),
                  loc="outside upper right", **LEGEND)  # fmt: skip
    return figure


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure((9.6, height), layout="constrained")


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _mark(panel: Axes, x: float, label: str) -> None:
    """A dashed vertical line with its label at the top."""
    panel.axvline(x, **DASHED)
    place = panel.get_xaxis_transform()
    panel.text(x, 0.985, f" {label}", color=INK, fontsize=9, va="top", transform=place)


def _plain(label: str) -> str:
    """Neither read as mathematics by matplotlib nor omitted from a legend."""
    return label.replace("$", r"\$").lstrip("_")


def _style(panel: Axes, title: str, x_label: str = "") -> None:
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    panel.set_xlabel(x_label, color=SOFT, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(SOFT)
    panel.tick_params(colors=SOFT, labelsize=8.5)
    panel.grid(color=GRID, lw=0.8)
    panel.set_axisbelow(True)


def plot_uri(figure: Figure) -> str:
    """A plot as SVG, with its text drawn as shapes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return data_uri("image/svg+xml", stream.getvalue())


def pixels_uri(image: Tensor, bounds: tuple[float, float] | None = None) -> str:
    """An image (1,H,W) or (3,H,W), scaled from `bounds` or its own range; enlarged if small."""
    low, high = bounds or (float(image.min()), float(image.max()))
    scaled = ((image - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round()
    levels = scaled.to(torch.uint8).cpu().movedim(0, -1).squeeze(-1).numpy()
    factor = -(-SMALLEST_SIDE // min(levels.shape[:2]))
    levels = levels.repeat(factor, axis=0).repeat(factor, axis=1)
    stream = io.BytesIO()
    Image.fromarray(levels).save(stream, format="PNG", optimize=True)
    return data_uri("image/png", stream.getvalue())


def change_uri(clean: Tensor, changed: Tensor, bounds: tuple[float, float]) -> tuple[str, float]:
    """The difference between two images (C,H,W), and the factor by which it is amplified. In gray
    images red is brighter, blue darker and white unchanged; in color, gray is unchanged."""
    step = (changed - clean).float() / (bounds[1] - bounds[0])
    limit = 1.0 if len(step) == 1 else 0.5
    largest = float(step.abs().max())
    factor = next((it for it in AMPLIFICATIONS if it * largest <= limit), 1.0)
    drawn = 0.5 + factor * step
    if len(step) == 1:
        up, down = ((sign * factor * step[0]).clamp(0, 1) for sign in (1, -1))
        drawn = torch.stack((1 - down, 1 - up - down, 1 - up))
    return pixels_uri(drawn, (0.0, 1.0)), factor


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
