"""The soft vote of all bank points, and its gradient: on a GPU by two kernels.

Torch would write a score for each pair of an input and a bank point some twenty times."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from otad.attacks.adaptive.neighborhood import Neighborhood
from otad.io.environment import has_triton

BLOCK = 2048  # points that a program reads at once


def advantage_over(
    bank: Neighborhood, aims: Tensor, y: Tensor, width: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return how much more the votes for `aims` (n,) weigh than those for y (n,), as a function of
    embedded inputs (n,d).

    It is the difference (n,) of the logarithms of both sums of exp(-rank / width), with a width
    (n,1). If no point votes for one side, the other side alone gives the direction."""
    if has_kernel(bank):
        return lambda embedded: advantage_by_kernel(bank, embedded, aims, y, width)
    wrong = bank.is_wrong(y)
    chosen = (bank.votes[None] == aims[:, None]) & wrong
    return lambda embedded: advantage(-bank.ranks(embedded) / width, chosen, ~wrong)


def advantage(scores: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
    """Return how much more the wrong points weigh than the right ones (n,), from scores (n,N)."""
    return _difference(*(scores.masked_fill(~side, -inf).logsumexp(1) for side in (wrong, right)))


def has_kernel(bank: Neighborhood) -> bool:
    sites = bank.sites
    return sites.is_cuda and sites.dtype == torch.float32 and not bank.by_tangents and has_triton()


def advantage_by_kernel(
    bank: Neighborhood, embedded: Tensor, aims: Tensor, y: Tensor, width: Tensor
) -> Tensor:
    products, squares = 2 * embedded @ bank.sites.T, embedded.square().sum(1)
    fixed = bank.offsets, bank.votes, width[:, 0], aims, y
    found: Tensor = _Advantage.apply(products, squares, *fixed)  # type: ignore[no-untyped-call]
    return found


class _Advantage(torch.autograd.Function):
    """The advantage (n,) of products 2 <e, x_i> (n,N) and squares |e|^2 (n,)."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        from otad.attacks.kernels import vote_kernel

        arrays = [one.contiguous() for one in given]
        rows, count = given[0].shape
        sums = arrays[0].new_empty((rows, 2))
        with torch.cuda.device_of(sums):
            vote_kernel[(rows,)](*arrays, sums, count, block=BLOCK, num_warps=8)
        ctx.save_for_backward(*arrays, sums)
        return _difference(*sums.unbind(1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        from otad.attacks.kernels import weight_kernel

        products = ctx.saved_tensors[0]
        (rows, count), weights = products.shape, torch.empty_like(products)
        grid, arrays = (rows, -(-count // BLOCK)), (*ctx.saved_tensors, slopes.contiguous())
        with torch.cuda.device_of(weights):
            weight_kernel[grid](*arrays, weights, count, block=BLOCK, num_warps=8)
        return weights, -weights.sum(1), *[None] * 5


def _difference(towards: Tensor, away: Tensor) -> Tensor:
    towards, away = (torch.where(total.isfinite(), total, 0.0) for total in (towards, away))
    return towards - away
