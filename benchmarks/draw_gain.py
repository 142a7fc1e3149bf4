"""Draws docs/images/gain.png, the picture of the README.

It shows the undefended network of the recorded demonstration beside the defended model, on the same
digits and for the same threat model.

    python benchmarks/draw_gain.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from otad.evaluate.records import Evaluation
from otad.report.plots import GRID, INK, PROVED, SOFT, WORST
from otad.report.verdict import percent

RECORD = Path(__file__).parents[1] / "results" / "demo" / "evaluation.json"


def gains(found: Evaluation) -> dict[str, float]:
    """Return the shares of right answers at the eps of the threat model, in percent."""
    alone, proved = found.undefended, found.certified_accuracy(found.headline_eps)
    if alone is None or proved is None:
        raise ValueError("found: expected a record with an undefended network and a certificate")
    return {
        "the network alone": alone.worst_case().value,
        "the same network, defended": found.worst_case().value,
        "proved for any attack": proved.value,
    }


def caption(found: Evaluation) -> str:
    """Return the picture in words, for the README and for the metadata of the file."""
    before, after, proved = (f"{value:g}%" for value in gains(found).values())
    return (
        f"Right under attack: {before} before, {after} after the defense, {proved} proved; "
        f"{percent(found.clean['otad'])} without attack"
    )


def draw_gain(path: Path, found: Evaluation) -> None:
    """Draw a bar each for before, after and proved, over the accuracy without attack."""
    bars, clean = gains(found), found.clean
    without = [clean["net"].value, clean["otad"].value, clean["otad"].value]
    figure = Figure(figsize=(9.0, 2.5), layout="constrained")
    panel = figure.subplots()
    rows = list(range(len(bars)))
    panel.barh(rows, without, color=GRID, height=0.7)
    panel.barh(rows, list(bars.values()), color=[WORST, PROVED, SOFT], height=0.7)
    for row, value in zip(rows, bars.values(), strict=True):
        style = {"va": "center", "ha": "right", "color": "white", "fontsize": 15}
        panel.text(value - 1, row, f"{value:g} %", weight="bold", **style)
    remark = {"va": "center", "ha": "right", "color": SOFT, "fontsize": 10}
    panel.text(without[0] - 1, 0, f"{without[0]:g} % without attack", **remark)
    panel.set_yticks(rows, list(bars), fontsize=12, color=INK)
    panel.invert_yaxis()
    panel.set(xlim=(0, 100), xticks=[])
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    eps = f"{found.threat['norm']} {found.headline_eps:g}"
    title = f"{found.n} test digits: right under every attack we ran within {eps}"
    panel.set_title(title, loc="left", fontsize=13, weight="bold", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=180, metadata={"Description": caption(found)})


if __name__ == "__main__":
    draw_gain(Path(*sys.argv[1:2] or ["docs/images/gain.png"]), Evaluation.read(RECORD))
