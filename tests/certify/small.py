"""Small models with a random head, and the truth about them by brute force and by search."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from otad.attacks.target import gain_of
from otad.cip import ExactCip
from otad.cip.whole_bank.potential import integrate_most, least_bank_smoothness
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import FCResNet, fc_resnet
from otad.nets.lipschitz import OrthogonalLinear, max_min

ANGLES = 96
SHARES = torch.tensor([0.2, 0.5, 0.75, 0.9, 0.98, 0.9999])


def random_net(drawn_by: torch.Generator, dim: int, task: str, std: tuple[float, ...]) -> FCResNet:
    outputs, scale = 3 if task == "classification" else 1, torch.tensor(std).expand(dim)
    net = fc_resnet((dim,), outputs, blocks=1, task=task, mean=0.3, std=scale)
    with torch.no_grad():
        net.head.weight.normal_(generator=drawn_by)
        net.head.bias.normal_(std=0.1, generator=drawn_by)
    return net.eval()


def bank_of(inputs: Tensor, features: Tensor, task: str) -> FeatureBank:
    dtype = torch.int64 if task == "classification" else torch.float32
    return FeatureBank(inputs, features, torch.zeros(len(inputs), dtype=dtype), "small")


# Settings of `plane_model` that cover every kind of local map.
SETTINGS: dict[str, dict[str, Any]] = {
    "one neighbor": {"n_neighbors": 1},
    "three": {"n_neighbors": 3},
    "eight": {"n_neighbors": 8, "noise": 0.2},
    "curved down": {"n_neighbors": 2, "strong_convexity": -0.5},
    "curved up": {"n_neighbors": 4, "strong_convexity": 0.4},
    "paper": {"n_neighbors": 4, "solver": {"mode": "paper"}},
    "paper, climbing": {
        "n_neighbors": 4, "strong_convexity": 0.2, "solver": {"mode": "paper", "climb": (0.5, 0.3)}
    },
    "spares": {"n_neighbors": 2, "solver": {"spares": 2, "max_smoothness": 2.5}},
    "dropping": {"n_neighbors": 5, "solver": {"max_smoothness": 2.0}},
    "copies": {"n_neighbors": 2, "copies": 10},
    "many points": {"n_neighbors": 2, "points": 200, "noise": 0.3},
    "other scales": {"n_neighbors": 2, "std": (0.3, 4.0)},
    "all neighbors": {"n_neighbors": 12, "points": 12, "noise": 0.02, "bend": 0.5},
    "all, curved down": {
        "n_neighbors": 12, "points": 12, "noise": 0.02, "strong_convexity": -0.3
    },
}  # fmt: skip


def plane_model(
    seed: int, *, points: int = 30, copies: int = 0, noise: float = 0.5, bend: float = 1.0,
    task: str = "classification", std: tuple[float, float] = (1.0, 1.0),
    on_failure: str = "fallback", solver: dict[str, Any] | None = None, **settings: Any,
) -> OTAD:  # fmt: skip
    """A bank in the plane with features bend * x + noise and a random head.

    The last `copies` points repeat the first ones, with features of their own.
    """
    drawn_by = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, 2, generator=drawn_by)
    if copies:
        inputs[-copies:] = inputs[:copies]
    features = bend * inputs + noise * torch.randn(points, 2, generator=drawn_by)
    net = random_net(drawn_by, 2, task, std)
    exact = ExactCip(on_failure=on_failure, **(solver or {}))
    settings = {"n_neighbors": 3, "solver": exact} | settings
    return OTAD(net, bank_of(inputs, features, task), **settings).eval()


class Folded(nn.Module):
    """The plane to `size` numbers: orthogonal matrices, a sine and sorted pairs between them, then
    times `scale`. No difference grows by more than that."""

    def __init__(self, seed: int, *, size: int = 4, scale: float = 1.5) -> None:
        super().__init__()
        drawn_by = torch.Generator().manual_seed(seed)
        self.first = OrthogonalLinear(2, 4, drawn_by)
        self.second = OrthogonalLinear(4, size, drawn_by)
        self.scale = scale

    @property
    def lipschitz(self) -> float:
        return self.scale * self.first.norm_bound() * self.second.norm_bound()

    def forward(self, x: Tensor) -> Tensor:
        folded = max_min(self.first(x))
        return self.scale * self.second(torch.cat([folded[:, :2], folded[:, 2:].sin()], 1))


def keyed(model: OTAD, metric: nn.Module) -> OTAD:
    """The same model with neighbors searched by the metric."""
    with torch.no_grad():
        keys = metric.eval()(model.bank_inputs * model.backbone.std + model.backbone.mean)
    return model.replace(metric=metric, keys=keys)


def keyed_plane(seed: int, metric: nn.Module | None = None, **settings: Any) -> OTAD:
    return keyed(plane_model(seed, **settings), metric or Folded(seed))


def global_model(
    seed: int, *, points: int = 40, dim: int = 2, bend: float = 0.0, noise: float = 0.0,
    smoothness: float | None = None, task: str = "classification", std: tuple[float, ...] = (1.0,),
) -> OTAD:  # fmt: skip
    """A bank with the gradient of a log-sum-exp as features, with noise only where l < 0 or L is
    given, and a random head."""
    drawn_by = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, dim, generator=drawn_by)
    corners = 2 * torch.randn(4, dim, generator=drawn_by)
    features = torch.softmax(inputs @ corners.T, 1) @ corners + 0.3 * inputs
    features += noise * torch.randn(points, dim, generator=drawn_by)
    net = random_net(drawn_by, dim, task, std)
    return on_global_map(net, bank_of(inputs, features, task), bend, smoothness)


def on_global_map(
    net: Any, bank: FeatureBank, bend: float = 0.0, smoothness: float | None = None, **given: Any
) -> OTAD:
    """The whole-bank model of these pairs; least L to 1 % where none is given."""
    if "potential" not in given:
        pairs = bank.inputs, bank.features
        given["potential"] = (
            least_bank_smoothness(*pairs, bend, tolerance=0.01)
            if smoothness is None
            else integrate_most(*pairs, smoothness, bend)
        )
    low = given["potential"].strong_convexity
    settings = {"n_neighbors": min(3, len(bank)), "strong_convexity": low, "scope": "global"}
    return OTAD(net.eval(), bank, **settings, **given).eval()


def queries(model: OTAD, count: int, seed: int) -> Tensor:
    """Inputs in the middle of the bank, or around it in global scope; two are bank points."""
    drawn_by = torch.Generator().manual_seed(seed)
    spread = 1.2 if model.scope == "global" else 0.8
    embedded = spread * torch.randn(count, model.bank_inputs.shape[1], generator=drawn_by)
    embedded[:2] = model.bank_inputs[:2]
    embedded = embedded[:, : model.backbone.std.numel()]  # without lifted coordinates
    return embedded * model.backbone.std + model.backbone.mean


def ring(radius: float, unit: Tensor | None = None) -> Tensor:
    """Steps (ANGLES * shares, 2) with |step / unit| up to just below the radius."""
    angle = torch.linspace(0, 2 * math.pi, ANGLES)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    circle = circle if unit is None else circle * unit
    return (min(radius, 10.0) * SHARES[:, None, None] * circle).reshape(-1, 2)


@torch.no_grad()
def broken(model: OTAD, x: Tensor, radius: Tensor, unit: Tensor | None = None) -> list[int]:
    """Rows whose prediction changes somewhere on a fine grid within their radius."""
    rows = (radius > 0).nonzero()[:, 0].tolist()
    if not rows:
        return []
    around = torch.stack([x[row] + ring(float(radius[row]), unit) for row in rows])
    answers = model(around.flatten(0, 1)).argmax(1).view(len(rows), -1)
    changed = (answers != model(x).argmax(1)[rows, None]).any(1)
    return [row for row, one in zip(rows, changed.tolist(), strict=True) if one]


@torch.no_grad()
def answers_around(model: OTAD, x: Tensor, eps: float) -> Tensor:
    """The answers of a regression (B,n) on a grid within eps of each input."""
    steps = ring(eps)[::3] if eps else torch.zeros(1, 2)
    return model((x[:, None] + steps).flatten(0, 1)).view(len(x), -1).double()


def distance_to(normals: np.ndarray, heights: np.ndarray) -> float:
    """min |u| subject to normals u >= heights, by its reduction to non-negative least squares."""
    stacked = np.vstack([normals.T, heights])
    target = np.eye(len(stacked))[-1]
    weights, residual = nnls(stacked, target)
    rest = stacked @ weights - target
    return float(np.linalg.norm(rest[:-1] / rest[-1])) if residual > 1e-9 else math.inf


def within(step: Tensor, radius: Tensor, unit: Tensor) -> Tensor:
    """Steps (B,d) shortened to just below their radius in |step / unit|."""
    length = (step / unit).double().norm(dim=1)
    most = (1 - 1e-6) * radius
    return step * (most / length.clamp_min(1e-300)).clamp_max(1.0)[:, None].to(step)


def best_gain(
    model: OTAD, x: Tensor, radius: Tensor, unit: Tensor | None = None, steps: int = 12
) -> Tensor:
    """The largest margin of another class (B,), above 0 where one has won, by search in the ball
    of each row: directions of a circle (in the plane), random ones, straight to bank points that
    vote for another class, and ascent of the exact gradient from the best of them and from x."""
    scale = torch.ones(x.shape[1]) if unit is None else unit
    radius = radius.clamp_max(20.0)
    with torch.no_grad():
        y = model(x).argmax(1)
    starts = _directions(model, x, y, scale)
    count = len(starts)
    starts = within((20 * starts).flatten(0, 1), radius.repeat(count), scale)
    with torch.no_grad():
        gain = gain_of(model(x.repeat(count, 1) + starts), y.repeat(count)).view(count, -1)
    best, place = gain.max(0)
    first = starts.view(count, *x.shape)[place, torch.arange(len(x))]
    moved, twice = torch.cat([first, torch.zeros_like(x)]), radius.repeat(2)
    for number in range(steps + 1):
        at = (x.repeat(2, 1) + moved).requires_grad_()
        gain = gain_of(model(at), y.repeat(2))
        best = torch.maximum(best, gain.detach().view(2, -1).amax(0))
        (gradient,) = torch.autograd.grad(gain.sum(), at)
        gradient = gradient * scale**2
        length = (gradient / scale).norm(dim=1, keepdim=True).clamp_min(1e-12)
        stride = twice[:, None].to(x) * (0.5 if number < steps // 2 else 0.05)
        moved = within(moved + stride * gradient / length, twice, scale)
    return best


@torch.no_grad()
def _directions(model: OTAD, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Where to go first (n,B,d)."""
    ways = [scale * torch.randn(8, *x.shape, generator=torch.Generator().manual_seed(0)).to(x)]
    if x.shape[1] == 2:
        angle = torch.linspace(0, 2 * math.pi, 25)[:-1]
        circle = scale * torch.stack([angle.cos(), angle.sin()], 1).to(x)
        ways.append(circle[:, None].expand(-1, *x.shape))
    places = model.bank_inputs[:, : x.shape[1]] * model.backbone.std + model.backbone.mean
    votes = model.backbone.head(model.bank_features).argmax(1)
    away = torch.cdist(x, places.to(x)).masked_fill(votes[None] == y[:, None], torch.inf)
    nearest = away.topk(min(3, len(places)), largest=False).indices
    ways.append((places.to(x)[nearest] - x[:, None]).movedim(1, 0))
    return torch.cat(ways)
