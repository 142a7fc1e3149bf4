"""Concave quadratic maximization over the simplex, exact and for a whole batch at once.

    maximize  c . w - w^T G w / 2     over  w >= 0, sum w = 1

The optimum is known once its support S is: on S it solves a linear system. So guess S, solve, drop
the neighbors whose weight came out negative, take in those whose gain is positive, and repeat until
nothing changes: then all optimality conditions hold. Almost every row ends within a few rounds;
this exchange of many at a time could circle, so the rest go to `pivoting`, which cannot.

H = G + 1 1^T has the same optimum (it adds a constant on the simplex) and is regular on affinely
independent images. Eliminating S from [H c 1] leaves p = H_SS^-1 c and r = H_SS^-1 1, and

    value = p - nu r,   nu = (sum_S p - 1) / sum_S r

holds the weights of the neighbors in S and, by the same formula, the gains of those outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otad.cip.pivoting import pivot_to_optimum

_REFINEMENTS = 3  # beyond the first
_GUESSES = 8  # rounds of exchange before a row is left to pivoting


@dataclass(frozen=True)
class SimplexOptimum:
    """`weights` (K,B); `sensitivity` (K,K,B) = d weights / d linear; `solved` (B,)."""

    weights: Tensor
    sensitivity: Tensor
    solved: Tensor


def maximize_on_simplex(
    gram: Tensor, linear: Tensor, active: Tensor, tolerance: float
) -> SimplexOptimum:
    """Maximize linear . w - w^T gram w / 2 over the simplex of the active neighbors, per column.

    `gram` (K,K,B) positive semidefinite up to the relative error `tolerance`, `linear` (K,B),
    `active` (K,B) with at least one True in each column.
    """
    scale = gram.diagonal(dim1=0, dim2=1).mT.amax(0)
    scale = torch.where(scale > 0, scale, 1.0)
    quadratic, linear = gram / scale, linear / scale
    # Only differences of the linear term matter; centered, they keep their digits.
    linear = linear - (linear * active).sum(0) / active.sum(0)
    weights, inverse = torch.zeros_like(linear), torch.zeros_like(quadratic)
    solved = torch.ones_like(scale, dtype=torch.bool)
    todo = _by_exchange(quadratic, linear, active, tolerance, weights, inverse)
    if len(todo):
        weights[:, todo], inverse[..., todo], solved[todo] = pivot_to_optimum(
            quadratic[..., todo], linear[:, todo], active[:, todo], tolerance
        )
    weights = _refined(quadratic, linear, weights, inverse)
    return SimplexOptimum(weights, inverse / scale, solved & weights.isfinite().all(0))


def _by_exchange(
    quadratic: Tensor,
    linear: Tensor,
    active: Tensor,
    tolerance: float,
    weights: Tensor,
    inverse: Tensor,
) -> Tensor:
    """Fill in weights and inverse of the rows that exchange solves; the rows left over."""
    place = torch.arange(linear.shape[1], device=linear.device)
    ones = torch.ones_like(linear)
    table = torch.cat((quadratic + 1, linear[:, None], ones[:, None]), dim=1)
    allowed = active.to(linear.dtype)
    support = allowed
    floor = tolerance * (1 + (linear * allowed).abs().amax(0))
    for _ in range(_GUESSES):
        swept, basis = _eliminate(table, support, tolerance)
        p, r = swept[:, -2], swept[:, -1]
        rate = (r * basis).sum(0)
        value = p - ((p * basis).sum(0) - 1) / rate * r
        # Optimal: no weight below zero, no gain above, up to rounding.
        excess = (value - 2 * basis * value) * allowed
        done = (excess.amax(0) <= floor) & (rate > 0)
        finished, left = done.nonzero()[:, 0], (~done).nonzero()[:, 0]
        rows, keep = place[finished], basis.index_select(-1, finished)
        border = r.index_select(-1, finished) * keep
        block = swept[:, :-2].index_select(-1, finished).mul_(-keep[:, None]).mul_(keep[None])
        block.addcmul_(border[:, None], (border / rate[finished])[None], value=-1)
        inverse[..., rows] = block
        weights[:, rows] = value.index_select(-1, finished) * keep
        place = place[left]
        if len(left) == 0:
            break
        support = ((value > 0) * allowed).index_select(-1, left)
        table, allowed = (part.index_select(-1, left) for part in (table, allowed))
        floor = floor[left]
    return place


def _eliminate(table: Tensor, support: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Sweep the columns in `support` (K,B) out of table (K,K+2,B): Gauss-Jordan without exchange.

    A neighbor whose image depends affinely on those before it has no pivot left and stays out; the
    basis (K,B) that was really swept comes back too.
    """
    count, table, basis = len(table), table.clone(), torch.empty_like(support)
    for k in range(count):
        row = table[k].clone()
        regular = row[k] > tolerance
        chosen = torch.mul(support[k], regular, out=basis[k])
        rate = chosen / torch.where(regular, row[k], 1.0)
        # With the pivot lowered by 1, one rank-one change makes row and column k right as well:
        # t - (p - 1) t / p = t / p; only the corner, 2 - 1 / p, is 2 too high.
        row[k] -= chosen
        table.addcmul_((row[:count] * rate)[:, None], row[None], value=-1)
        table[k, k] -= 2 * chosen
    return table, basis


def _refined(quadratic: Tensor, linear: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Iterative refinement removes what elimination has gathered in rounding.

    Each step makes the error many times smaller; few rows (nearly dependent images) need a second.
    """
    better = _refined_once(quadratic, linear, weights, inverse)
    for _ in range(_REFINEMENTS):
        rows = ((better - weights).abs().amax(0) > 1e-12).nonzero()[:, 0]
        if len(rows) == 0:
            break
        weights = better.clone()
        better[:, rows] = _refined_once(
            quadratic[..., rows], linear[:, rows], weights[:, rows], inverse[..., rows]
        )
    return better


def _refined_once(quadratic: Tensor, linear: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    gap = linear - (quadratic * weights[None]).sum(1)
    gap = gap - (weights * gap).sum(0)  # the inverse ignores constants; do not round them in
    better = weights + (inverse * gap[None]).sum(1)
    better = better.clamp_min(0.0)
    return better / better.sum(0)
