"""The method in the plane: a bank of pairs and the map that interpolates them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import qmc
from torch import Tensor

from otad.cip import CipProblem, ExactCip

INK = "#333333"
CLASS_COLORS = ("#12a594", "#e4572e", "#f2a900")
SHADES = ("#c3cbe0", "#7c83c4", "#5a2a83", "#240a3c")
CURVATURE = LinearSegmentedColormap.from_list("curvature", SHADES)

MAP_POINTS, MAP_NEIGHBORS, MAP_SMOOTHNESS = 140, 8, 1.0
LINES, EVERY = 25, 6  # grid lines in each direction, nodes from one line to the next
MAP_EXTENT = 1.5  # bank and grid fill the square [-MAP_EXTENT, MAP_EXTENT]^2

Array = NDArray[np.float64]
Bank = tuple[Tensor, Tensor, Tensor]  # inputs and features (N,2), labels (N,)


def make_bank() -> Bank:
    """Points that a convex potential separates into three classes: features are the gradient of
    (2/5) logsumexp(5/2 <c_i, x>) + |x|^2 / 8 for three corners c_i, plus a little noise."""
    spread = qmc.Halton(2, rng=0).random(MAP_POINTS)
    inputs = MAP_EXTENT * (2 * torch.from_numpy(spread) - 1)
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    corners = torch.stack((angles.cos(), angles.sin()), 1)
    features = torch.softmax(2.5 * inputs @ corners.T, 1) @ corners + inputs / 4
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(features.shape, generator=generator, dtype=torch.float64)
    return inputs, features + 0.01 * noise, (inputs @ corners.T).argmax(1)


def interpolate_grid(bank: Bank) -> tuple[Array, Array, Array]:
    """Nodes (n,n,2) of a grid, their images by the nearest bank points, the smoothness (n,n)."""
    axis = torch.linspace(-MAP_EXTENT, MAP_EXTENT, (LINES - 1) * EVERY + 1, dtype=torch.float64)
    nodes = torch.cartesian_prod(axis, axis)
    nearest = torch.cdist(nodes, bank[0]).topk(MAP_NEIGHBORS, largest=False).indices
    solution = ExactCip()(CipProblem(nodes, bank[0][nearest], bank[1][nearest], MAP_SMOOTHNESS))
    n = len(axis)
    places, images = (it.view(n, n, 2).numpy() for it in (nodes, solution.image))
    return places, images, solution.smoothness.view(n, n).numpy()


def draw_map(path: Path) -> None:
    """Draw the bank, a grid over its inputs, and the same grid sent through the map."""
    inputs, features, labels = pairs = make_bank()
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
    for panel, (title, subtitle) in zip((bank, before, after), titles, strict=True):
        panel.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=23)
        panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize=9.5, color=INK)
        panel.set_aspect("equal")
        panel.set(xlim=limits, ylim=limits, xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    look: dict[str, Any] = {"cmap": CURVATURE, "norm": norm, "linewidths": 1.1, "capstyle": "round"}
    colors = [CLASS_COLORS[label] for label in labels.tolist()]
    ends = torch.stack((inputs, features), 1).numpy()
    bank.add_collection(LineCollection(list(ends), colors=colors, linewidths=1, alpha=0.45))
    for (x, y), face in zip(ends.transpose(1, 2, 0), (colors, "white"), strict=True):
        bank.scatter(x, y, s=19, facecolors=face, edgecolors=colors, linewidths=1.1, zorder=3)
    for panel, places, points in ((before, nodes, inputs), (after, images, features)):
        # Grid lines in both directions, each segment in the color of the smoothness there.
        for lines, values in ((places, smoothness), (places.swapaxes(0, 1), smoothness.T)):
            for line, value in zip(lines[::EVERY], values[::EVERY], strict=True):
                segments = list(np.stack((line[:-1], line[1:]), 1))
                larger = np.maximum(value[:-1], value[1:])
                panel.add_collection(LineCollection(segments, array=larger, **look))
        at = points.T.numpy()
        panel.scatter(*at, s=20, c=colors, edgecolors="white", linewidths=0.6, zorder=3)
    place = figure.add_axes((0.945, 0.2, 0.009, 0.5))
    bar = figure.colorbar(ScalarMappable(norm, CURVATURE), cax=place)
    bar.set_label("smoothness L", color=INK)
    bar.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
