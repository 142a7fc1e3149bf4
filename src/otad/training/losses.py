"""Losses of a backbone: cross-entropy or squared error, wide margins, smooth pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from otad.errors import InputError
from otad.nets.base import LinearHead

Loss = Callable[[Tensor, Tensor, LinearHead], Tensor]
"""outputs (B,C) or values (B,), targets, the head of the outputs -> mean loss. Targets are labels
(B,), shares of the classes (B,C) where images are mixed, or values (B,)."""


class LossSettings(Protocol):
    """The settings of a `TrainConfig` that losses use."""

    @property
    def label_smoothing(self) -> float: ...
    @property
    def target_margin(self) -> float: ...
    @property
    def mixing(self) -> float: ...


def fit_loss(task: str, settings: LossSettings) -> Loss:
    """Cross-entropy, or for regression the squared error."""
    smoothing = settings.label_smoothing

    def cross_entropy(outputs: Tensor, targets: Tensor, _head: LinearHead) -> Tensor:
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    def squared_error(outputs: Tensor, targets: Tensor, _head: LinearHead) -> Tensor:
        return functional.mse_loss(outputs, targets)

    if task == "classification":
        return cross_entropy
    if smoothing > 0:
        raise InputError(f"label_smoothing: expected 0 for regression, got {smoothing}")
    return squared_error


def margin_loss(task: str, settings: LossSettings) -> Loss:
    """The mean of what scaled margins lack to `target_margin`.

    If features change by at most K times the change of the input, a label y is certain within
    min over j of (o_y - o_j) / (K |w_y - w_j|). The loss asks for wide margins in these terms; K is
    bounded by other terms (`pair_excess`, energy) or by the net.
    """

    def shortfall(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
        margins = scaled_margins(outputs, labels, head)
        return (settings.target_margin - margins).clamp_min(0.0).mean()

    if task != "classification":
        raise InputError("loss: expected 'fit' for regression, got 'margin'")
    for name in ("label_smoothing", "mixing"):
        if (value := getattr(settings, name)) > 0:
            raise InputError(f"{name}: expected 0 for the loss 'margin', got {value}")
    return shortfall


LOSSES: dict[str, Callable[[str, LossSettings], Loss]] = {"fit": fit_loss, "margin": margin_loss}
"""By the name of `TrainConfig.loss`: makers from the task and the settings."""


def scaled_margins(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
    """min over j of (o_y - o_j) / |w_y - w_j| (B,) for outputs (B,C), below 0 where wrong."""
    rows = head.matrix
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")[labels]
    own = outputs.gather(1, labels[:, None])
    tiny = torch.finfo(outputs.dtype).tiny
    margins = (own - outputs) / apart.to(outputs.dtype).clamp_min(tiny)
    return margins.scatter(1, labels[:, None], torch.inf).amin(1)


def pair_excess(embedded: Tensor, features: Tensor, smoothness: float) -> Tensor:
    """How much the points of a batch (B,d) contradict one map of smoothness L, in the mean: scalar.

    Pairs (e_i, z_i) belong to the gradient of a convex, L-smooth function only if for all i, j

        |z_i - z_j|^2 / L  <=  <z_i - z_j, e_i - e_j>.

    The excess of a point is the sum of its violations over all partners. For a lifted net,
    z = (x, g) and e = (x, 0), and L = 2 the condition is |g_i - g_j| <= |x_i - x_j| and sufficient
    (`cip.whole_bank.lifted_potential`); for other nets cycles of more points matter too.
    """
    steps, moves = embedded - embedded.mean(0).detach(), features - features.mean(0).detach()
    excess = _pair_products(moves, moves) / smoothness - _pair_products(steps, moves)
    return excess.clamp_min(0.0).sum(1).mean()


def _pair_products(one: Tensor, other: Tensor) -> Tensor:
    """<a_i - a_j, b_i - b_j> of all pairs (B,B)."""
    products = one @ other.mT
    own = products.diagonal()
    return own[:, None] + own - products - products.mT
