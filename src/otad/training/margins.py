"""Margins of outputs and of labeled points, and pairs that contradict a smooth convex potential."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from otad.nets.base import LinearHead


def scaled_margins(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
    """Return min over j of (o_y - o_j) / |w_y - w_j| (B,) for outputs (B,C).

    The norm is that of the head. A margin is below 0 where the label is wrong."""
    return margins_to_classes(outputs, labels, head, torch.inf).amin(1)


def margins_to_classes(outputs: Tensor, labels: Tensor, head: LinearHead, own: float) -> Tensor:
    """Return (o_y - o_j) / |w_y - w_j| (B,C) for outputs (B,C), and the number `own` for j = y."""
    rows, mode = head.matrix, "donot_use_mm_for_euclid_dist"
    apart = torch.cdist(rows, rows, p=head.order, compute_mode=mode)[labels]
    tiny = torch.finfo(outputs.dtype).tiny
    rises = outputs.gather(1, labels[:, None]) - outputs
    margins = rises / apart.to(outputs.dtype).clamp_min(tiny)
    return margins.scatter(1, labels[:, None], own)


def bisector_margins(
    inputs: Tensor,
    labels: Tensor,
    points: Tensor,
    point_labels: Tensor,
    rivals: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return soft margins (B,) of inputs (B,p) whose answer is the label of the nearest point, and
    scores (B,): 1 where this answer is right.

    While an input moves by less than b_ij = (|x - x_j|^2 - |x - x_i|^2) / (2 |x_i - x_j|), the
    point i stays nearer than the point j. So a label y cannot change within the radius max over i
    of class y of min over all other j of b_ij. Here the nearest `rivals` points of both kinds
    count, with a soft maximum and minimum of this temperature."""
    with torch.no_grad():
        apart = points.square().sum(1) - 2 * inputs @ points.mT
        own = point_labels == labels[:, None]
        sides = [apart.masked_fill(hidden, torch.inf) for hidden in (~own, own)]
        nearest = [side.topk(min(rivals, len(points)), largest=False) for side in sides]
        right = nearest[0].values[:, 0] < nearest[1].values[:, 0]
    # An embedding, because its gradient is summed faster than that of an indexed tensor.
    own_steps, other_steps = (
        functional.embedding(side.indices, points) - inputs[:, None] for side in nearest
    )
    own_squares, other_squares = (steps.square().sum(2) for steps in (own_steps, other_steps))
    sizes = own_squares[:, :, None] + other_squares[:, None]
    gaps = (sizes - 2 * own_steps @ other_steps.mT).clamp_min(1e-12).sqrt()
    bisectors = (other_squares[:, None] - own_squares[:, :, None]) / (2 * gaps)
    lacking = [side.values.isinf() for side in nearest]  # where a class has fewer points
    against = (-bisectors / temperature).masked_fill(lacking[1][:, None], -torch.inf)
    each = -against.logsumexp(2).masked_fill(lacking[0], torch.inf)
    return temperature * each.logsumexp(1), right.to(inputs.dtype)


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
