"""How far an intersection of half-spaces is, in the whole space and within a box around 0.

Half-spaces are <g_k, u> >= h_k with normals g_k. Any weights w >= 0 give the one half-space
<sum_k w_k g_k, u> >= sum_k w_k h_k that contains their intersection, so its distance is a lower
bound. Good weights are searched, and the bound is proved for the weights that were found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

ROUNDING = 1e-9  # relative error allowed for float64 sums; a million terms stay below it
TINY = 1e-300  # makes 0 / 0 a 0
SWEEPS = 8  # of coordinate ascent
ROUNDS = 3  # of guesses which coordinates are at the border of the box
STEPS = 16  # of Newton's method; each one gives a lower bound


@dataclass(frozen=True, eq=False)
class HalfSpaces:
    """<g_k, u> >= heights_k (...,m) for all k.

    `gram` (...,m,m) holds <g_j, g_k> up to the relative error ROUNDING of sqrt(sizes_j sizes_k),
    sizes (...,m), and this error on its diagonal."""

    gram: Tensor
    heights: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, gram: Tensor, heights: Tensor, sizes: Tensor) -> Self:
        return cls(gram + torch.diag_embed(ROUNDING * sizes + TINY), heights, sizes)

    def weights(self) -> Tensor:
        """Weights (...,m) by a few sweeps of coordinate ascent on w.h - |sum_k w_k g_k|^2 / 2. At
        its optimum, sum_k w_k g_k is the point of the intersection that is nearest to 0."""
        weights = torch.zeros_like(self.heights)
        for _ in range(SWEEPS):
            for k in range(self.heights.shape[-1]):
                miss = self.heights[..., k] - (self.gram[..., k, :] * weights).sum(-1)
                weights[..., k] = (weights[..., k] + miss / self.gram[..., k, k]).clamp_min(0)
        return weights

    def polished(self, weights: Tensor) -> Tensor:
        """The optimal weights (...,m), where they are positive at the same places as `weights`."""
        used = weights > 0
        both = used[..., :, None] & used[..., None, :]
        equations = torch.where(both, self.gram, 0.0) + torch.diag_embed((~used).to(self.gram))
        solved, failed = torch.linalg.solve_ex(equations, torch.where(used, self.heights, 0.0))
        good = (failed == 0) & solved.isfinite().all(-1) & (solved >= 0).all(-1)
        better = torch.where(good[..., None], solved, weights)
        gains = self.distance(better) > self.distance(weights)
        return torch.where(gains[..., None], better, weights)

    def distance(self, weights: Tensor) -> Tensor:
        """The lower bound (...) of |u| that weights w >= 0 give, as w.h <= |sum_k w_k g_k| |u|."""
        square = (weights * (self.gram @ weights[..., None])[..., 0]).sum(-1)
        square += ROUNDING * (weights * self.sizes.sqrt()).sum(-1).square()
        return (weights * self.heights).sum(-1) / square.clamp_min(TINY).sqrt()


class Box(NamedTuple):
    """Bounds of u, `low` (P,d) <= 0 <= `high` (P,d)."""

    low: Tensor
    high: Tensor

    def distance(
        self, normals: Tensor, heights: Tensor, sizes: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A lower bound (P,) of |u| over all u in the box and in the half-space that `weights`
        (P,m) give, for `normals` (P,m,d), and the point (P,d) that has this length.

        Of all u with |u| <= r, the one that goes furthest along g is u(t) = clip(t g, low, high)
        with |u(t)| = r. So none of them is in the half-space while <g, u(t)> is below its height.
        As a function of t this product is concave, so Newton's method approaches the height from
        below."""
        low, high = self
        normal = (weights[:, None] @ normals)[:, 0]
        corner = torch.where(normal > 0, high, low).masked_fill(normal == 0, 0.0)
        # A computed normal is wrong by ROUNDING of its terms |x_i| + |x_j| <= sqrt(2 sizes).
        terms = math.sqrt(2) * (weights * sizes.sqrt()).sum(1)
        slack = ROUNDING * terms * torch.linalg.vector_norm(torch.maximum(-low, high), dim=1)
        goal = ((weights * heights).sum(1) - slack) * (1 - 2 * ROUNDING)
        factor = torch.zeros_like(goal)
        for _ in range(STEPS):
            point = (factor[:, None] * normal).clamp(low, high)
            free = torch.where(point == corner, 0.0, normal)
            slope = free.square().sum(1)
            step = (goal - (normal * point).sum(1)) / slope.clamp_min(TINY)
            step = torch.where(slope > 0, step.clamp_min_(0.0), 0.0)
            factor = factor + step
        point = (factor[:, None] * normal).clamp(low, high)
        length = torch.linalg.vector_norm(point, dim=1) * (1 - ROUNDING)
        is_short = (normal * point).sum(1) <= goal * (1 + ROUNDING)
        never = (normal * corner).sum(1) < goal
        return torch.where(never, torch.inf, torch.where(is_short, length, 0.0)), point

    def joint_distance(
        self, normals: Tensor, heights: Tensor, sizes: Tensor, weights: Tensor
    ) -> Tensor:
        """A lower bound (P,) of |u| in the box and in all half-spaces, from good `weights` (P,m).

        If the coordinates at the border of the box were known, only the others would matter: a
        problem without a box. They are guessed by the point that the last weights gave."""
        best, point = self.distance(normals, heights, sizes, weights)
        for _ in range(ROUNDS):
            fixed = (point <= self.low) | (point >= self.high)
            free = normals.masked_fill(fixed[:, None], 0.0)
            done = (normals @ torch.where(fixed, point, 0.0)[..., None])[..., 0]
            spaces = HalfSpaces.of(free @ free.mT, heights - done, sizes)
            weights = spaces.polished(spaces.weights())
            found, point = self.distance(normals, heights, sizes, weights)
            best = torch.maximum(best, found)
        return best
