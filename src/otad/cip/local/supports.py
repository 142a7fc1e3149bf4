"""Linear systems on the support of weights: H = G + 1 1^T there, the identity elsewhere.

H has the same optimum on the simplex as G and is regular on affinely independent images. Here the
batch comes first: matrices are (B,K,K), supports (B,K) of ones and zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor


def factor(matrix: Tensor, support: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Cholesky factor (B,K,K) of `matrix`, which is H, on the support.

    Also whether the images in the support are affinely independent (B,): if not, it means nothing.
    """
    part = matrix * (support[:, :, None] * support[:, None])
    part.diagonal(dim1=1, dim2=2).add_(1 - support)
    found, failed = torch.linalg.cholesky_ex(part)
    pivots = found.diagonal(dim1=1, dim2=2)
    return found, (failed == 0) & (pivots.amin(1) > tolerance**0.5)


def solve(factors: Tensor, sides: Tensor) -> Tensor:
    """H^-1 (B,K,K) applied to columns (B,K,n)."""
    half = torch.linalg.solve_triangular(factors, sides, upper=False)
    whole: Tensor = torch.linalg.solve_triangular(factors.mT, half, upper=True)
    return whole


def reduced_inverse(factors: Tensor, support: Tensor, edge: Tensor, rate: Tensor) -> Tensor:
    """N = H_SS^-1 - r r^T / sum r (B,K,K), zero outside the support, with r = H_SS^-1 1 the `edge`
    (B,K) and its sum the `rate` (B,)."""
    block = solve(factors, torch.diag_embed(support))
    return block.addcmul_(edge[:, :, None], (edge / rate[:, None])[:, None], value=-1)
