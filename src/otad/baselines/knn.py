"""The two k-NN baselines of OTAD: same bank, same exact search, no convex integration."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from otad.checks import check_count, require
from otad.io.mapped_rows import gathered
from otad.model.otad import OTAD
from otad.search.neighbors import Neighbors


class Knn(nn.Module, ABC):
    """x (B,*input_shape) -> scores (B,C) or values (B,), from the K nearest bank points of `model`,
    without a gradient."""

    def __init__(self, model: OTAD, n_neighbors: int | None = None) -> None:
        super().__init__()
        count, points = n_neighbors, len(model.bank_inputs)
        count = model.n_neighbors if count is None else count
        fits = check_count(count, "n_neighbors") <= points
        require(fits, "n_neighbors", f"at most the {points} points of the bank", count)
        self.model, self.n_neighbors = model, count

    def neighbors(self, x: Tensor) -> Neighbors:
        """The bank points nearest to inputs, nearest first; equal distances by bank order."""
        with torch.no_grad():
            keys = self.model.query_keys(self.model.backbone.check_inputs(x))
            return self.model.neighbors(keys, self.n_neighbors)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (B,C) or values (B,) for inputs (B,*input_shape)."""
        return self.answer(self.neighbors(x))

    @abstractmethod
    def answer(self, neighbors: Neighbors) -> Tensor:
        """Scores (B,C) or values (B,) from the neighbors alone."""


class MajorityKnn(Knn):
    """The class most neighbors belong to; in regression, the mean of their targets.

    A class scores its votes, and (K - r) / (K + 1) < 1 if its nearest member is the r-th of the K
    neighbors, r from 0. So of the classes with the most votes the one with the nearest member wins.

    Parameters
    ----------
    model : OTAD
        The model whose bank is searched.
    n_neighbors : int or None
        The number of neighbors, by default that of the model.

    Examples
    --------
    >>> import otad
    >>> from otad.baselines import MajorityKnn
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> MajorityKnn(model, 5)(digits.test_x[:3]).argmax(1).shape
    torch.Size([3])
    """

    def answer(self, neighbors: Neighbors) -> Tensor:
        labels = gathered(self.model.bank_labels, neighbors.indices, neighbors.indices.device)
        if self.model.backbone.task == "regression":
            return labels.mean(1)
        count = self.n_neighbors
        scores = torch.zeros(len(labels), self.model.backbone.n_outputs, device=labels.device)
        scores.scatter_add_(1, labels, torch.ones_like(labels, dtype=scores.dtype))
        rank = torch.arange(count, device=labels.device, dtype=scores.dtype)
        closeness = ((count - rank) / (count + 1)).expand(labels.shape)
        return scores + torch.zeros_like(scores).scatter_reduce_(1, labels, closeness, "amax")


class MeanFeatureKnn(Knn):
    """The mean of the neighbors' features, read by the backbone's own head.

    Parameters
    ----------
    model : OTAD
        The model whose bank is searched.
    n_neighbors : int or None
        The number of neighbors, by default that of the model.

    Examples
    --------
    >>> import otad
    >>> from otad.baselines import MeanFeatureKnn
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> MeanFeatureKnn(model)(digits.test_x[:3]).shape
    torch.Size([3, 10])
    """

    def answer(self, neighbors: Neighbors) -> Tensor:
        features = self.model.bank_features
        indices = neighbors.indices.to(features.device)
        head = self.model.backbone.head
        mean = torch.zeros(len(indices), features.shape[1], device=features.device)
        for column in indices.unbind(1):  # one neighbor at a time: never B*K*d numbers at once
            mean += features[column] / self.n_neighbors
        with torch.no_grad():
            outputs: Tensor = head(mean.to(head.weight))
        return outputs
