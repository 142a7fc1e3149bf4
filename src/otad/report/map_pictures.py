"""Pictures of the method in the plane, where maps can be drawn.

`draw_map` shows a bank of pairs and the map that interpolates them (docs/images/map.png),
`draw_scopes` the answers of local maps, which jump, beside those of a global map
(docs/images/scopes.png).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import qmc
from sklearn.datasets import make_moons
from torch import Tensor

from otad.cip import CipProblem, ExactCip
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import lifted_net
from otad.training import TrainConfig, train

INK = "#333333"
CLASS_COLORS = ("#12a594", "#e4572e", "#f2a900")
SHADES = ("#f4f4f8", "#c3cbe0", "#7c83c4", "#5a2a83", "#240a3c")
CURVATURE = LinearSegmentedColormap.from_list("curvature", SHADES[1:])
STEEPNESS = LinearSegmentedColormap.from_list("steepness", SHADES)
MARGINS = LinearSegmentedColormap.from_list("margins", ("#12a594", "#f7f7f5", "#e4572e"))

MAP_NEIGHBORS, MAP_SMOOTHNESS = 8, 1.0
LINES, EVERY = 25, 6  # grid lines in each direction, nodes from one line to the next
MAP_EXTENT = 1.5  # bank and grid fill the square [-MAP_EXTENT, MAP_EXTENT]^2

MOONS, NOISE, HIDDEN, NEIGHBORS = 240, 0.12, (32, 32), 5
TRAINING = TrainConfig(epochs=80, batch_size=40, learning_rate=0.05, energy_weight=0.05)
MOONS_EXTENT = (-1.6, 2.6), (-1.25, 1.75)
NODES = 300  # of the grid along the first axis
BATCH = 20_000

Array = NDArray[np.float64]


Bank = tuple[Tensor, Tensor, Tensor]
"""Inputs and features (N,2), labels (N,)."""


def make_bank(size: int = 140, *, seed: int = 0) -> Bank:
    """Points that a convex potential separates into three classes.

    Features are the gradient of (2/5) logsumexp(5/2 <c_i, x>) + |x|^2 / 8 for three corners c_i,
    plus a little noise: similar to what a network trained with the transport energy learns.
    """
    spread = qmc.Halton(2, rng=seed).random(size)
    inputs = MAP_EXTENT * (2 * torch.from_numpy(spread) - 1)
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    corners = torch.stack((angles.cos(), angles.sin()), 1)
    features = torch.softmax(2.5 * inputs @ corners.T, 1) @ corners + inputs / 4
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(features.shape, generator=generator, dtype=torch.float64)
    return inputs, features + 0.01 * noise, (inputs @ corners.T).argmax(1)


def interpolate_grid(bank: Bank) -> tuple[Array, Array, Array]:
    """Nodes (n,n,2) of a grid, their images (n,n,2), and the smoothness used (n,n).

    One convex integration problem per node, with the nearest bank points.
    """
    axis = torch.linspace(-MAP_EXTENT, MAP_EXTENT, (LINES - 1) * EVERY + 1, dtype=torch.float64)
    nodes = torch.cartesian_prod(axis, axis)
    nearest = torch.cdist(nodes, bank[0]).topk(MAP_NEIGHBORS, largest=False).indices
    solution = ExactCip()(CipProblem(nodes, bank[0][nearest], bank[1][nearest], MAP_SMOOTHNESS))
    n = len(axis)
    found = nodes.view(n, n, 2), solution.image.view(n, n, 2), solution.smoothness.view(n, n)
    return found[0].numpy(), found[1].numpy(), found[2].numpy()


def draw_map(path: Path, *, seed: int = 0) -> None:
    """Draw the bank, a grid over its inputs, and the same grid sent through the map."""
    inputs, features, labels = pairs = make_bank(seed=seed)
    nodes, images, smoothness = interpolate_grid(pairs)
    norm = Normalize(smoothness.min(), smoothness.max())
    figure = Figure(figsize=(13.2, 4.8))
    figure.subplots_adjust(left=0.01, right=0.95, top=0.85, bottom=0.02, wspace=0.06)
    bank, before, after = figure.subplots(1, 3)
    titles = (
        ("The bank", "training points (filled) and their features (open)"),
        ("The queries", f"a grid, dark where the {MAP_NEIGHBORS} nearest pairs need a larger L"),
        ("The map", "the same grid where the interpolated map sends it"),
    )
    limits = (-MAP_EXTENT - 0.05, MAP_EXTENT + 0.05)
    for panel, title in zip((bank, before, after), titles, strict=True):
        _frame(panel, *title, limits, limits)
    colors = _colors(labels)
    ends = torch.stack((inputs, features), 1).numpy()
    bank.add_collection(LineCollection(list(ends), colors=colors, linewidths=1, alpha=0.45))
    for (x, y), face in zip(ends.transpose(1, 2, 0), (colors, "white"), strict=True):
        bank.scatter(x, y, s=19, facecolors=face, edgecolors=colors, linewidths=1.1, zorder=3)
    for panel, places, points in ((before, nodes, inputs), (after, images, features)):
        _draw_lines(panel, places, smoothness, norm)
        _draw_points(panel, points, labels, size=20)
    _color_bar(figure, ScalarMappable(norm, CURVATURE), (0.945, 0.2, 0.009, 0.5), "smoothness L")
    _save(figure, path, dpi=150)


def _draw_lines(panel: Axes, places: Array, smoothness: Array, norm: Normalize) -> None:
    """Grid lines in both directions, each segment in the color of the smoothness there."""
    look: dict[str, Any] = {"cmap": CURVATURE, "norm": norm, "linewidths": 1.1, "capstyle": "round"}
    for points, values in ((places, smoothness), (places.swapaxes(0, 1), smoothness.T)):
        for line, value in zip(points[::EVERY], values[::EVERY], strict=True):
            segments = list(np.stack((line[:-1], line[1:]), 1))
            larger = np.maximum(value[:-1], value[1:])
            panel.add_collection(LineCollection(segments, array=larger, **look))


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
        _draw_points(top, local.bank_inputs, local.bank_labels, size=15)
        _frame(top, *title, *MOONS_EXTENT)
        slopes = bottom.imshow(slope.clip(0.05), STEEPNESS, norm=LogNorm(0.05, steepest), **look)
        subtitle = f"slope of the answers: at most {slope.max():.3g} on the grid"
        _frame(bottom, "", subtitle, *MOONS_EXTENT)
    _color_bar(figure, margins, (0.915, 0.56, 0.012, 0.3), "margin of one class over the other")
    _color_bar(figure, slopes, (0.915, 0.075, 0.012, 0.3), "|g(a) - g(b)| / |a - b|")
    _save(figure, path, dpi=120)


def _frame(
    panel: Axes, title: str, subtitle: str, x: tuple[float, float], y: tuple[float, float]
) -> None:
    panel.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=23)
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize=9.5, color=INK)
    panel.set_aspect("equal")
    panel.set(xlim=x, ylim=y, xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _colors(labels: Tensor) -> list[str]:
    return [CLASS_COLORS[int(label)] for label in labels]


def _draw_points(panel: Axes, points: Tensor, labels: Tensor, *, size: float) -> None:
    x, y = points[:, :2].T.numpy()
    look: dict[str, Any] = {"c": _colors(labels), "edgecolors": "white", "linewidths": 0.6}
    panel.scatter(x, y, s=size, zorder=3, **look)


def _color_bar(
    figure: Figure, colors: ScalarMappable, place: tuple[float, float, float, float], label: str
) -> None:
    bar = figure.colorbar(colors, cax=figure.add_axes(place))
    bar.set_label(label, color=INK)
    bar.outline.set_visible(False)


def _save(figure: Figure, path: Path, *, dpi: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
