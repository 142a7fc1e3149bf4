"""How far the pairs of a batch are from one map of given smoothness.

Pairs (e_i, z_i) are those of the gradient of a convex, L-smooth function only if for all i, j

    |z_i - z_j|^2 / L  <=  <z_i - z_j, e_i - e_j>.

For a lifted net, z = (x, g) and e = (x, 0), and L = 2 it says |g_i - g_j| <= |x_i - x_j|, and is
then enough (`cip.whole_bank.lifted_potential`); for other nets cycles of more points matter too.
"""

from __future__ import annotations

from torch import Tensor


def pair_excess(embedded: Tensor, features: Tensor, smoothness: float) -> Tensor:
    """What a point of the batch (B,d) violates by, over all its partners, in the mean: scalar."""
    steps, moves = embedded - embedded.mean(0).detach(), features - features.mean(0).detach()
    rise = _between(steps, moves)
    bend = _between(moves, moves)
    return (bend / smoothness - rise).clamp_min(0.0).sum(1).mean()


def _between(one: Tensor, other: Tensor) -> Tensor:
    """<a_i - a_j, b_i - b_j> of all pairs (B,B)."""
    products = one @ other.mT
    own = products.diagonal()
    return own[:, None] + own - products - products.mT
