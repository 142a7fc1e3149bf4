"""Random instances of the convex integration problem, the same for every solver.

The anchors of each query scatter around a random center. Images are the gradient of the smooth
convex function sum_i log cosh x_i + (l/2) x_i^2 plus a little noise, so potentials exist for the
given smoothness. The query is near the mean of its anchors, so that many of them have a positive
weight in the solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip

SMOOTHNESS, NOISE, QUERY_OFFSET = 2.0, 0.05, 0.3
BLOCK_BYTES = 2**29  # the size of the random numbers that are drawn at a time


@dataclass(frozen=True, eq=False)
class Instance:
    """Queries (B,d) with anchors and images (B,K,d), in float64 on the CPU."""

    query: Tensor
    anchors: Tensor
    images: Tensor
    smoothness: float
    strong_convexity: float

    @cached_property
    def solution(self) -> CipSolution:
        """Our solution in float64: other solvers use its potentials and are compared with it."""
        tensors = (self.query, self.anchors, self.images)
        return ExactCip()(CipProblem(*tensors, self.smoothness, self.strong_convexity))


def random_instance(
    batch: int, neighbors: int, dim: int, *, seed: int, strong_convexity: float = 0.0
) -> Instance:
    """Draw B = `batch` independent problems with K = `neighbors` pairs in R^d, d = `dim`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchors = normal(batch, neighbors, dim) + normal(batch, 1, dim)
    query = anchors.mean(1) + QUERY_OFFSET * normal(batch, dim)
    gradient = torch.tanh(anchors) + strong_convexity * anchors
    images = gradient + NOISE * normal(batch, neighbors, dim)
    return Instance(query, anchors, images, SMOOTHNESS, strong_convexity)


def random_bank(
    size: int, batch: int, neighbors: int, dim: int, dtype: torch.dtype, source: torch.Generator
) -> BankProblem:
    """Draw a bank of N = `size` pairs in `dtype`, and B = `batch` float32 queries.

    They are on the device of `source` and are filled block by block. The neighbors of a query are
    distinct rows of the bank."""
    on = {"generator": source, "device": source.device}
    inputs = torch.empty(size, dim, dtype=dtype, device=source.device)
    features, query = torch.empty_like(inputs), torch.empty(batch, dim, device=source.device)
    block = max(1, BLOCK_BYTES // (4 * dim))
    for x, z in zip(inputs.split(block), features.split(block), strict=True):
        points = torch.randn(x.shape, **on)
        x.copy_(points)
        z.copy_(torch.tanh(points) + NOISE * torch.randn(x.shape, **on))
    # Random steps that together never go around the whole bank, so that rows are distinct.
    steps = torch.randint(1, max(1, size // neighbors) + 1, (batch, neighbors), **on)
    indices = (torch.randint(size, (batch, 1), **on) + steps.cumsum(1)) % size
    for part, rows in zip(query.split(block), indices.split(block), strict=True):
        part.copy_(QUERY_OFFSET * torch.randn(part.shape, **on))
        for column in rows.T:
            part += inputs[column].float() / neighbors
    return BankProblem(query, inputs, features, indices, SMOOTHNESS)
