"""Losses that draw the keys of one class together and those of others apart."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otad.errors import MissingExtraError

LOSSES = {"neighborhood": 0.0, "triplet": 0.2, "contrastive": 1.0}
"""Every loss by name, with its usual margin."""

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""keys (B,m), labels (B,), references (R,m), their labels (R,), own place among them (B,) -> mean
loss. For triplets and pairs the references are the same batch, in the same order."""


def squared_distances(keys: Tensor, references: Tensor) -> Tensor:
    """|k_i - r_j|^2 (B,R), by a matrix product."""
    ends = keys.square().sum(1, keepdim=True) + references.square().sum(1)
    return (ends - 2 * keys @ references.T).clamp_min(0.0)


def neighborhood_loss(
    keys: Tensor,
    labels: Tensor,
    references: Tensor,
    reference_labels: Tensor,
    *,
    temperature: float = 0.1,
    margin: float = 0.0,
    own: Tensor | None = None,
) -> Tensor:
    """Per row (B,), how unlikely a soft nearest neighbor is of the right class:

        -log( sum over j of the same class of p_ij ),  p_ij ~ exp(-|k_i - r_j|^2 / temperature).

    Distances within a class count as longer by `margin`: only neighbors that are nearer by so
    much than those of other classes cost nothing. `own` (B,) are places in the references that
    are no neighbors of a row, its own copy; -1 for none. A row without any reference of its class
    counts as 0.
    """
    same = labels[:, None] == reference_labels
    lengths = squared_distances(keys, references)
    if margin > 0:
        longer = (lengths.clamp_min(1e-12).sqrt() + margin).square()
        lengths = torch.where(same, longer, lengths)
    scores = -lengths / temperature
    if own is not None:
        self_pairs = own[:, None] == torch.arange(len(references), device=own.device)
        scores = scores.masked_fill(self_pairs, -math.inf)
        same = same & ~self_pairs
    kept = same.any(1)
    right = scores.masked_fill(~same & kept[:, None], -math.inf)
    return scores.logsumexp(1) - right.logsumexp(1)


def make_loss(name: str, margin: float, temperature: float) -> Loss:
    """The mean loss over a batch; triplets and pairs are those of pytorch-metric-learning."""
    if name == "neighborhood":

        def mean_neighborhood(
            keys: Tensor, labels: Tensor, references: Tensor, their_labels: Tensor, own: Tensor
        ) -> Tensor:
            return neighborhood_loss(
                keys,
                labels,
                references,
                their_labels,
                temperature=temperature,
                margin=margin,
                own=own,
            ).mean()

        return mean_neighborhood
    return _pair_loss(name, margin)


def _pair_loss(name: str, margin: float) -> Loss:
    """triplet: mean of max(0, |a - p| - |a - n| + margin) over semi-hard triplets (a, p, n), those
    with 0 < |a - n| - |a - p| <= margin. contrastive: mean |a - p| over pairs of one class, plus
    mean max(0, margin - |a - n|) over the others; means are over what is not 0."""
    losses, distances = _library("losses"), _library("distances")
    plain = distances.LpDistance(normalize_embeddings=False)  # the metric scales its keys itself
    miner: Any = None
    if name == "triplet":
        loss = losses.TripletMarginLoss(margin=margin, distance=plain)
        miner = _library("miners").TripletMarginMiner(
            margin=margin, type_of_triplets="semihard", distance=plain
        )
    else:
        loss = losses.ContrastiveLoss(pos_margin=0.0, neg_margin=margin, distance=plain)

    def mean_over_pairs(
        keys: Tensor, labels: Tensor, references: Tensor, _labels: Tensor, _own: Tensor
    ) -> Tensor:
        # The very same labels: the library then leaves out pairs of a row with itself.
        among = {"ref_emb": references, "ref_labels": labels}
        found = None if miner is None else miner(keys, labels, **among)
        value: Tensor = loss(keys, labels, found, **among)
        return value

    return mean_over_pairs


def _library(part: str) -> Any:
    try:
        return importlib.import_module(f"pytorch_metric_learning.{part}")
    except ImportError as error:
        raise MissingExtraError("pytorch-metric-learning", "metric") from error
