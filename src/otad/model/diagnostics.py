"""How close a learned map x_i -> z_i is to optimal transport, and how smooth the defended one is.

The gradient of a convex L-smooth potential is monotone, <z_i - z_j, x_i - x_j> >= 0, and moves
nearby points by at most L times their distance. These functions measure how far a trained net, its
bank and the model are from that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_count, check_tensor
from otad.cip import BankProblem, least_smoothness
from otad.errors import InputError
from otad.model.answerers import Answer
from otad.model.otad import OTAD
from otad.nets import Backbone
from otad.search.neighbors import Neighbors

Map = Callable[[Tensor], Tensor]
"""Points (B,d) -> features (B,d'), differentiable or not."""


@dataclass(frozen=True)
class Distribution:
    """A summary of `count` values. Infinity is the largest of values; NaN does not count.

    A quantile is the least value that so many percent do not exceed: one that occurs, so that
    infinity is not mixed into it.
    """

    count: int
    mean: float
    least: float
    median: float
    quantile_90: float
    quantile_99: float
    most: float

    @property
    def marks(self) -> tuple[float, ...]:
        """Least, median, 90 %, 99 %, most."""
        return self.least, self.median, self.quantile_90, self.quantile_99, self.most

    @staticmethod
    def of(values: Tensor) -> Distribution | None:
        """The distribution of values (B,); None where all of them are NaN."""
        numbers = values.detach().double().cpu().numpy()
        numbers = numbers[~np.isnan(numbers)]
        if len(numbers) == 0:
            return None
        marks = np.quantile(numbers, [0.0, 0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
        return Distribution(len(numbers), float(numbers.mean()), *(float(mark) for mark in marks))


def problem_of(model: OTAD, embedded: Tensor, indices: Tensor) -> BankProblem:
    """The convex integration problem of embedded inputs (B,d) with these bank points (B,K)."""
    return model.problem(embedded, indices, model.smoothness, model.strong_convexity)


@torch.no_grad()
def residual_of(model: OTAD, embedded: Tensor, answer: Answer) -> Tensor:
    """How far an answer (or trace) for embedded inputs (B,d) is from exact, (B,) in float64,
    without a unit: see `Answerer.residual`."""
    return model.answerer.residual(model, embedded, answer)


def chooses_potential(model: OTAD) -> bool:
    """Whether a class prediction may depend on which of the feasible potentials is taken."""
    return model.answerer.chooses_potential and model.backbone.task == "classification"


@torch.no_grad()
def changed_by_potential(model: OTAD, embedded: Tensor, neighbors: Neighbors) -> Tensor:
    """Whether a class prediction (B,) differs between the two extreme potentials, for a model that
    `chooses_potential`."""
    low, high = (
        model.backbone.head(one.solve(model, embedded, neighbors.indices).image).argmax(1)
        for one in model.answerer.extremes()
    )
    changed: Tensor = low != high
    return changed


@torch.no_grad()
def neighborhood_smoothness(model: OTAD, x: Tensor, *, batch_size: int = 1024) -> Tensor:
    """The least L (B,) for which the K neighbors of each input are integrable, in float64.

    It is what the data require around an input, in either scope, with the model's strong convexity;
    infinite where no L is enough. See `least_smoothness`.
    """
    found = []
    for batch in model.backbone.check_inputs(x).split(batch_size):
        embedded = model.backbone.embed(batch)
        indices = model.neighbors(model.query_keys(batch), model.n_neighbors).indices
        found.append(least_smoothness(problem_of(model, embedded, indices)))
    return torch.cat(found)


@torch.no_grad()
def transport_energy(backbone: Backbone, x: Tensor, *, batch_size: int = 1024) -> Tensor:
    """sum_k |x^k - x^(k-1)|^2 (B,): the energy of the path from each input to its feature."""
    batches = backbone.check_inputs(x).split(batch_size)
    return torch.cat([backbone.transport(backbone.embed(batch))[1] for batch in batches])


@torch.no_grad()
def monotonicity_violations(
    model: OTAD, rows: Tensor | None = None, *, batch_size: int = 256
) -> float:
    """The share of pairs with <z_i - z_j, x_i - x_j> < 0, which no convex potential allows.

    i runs over `rows` of the bank (int64, all by default), j over the K nearest other bank points
    of each.
    """
    inputs, features = model.bank_inputs, model.bank_features
    if rows is None:
        rows = torch.arange(len(inputs))
    check_tensor(rows, "rows", "B", dtypes=(torch.int64,))
    violations = pairs = 0
    for batch in rows.to(inputs.device).split(batch_size):
        points = model.bank_points[batch]
        found = model.neighbors(points, model.n_neighbors, exclude=batch).indices
        found = found.to(inputs.device)
        step = inputs[batch].double()[:, None] - inputs[found].double()
        image_step = features[batch].double()[:, None] - features[found].double()
        products = (step * image_step).sum(2)
        violations += int((products < 0).sum())
        pairs += products.numel()
    return violations / pairs


@torch.no_grad()
def relative_error(model: OTAD, x: Tensor, *, batch_size: int = 1024) -> Tensor:
    """The paper's RE (B,): |R(x) - f(x)|^2 / |R(x)|^2 between the features of the net, R, and of
    the defense, f."""
    found = []
    for batch in model.backbone.check_inputs(x).split(batch_size):
        embedded = model.backbone.embed(batch)
        learned = model.backbone.transport(embedded)[0]
        keys = None if model.metric is None else model.query_keys(batch)
        defended = model.solve(embedded, keys).solution.image
        found.append((learned - defended).square().sum(1) / learned.square().sum(1))
    return torch.cat(found)


def defended_map(model: OTAD) -> Map:
    """Embedded inputs (B,d) -> features of the defense (B,d)."""
    if model.metric is not None:
        raise InputError("model: expected neighbors by embedded inputs, got a metric of its own")
    return lambda embedded: model.solve(embedded).solution.image


def local_lipschitz(
    function: Map,
    points: Tensor,
    *,
    radius: float,
    generator: torch.Generator,
    steps: int = 20,
    batch_size: int = 256,
) -> Tensor:
    """The largest |f(x + e) - f(x)| / |e| found with |e| = `radius`, for each point x (B,d).

    The paper measures the local Lipschitz constant at the noise level of an attack. This one is
    attacked, too, and gives a lower bound. Each step takes the gradient of
    |f(x + e) - f(x)|^2 in e as the next direction, which for a linear f is the power method for
    its largest singular value. Where the gradient is zero, a random direction is tried.
    """
    check_tensor(points, "points", "B,d")
    check_count(steps, "steps", least=0)
    if not 0 < radius < float("inf"):
        raise InputError(f"radius: expected a positive number, got {radius!r}")
    found = [
        _steepest(function, batch.detach(), radius, steps, generator)
        for batch in points.split(batch_size)
    ]
    return torch.cat(found)


def _steepest(
    function: Map, points: Tensor, radius: float, steps: int, generator: torch.Generator
) -> Tensor:
    with torch.no_grad():
        center = function(points)
    best = points.new_zeros(len(points))
    direction = _random_like(points, generator)
    for _ in range(steps + 1):
        moved = points + radius * direction / direction.norm(dim=1, keepdim=True)
        moved.requires_grad_()
        with torch.enable_grad():
            shift = function(moved) - center
            size = shift.square().sum(1)
        way = (moved.detach() - points).norm(dim=1)  # radius, but for rounding
        best = torch.maximum(best, size.detach().sqrt() / way)
        gradient = None
        if size.requires_grad:
            (gradient,) = torch.autograd.grad(size.sum(), moved, allow_unused=True)
        direction = _random_like(points, generator)
        if gradient is not None:
            moving = gradient.norm(dim=1, keepdim=True) > 0
            direction = torch.where(moving, gradient, direction)
    return best


def _random_like(points: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(points.shape, generator=generator, device=generator.device)
    return drawn.to(points)
