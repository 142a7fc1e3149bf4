"""The quadratic program of eq. (3), as its dual: concave maximization over the simplex.

    maximize  c . w - w^T G w / 2     over  w >= 0, sum w = 1

On its support S the optimum solves a linear system. So guess S, solve, drop the neighbors whose
weight came out negative, add those whose gain is positive, and repeat until nothing changes: then
all optimality conditions hold. Almost every row ends within a few rounds; exchanging many at a time
could cycle, or meet affinely dependent images: such rows go to `pivoting`, which always ends.

H = G + 1 1^T has the same optimum (it adds a constant on the simplex) and is regular on affinely
independent images. With p = H_SS^-1 c and r = H_SS^-1 1 on the support,

    w = p - nu r,   nu = (sum p - 1) / sum r

are the weights there, and c_i - nu - (H w)_i are the gains of the neighbors outside.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otad.cip.execution import blocks, one_thread, run_parts
from otad.cip.local.pivoting import factor, pivot_to_optimum, reduced_inverse, solve

_REFINEMENTS = 3  # beyond the first
_GUESSES = 8  # rounds of exchange before a row is left to pivoting
_FEWEST_ROWS = 512  # that are worth a thread of their own


class SimplexOptimum(NamedTuple):
    """`weights` (K,B); `sensitivity` (K,K,B) = d weights / d linear; `solved` (B,)."""

    weights: Tensor
    sensitivity: Tensor
    solved: Tensor


def maximize_on_simplex(
    gram: Tensor, linear: Tensor, active: Tensor, tolerance: float, guess: Tensor | None = None
) -> SimplexOptimum:
    """Maximize linear . w - w^T gram w / 2 over the simplex of the active neighbors, per column.

    `gram` (K,K,B) positive semidefinite up to the relative error `tolerance`, `linear` (K,B),
    `active` (K,B) with at least one True in each column. `guess` (K,B): which are expected to get
    weight, one active neighbor at least; by default all.
    """
    first = active if guess is None else guess
    batch = linear.shape[1]
    threads = torch.get_num_threads() if linear.device.type == "cpu" else 1
    width = max(_FEWEST_ROWS, -(-batch // threads))
    if batch <= width:
        with one_thread():
            return _maximize(gram, linear, active, first, tolerance)

    def work(rows: slice) -> SimplexOptimum:
        parts = (gram[..., rows], linear[:, rows], active[:, rows], first[:, rows])
        return _maximize(*parts, tolerance)

    found = run_parts(blocks(batch, width), work, linear.device)
    return SimplexOptimum(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))


def _maximize(
    gram: Tensor, linear: Tensor, active: Tensor, guess: Tensor, tolerance: float
) -> SimplexOptimum:
    scale = gram.diagonal(dim1=0, dim2=1).amax(1)
    scale = torch.where(scale > 0, scale, 1.0)
    quadratic, linear = gram / scale, linear / scale
    # Only differences of the linear term matter; centered, they keep their digits.
    linear = linear - (linear * active).sum(0) / active.sum(0)
    solved = torch.ones_like(scale, dtype=torch.bool)
    weights, inverse, todo = _by_exchange(quadratic, linear, active, guess, tolerance)
    if len(todo):
        matrix, slope, allowed = (part[..., todo] for part in (quadratic, linear, active))
        found = pivot_to_optimum(matrix, slope, allowed, tolerance)
        weights[:, todo], inverse[..., todo], solved[todo] = found
    weights = _refined(quadratic, linear, weights, inverse)
    return SimplexOptimum(weights, inverse / scale, solved & (weights.amax(0) <= 1))  # false of NaN


def _by_exchange(
    quadratic: Tensor, linear: Tensor, active: Tensor, guess: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and inverse of the rows that exchange solves, zero in the rows left over (n,)."""
    weights, inverse = torch.zeros_like(linear), torch.zeros_like(quadratic)
    place = torch.arange(linear.shape[1], device=linear.device)
    matrix = (quadratic + 1).permute(2, 0, 1).contiguous()  # here the batch comes first
    target, allowed = linear.mT.contiguous(), active.mT.to(linear.dtype)
    floor = tolerance * (1 + torch.linalg.vector_norm(target * allowed, math.inf, dim=1))
    support, given_up = guess.mT.to(linear.dtype), []
    for number in range(1, _GUESSES + 1):
        factors, regular = factor(matrix, support, tolerance)
        solved = solve(factors, torch.stack((target * support, support), dim=2))
        (p, r), (mass, rate) = solved.unbind(2), solved.sum(1).unbind(1)
        level = ((mass - 1) / rate)[:, None]
        weight = torch.addcmul(p, level, r, value=-1)
        gain = torch.baddbmm((target - level)[..., None], matrix, weight[..., None], alpha=-1)
        # Optimal: no weight below zero, no gain above, up to rounding.
        value = torch.addcmul(weight, allowed - support, gain[..., 0])
        done = regular & (torch.sub(value, weight, alpha=2).amax(1) <= floor)
        left = (regular & ~done).nonzero()[:, 0]
        if 2 * len(left) <= len(place) or number == _GUESSES:  # store finished rows
            best = done.nonzero()[:, 0]
            rows = place[best]
            weights[:, rows] = weight[best].mT
            found = reduced_inverse(factors[best], support[best], r[best], rate[best])
            inverse[..., rows] = found.permute(1, 2, 0)
            if len(best) + len(left) < len(place):
                given_up.append(place[~regular])
            place = place[left]
            if len(left) == 0:
                break
            parts = (support, matrix, target, allowed, floor, value, done)
            support, matrix, target, allowed, floor, value, done = (x[left] for x in parts)
        support = torch.where(done[:, None], support, (value > 0).to(support.dtype))
    return weights, inverse, torch.cat([place, *given_up])


def _refined(quadratic: Tensor, linear: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Iterative refinement removes the rounding errors of the factors; rows of nearly dependent
    images need a second step."""
    better = _refined_once(quadratic, linear, weights, inverse)
    for _ in range(_REFINEMENTS):
        rows = ((better - weights).abs().amax(0) > 1e-12).nonzero()[:, 0]
        if len(rows) == 0:
            break
        weights = better.clone()
        parts = (part[..., rows] for part in (quadratic, linear, weights, inverse))
        better[:, rows] = _refined_once(*parts)
    return better


def _refined_once(quadratic: Tensor, linear: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    gap = linear - (quadratic * weights[None]).sum(1)
    gap = gap - (weights * gap).sum(0)  # the inverse ignores constants; do not round them in
    better = (weights + (inverse * gap[None]).sum(1)).clamp_min(0.0)
    return better / better.sum(0)
