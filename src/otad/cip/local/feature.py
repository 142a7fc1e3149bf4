"""The feature z' as a differentiable function of the query.

Let H (B,K,K) be the sensitivity of the multipliers to the K numbers <z~_i, x'>. The derivatives are

    d lambda / dx' = H Z~,      dz'/dx' = l I + Z~^T H Z~,      dv/dx' = z'.

The matrix dz'/dx' is symmetric with eigenvalues in [l, L], so the backward pass is two products
with the neighbors. The potentials do not depend on the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otad.cip.execution import matmul, problem_blocks, run_parts
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
    points_of = problem.anchors_of if anchors else problem.images_of
    total = torch.empty_like(problem.query)

    def work(rows: slice) -> None:
        points, weight, part = points_of(rows).to(total.dtype), weights[rows], total[rows]
        if part.device.type == "cpu":
            matmul(weight[:, None], points, part[:, None])
            return
        torch.mul(points[:, 0], weight[:, :1], out=part)
        for k in range(1, weight.shape[1]):  # faster than batched products of a single row
            part.addcmul_(points[:, k], weight[:, k, None])

    run_parts(problem_blocks(problem, chunk), work, total.device)
    return total


def feature(
    problem: RowProblem,
    multipliers: Tensor,
    value: Tensor,
    sensitivity: Tensor | None,
    convexity: Tensor | None,
    chunk: int | None = None,
    image: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z' (B,d), the value and the multipliers, differentiable if gradients are on.

    z' is assembled unless it is given as the `image`."""
    if image is None:
        with torch.no_grad():
            image = assemble(problem, multipliers, convexity, chunk)
    made = image, value, multipliers
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
        dtype, problem = slope.dtype, ctx.problem
        grad = value_grad[:, None] * slope
        shift = None if convexity is None else convexity.to(dtype)[:, None]
        if shift is not None:
            grad += shift * image_grad

        columns = image_grad.contiguous()[..., None]  # an expanded gradient slows down BLAS

        def work(rows: slice) -> None:
            lines = problem.images_of(rows).to(dtype)
            if shift is not None:  # without l x', which all neighbors share and has no effect
                lines = lines - shift[rows, :, None] * problem.anchors_of(rows).to(dtype)
            pull = matmul(lines, columns[rows])[..., 0] + multiplier_grad[rows]
            push = (sensitivity[rows] @ pull.double()[..., None]).to(dtype)
            grad[rows] += matmul(push.mT, lines)[:, 0]

        if not can_stream(problem):
            run_parts(problem_blocks(problem, ctx.chunk), work, grad.device)
            return grad, *[None] * 5
        bank, indices = (problem.inputs, problem.features), problem.indices
        pull = streamed_dots(bank[1], indices, image_grad) + multiplier_grad
        if shift is not None:
            pull -= shift * streamed_dots(bank[0], indices, image_grad)
        push = (sensitivity @ pull[..., None])[..., 0].to(dtype)
        curved = streamed_combination(bank[1], indices, push)
        if shift is not None:
            curved -= shift * streamed_combination(bank[0], indices, push)
        return grad + curved, *[None] * 5
