"""Losses that bring keys of one class together and separate keys of different classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOSSES = {"neighborhood": 0.0, "means": 0.5, "triplet": 0.2, "contrastive": 1.0}  # usual margins
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps keys (B,m), labels (B,), references (R,m), their labels (R,), and the place (B,) of each key
among the references to the mean loss. Except for "neighborhood", the references are the same batch
in the same order."""


def squared_distances(keys: Tensor, references: Tensor) -> Tensor:
    """Return |k_i - r_j|^2 (B,R) by a matrix product in full precision.

    Keys are taken relative to the mean reference. Otherwise distances that are small compared with
    |k_i| would be lost in rounding."""
    center = references.detach().mean(0)
    keys, references = keys - center, references - center
    ends = keys.square().sum(1, keepdim=True) + references.square().sum(1)
    with torch.autocast(keys.device.type, enabled=False):
        return (ends - 2 * keys @ references.T).clamp_min(0.0)


def neighborhood_loss(
    keys: Tensor,
    labels: Tensor,
    references: Tensor,
    reference_labels: Tensor,
    own: Tensor | None = None,
    *,
    temperature: float = 0.1,
    margin: float = 0.0,
) -> Tensor:
    """Return for each row (B,) how unlikely it is that a soft nearest neighbor is of its class:

        -log( sum over j of the same class of p_ij ),  p_ij ~ exp(-|k_i - r_j|^2 / temperature).

    Distances within a class count as longer by `margin`. `own` (B,) is the place of each row's own
    copy among the references, which is not a neighbor, or -1 for none. The loss is 0 for a row
    without a reference of its class."""
    same = labels[:, None] == reference_labels
    lengths = squared_distances(keys, references)
    if margin > 0:
        longer = (lengths.clamp_min(1e-12).sqrt() + margin).square()
        lengths = torch.where(same, longer, lengths)
    scores = -lengths / temperature
    others = torch.ones_like(same)
    if own is not None:
        others = own[:, None] != torch.arange(len(references), device=own.device)
    same = same & others
    # Rows without a reference of their class are not masked: both sums are equal and finite, and
    # their gradients cancel.
    has_class = same.any(1, keepdim=True)
    scores = scores.masked_fill(~others & has_class, -math.inf)
    right = scores.masked_fill(~same & has_class, -math.inf)
    return scores.logsumexp(1) - right.logsumexp(1)


def means_loss(
    keys: Tensor,
    labels: Tensor,
    references: Tensor,
    reference_labels: Tensor,
    own: Tensor,
    *,
    temperature: float = 0.25,
    margin: float = 0.5,
) -> Tensor:
    """Return for each row (B,) how unlikely its class is, by the distance to each class mean:

        -log( p_iy ),  p_ic ~ exp(-(|k_i - m_c| + margin [c = y]) / temperature).

    Means are taken over the references (R,m) without the row's own copy `own` (B,). The loss is 0
    for a row that is alone in its class. Distances are not squared, because differences of
    distances give certificates for a Lipschitz map."""
    alike = (reference_labels[:, None] == reference_labels).to(keys.dtype)
    counts = alike.sum(1)
    means = alike @ references / counts[:, None]  # one for each reference
    others = counts[own] - 1
    right_mean = (means[own] * counts[own, None] - references[own]) / others.clamp_min(1)[:, None]
    scores = -squared_distances(keys, means).clamp_min(1e-12).sqrt() / temperature - counts.log()
    wrong = scores.masked_fill(labels[:, None] == reference_labels, -math.inf).logsumexp(1)
    off = (keys - right_mean).square().sum(1).clamp_min(1e-12).sqrt()
    right = -(off + margin) / temperature
    return torch.where(others > 0, torch.logaddexp(right, wrong) - right, 0.0)


def triplet_loss(lengths: Tensor, same: Tensor, different: Tensor, margin: float) -> Tensor:
    """Return the mean of |k - p| - |k - n| + margin over semi-hard triplets of a key k, a reference
    p of its class and a reference n of another class: those with 0 < |k - n| - |k - p| < margin.

    No value decides about a shape, so the step can be captured in a CUDA graph."""
    excess = lengths[:, :, None] - lengths[:, None, :] + margin
    triplets = same[:, :, None] & different[:, None, :]
    return _mean_where(triplets & (excess > 0) & (excess < margin), excess)


def contrastive_loss(lengths: Tensor, same: Tensor, different: Tensor, margin: float) -> Tensor:
    """Return the mean of |k - p| over pairs of one class, plus the mean of margin - |k - n| over
    pairs of different classes that are nearer than `margin`."""
    near = different & (lengths < margin)
    return _mean_where(same, lengths) + _mean_where(near, margin - lengths)


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return the mean of the values in the mask, or 0 if there are none."""
    return values.where(mask, 0.0).sum() / mask.sum().clamp_min(1)


def pairs(
    keys: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, own: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all distances (B,R), and which pairs are of one class, without a row and its own copy,
    and which are of different classes."""
    # By differences: with a matrix product, rounding swamps the gradient of short distances.
    exact = "donot_use_mm_for_euclid_dist"
    lengths = torch.cdist(keys.float(), references.float(), compute_mode=exact)
    alike = labels[:, None] == reference_labels
    others = own[:, None] != torch.arange(len(references), device=own.device)
    return lengths, alike & others, ~alike


def make_loss(name: str, margin: float, temperature: float) -> Loss:
    """Return the mean loss over a batch as a function."""
    if name in ("triplet", "contrastive"):
        pair_loss = triplet_loss if name == "triplet" else contrastive_loss
        return lambda *batch: pair_loss(*pairs(*batch), margin)
    row_loss = neighborhood_loss if name == "neighborhood" else means_loss
    return lambda *batch: row_loss(*batch, temperature=temperature, margin=margin).mean()
