"""Draw docs/images/scopes.png: local maps, whose answers jump, beside a global map.

python benchmarks/draw_scopes.py [FILE]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from sklearn.datasets import make_moons

from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import lifted_net
from otad.report.map_pictures import INK, SHADES, Array, color_bar, draw_points, frame
from otad.training import TrainConfig, train

STEEPNESS = LinearSegmentedColormap.from_list("steepness", SHADES)
MARGINS = LinearSegmentedColormap.from_list("margins", ("#12a594", "#f7f7f5", "#e4572e"))
MOONS, NOISE, HIDDEN, NEIGHBORS = 240, 0.12, (32, 32), 5
TRAINING = TrainConfig(epochs=80, batch_size=40, learning_rate=0.05, energy_weight=0.05)
MOONS_EXTENT = (-1.6, 2.6), (-1.25, 1.75)
NODES = 300  # of the grid along the first axis
BATCH = 20_000


def both_scopes(*, size: int = MOONS, epochs: int = TRAINING.epochs, seed: int = 0) -> list[OTAD]:
    """A local and a global model of two moons, with the same network, bank and curvature."""
    points, labels = make_moons(size, noise=NOISE, random_state=seed)
    x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    net = lifted_net((2,), 2, hidden=HIDDEN, seed=seed)
    train(net, (x, y), replace(TRAINING, epochs=epochs, seed=seed))
    whole = defend(net, x, y, n_neighbors=NEIGHBORS, scope="global")
    curvature = {"smoothness": whole.smoothness, "strong_convexity": whole.strong_convexity}
    return [whole.replace(scope="local", **curvature), whole]


@torch.no_grad()
def field_of(model: OTAD, *, nodes: int = NODES) -> tuple[Array, Array]:
    """Of the answers g on a grid of h x w nodes: the margin of class 1 over class 0 (h,w), and the
    slope |g - g'| / |x - x'| between neighboring nodes, the larger of two directions (h-1,w-1).

    Computed in float64, to tell jumps from rounding.
    """
    (left, right), (low, high) = MOONS_EXTENT
    step = (right - left) / (nodes - 1)
    first = left + step * torch.arange(nodes, dtype=torch.float64)
    second = low + step * torch.arange(round((high - low) / step) + 1, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(first, second, indexing="xy"), dim=2)
    answers = torch.cat([model(batch) for batch in grid.flatten(0, 1).split(BATCH)])
    answers = answers.view(*grid.shape[:2], -1)
    across = (answers[:, 1:] - answers[:, :-1]).norm(dim=2)[:-1]
    along = (answers[1:] - answers[:-1]).norm(dim=2)[:, :-1]
    margin = answers[..., 1] - answers[..., 0]
    return margin.numpy(), (torch.maximum(across, along) / step).numpy()


def draw_scopes(
    path: Path, *, models: list[OTAD] | None = None, nodes: int = NODES, seed: int = 0
) -> None:
    """Draw margin and slope of a local and a global model side by side."""
    local, whole = both_scopes(seed=seed) if models is None else models
    fields = [field_of(model.double(), nodes=nodes) for model in (local, whole)]
    largest = max(float(np.abs(margin).max()) for margin, _ in fields)
    steepest = max(float(slope.max()) for _, slope in fields)
    figure = Figure(figsize=(11.0, 8.4))
    figure.subplots_adjust(left=0.02, right=0.9, top=0.91, bottom=0.02, hspace=0.1, wspace=0.04)
    titles = (
        ("Local maps", f"each input by its {local.n_neighbors} nearest training points"),
        ("Global map", f"{whole.smoothness - 1:.2f}-Lipschitz, through the whole bank"),
    )
    look: dict[str, Any] = {"origin": "lower", "interpolation": "nearest"}
    look["extent"] = (*MOONS_EXTENT[0], *MOONS_EXTENT[1])
    panels = figure.subplots(2, 2).T
    for (top, bottom), (margin, slope), title in zip(panels, fields, titles, strict=True):
        margins = top.imshow(margin, MARGINS, vmin=-largest, vmax=largest, **look)
        axes = (np.linspace(*MOONS_EXTENT[k], margin.shape[1 - k]) for k in (0, 1))
        top.contour(*axes, margin, levels=[0.0], colors=[INK], linewidths=1.3)
        draw_points(top, local.bank_inputs, local.bank_labels, size=15)
        frame(top, *title, *MOONS_EXTENT)
        slopes = bottom.imshow(slope.clip(0.05), STEEPNESS, norm=LogNorm(0.05, steepest), **look)
        subtitle = f"slope of the answers: at most {slope.max():.3g} on the grid"
        frame(bottom, "", subtitle, *MOONS_EXTENT)
    color_bar(figure, margins, (0.915, 0.56, 0.012, 0.3), "margin of one class over the other")
    color_bar(figure, slopes, (0.915, 0.075, 0.012, 0.3), "|g(a) - g(b)| / |a - b|")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw_scopes(Path(*sys.argv[1:2] or ["docs/images/scopes.png"]))
