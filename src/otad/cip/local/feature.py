"""The feature z' as a differentiable function of the query.

Let H (B,K,K) be the sensitivity of the multipliers to the K numbers <z~_i, x'>. The derivatives are

    d lambda / dx' = H Z~,      dz'/dx' = l I + Z~^T H Z~,      dv/dx' = z'.

The matrix dz'/dx' is symmetric with eigenvalues in [l, L], so the backward pass is two products
with the neighbors. The potentials do not depend on the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otad.cip.execution import can_compile, full_precision, problem_blocks, run_parts
from otad.cip.local.read_compiled import compiled_combination, compiled_dots
from otad.cip.local.stream_triton import can_stream, streamed_combination, streamed_dots
from otad.cip.protocols import RowProblem


def assemble(
    problem: RowProblem, multipliers: Tensor, convexity: Tensor | None, chunk: int | None = None
) -> Tensor:
    """Return z' = sum_i lambda_i (z_i - l a_i), (B,d), in blocks of rows.

    l is the `convexity` (B,) of the map, or None if it is 0 in all rows."""
    image = _combination(problem, multipliers, chunk, anchors=False)
    if convexity is not None:
        mean = _combination(problem, multipliers, chunk, anchors=True)
        image -= convexity[:, None].to(image.dtype) * (mean - problem.query.detach())
    return image


def _combination(
    problem: RowProblem, weights: Tensor, chunk: int | None, *, anchors: bool
) -> Tensor:
    """Return sum_i lambda_i z_i (B,d), or with `anchors` sum_i lambda_i x_i."""
    if can_stream(problem):
        points = problem.inputs if anchors else problem.features
        return streamed_combination(points, problem.indices, weights)
    if can_compile(weights):
        return compiled_combination(problem, "anchors" if anchors else "images", weights, chunk)
    points_of = problem.anchors_of if anchors else problem.images_of
    total = torch.empty_like(problem.query)

    def work(rows: slice) -> None:
        points, weight, part = points_of(rows).to(total.dtype), weights[rows], total[rows]
        torch.mul(points[:, 0], weight[:, :1], out=part)
        for k in range(1, weight.shape[1]):  # faster than batched products of a single row
            part.addcmul_(points[:, k], weight[:, k, None])

    run_parts(problem_blocks(problem, chunk), work, total.device)
    return total


def _dots(problem: RowProblem, vectors: Tensor, chunk: int | None, *, anchors: bool) -> Tensor:
    """Return <z_i, vectors> (B,K) in float64, or with `anchors` <x_i, vectors>."""
    if can_stream(problem):
        points = problem.inputs if anchors else problem.features
        return streamed_dots(points, problem.indices, vectors)
    if can_compile(vectors):
        return compiled_dots(problem, "anchors" if anchors else "images", vectors, chunk)
    points_of = problem.anchors_of if anchors else problem.images_of
    dots = vectors.new_empty(problem.shape[:2])

    def work(rows: slice) -> None:
        points = points_of(rows).to(vectors.dtype)
        torch.matmul(points, vectors[rows, :, None], out=dots[rows, :, None])

    with full_precision(vectors.device):
        run_parts(problem_blocks(problem, chunk), work, vectors.device)
    return dots.double()


def feature(
    problem: RowProblem,
    multipliers: Tensor,
    value: Tensor,
    sensitivity: Tensor | None,
    convexity: Tensor | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z' (B,d), the value and the multipliers, differentiable if gradients are on."""
    made = assemble(problem, multipliers, convexity, chunk), value, multipliers
    if not (problem.query.requires_grad and torch.is_grad_enabled()):
        return made
    found: tuple[Tensor, Tensor, Tensor] = DifferentiableMap.apply(  # type: ignore[no-untyped-call]
        problem.query, problem, made, sensitivity, convexity, chunk
    )
    return found


class DifferentiableMap(torch.autograd.Function):
    """The map from the query to (image, value, multipliers); everything else is constant."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, problem: RowProblem, *constants: Any) -> tuple[Any, ...]:
        # As a tuple, because an output that shares memory with an input would confuse autograd.
        (image, value, multipliers), sensitivity, convexity, ctx.chunk = constants
        ctx.problem = problem
        slope = image.masked_fill(value.isnan()[:, None], 0.0)  # the value of a failed row is fixed
        ctx.save_for_backward(slope, sensitivity, convexity)
        return image, value, multipliers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, image_grad: Tensor, value_grad: Tensor, multiplier_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, sensitivity, convexity = ctx.saved_tensors
        dtype, problem, chunk = slope.dtype, ctx.problem, ctx.chunk
        grad, vectors = value_grad[:, None] * slope, image_grad.contiguous()
        shift = None if convexity is None else convexity.to(dtype)[:, None]
        pull = _dots(problem, vectors, chunk, anchors=False) + multiplier_grad
        # With l x_i instead of l a_i, because l x' is shared by all neighbors and has no effect.
        if shift is not None:
            grad += shift * vectors
            pull -= shift * _dots(problem, vectors, chunk, anchors=True)
        push = (sensitivity @ pull[..., None])[..., 0].to(dtype)
        curved = _combination(problem, push, chunk, anchors=False)
        if shift is not None:
            curved -= shift * _combination(problem, push, chunk, anchors=True)
        return grad + curved, *[None] * 5
