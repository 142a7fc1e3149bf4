"""Draw the pictures of `how_it_works.md` and of the theory.

python docs/pictures.py [FOLDER]      # docs/images unless another one is named

All but one of them show the same network. It sorts points of the plane into three classes.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import qmc
from torch import Tensor

import otad
from otad.cip import CipProblem, ExactCip
from otad.nets import FCResNet, fc_resnet
from otad.training import TrainConfig, train

INK, SOFT, GRID = "#1f2a30", "#66757f", "#c9d1d6"
COLORS = ("#0f766e", "#e05a33", "#7a5cc2")  # of the classes
LOCAL, GLOBAL = "#e05a33", "#0f766e"
REGIONS = LinearSegmentedColormap.from_list("regions", ["#d5e8e6", "#fae2da", "#e6e0f5"])
SLOPES = LinearSegmentedColormap.from_list("slopes", ["#ffffff", "#9db6b9", "#1f2a30"])
WIDTH, DPI = 4.8, 220  # inches, so that text is readable on a phone too
EXTENT, GAP, POINTS = 1.5, 0.3, 160  # half the side of the square, between classes, drawn points
NEIGHBORS, ENERGY, EPOCHS = 3, 0.3, 60
NODES = 241  # of a grid of queries along each axis
ACROSS = 0.85  # first coordinate of the line of queries; its second one varies
PLACE = (0.0, -0.5)  # of the query whose neighbors are shown
CERTIFIED = ((0.85, 1.1), (-0.9, -0.4), (-0.35, -1.15), (0.6, -0.75), (1.15, 0.0), (-0.4, 0.85))

Array = NDArray[np.float64]


def make_points() -> tuple[Tensor, Tensor]:
    """Points (n,2) of a square, in three sectors with gaps between them, and their class (n,)."""
    points = EXTENT * (2 * torch.from_numpy(qmc.Halton(2, rng=0).random(POINTS)) - 1)
    angles = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    sides = points @ torch.stack((angles.cos(), angles.sin()))
    first, second = sides.topk(2, dim=1).values.T
    is_clear = first - second > GAP
    return points[is_clear], sides.argmax(1)[is_clear]


@cache
def trained(energy_weight: float, epochs: int = EPOCHS) -> FCResNet:
    """A residual network in float64, to tell jumps from rounding."""
    net = fc_resnet((2,), 3, blocks=5, hidden=32, seed=1).double()
    settings = TrainConfig(epochs=epochs, batch_size=32, learning_rate=0.01)
    train(net, make_points(), replace(settings, energy_weight=energy_weight))
    return net


@cache
def defended(scope: str, epochs: int = EPOCHS) -> otad.OTAD:
    """The network with the energy regularizer, defended by local maps or by the global map."""
    net = trained(ENERGY, epochs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "defense")
        return otad.defend(net, *make_points(), scope=scope, n_neighbors=NEIGHBORS)


@torch.no_grad()
def paths_of(net: FCResNet, x: Tensor) -> Tensor:
    """Where points (n,2) are before, between and after the m blocks (m + 1,n,2)."""
    places = [net.embed(x)]
    for block in net.blocks:
        places.append(places[-1] + block(places[-1]))
    return torch.stack(places)


@torch.no_grad()
def field_of(model: otad.OTAD, nodes: int = NODES) -> tuple[Array, Array]:
    """The class at each node of a grid (n,n), and the slope |g(a) - g(b)| / |a - b| of the logits g
    between neighboring nodes, the larger one of two directions (n-1,n-1)."""
    axis = torch.linspace(-EXTENT, EXTENT, nodes, dtype=torch.float64)
    logits = model(torch.cartesian_prod(axis, axis)).view(nodes, nodes, -1)
    across = (logits[1:] - logits[:-1]).norm(dim=2)[:, :-1]
    along = (logits[:, 1:] - logits[:, :-1]).norm(dim=2)[:-1]
    slope = torch.maximum(across, along) / (axis[1] - axis[0])
    return logits.argmax(2).double().numpy(), slope.numpy()


def canvas(height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    return plt.subplots(rows, columns, figsize=(WIDTH, height), dpi=DPI, **options)


def plane(panel: Axes, title: str, reach: float = EXTENT + 0.1) -> None:
    panel.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], title=title)
    panel.set_aspect("equal")
    panel.spines[:].set_visible(False)


def scatter(panel: Axes, points: Tensor, labels: Tensor, **look: Any) -> None:
    colors = [COLORS[label] for label in labels.tolist()]
    panel.scatter(*points.T, **{"c": colors, "s": 9, "linewidths": 0, "zorder": 3, **look})


@torch.no_grad()
def draw_transport() -> Figure:
    x, y = make_points()
    figure, panels = canvas(3.2, 1, 2)
    for panel, weight in zip(panels, (0.0, ENERGY), strict=True):
        net = trained(weight)
        paths = paths_of(net, x)
        reach = 1.05 * float(paths.abs().max())
        lengths = (paths[1:] - paths[:-1]).norm(dim=2).sum(0) / (paths[-1] - paths[0]).norm(dim=1)
        energy = float(net.transport(net.embed(x))[1].mean())
        named = "with the energy" if weight else "without the energy"
        plane(panel, f"{named}\nmean energy: {energy:.2g}", reach)
        panel.set_xlabel(f"path length: {float(lengths.mean()):.2f} x straight")
        side = 2 * EXTENT
        panel.add_patch(Rectangle((-EXTENT, -EXTENT), side, side, fill=False, ec=SOFT, lw=0.7))
        colors = [COLORS[label] for label in y.tolist()]
        lines = LineCollection(list(paths.transpose(0, 1)), colors=colors, linewidths=0.7)
        panel.add_collection(lines)
        scatter(panel, paths[0], y, s=6, c="white", edgecolors=colors, linewidths=0.6)
        scatter(panel, paths[-1], y)
    return figure


def draw_neighbors() -> Figure:
    (x, y), model = make_points(), defended("local")
    query = torch.tensor([PLACE], dtype=torch.float64)
    with torch.no_grad():
        trace, features = model.trace(query), paths_of(trained(ENERGY), x)[-1]
    rows, weights = trace.neighbors.indices[0], trace.solution.multipliers[0].tolist()
    figure, panels = canvas(2.75, 1, 2)
    titles = f"a query and its {NEIGHBORS} neighbors", "their features, the answer"
    sides = (x, query[0]), (features, trace.solution.image[0])
    for panel, title, (points, star) in zip(panels, titles, sides, strict=True):
        plane(panel, title, 1.05 * float(points.abs().max()))
        scatter(panel, points, y, alpha=0.35)
        for row, weight in zip(rows.tolist(), weights, strict=True):
            ends = torch.stack((points[row], star))
            panel.plot(*ends.T, color=INK, lw=0.5 + 3 * weight, zorder=2)
        scatter(panel, points[rows], y[rows], s=34)
        panel.scatter(*star, marker="*", s=110, c=INK, edgecolors="white", lw=0.7, zorder=4)
    for row, weight in zip(rows.tolist(), weights, strict=True):
        away = 13 * torch.nn.functional.normalize(features[row] - star, dim=0)
        look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center"}
        panels[1].annotate(f"{weight:.0%}", features[row].tolist(), away.tolist(), **look)
    return figure


def solve_line(smoothness: float, convexity: float, potential: str) -> tuple[Array, Array, Array]:
    """Queries (n,) of the real line, the potential through four pairs, and its gradient."""
    queries = torch.linspace(-2.2, 2.2, 441, dtype=torch.float64)[:, None]
    anchors, images = (line.expand(len(queries), 4)[..., None] for line in PAIRS)
    problem = CipProblem(queries, anchors, images, smoothness, convexity)
    found = ExactCip(potential=potential)(problem)
    value = found.value - found.potentials[:, 0]
    return queries[:, 0].numpy(), value.numpy(), found.image[:, 0].numpy()


PAIRS = torch.tensor([[-1.5, -0.6, 0.6, 1.5], [-0.9, -0.5, 0.55, 0.9]], dtype=torch.float64)


def draw_potential() -> Figure:
    figure, (top, middle, bottom) = canvas(6.0, 3, 1, sharex=True)
    line, *low = solve_line(1.5, 0.0, "lowest")
    high, canonical = (solve_line(1.5, 0.0, name)[1:] for name in ("highest", "canonical"))
    for panel, one, other, chosen in zip((top, middle), low, high, canonical, strict=True):
        panel.fill_between(
            line, one, other, color=COLORS[0], alpha=0.2, lw=0, label="lowest to highest"
        )
        panel.plot(line, chosen, color=COLORS[0], lw=1.8, label="chosen")
    tangent = np.array([-0.28, 0.28])
    heights = np.interp(PAIRS[0].numpy(), line, canonical[0])
    for place, slope, height in zip(*PAIRS.tolist(), heights.tolist(), strict=True):
        top.plot(place + tangent, height + slope * tangent, color=INK, lw=1.4)
        top.plot(place, height, "o", color=INK, ms=4.5)
    for smoothness, convexity, color in ((1.0, 0.0, 0), (6.0, 0.0, 1), (6.0, 0.3, 2)):
        _, _, gradient = solve_line(smoothness, convexity, "canonical")
        label = f"L = {smoothness:g}, l = {convexity:g}"
        bottom.plot(line, gradient, color=COLORS[color], lw=1.6, label=label)
    for panel in (middle, bottom):
        panel.plot(*PAIRS.numpy(), "o", color=INK, ms=4.5, zorder=4)
    top.set(title="potential h through four neighbors, with given slopes")
    middle.set(title="its gradient: the map to features (L = 1.5, l = 0)")
    bottom.set(title="the map for other bounds L and l on its slope", xlabel="query")
    for panel in (top, middle, bottom):
        panel.legend(loc="upper left" if panel is not top else "upper center")
    return figure


@torch.no_grad()
def draw_map() -> Figure:
    (x, y), model = make_points(), defended("local")
    figure, panels = canvas(2.75, 1, 2)
    ticks, fine = (torch.linspace(-EXTENT, EXTENT, n, dtype=torch.float64) for n in (19, 325))
    grid = torch.stack(torch.meshgrid(ticks, fine, indexing="ij"), 2)
    lines = torch.cat((grid, grid.flip(2)))
    images = model.trace(lines.flatten(0, 1)).solution.image.view_as(lines)
    features = paths_of(trained(ENERGY), x)[-1]
    titles = "queries on a grid", "their interpolated features"
    for panel, title, curves, points in zip(
        panels, titles, (lines, images), (x, features), strict=True
    ):
        plane(panel, title, 1.05 * float(curves.abs().max()))
        panel.add_collection(LineCollection(list(curves), colors=SOFT, linewidths=0.5))
        scatter(panel, points, y)
    return figure


@torch.no_grad()
def draw_jump() -> Figure:
    (x, y), model = make_points(), defended("local")
    second = torch.linspace(0.1, 1.1, 2001, dtype=torch.float64)
    queries = torch.stack((torch.full_like(second, ACROSS), second), 1)
    trace = model.trace(queries)
    sets = trace.neighbors.indices.sort(1).values
    changes = (sets[1:] != sets[:-1]).any(1).nonzero()[:, 0].tolist()
    figure, (left, right) = canvas(2.9, 1, 2, width_ratios=(2, 3))
    local, smooth = (it[:, 0] - it[:, 2] for it in (trace.outputs, defended("global")(queries)))
    for start, end in pairwise([0, *(row + 1 for row in changes), len(second)]):
        right.plot(second[start:end], local[start:end], color=LOCAL, lw=2)
    right.plot(second, smooth, color=GLOBAL, lw=1.4)
    for row in changes:
        right.axvline(float(second[row]), color=GRID, lw=0.8, zorder=0)
    right.axhline(0, color=INK, lw=0.8)
    right.text(0.12, 1.5, "local maps", color=LOCAL, fontsize=9, weight="bold")
    right.text(0.12, 1.0, "global map", color=GLOBAL, fontsize=9, weight="bold")
    right.set(title="margin along the line", xlabel="place (gray: neighbors change)")
    plane(left, "a line of queries")
    left.set(xlim=(0.3, 1.4), ylim=(-0.35, 1.55))
    scatter(left, x, y, s=22)
    left.plot(*queries.T, color=INK, lw=1.2)
    for row in changes:
        left.plot(*queries[row], "_", color=INK, ms=7)
    return figure


def draw_scopes() -> Figure:
    x, y = make_points()
    models = {"local maps": defended("local"), "global map": defended("global")}
    fields = [field_of(model) for model in models.values()]
    figure, panels = canvas(5.3, 2, 2)
    look: dict[str, Any] = {"origin": "lower", "extent": (-EXTENT, EXTENT, -EXTENT, EXTENT)}
    steepest = max(float(slope.max()) for _, slope in fields)
    for (top, bottom), name, (classes, slope) in zip(panels.T, models, fields, strict=True):
        top.imshow(classes.T, cmap=REGIONS, interpolation="nearest", **look)
        scatter(top, x, y)
        bottom.imshow(slope.T, cmap=SLOPES, norm=LogNorm(1, steepest), **look)
        plane(top, f"{name}: answers", EXTENT)
        plane(bottom, f"slope: at most {slope.max():.3g}", EXTENT)
    return figure


@torch.no_grad()
def draw_certificate() -> Figure:
    (x, y), model = make_points(), defended("global")
    queries = torch.tensor(CERTIFIED, dtype=torch.float64)
    certificate = otad.certify(model, queries)
    classes, _ = field_of(model)
    figure, (left, right) = canvas(2.9, 1, 2)
    extent = (-EXTENT, EXTENT, -EXTENT, EXTENT)
    left.imshow(classes.T, cmap=REGIONS, origin="lower", extent=extent, interpolation="nearest")
    scatter(left, x, y, alpha=0.35, s=6)
    for place, radius in zip(CERTIFIED, certificate.radius.tolist(), strict=True):
        left.add_patch(Circle(place, radius, fill=False, ec=INK, lw=1.2))
    left.scatter(*queries.T, c=INK, s=12, zorder=4)
    plane(left, "certified radii", EXTENT)
    place, radius = queries[0], float(certificate.radius[0])
    angles = torch.linspace(0, 2 * torch.pi, 361, dtype=torch.float64)[:, None]
    steps = torch.linspace(0, 1.2, 241, dtype=torch.float64)
    rays = place + steps[:, None, None] * torch.cat((angles.cos(), angles.sin()), 1)
    logits = model(rays.flatten(0, 1)).view(len(steps), len(angles), -1)
    own = int(certificate.prediction[0])
    others = [label for label in range(3) if label != own]
    lead = (logits[..., own] - logits[..., others].amax(2)).amin(1)
    corner: dict[str, Any] = {"transform": right.transAxes, "ha": "right", "fontsize": 9}
    right.plot(steps, lead, color=GLOBAL, lw=1.8)
    bound = float(lead[0]) * (1 - steps / radius)
    right.plot(steps, bound, color=INK, lw=1.2, ls="--")
    right.axhline(0, color=INK, lw=0.8)
    right.plot(radius, 0, "o", color=INK, ms=5)
    right.set(ylim=(-2, None), title="margin of one query", xlabel="distance from the query")
    right.text(0.98, 0.84, "smallest margin\nat this distance", color=GLOBAL, **corner)
    right.text(0.36, 0.08, "proved\nbound", color=INK, **corner)
    return figure


PICTURES = {
    "transport": draw_transport,
    "neighbors": draw_neighbors,
    "potential": draw_potential,
    "map": draw_map,
    "jump": draw_jump,
    "scopes": draw_scopes,
    "certificate": draw_certificate,
}


def draw_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.use("agg")
    with plt.style.context("otad.report.gallery"):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(drawn := BytesIO())
            plt.close(figure)
            with Image.open(drawn) as picture:
                few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
                few.save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    draw_all(Path(*sys.argv[1:2] or [Path(__file__).parent / "images"]))
