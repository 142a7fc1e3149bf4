"""Margins of outputs, and pairs of features that contradict a smooth convex potential."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.nets.base import LinearHead


def scaled_margins(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
    """Return min over j of (o_y - o_j) / |w_y - w_j| (B,) for outputs (B,C).

    The norm is that of the head. A margin is below 0 where the label is wrong."""
    rows, mode = head.matrix, "donot_use_mm_for_euclid_dist"
    apart = torch.cdist(rows, rows, p=head.order, compute_mode=mode)[labels]
    own = outputs.gather(1, labels[:, None])
    tiny = torch.finfo(outputs.dtype).tiny
    margins = (own - outputs) / apart.to(outputs.dtype).clamp_min(tiny)
    return margins.scatter(1, labels[:, None], torch.inf).amin(1)


def pair_excess(embedded: Tensor, features: Tensor, smoothness: float) -> Tensor:
    """Return how much the points of a batch (B,d) contradict a map of smoothness L: a scalar.

    Pairs (e_i, z_i) belong to the gradient of a convex, L-smooth function only if for all i, j

        |z_i - z_j|^2 / L  <=  <z_i - z_j, e_i - e_j>.

    The excess of a point is the sum of its violations, and the mean over the batch is returned. For
    a lifted network, where z = (x, g) and e = (x, 0), and for L = 2 the condition is
    |g_i - g_j| <= |x_i - x_j|, and it is sufficient (`cip.whole_bank.lifted_bank`). For other
    networks, cycles of more than two points matter too."""

    def pair_products(one: Tensor, other: Tensor) -> Tensor:
        """Return <a_i - a_j, b_i - b_j> for all pairs (B,B)."""
        products = one @ other.mT
        own = products.diagonal()
        return own[:, None] + own - products - products.mT

    steps, moves = embedded - embedded.mean(0).detach(), features - features.mean(0).detach()
    excess = pair_products(moves, moves) / smoothness - pair_products(steps, moves)
    return excess.clamp_min(0.0).sum(1).mean()
