"""A picture of both scopes in the plane: maps of neighbors jump, one map for the whole bank bends.

    draw_scopes(Path("docs/images/scopes.png"))

makes the one of the documentation, from a lifted net trained on two moons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import lifted_net
from otad.training import TrainConfig, train

SIZE, NOISE, HIDDEN, NEIGHBORS = 240, 0.12, (32, 32), 5
RECIPE = TrainConfig(epochs=80, batch_size=40, learning_rate=0.05, energy_weight=0.05)
REACH = (-1.6, 2.6), (-1.25, 1.75)  # of the picture
NODES = 300  # of the grid along the first axis
QUERIES_AT_ONCE = 20_000

INK = "#333333"
COLORS = ("#12a594", "#e4572e")
MARGINS = LinearSegmentedColormap.from_list("margins", ("#12a594", "#f7f7f5", "#e4572e"))
STEEPNESS = LinearSegmentedColormap.from_list(
    "steepness", ("#f4f4f8", "#c3cbe0", "#7c83c4", "#5a2a83", "#240a3c")
)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Field:
    """Answers g on a grid of h x w nodes: by how much that for one class is above the other (h,w),
    and |g - g'| / |x - x'| from each node to the next, the larger of two directions (h-1,w-1)."""

    margin: Array
    stretch: Array


def two_moons(size: int = SIZE, *, noise: float = NOISE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two half circles that reach into each other: points (N,2), labels (N,)."""
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(size, generator=generator)
    y = torch.arange(size) % 2
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    points = torch.where(y[:, None] == 0, upper, lower)
    return points + noise * torch.randn(size, 2, generator=generator), y


def both_scopes(*, size: int = SIZE, epochs: int = RECIPE.epochs, seed: int = 0) -> list[OTAD]:
    """A local and a global model of the same curvature, on the bank of one net."""
    x, y = two_moons(size, seed=seed)
    net = lifted_net((2,), 2, hidden=HIDDEN, seed=seed)
    train(net, (x, y), replace(RECIPE, epochs=epochs, seed=seed))
    whole = defend(net, x, y, n_neighbors=NEIGHBORS, scope="global")
    local = defend(
        net,
        x,
        y,
        n_neighbors=NEIGHBORS,
        smoothness=whole.smoothness,
        strong_convexity=whole.strong_convexity,
    )
    return [local, whole]


@torch.no_grad()
def field_of(model: OTAD, *, nodes: int = NODES) -> Field:
    """In float64, so that a jump is not mistaken for rounding nor the other way round."""
    grid = _grid(nodes)
    inputs = grid.flatten(0, 1)
    answers = torch.cat([model(part) for part in inputs.split(QUERIES_AT_ONCE)])
    answers = answers.view(*grid.shape[:2], -1)
    across = (answers[:, 1:] - answers[:, :-1]).norm(dim=2)[:-1]
    along = (answers[1:] - answers[:-1]).norm(dim=2)[:, :-1]
    stretch = torch.maximum(across, along) / (grid[0, 1, 0] - grid[0, 0, 0])
    return Field((answers[..., 1] - answers[..., 0]).numpy(), stretch.numpy())


def draw_scopes(
    path: Path, *, models: list[OTAD] | None = None, nodes: int = NODES, seed: int = 0
) -> None:
    """Margin and steepness of a local and a global model side by side; one image file."""
    models = both_scopes(seed=seed) if models is None else models
    fields = [field_of(model.double(), nodes=nodes) for model in models]
    bound = models[1].smoothness - 1
    largest = float(np.abs([field.margin for field in fields]).max())
    steepest = max(float(field.stretch.max()) for field in fields)
    figure = Figure(figsize=(11.0, 8.4))
    figure.subplots_adjust(left=0.02, right=0.9, top=0.91, bottom=0.02, hspace=0.1, wspace=0.04)
    panels = figure.subplots(2, 2)
    names = (
        ("Local scope", f"each input by its {models[0].n_neighbors} nearest training points"),
        ("Global scope", f"one {bound:.2f}-Lipschitz map for the whole bank"),
    )
    for column, (model, field, name) in enumerate(zip(models, fields, names, strict=True)):
        top, bottom = panels[:, column]
        _title(top, *name)
        shown = top.imshow(field.margin, MARGINS, vmin=-largest, vmax=largest, **_frame())
        height, width = field.margin.shape
        axes = np.linspace(*REACH[0], width), np.linspace(*REACH[1], height)
        top.contour(*axes, field.margin, levels=[0.0], colors=[INK], linewidths=1.3)
        _draw_points(top, model)
        _title(
            bottom, "", f"how steep the answers are: {field.stretch.max():.3g} at most, on the grid"
        )
        steep = bottom.imshow(
            field.stretch.clip(0.05), STEEPNESS, norm=LogNorm(0.05, steepest), **_frame()
        )
    for row, (picture, label) in enumerate(
        ((shown, "answer, for one class less the other"), (steep, "|g(a) - g(b)| / |a - b|"))
    ):
        place = figure.add_axes((0.915, 0.56 - 0.485 * row, 0.012, 0.3))
        bar = figure.colorbar(picture, cax=place)
        bar.set_label(label, color=INK)
        bar.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _grid(nodes: int) -> Tensor:
    """Inputs (h,w,2), as far apart in both directions."""
    (left, right), (low, high) = REACH
    step = (right - left) / (nodes - 1)
    first = left + step * torch.arange(nodes, dtype=torch.float64)
    second = low + step * torch.arange(round((high - low) / step) + 1, dtype=torch.float64)
    return torch.stack(torch.meshgrid(first, second, indexing="xy"), dim=2)


def _frame() -> dict[str, Any]:
    return {"origin": "lower", "extent": (*REACH[0], *REACH[1]), "interpolation": "nearest"}


def _title(panel: Axes, title: str, subtitle: str) -> None:
    if title:
        panel.set_title(title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=22)
    panel.text(0, 1.02, subtitle, transform=panel.transAxes, fontsize=9.5, color=INK)
    panel.set(xlim=REACH[0], ylim=REACH[1], xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _draw_points(panel: Axes, model: OTAD) -> None:
    first, second = model.bank_inputs[:, :2].T.numpy()
    colors = [COLORS[int(label)] for label in model.bank_labels]
    panel.scatter(first, second, s=15, c=colors, edgecolors="white", linewidths=0.5, zorder=3)
