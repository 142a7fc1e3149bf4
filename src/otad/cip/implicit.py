"""The answer as a differentiable function of the query.

The multipliers solve a linear system on their support, so with the sensitivity H (B,K,K) of the
multipliers to the K lines <z~_i, x'> the derivatives are

    d lambda / dx' = H Z~,      dz'/dx' = l I + Z~^T H Z~,      dv/dx' = z'.

dz'/dx' is symmetric with eigenvalues in [l, L], so the backward pass is one more solve of the same
kind: two products with the neighbors. The potentials do not depend on the query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otad.cip.fused import streamed_combination, streams
from otad.cip.gram import for_blocks
from otad.cip.rows import RowProblem


def assemble(
    problem: RowProblem, multipliers: Tensor, strong_convexity: Tensor, chunk: int | None
) -> Tensor:
    """z' = sum_i lambda_i (z_i - l a_i), (B,d), in blocks of rows."""
    query = problem.query.detach()
    bent = bool(strong_convexity.any())
    if streams(problem):
        image = streamed_combination(problem.features, problem.indices, multipliers)
        if bent:
            mean = streamed_combination(problem.inputs, problem.indices, multipliers)
            image -= strong_convexity[:, None].to(image.dtype) * (mean - query)
        return image
    image = torch.empty_like(query)

    def work(rows: slice) -> None:
        weight = multipliers[rows, None]
        answer = weight @ problem.images_of(rows).to(image.dtype)
        if bent:
            mean = weight @ problem.anchors_of(rows).to(image.dtype)
            low = strong_convexity[rows, None, None].to(image.dtype)
            answer -= low * (mean - query[rows, None])
        image[rows] = answer[:, 0]

    for_blocks(problem, chunk, work)
    return image


class ImplicitMap(torch.autograd.Function):
    """query -> (image, value, multipliers); everything else is a constant of the map."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        problem: RowProblem,
        multipliers: Tensor,
        value: Tensor,
        sensitivity: Tensor,
        strong_convexity: Tensor,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        image = assemble(problem, multipliers, strong_convexity, chunk)
        ctx.problem, ctx.chunk = problem, chunk
        slope = image.masked_fill(value.isnan()[:, None], 0.0)  # a failed row's value is constant
        ctx.save_for_backward(slope, sensitivity, strong_convexity)
        # Copies: an output that shares memory with an input would confuse autograd.
        return image, value.clone(), multipliers.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, image_grad: Tensor, value_grad: Tensor, multiplier_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, sensitivity, strong_convexity = ctx.saved_tensors
        dtype = slope.dtype
        low = strong_convexity.to(dtype)[:, None]
        grad = low * image_grad + value_grad[:, None] * slope
        bent = bool(strong_convexity.any())
        problem = ctx.problem

        def work(rows: slice) -> None:
            lines = problem.images_of(rows).to(dtype)
            if bent:  # the part of z~_i that all neighbors share has no effect
                lines = lines - low[rows, :, None] * problem.anchors_of(rows).to(dtype)
            pull = (lines @ image_grad[rows, :, None])[..., 0] + multiplier_grad[rows]
            push = (sensitivity[rows] @ pull.double()[..., None])[..., 0].to(dtype)
            grad[rows] += (push[:, None] @ lines)[:, 0]

        for_blocks(problem, ctx.chunk, work)
        return grad, None, None, None, None, None, None
