"""Small models of global scope, and searches for inputs that would refute their certificates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otad.attacks.base import gain_of
from otad.cip.whole_bank.potential import BankPotential, integrate_most, least_bank_smoothness
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import fc_resnet


def one_map_model(
    seed: int,
    *,
    points: int = 40,
    dim: int = 2,
    bend: float = 0.0,
    noise: float = 0.0,
    smoothness: float | None = None,
    task: str = "classification",
    std: tuple[float, ...] = (1.0,),
    classes: int = 3,
) -> OTAD:
    """A bank with the gradient of a log-sum-exp as features, with noise only where l < 0 or L is
    given, and a random head."""
    drawn_by = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, dim, generator=drawn_by)
    corners = 2 * torch.randn(4, dim, generator=drawn_by)
    features = torch.softmax(inputs @ corners.T, 1) @ corners + 0.3 * inputs
    features += noise * torch.randn(points, dim, generator=drawn_by)
    outputs = classes if task == "classification" else 1
    scale = torch.tensor(std).expand(dim)
    net = fc_resnet((dim,), outputs, blocks=1, task=task, mean=0.3, std=scale)
    with torch.no_grad():
        net.head.weight.normal_(generator=drawn_by)
        net.head.bias.normal_(std=0.1, generator=drawn_by)
    labels = torch.zeros(points, dtype=torch.int64 if outputs > 1 else torch.float32)
    return on_one_map(net, inputs, features, labels, bend=bend, smoothness=smoothness)


def on_one_map(
    net: Any,
    inputs: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    bend: float = 0.0,
    smoothness: float | None = None,
) -> OTAD:
    """The whole-bank model of these pairs; least L to 1 % where none is given."""
    if smoothness is None:
        potential = least_bank_smoothness(inputs, features, bend, tolerance=0.01)
    else:
        potential = integrate_most(inputs, features, smoothness, bend)
    return with_potential(net, inputs, features, labels, potential)


def with_potential(
    net: Any, inputs: Tensor, features: Tensor, labels: Tensor, potential: BankPotential
) -> OTAD:
    bank = FeatureBank(inputs, features, labels, "one map")
    settings: dict[str, Any] = {"n_neighbors": min(3, len(inputs)), "scope": "global"}
    settings["strong_convexity"] = potential.strong_convexity
    return OTAD(net.eval(), bank, potential=potential, **settings).eval()


def some_inputs(model: OTAD, count: int, seed: int) -> Tensor:
    """Around the bank, a few of them on its points."""
    drawn_by = torch.Generator().manual_seed(seed)
    bank = model.bank_inputs
    embedded = 1.2 * torch.randn(count, bank.shape[1], generator=drawn_by)
    embedded[:2] = bank[:2]
    shape = model.backbone.input_shape
    embedded = embedded[:, : model.backbone.std.numel()].reshape(count, *shape)
    return embedded * model.backbone.std + model.backbone.mean


def within(step: Tensor, radius: Tensor, unit: Tensor) -> Tensor:
    """Steps (B,d) shortened to just below their radius in |step / unit|."""
    length = (step / unit).double().norm(dim=1)
    most = (1 - 1e-6) * radius
    return step * (most / length.clamp_min(1e-300)).clamp_max(1.0)[:, None].to(step)


def strongest_gain(
    model: OTAD, x: Tensor, radius: Tensor, unit: Tensor | None = None, steps: int = 12
) -> Tensor:
    """The largest margin of another class (B,), above 0 where one has won, by search in the ball
    of each row: directions of a circle (in the plane), random ones, straight to bank points of
    other opinions, and ascent of the exact gradient from the best of them and from x."""
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


def _directions(model: OTAD, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Where to go first (n,B,d)."""
    drawn_by = torch.Generator().manual_seed(0)
    ways = [scale * torch.randn(8, *x.shape, generator=drawn_by).to(x)]
    if x.shape[1] == 2:
        angle = torch.linspace(0, 6.2832, 25)[:-1]
        circle = scale * torch.stack([angle.cos(), angle.sin()], 1).to(x)
        ways.append(circle[:, None].expand(-1, *x.shape))
    places = model.bank_inputs[:, : x.shape[1]] * model.backbone.std + model.backbone.mean
    with torch.no_grad():
        votes = model.backbone.head(model.bank_features).argmax(1)
    away = torch.cdist(x, places.to(x)).masked_fill(votes[None] == y[:, None], torch.inf)
    nearest = away.topk(min(3, len(places)), largest=False).indices
    ways.append((places.to(x)[nearest] - x[:, None]).movedim(1, 0))
    return torch.cat(ways)
