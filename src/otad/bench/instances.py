"""Random instances of the convex integration problem, the same for every solver.

Anchors scatter around a center of their own; images are the gradient of the smooth convex function
sum_i log cosh x_i + (l/2) x_i^2 plus a little noise, so potentials exist for the smoothness given;
the query lies near the mean of its anchors, so that many of them have a say in the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from otad.cip import CipProblem, CipSolution, ExactCip

SMOOTHNESS = 2.0
NOISE = 0.05
QUERY_OFFSET = 0.3
_BANK_BLOCK_BYTES = 2**29  # float32 random numbers drawn at a time


@dataclass(frozen=True, eq=False)
class Instance:
    """Queries (B,d) with anchors and images (B,K,d), float64 on the CPU."""

    query: Tensor
    anchors: Tensor
    images: Tensor
    smoothness: float
    strong_convexity: float

    def problem(self) -> CipProblem:
        return CipProblem(
            self.query, self.anchors, self.images, self.smoothness, self.strong_convexity
        )

    @cached_property
    def solution(self) -> CipSolution:
        """Our answer in float64: every other answer is compared with it, and shares its u_i."""
        return ExactCip()(self.problem())


def random_instance(
    batch: int,
    neighbors: int,
    dim: int,
    *,
    generator: torch.Generator,
    strong_convexity: float = 0.0,
) -> Instance:
    """B = `batch` independent problems with K = `neighbors` pairs in R^d, d = `dim`."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    anchors = normal(batch, neighbors, dim) + normal(batch, 1, dim)
    query = anchors.mean(1) + QUERY_OFFSET * normal(batch, dim)
    images = _gradient(anchors, strong_convexity) + NOISE * normal(batch, neighbors, dim)
    return Instance(query, anchors, images, SMOOTHNESS, strong_convexity)


@dataclass(frozen=True, eq=False)
class BankInstance:
    """A bank of pairs (N,d) in storage precision, and float32 queries (B,d) with `indices` (B,K).

    All on one device; the neighbors of a query are distinct and lie anywhere in the bank.
    """

    query: Tensor
    inputs: Tensor
    features: Tensor
    indices: Tensor


def random_bank(
    size: int,
    batch: int,
    neighbors: int,
    dim: int,
    *,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> BankInstance:
    """N = `size` pairs and B = `batch` queries on the generator's device, filled block by block."""
    device = generator.device
    inputs = torch.empty(size, dim, dtype=dtype, device=device)
    features = torch.empty_like(inputs)
    block = max(1, _BANK_BLOCK_BYTES // (4 * dim))
    for start in range(0, size, block):
        rows = slice(start, min(start + block, size))
        points = torch.randn(rows.stop - start, dim, generator=generator, device=device)
        noise = torch.randn(points.shape, generator=generator, device=device)
        inputs[rows] = points
        features[rows] = _gradient(points, 0.0) + NOISE * noise
    indices = _distinct_indices(size, batch, neighbors, generator)
    query = torch.empty(batch, dim, device=device)
    for start in range(0, batch, block):
        rows = slice(start, min(start + block, batch))
        noise = torch.randn(rows.stop - start, dim, generator=generator, device=device)
        query[rows] = QUERY_OFFSET * noise
        for column in indices[rows].T:
            query[rows] += inputs[column].float() / neighbors
    return BankInstance(query, inputs, features, indices)


def _gradient(points: Tensor, strong_convexity: float) -> Tensor:
    return torch.tanh(points) + strong_convexity * points


def _distinct_indices(size: int, batch: int, neighbors: int, generator: torch.Generator) -> Tensor:
    """(B,K) bank rows, distinct within a query: random steps that never go round the bank once."""
    longest_step = max(1, size // neighbors)
    steps = torch.randint(
        1,
        longest_step + 1,
        (batch, neighbors),
        generator=generator,
        device=generator.device,
    )
    start = torch.randint(size, (batch, 1), generator=generator, device=generator.device)
    return (start + steps.cumsum(1)) % size
