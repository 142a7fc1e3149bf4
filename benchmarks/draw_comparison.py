"""Draws docs/images/comparison.png, the picture of the README with OTAD beside other defenses.

Every figure is read from a record in `results`. A method whose record is missing is left out, so
that new records appear when the picture is drawn again.

    python benchmarks/draw_comparison.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from otad.evaluate.records import Evaluation
from otad.experiments import RunRecord
from otad.report.plots import GRID, INK, OTHER, PROVED, SOFT, WORST

RESULTS = Path(__file__).parents[1] / "results"
NONE, OURS, BASELINE = "no defense", "OTAD", "other defenses"
COLORS = {NONE: SOFT, OURS: WORST, BASELINE: OTHER}
FAR = 16  # percent between marks, so that a figure fits in between


@dataclass(frozen=True)
class Panel:
    """A data set and a radius in l2. `methods`: their rows, as "RECORD/ROW", by group and name; the
    rows of one method are the same model. `baselines`: records whose rows are all shown."""

    title: str
    eps: float
    methods: dict[str, dict[str, tuple[str, ...]]]
    baselines: tuple[str, ...]


PANELS = (
    Panel(
        "MNIST",
        2.0,
        {
            NONE: {"network": ("mnist_attacks/ResNet",)},
            OURS: {
                "OTAD as in the paper": ("mnist_attacks/OTAD as printed", "curvature/L = 2"),
                "OTAD": (
                    "suite/OTAD", "suite_full/OTAD", "mnist_attacks/OTAD consistent, tuned",
                    "global_suite/neighbors",
                ),
                "OTAD, one neighbor": ("suite/OTAD, K = 1",),
                "OTAD, global map": ("global_suite_all/global map",),
                "OTAD, 2,000 prototypes": ("global_suite/global map",),
                "OTAD, 4,000 prototypes": ("mnist_prototypes_suite/nearest prototype",),
                "OTAD, robust keys": ("mnist_keys/softmax",),
                "OTAD, orthogonal network": ("mnist_orthogonal/global map, unread 0.1",),
            },
            BASELINE: {
                "majority k-NN": ("mnist_attacks/majority k-NN",),
                "PGD in l2, ResNet": ("mnist_keys/classifier",),
            },
        },
        ("mnist_at", "mnist_lipschitz", "mnist_purification"),
    ),
    Panel(
        "CIFAR-10",
        0.5,
        {
            NONE: {"ViT": ("cifar10/ViT", "cifar10_energy/ViT")},
            OURS: {
                "OTAD-T as in the paper": (
                    "cifar10/OTAD-T", "cifar10_metrics/3-block ResNet", "cifar10_nn/OTAD-T",
                ),
                "OTAD-T-NN": ("cifar10_nn/OTAD-T-NN",),
                "OTAD-T, robust metric": ("cifar10_robust_moved/robust",),
                "OTAD-T, certified metric": ("cifar10_robust/1-Lipschitz, one point",),
                "OTAD, robust keys": ("cifar10_keys/softmax",),
                "OTAD, orthogonal network": ("cifar10_orthogonal/global map, unread 0.1",),
            },
            BASELINE: {
                "PGD + AWP + CutMix, ResNet-18": ("cifar10_keys/classifier",),
                "PGD + AWP + CutMix, WRN-28-8": ("cifar10_wrn/classifier",),
            },
        },
        (
            "cifar10_at", "cifar10_at_l2", "cifar10_at_linf", "cifar10_at_vit_l2",
            "cifar10_at_vit_linf", "cifar10_lipschitz", "cifar10_purification", "cifar10_diffpure",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """Accuracies in percent: without attack, the least under attack, and proved. `strongest`: among
    the attacks is a whole suite, or standard AutoAttack for a network without neighbors."""

    name: str
    group: str
    clean: float
    worst: float | None
    proved: float | None
    strongest: bool


def methods(panel: Panel, results: Path = RESULTS) -> list[Method]:
    """Return the recorded methods of a panel, group by group, the weakest under attack first."""
    named = [(group, *one) for group, rows in panel.methods.items() for one in rows.items()]
    for record in panel.baselines:
        path = results / f"{record}.json"
        specs = _read_run(path).experiment.rows if path.is_file() else {}
        for key, spec in specs.items():
            short = spec.label.replace("adversarial training", "training")
            named.append((BASELINE, short, (f"{record}/{key}",)))
    found = [
        method
        for group, name, rows in named
        if (method := _method(group, name, rows, panel.eps, results)) is not None
    ]
    groups = list(panel.methods)
    return sorted(found, key=lambda one: (groups.index(one.group), _rank(one)))


_read_run, _read_evaluation = cache(RunRecord.read), cache(Evaluation.read)


def _rank(method: Method) -> float:
    return max(method.worst or 0.0, method.proved or 0.0)


def _method(
    group: str, name: str, rows: tuple[str, ...], eps: float, results: Path
) -> Method | None:
    clean, attacked, suites, proved = [], [], [], []
    for address in rows:
        record, _, key = address.partition("/")
        path = results / f"{record}.json"
        if not path.is_file():
            continue
        run = _read_run(path)
        row, spec = run.rows[key], run.experiment.rows[key]
        clean.append(row.score.value)
        for attack, asked in spec.attacks.items():
            if (asked.norm, asked.eps, asked.unit) == ("l2", eps, "input"):
                is_whole = spec.method == "net" and asked.name == "autoattack"
                kind = suites if is_whole and not asked.options else attacked
                kind.append(row.attacks[attack].score.value)
        # The certificate of an l-infinity distance net is in another norm.
        if run.experiment.nets[spec.net].kind != "linf_dist":
            proved += [
                score.value for radius, score in row.certified.items() if radius == f"{eps:g}"
            ]
        for suite in run.suites:
            found = suite.certified.get(key, {}).get(f"{eps:g}")
            proved += [] if found is None else [found.value]
            if suite.row == key:
                evaluation = _read_evaluation(results / suite.folder / "evaluation.json")
                suites.append(evaluation.worst_case(eps).value)
    if not attacked + suites + proved:
        return None
    worst = min(attacked + suites, default=None)
    return Method(name, group, clean[0], worst, max(proved, default=0.0) or None, bool(suites))


def caption(results: Path = RESULTS) -> str:
    """Return the picture in words, for the README and for the metadata of the file."""
    return "; ".join(_summary(panel, methods(panel, results)) for panel in PANELS)


def _summary(panel: Panel, found: list[Method]) -> str:
    best = []
    for group in (OURS, BASELINE):
        known = [one for one in found if one.group == group and one.strongest and one.worst]
        if known:
            one = max(known, key=_rank)
            best.append(f"{one.name} keeps {one.worst:g}% of {one.clean:.1f}%")
    return f"{panel.title}, l2 {panel.eps:g}: {', '.join(best)}"


def draw_comparison(path: Path, results: Path = RESULTS) -> None:
    """Draw a line for each method, from its worst case to its accuracy without attack."""
    found = [methods(panel, results) for panel in PANELS]
    height = 1.5 + 0.3 * max(map(len, found))
    figure = Figure(figsize=(11.0, height), layout="constrained")
    for axes, panel, listed in zip(figure.subplots(1, len(PANELS)), PANELS, found, strict=True):
        _draw_panel(axes, panel, listed)
    dot: dict[str, Any] = {"linestyle": "", "markersize": 8, "color": INK}
    marks = {
        "accuracy without attack": Line2D([], [], marker="|", mew=2, **dot),
        "worst case under attack": Line2D([], [], marker="o", **dot),
        "at most, as stronger attacks are not recorded": Line2D(
            [], [], marker="o", mfc="white", **dot
        ),
        "proved for any attack": Line2D([], [], marker="D", **dot | {"color": PROVED}),
    }
    style: dict[str, Any] = {"ncols": len(marks), "frameon": False, "fontsize": 9}
    figure.legend(marks.values(), marks, loc="outside lower center", labelcolor=INK, **style)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Description": caption(results)})


def _draw_panel(axes: Axes, panel: Panel, listed: list[Method]) -> None:
    for row, one in enumerate(listed):
        color = COLORS[one.group]
        low = min(value for value in (one.worst, one.proved) if value is not None)
        axes.plot((low, one.clean), (row, row), color=GRID, lw=5, solid_capstyle="round", zorder=1)
        axes.plot(one.clean, row, "|", color=color, ms=11, mew=2.5)
        if one.worst is not None:
            axes.plot(one.worst, row, "o", mec=color, mfc=color if one.strongest else "white", ms=8)
        if one.proved is not None:
            axes.plot(one.proved, row, "D", color=PROVED, ms=6)
        for place, shown, side in _numbers(one):
            text: dict[str, Any] = {"va": "center", "fontsize": 8, "color": SOFT}
            text |= {"textcoords": "offset points", "ha": "left" if side > 0 else "right"}
            axes.annotate(shown, (place, row), (7 * side, 0), **text)
    axes.set_yticks(range(len(listed)), [one.name for one in listed], fontsize=9.5)
    for label, one in zip(axes.get_yticklabels(), listed, strict=True):
        label.set_color(COLORS[one.group])
    axes.set(xlim=(-9, 109), ylim=(-0.7, len(listed) - 0.3), xticks=range(0, 101, 20))
    axes.tick_params(length=0, colors=SOFT, axis="x", labelsize=8.5)
    axes.tick_params(length=0, axis="y")
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    title = f"{panel.title}: % right, l2 eps {panel.eps:g}"
    axes.set_title(title, loc="left", fontsize=11.5, weight="bold", color=INK)


def _numbers(one: Method) -> Iterator[tuple[float, str, int]]:
    """The places and figures that are printed, and on which side of their mark."""
    yield one.clean, f"{one.clean:.1f}", 1
    marks = sorted(value for value in (one.worst, one.proved) if value is not None)
    if marks[-1] - marks[0] > FAR:
        yield from ((value, f"{value:.1f}", -1) for value in marks)
    else:
        yield marks[0], ", ".join(f"{value:.1f}" for value in marks), -1


if __name__ == "__main__":
    draw_comparison(Path(*sys.argv[1:2] or ["docs/images/comparison.png"]))
