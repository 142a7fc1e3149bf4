"""The distance of an intersection of half-spaces, from below."""

from __future__ import annotations

import torch
from torch import Tensor

SWEEPS = 8
TINY = 1e-300  # keeps 0 / 0 at 0


def joint_distance(gram: Tensor, heights: Tensor, sizes: Tensor, rounding: float) -> Tensor:
    """A lower bound (...) of |u| over all u with <g_k, u> >= heights_k (...,m) for every k.

    Any weights w >= 0 give one, as sum_k w_k heights_k <= |sum_k w_k g_k| |u|. They are found by a
    few sweeps of coordinate ascent on w.heights - |sum_k w_k g_k|^2 / 2, whose optimum gives the
    distance itself. `gram` (...,m,m) holds <g_j, g_k> up to the relative error `rounding` of
    sqrt(sizes_j sizes_k), sizes (...,m).
    """
    gram = gram + torch.diag_embed(rounding * sizes + TINY)
    weights = torch.zeros_like(heights)
    for _ in range(SWEEPS):
        for k in range(heights.shape[-1]):
            miss = heights[..., k] - (gram[..., k, :] * weights).sum(-1)
            weights[..., k] = (weights[..., k] + miss / gram[..., k, k]).clamp_min(0)
    square = (weights * (gram @ weights[..., None])[..., 0]).sum(-1)
    square += rounding * (weights * sizes.sqrt()).sum(-1).square()
    return (weights * heights).sum(-1) / square.clamp_min(TINY).sqrt()
