"""Small models in the plane, and the truth about them by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from otad.cip import ExactCip
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD
from otad.nets import fc_resnet

ANGLES = 144
SHARES = torch.tensor([0.2, 0.5, 0.75, 0.9, 0.98, 0.9999])


def plane_model(
    seed: int,
    *,
    points: int = 30,
    copies: int = 0,
    noise: float = 0.5,
    bend: float = 1.0,
    task: str = "classification",
    std: tuple[float, float] = (1.0, 1.0),
    on_failure: str = "fallback",
    solver: dict[str, Any] | None = None,
    **settings: Any,
) -> OTAD:
    """A bank in the plane with features bend * x + noise and a random head.

    The last `copies` points repeat the first ones, with features of their own.
    """
    drawn_by = torch.Generator().manual_seed(seed)
    inputs = torch.randn(points, 2, generator=drawn_by)
    if copies:
        inputs[-copies:] = inputs[:copies]
    features = bend * inputs + noise * torch.randn(points, 2, generator=drawn_by)
    outputs = 3 if task == "classification" else 1
    net = fc_resnet((2,), outputs, blocks=1, task=task, mean=0.3, std=torch.tensor(std))
    with torch.no_grad():
        net.head.weight.normal_(generator=drawn_by)
        net.head.bias.normal_(std=0.1, generator=drawn_by)
    labels = torch.zeros(points, dtype=torch.int64 if outputs == 3 else torch.float32)
    return OTAD(
        net,
        FeatureBank(inputs, features, labels, "plane"),
        solver=ExactCip(on_failure=on_failure, **(solver or {})),
        **({"n_neighbors": 3} | settings),
    ).eval()


def queries(model: OTAD, count: int, seed: int) -> Tensor:
    """Inputs in the midst of the bank, a few of them on its points."""
    drawn_by = torch.Generator().manual_seed(seed)
    embedded = 0.8 * torch.randn(count, 2, generator=drawn_by)
    embedded[:2] = model.bank_inputs[:2]
    return embedded * model.backbone.std + model.backbone.mean


def ring(radius: float, unit: Tensor) -> Tensor:
    """Steps (ANGLES * shares, 2) with |step / unit| up to just below the radius."""
    angle = torch.linspace(0, 2 * math.pi, ANGLES)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return (min(radius, 10.0) * SHARES[:, None, None] * circle * unit).reshape(-1, 2)


def broken(model: OTAD, x: Tensor, radius: Tensor, unit: Tensor | None = None) -> list[int]:
    """Rows whose prediction changes somewhere on a fine grid within their radius."""
    scale = torch.ones(2) if unit is None else unit
    with torch.no_grad():
        own = model(x).argmax(1)
        return [
            row
            for row in range(len(x))
            if radius[row] > 0
            and bool((model(x[row] + ring(float(radius[row]), scale)).argmax(1) != own[row]).any())
        ]


def distance_to(normals: np.ndarray, heights: np.ndarray) -> float:
    """min |u| subject to normals u >= heights, by its reduction to non-negative least squares."""
    stacked = np.vstack([normals.T, heights])
    target = np.eye(len(stacked))[-1]
    weights, residual = nnls(stacked, target)
    rest = stacked @ weights - target
    return float(np.linalg.norm(rest[:-1] / rest[-1])) if residual > 1e-9 else math.inf


def exact_radius(model: OTAD, x: Tensor) -> np.ndarray:
    """For one neighbor and l = 0: the distance of the nearest Voronoi cell of another opinion."""
    bank = model.bank_inputs.double().numpy()
    own = model(x).argmax(1).numpy()
    opinions = model.backbone.head(model.bank_features).argmax(1).numpy()
    found = []
    for query, answer in zip(model.backbone.embed(x).double().numpy(), own, strict=True):
        squares = ((bank - query) ** 2).sum(1)
        cells = [
            distance_to(2 * (bank[i] - np.delete(bank, i, 0)), squares[i] - np.delete(squares, i))
            for i in np.nonzero(opinions != answer)[0]
        ]
        found.append(min(cells, default=math.inf))
    return np.array(found)
