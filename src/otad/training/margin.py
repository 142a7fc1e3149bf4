"""The loss of wide margins: what a certificate by a Lipschitz constant is made of.

If features move by at most K for each unit that the input moves, an answer y stays while the input
moves by less than min over j of (o_y - o_j) / (K |w_y - w_j|). The loss asks for a wide margin in
these terms, and K is held by other terms (`otad.training.pair_penalty`, energy) or by the net.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otad.nets.base import LinearHead


def scaled_margins(outputs: Tensor, labels: Tensor, head: LinearHead) -> Tensor:
    """min over j of (o_y - o_j) / |w_y - w_j| (B,) for outputs (B,C), below 0 where wrong."""
    rows = head.matrix
    apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")[labels]
    own = outputs.gather(1, labels[:, None])
    tiny = torch.finfo(outputs.dtype).tiny
    margins = (own - outputs) / apart.to(outputs.dtype).clamp_min(tiny)
    return margins.scatter(1, labels[:, None], torch.inf).amin(1)


def margin_shortfall(outputs: Tensor, labels: Tensor, head: LinearHead, target: float) -> Tensor:
    """How much margins lack to the target, in the mean."""
    return (target - scaled_margins(outputs, labels, head)).clamp_min(0.0).mean()
