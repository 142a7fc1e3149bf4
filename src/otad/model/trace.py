"""A prediction and what it is based on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from otad.model.answerers import Answer


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace(Answer):
    """A prediction and all that it is based on, with one row for each of the B inputs.

    Attributes
    ----------
    outputs : Tensor (B, C) or (B,)
        The logits, or the values in regression. They are NaN where the model abstains.
    neighbors : Neighbors
        The `indices` (B, K) of bank points and their `distances` (B, K). For a global map they are
        the points with weight, most weight first, padded with points of weight 0.
    labels : Tensor (B, K)
        The labels, or the targets, of these points.
    solution : CipSolution
        The interpolated features, the weights of the points, and how each row was solved.
    distance : Tensor (B,) of float64
        How far the inputs are from the bank: see `OTAD.distance`.
    gap : Tensor (B,) or None
        The duality gap of a global map, which bounds the error of a feature z by
        `|z - exact|^2 <= (L - l) gap`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> trace = model.trace(torch.tensor([[0.9, 0.1, 0.0]]))
    >>> trace.outputs.argmax(1).tolist(), trace.labels[0, 0].item()
    ([0], 0)
    >>> round(float(trace.solution.multipliers.sum()), 3)
    1.0
    """

    outputs: Tensor
    labels: Tensor
    distance: Tensor
    __repr__ = Answer.__repr__
