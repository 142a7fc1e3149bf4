"""A picture of the method in the plane: a bank of pairs, and the map that interpolates them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from otad.cip import CipProblem, ExactCip

NEIGHBORS = 8
SMOOTHNESS = 1.0
REACH = 1.5  # bank and grid fill the square [-REACH, REACH]^2

CLASS_COLORS = ("#e4572e", "#12a594", "#f2a900")
INK = "#333333"
CURVATURE_COLORS = LinearSegmentedColormap.from_list(
    "curvature", ("#c3cbe0", "#7c83c4", "#5a2a83", "#240a3c")
)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Example:
    """A bank in the plane: inputs and features (N,2), labels (N,)."""

    inputs: Tensor
    features: Tensor
    labels: Tensor


def make_example(size: int = 140, *, seed: int = 0) -> Example:
    """One cloud of points that a convex potential pulls apart into three classes.

    Features are the gradient of (2/5) logsumexp(5/2 <c_i, x>) + |x|^2 / 8 for three corners c_i,
    plus a little noise: what a network trained with the transport energy makes of its inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = _scattered(size, generator)
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    corners = torch.stack((angles.cos(), angles.sin()), 1)
    features = torch.softmax(2.5 * inputs @ corners.T, 1) @ corners + inputs / 4
    noise = torch.randn(features.shape, generator=generator, dtype=torch.float64)
    return Example(inputs, features + 0.01 * noise, (inputs @ corners.T).argmax(1))


def _scattered(size: int, generator: torch.Generator) -> Tensor:
    """Random points of the square that keep a distance: each the loneliest of 40 candidates."""
    candidates = torch.rand(size, 40, 2, generator=generator, dtype=torch.float64)
    candidates = REACH * (2 * candidates - 1)
    points = candidates[0, :1]
    for tries in candidates[1:]:
        loneliest = torch.cdist(tries, points).amin(1).argmax()
        points = torch.cat((points, tries[loneliest, None]))
    return points


@dataclass(frozen=True, eq=False)
class GridMap:
    """The map on a square grid of nodes: where they go (n,n,2), with which smoothness (n,n).

    `every` nodes lie from one drawn line to the next.
    """

    nodes: Array
    images: Array
    smoothness: Array
    every: int


def interpolate_grid(example: Example, *, lines: int = 25, every: int = 6) -> GridMap:
    """One convex integration problem per node, with the nearest bank points as its anchors."""
    axis = torch.linspace(-REACH, REACH, (lines - 1) * every + 1, dtype=torch.float64)
    nodes = torch.cartesian_prod(axis, axis)
    nearest = torch.cdist(nodes, example.inputs).topk(NEIGHBORS, largest=False).indices
    problem = CipProblem(nodes, example.inputs[nearest], example.features[nearest], SMOOTHNESS)
    solution = ExactCip()(problem)
    side = len(axis)
    return GridMap(
        nodes.view(side, side, 2).numpy(),
        solution.image.view(side, side, 2).numpy(),
        solution.smoothness.view(side, side).numpy(),
        every,
    )


def draw_map(path: Path, *, seed: int = 0) -> None:
    """The bank, a grid over its inputs, and the same grid sent through the map; one image file."""
    example = make_example(seed=seed)
    grid = interpolate_grid(example)
    shades = Normalize(grid.smoothness.min(), grid.smoothness.max())
    figure = Figure(figsize=(13.2, 4.8))
    figure.subplots_adjust(left=0.01, right=0.95, top=0.85, bottom=0.02, wspace=0.06)
    bank, before, after = figure.subplots(1, 3)

    _title(bank, "The bank", "training points (filled) and their features (open)")
    _draw_pairs(bank, example)

    _title(
        before, "The queries", f"a grid, dark where the {NEIGHBORS} nearest pairs need a larger L"
    )
    _draw_lines(before, grid.nodes, grid, shades)
    _draw_points(before, example.inputs, example.labels)

    _title(after, "The map", "the same grid where the interpolated map sends it")
    _draw_lines(after, grid.images, grid, shades)
    _draw_points(after, example.features, example.labels)

    bar = figure.colorbar(
        ScalarMappable(shades, CURVATURE_COLORS), cax=figure.add_axes((0.945, 0.2, 0.009, 0.5))
    )
    bar.set_label("smoothness L", color=INK)
    bar.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _title(panel: Axes, title: str, subtitle: str) -> None:
    panel.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=24)
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize=9.5, color=INK)
    panel.set_aspect("equal")
    panel.set(xlim=(-1.55, 1.55), ylim=(-1.55, 1.55), xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _colors(labels: Tensor) -> list[str]:
    return [CLASS_COLORS[int(label)] for label in labels]


def _draw_pairs(panel: Axes, example: Example) -> None:
    colors = _colors(example.labels)
    ends = torch.stack((example.inputs, example.features), 1).numpy()
    panel.add_collection(LineCollection(list(ends), colors=colors, linewidths=1, alpha=0.45))
    for (x, y), face in zip(ends.transpose(1, 2, 0), (colors, "white"), strict=True):
        panel.scatter(x, y, s=19, facecolors=face, edgecolors=colors, linewidths=1.1, zorder=3)


def _draw_points(panel: Axes, points: Tensor, labels: Tensor) -> None:
    x, y = points.T.numpy()
    panel.scatter(x, y, s=20, c=_colors(labels), edgecolors="white", linewidths=0.6, zorder=3)


def _draw_lines(panel: Axes, places: Array, grid: GridMap, shades: Normalize) -> None:
    """Grid lines in both directions, piece by piece in the color of the smoothness there."""
    across = (places, grid.smoothness)
    along = (places.swapaxes(0, 1), grid.smoothness.T)
    for points, smoothness in (across, along):
        for line, value in zip(points[:: grid.every], smoothness[:: grid.every], strict=True):
            panel.add_collection(
                LineCollection(
                    list(np.stack((line[:-1], line[1:]), 1)),
                    array=np.maximum(value[:-1], value[1:]),
                    cmap=CURVATURE_COLORS,
                    norm=shades,
                    linewidths=1.1,
                    capstyle="round",
                )
            )
