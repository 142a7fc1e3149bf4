"""How far a network, its bank and its model are from the gradient of a convex, L-smooth potential.

Such a gradient is monotone, <z_i - z_j, x_i - x_j> >= 0, and stretches distances by at most L."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_count, check_tensor, require
from otad.cip import least_smoothness
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.search.neighbors import Neighbors

Map = Callable[[Tensor], Tensor]
"""Maps points (B,d) to features (B,d'). It need not be differentiable."""
PAIRED_ROWS = 256  # rows that are compared at a time


@dataclass(frozen=True)
class Distribution:
    """A summary of `count` values.

    Infinity counts as the largest value, and NaN does not count. Quantiles are values that occur,
    not means of two values, so that infinity is not mixed into them."""

    count: int
    mean: float
    least: float
    median: float
    quantile_90: float
    quantile_99: float
    most: float

    @property
    def marks(self) -> tuple[float, ...]:
        """The least value, the median, the 90% and 99% quantiles, and the largest value."""
        return self.least, self.median, self.quantile_90, self.quantile_99, self.most

    @staticmethod
    def of(values: Tensor) -> Distribution | None:
        """Return the distribution of values (B,), or None if all of them are NaN."""
        numbers = values.detach().double().cpu().numpy()
        numbers = numbers[~np.isnan(numbers)]
        if len(numbers) == 0:
            return None
        marks = np.quantile(numbers, [0.0, 0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
        return Distribution(len(numbers), float(numbers.mean()), *(float(mark) for mark in marks))


@torch.no_grad()
def changed_by_potential(model: OTAD, embedded: Tensor, neighbors: Neighbors) -> Tensor:
    """Return whether each class prediction (B,) differs between the two extreme potentials."""
    solver = model.answerer.exact_solver
    if solver is None:
        given = type(model.answerer).__name__
        raise InputError(f"answerer: expected one that chooses among potentials, got {given}")
    problem = model.problem(embedded, neighbors.indices)
    images = (replace(solver, potential=rule)(problem).image for rule in ("lowest", "highest"))
    low, high = (model.backbone.head(image).argmax(1) for image in images)
    changed: Tensor = low != high
    return changed


@torch.no_grad()
def neighborhood_smoothness(model: OTAD, x: Tensor) -> Tensor:
    """Return the least L (B,) in float64 for which the K neighbors of each input have a potential.

    It is infinite if no L is enough. The strong convexity is the model's own, and the scope does
    not matter."""
    embedded = model.backbone.embed(model.backbone.check_inputs(x))
    indices = model.neighbors(model.query_keys(x), model.n_neighbors).indices
    return least_smoothness(model.problem(embedded, indices))


@torch.no_grad()
def transport_energy(backbone: Backbone, x: Tensor) -> Tensor:
    """Return sum_k |x^k - x^(k-1)|^2 (B,), the energy of the path from an input to its feature."""
    return backbone.transport(backbone.embed(backbone.check_inputs(x)))[1]


@torch.no_grad()
def monotonicity_violations(model: OTAD, rows: Tensor | None = None) -> float:
    """Return the share of pairs with <z_i - z_j, x_i - x_j> < 0, which no potential allows.

    Point i runs over `rows` of the bank (int64, all by default), and j over its K nearest other
    bank points."""
    inputs, features = model.bank_inputs, model.bank_features
    rows = torch.arange(len(inputs)) if rows is None else rows
    check_tensor(rows, "rows", "B", dtypes=(torch.int64,))
    violations = pairs = 0
    for batch in rows.to(inputs.device).split(PAIRED_ROWS):
        points = model.bank_points[batch]
        found = model.neighbors(points, model.n_neighbors, exclude=batch).indices
        found = found.to(inputs.device)
        step = inputs[batch].double()[:, None] - inputs[found].double()
        image_step = features[batch].double()[:, None] - features[found].double()
        products = (step * image_step).sum(2)
        violations += int((products < 0).sum())
        pairs += products.numel()
    return violations / pairs


def defended_map(model: OTAD) -> Map:
    """Return the map from embedded inputs (B,d) to the features (B,d) of the defense."""
    require(model.metric is None, "model", "neighbors by embedded inputs", "a metric of its own")
    return lambda embedded: model.solve(embedded).solution.image


def local_lipschitz(
    function: Map, points: Tensor, *, radius: float, generator: torch.Generator, steps: int = 20
) -> Tensor:
    """Return the largest |f(x + e) - f(x)| / |e| (B,) found with |e| = `radius` at x (B,d).

    It is a lower bound on the Lipschitz constant. Each step takes the gradient of
    |f(x + e) - f(x)|^2 in e as the next direction, or a random direction where it is zero. For a
    linear f this is the power method."""
    check_tensor(points, "points", "B,d")
    check_count(steps, "steps", least=0)
    require(0 < radius < float("inf"), "radius", "a positive number", repr(radius))
    batches = points.detach().split(PAIRED_ROWS)
    return torch.cat([_steepest(function, one, radius, steps, generator) for one in batches])


def _steepest(
    function: Map, points: Tensor, radius: float, steps: int, generator: torch.Generator
) -> Tensor:
    with torch.no_grad():
        center = function(points)

    def draw() -> Tensor:
        return torch.randn(points.shape, generator=generator, device=generator.device).to(points)

    best, direction = points.new_zeros(len(points)), draw()
    for _ in range(steps + 1):
        moved = points + radius * direction / direction.norm(dim=1, keepdim=True)
        moved.requires_grad_()
        with torch.enable_grad():
            size = (function(moved) - center).square().sum(1)
        way = (moved.detach() - points).norm(dim=1)  # the radius, up to rounding
        best = torch.maximum(best, size.detach().sqrt() / way)
        gradient, direction = None, draw()
        if size.requires_grad:
            (gradient,) = torch.autograd.grad(size.sum(), moved, allow_unused=True)
        if gradient is not None:
            direction = torch.where(gradient.norm(dim=1, keepdim=True) > 0, gradient, direction)
    return best
