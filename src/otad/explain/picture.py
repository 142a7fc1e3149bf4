"""The picture of an explanation: the query beside training points, with their weights as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from otad.checks import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT, SOFT, FAINT = "#22282d", "#69737b", "#e4e7ea"
# In inches: an image, the space between two, the wider one after the query, and the edges.
SIDE, GAP, BREAK, EDGE = 1.25, 0.2, 0.55, 0.2
ABOVE, BELOW = 0.5, 1.55
BAR, LINE = 0.07, 0.18


@dataclass(frozen=True, eq=False)
class Panel:
    """An image (C,H,W) or (H,W), its label, further lines of text, the color of its frame, and its
    weight from 0 to 1, which is drawn as a bar. An image of weight 0 is drawn pale."""

    image: Tensor
    label: str
    detail: str
    color: str
    weight: float | None = None


def draw(
    panels: Sequence[Panel], heading: str, below: Sequence[str], bounds: tuple[float, float] | None
) -> Figure:
    """Draw the query, then the training points under a heading, with lines of text below. Gray
    levels follow the bounds, or else the range of all values."""
    from matplotlib.figure import Figure

    width = 2 * EDGE + len(panels) * SIDE + (len(panels) - 2) * GAP + BREAK
    height = ABOVE + SIDE + BELOW
    figure = Figure(figsize=(width, height), facecolor="white")
    low = min(float(panel.image.min()) for panel in panels)
    high = max(float(panel.image.max()) for panel in panels)
    for number, panel in enumerate(panels):
        left = EDGE + number * (SIDE + GAP) + (BREAK - GAP if number else 0.0)
        _draw_panel(figure, panel, left, *(bounds or (low, high)))
    beside, above = EDGE + SIDE + BREAK, height - 0.2
    texts = [(EDGE, above, "query"), (beside, above, heading)]
    texts += [(beside, 0.16 + LINE * row, text) for row, text in enumerate(reversed(below))]
    for left, bottom, text in texts:
        figure.text(
            left / width, bottom / height, text,
            color=SOFT, fontsize=8.5, va="center", parse_math=False,
        )  # fmt: skip
    return figure


def _draw_panel(figure: Figure, panel: Panel, left: float, low: float, high: float) -> None:
    width, height = figure.get_size_inches()

    def place(bottom: float, tall: float) -> tuple[float, float, float, float]:
        return left / width, bottom / height, SIDE / width, tall / height

    alpha = 0.4 if panel.weight == 0 else 1.0
    image = figure.add_axes(place(BELOW, SIDE), xticks=[], yticks=[], anchor="S")
    image.imshow(_pixels(panel.image, low, high), cmap="gray", vmin=0, vmax=1, alpha=alpha)
    for spine in image.spines.values():
        spine.set(color=panel.color, linewidth=2.5, alpha=alpha)
    middle = (left + SIDE / 2) / width
    figure.text(
        middle, (BELOW - 0.2) / height, panel.label,
        ha="center", va="center", color=panel.color, alpha=alpha, fontweight="bold",
        fontsize=min(11, 130 / max(len(panel.label), 1)), parse_math=False,
    )  # fmt: skip
    figure.text(
        middle, (BELOW - 0.47) / height, panel.detail,
        ha="center", va="top", color=TEXT, alpha=alpha, fontsize=8, linespacing=1.4,
    )  # fmt: skip
    if panel.weight is not None:
        bar = figure.add_axes(place(BELOW - 0.42, BAR), xlim=(0, 1))
        bar.set_axis_off()
        bar.barh(0, 1, color=FAINT)
        bar.barh(0, panel.weight, color=panel.color)


def _pixels(image: Tensor, low: float, high: float) -> NDArray[np.float32]:
    """(H,W) in gray or (H,W,3) in color, from 0 to 1."""
    is_image = image.dim() == 2 or (image.dim() == 3 and image.shape[0] in (1, 3))
    expected, found = "images (1,H,W), (3,H,W) or (H,W)", f"inputs of shape {tuple(image.shape)}"
    require(is_image, "figure", expected, f"{found}; a table shows vectors")
    scaled = ((image.detach().float().cpu() - low) / max(high - low, 1e-12)).clamp(0, 1)
    return (scaled if scaled.dim() == 2 else scaled.movedim(0, -1).squeeze(-1)).numpy()
