"""Small models whose neighbors are searched by a metric of known Lipschitz constant."""

from __future__ import annotations

import math
from typing import Any

import torch
from certify.small import plane_model
from torch import Tensor, nn

from otad.model.otad import OTAD
from otad.nets.lipschitz import OrthogonalLinear, max_min


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


class Straightened(nn.Module):
    """The embedding of `plane_model` itself, as a metric: 1 / the smallest std."""

    def __init__(self, std: tuple[float, float]) -> None:
        super().__init__()
        self.register_buffer("std", torch.tensor(std))

    @property
    def lipschitz(self) -> float:
        return 1 / float(self.std.double().min())

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.3) / self.std


def keyed(model: OTAD, metric: nn.Module) -> OTAD:
    """The same model with neighbors searched by the metric."""
    raw = model.bank_inputs * model.backbone.std + model.backbone.mean
    with torch.no_grad():
        keys = metric.eval()(raw)
    return model.replace(metric=metric, keys=keys)


def keyed_plane(seed: int, metric: nn.Module | None = None, **settings: Any) -> OTAD:
    return keyed(plane_model(seed, **settings), metric or Folded(seed))


def entry_distance(keys: Tensor, place: Tensor, point: int, searched: int) -> float:
    """Key space, by definition: the K-th largest distance of a bisector of `point` and another."""
    squares = (keys - place).square().sum(1)
    gaps = (keys[point] - keys).norm(dim=1)
    away = (squares[point] - squares) / (2 * gaps)
    away[point] = -math.inf
    return max(0.0, float(away.topk(searched).values[-1]))
