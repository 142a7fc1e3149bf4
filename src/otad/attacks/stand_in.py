"""Tests whether the gradient of keys predicts how they change, and replaces one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otad.attacks.target import value_and_gradient
from otad.threat import LpBall, per_row

STEPS = (1 / 4, 1 / 16, 1 / 64)  # lengths in eps; one of them suits the curvature of a smooth map
ERROR = 0.5  # |rise - predicted| / (|rise| + |predicted|): within a factor of 3
TRUSTED_SHARE = 0.75  # the share of the rows that must agree
SAMPLE = 64  # rows that are tested
DIRECTIONS = 32  # pairs of steps for a gradient by differences
WIDTH = 0.5  # the length of these steps in eps
ROWS_AT_ONCE = 1024  # inputs of one call of the keys
EVERYWHERE = 1e9  # the radius in eps of a ball that shortens no step

Map = Callable[[Tensor], Tensor]
"""Maps inputs (n,*) to keys (n,m), outputs (n,C) or values (n,)."""


@torch.inference_mode(False)
def agreement(keys: Map, x: Tensor, ball: LpBall) -> Tensor:
    """Return for which rows the gradient of the keys predicts their change (m,), bool.

    Only the m rows of x (n,*) whose keys change under random noise of size eps are tested. A row
    agrees if the keys rise along the gradient of that change as much as the gradient predicts. The
    steps have several lengths on the scale of the threat, and the length with the best agreement
    counts. Maps that round, saturate, shatter or detach their gradients fail. The noise is the same
    in every call."""
    noise = torch.Generator().manual_seed(0)

    def rows(at: Tensor) -> Tensor:
        return keys(at).reshape(len(at), -1)

    with torch.no_grad():
        before = rows(x).double()
        change = rows(ball.surface(x, noise)) - before
    size, least = change.norm(dim=1), 8 * torch.finfo(x.dtype).eps * before.norm(dim=1)
    changed = size > least
    aims = (change / size.clamp_min(torch.finfo(x.dtype).tiny)[:, None]).to(x)
    _, gradient = value_and_gradient(lambda at: (rows(at) * aims).sum(1), x)
    broken = ~gradient.flatten(1).isfinite().all(1)
    gradient = gradient.masked_fill(per_row(broken, x), 0.0)
    agrees = torch.zeros((len(STEPS), len(x)), dtype=torch.bool, device=x.device)
    for place, share in enumerate(STEPS):
        near = ball.with_eps(share * ball.eps)
        step = near.eps * near.steepest(gradient)
        ends = near.project(x + step, x), near.project(x - step, x)
        with torch.no_grad():
            rise = ((rows(ends[0]) - rows(ends[1])) * aims).sum(1)
        promised = (gradient * (ends[0] - ends[1])).flatten(1).sum(1)
        agrees[place] = (rise - promised).abs() < ERROR * (rise.abs() + promised.abs())
    agrees = agrees[:, changed]
    return agrees[agrees.sum(1).argmax()]


def is_trusted(agrees: Tensor) -> bool:
    """Return whether enough rows agree, or no key changes at all."""
    return not len(agrees) or float(agrees.double().mean()) >= TRUSTED_SHARE


def climbable(keys: Map, x: Tensor, ball: LpBall, stand_in: Map | None = None) -> Map:
    """Return the same keys with a gradient that an attack can follow.

    It is the gradient of a differentiable `stand_in` if one is given (straight through), the
    gradient of the keys themselves where it can be trusted, and otherwise a gradient by smoothed
    differences."""
    if stand_in is not None:
        given = stand_in

        def straight_through(at: Tensor) -> Tensor:
            passed = given(at)
            return keys(at).detach() + (passed - passed.detach())

        return straight_through
    if ball.eps == 0 or is_trusted(agreement(keys, x[:SAMPLE], ball)):
        return keys
    generator = torch.Generator().manual_seed(0)
    return lambda at: _Smoothed.apply(at, keys, ball, generator)  # type: ignore[no-untyped-call]


class _Smoothed(torch.autograd.Function):
    """Keys with the gradient of their mean over Gaussian steps, estimated by antithetic pairs.

    The gradient of each feature is the slope of a regression, because bounds shorten some steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Map, ball: LpBall, generator: torch.Generator) -> Tensor:
        ctx.save_for_backward(x)
        ctx.given = keys, ball, generator
        return keys(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (keys, ball, generator) = ctx.saved_tensors, ctx.given
        legal, free = ball.with_eps(EVERYWHERE * ball.eps), max(1, len(ball.free_features(x)))
        unit = x.new_ones(()) if ball.scale is None else ball.scale.to(x)
        unit = unit * (WIDTH * ball.eps / free ** (1 / ball.order))
        products, squares = torch.zeros_like(x), torch.zeros_like(x)
        size = max(1, ROWS_AT_ONCE // len(x))
        for count in torch.ones(DIRECTIONS).split(size):
            shape = len(count), *x.shape
            step = unit * torch.randn(shape, generator=generator).to(x)
            center = x.expand(shape).flatten(0, 1)
            ends = [legal.clip(center + way * step.flatten(0, 1), center) for way in (1, -1)]
            rises = keys(ends[0]) - keys(ends[1])
            rise = (gradients[0] * rises.unflatten(0, shape[:2])).flatten(2).sum(2)
            step = (ends[0] - ends[1]).unflatten(0, shape[:2]) / unit
            products += (rise.view(*shape[:2], *[1] * (x.dim() - 1)) * step).sum(0)
            squares += step.square().sum(0)
        return products / squares.clamp_min(torch.finfo(x.dtype).tiny) / unit, None, None, None
