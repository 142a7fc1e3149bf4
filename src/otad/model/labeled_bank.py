"""Lifted banks that no net is needed for: every point answers with its own label.

A point x_i of class y_i gets the answer g_i = h_i e_(y_i) with the height h_i = D_i / sqrt 2, where
D_i is the distance to the nearest point of another class. These answers are 1-Lipschitz:

- points of two classes: |g_i - g_j|^2 = (D_i^2 + D_j^2) / 2 <= |x_i - x_j|^2, since neither is
  nearer to a point of another class than to this one;
- points of one class: |g_i - g_j| = |D_i - D_j| / sqrt 2 <= |x_i - x_j| / sqrt 2, since a distance
  to a set is 1-Lipschitz.

And no 1-Lipschitz map does better: at x_i the margin h_i certifies a radius of h_i / sqrt 2, that
is D_i / 2, half of the way to a point of another class.

Before that, each point may be replaced by the mean of its nearest points of the same class: what
tells classes apart remains, and what is peculiar to one example goes, so that new examples of a
class lie as near to the bank as those it was made of.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_count, check_shape, check_tensor
from otad.errors import InputError
from otad.model.bank import FeatureBank
from otad.search.neighbors import TorchSearch

BLOCK = 2**24  # pairs that are compared at a time


def bank_of_labels(
    points: Tensor, labels: Tensor, heights: Tensor, n_classes: int, fingerprint: str
) -> FeatureBank:
    """Inputs (x_i, 0) and features (x_i, h_i e_y), (N,p+C), of points (N,p)."""
    answers = functional.one_hot(labels, n_classes) * heights[:, None]
    inputs = functional.pad(points, (0, n_classes))
    return FeatureBank(inputs, torch.cat([points, answers], dim=1), labels, fingerprint)


@torch.no_grad()
def class_means(points: Tensor, labels: Tensor, neighbors: int) -> Tensor:
    """(N,p): for each point the mean of the `neighbors` points of its class nearest to it, itself
    among them; of all of them where a class has fewer."""
    _check(points, labels)
    if check_count(neighbors, "neighbors") == 1:
        return points
    means, centered = torch.empty_like(points), _centered(points)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        own = centered[members]
        count = min(neighbors, len(own))
        for rows in members.split(max(1, BLOCK // len(own))):
            apart = _distances(centered[rows], own)
            nearest = apart.topk(count, dim=1, largest=False).indices
            shares = torch.zeros_like(apart).scatter_(1, nearest, 1 / count)
            means[rows] = shares @ points[members]
    return means


@torch.no_grad()
def label_heights(points: Tensor, labels: Tensor) -> Tensor:
    """h_i = D_i / sqrt 2 (N,) in float64."""
    rivals = nearest_rivals(points, labels)
    steps = points.double() - points[rivals].double()
    apart: Tensor = torch.linalg.vector_norm(steps, dim=1)
    return apart / math.sqrt(2)


@torch.no_grad()
def nearest_rivals(points: Tensor, labels: Tensor) -> Tensor:
    """For each point (N,p) the nearest one of another class (N,)."""
    _check(points, labels)
    if bool((labels == labels[0]).all()):
        raise InputError(f"labels: expected two classes at least, got only {int(labels[0])}")
    nearest = torch.empty_like(labels)
    for label in labels.unique():
        own = labels == label
        others = (~own).nonzero()[:, 0]
        nearest[own] = others[TorchSearch(points[others])(points[own], 1).indices[:, 0]]
    return nearest


def _centered(points: Tensor) -> Tensor:
    """Points (N,p) about their mean: far from the origin `_distances` are lost in rounding."""
    return points - points.mean(0, dtype=torch.float64).to(points.dtype)


def _distances(one: Tensor, other: Tensor) -> Tensor:
    """|x_i - x_j|^2 of all pairs, up to rounding and up to a constant for each i."""
    return torch.addmm(other.square().sum(1), one, other.mT, alpha=-2)


def _check(points: Tensor, labels: Tensor) -> None:
    check_tensor(points, "points", "N,p")
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    check_shape(labels, "labels", (len(points),), "with one label per point")
