"""Steps within a ball, on a GPU by few kernels: attacks take them by the thousand."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from otad.attacks.row_graphs import row_wise
from otad.io.environment import has_triton
from otad.threat import L2, Linf, LpBall, per_row
from otad.threat.ball import FIRST_SHRINK
from otad.threat.norms import FILLINGS

MOST_FEATURES = 2**12  # of an input: a program has all of them in its registers
ROOM = 1e-12  # of a squared length, for other sums of the same squares


def projected(ball: LpBall, moved: Tensor, x: Tensor) -> Tensor:
    """Return `ball.project(moved, x)` for legal examples x (n,*), up to rounding."""
    return project_by_kernel(ball, moved, x) if has_kernel(ball, x) else ball.project(moved, x)


@row_wise
def ascended(x: Tensor, moved: Tensor, length: Tensor, gradient: Tensor, *, ball: LpBall) -> Tensor:
    """Return the points (n,*) of the ball around x that are a step of some length (n,), in units of
    the ball, along a gradient from `moved`."""
    return projected(ball, moved + per_row(length, moved) * ball.steepest(gradient), x)


def has_kernel(ball: LpBall, x: Tensor) -> bool:
    """Return whether the kernel projects inputs like x (n,*) into a ball."""
    is_plain = type(ball) in (L2, Linf) and ball.scale is ball.mutable is ball.groups is None
    fits = x.dtype == torch.float32 and len(x) > 0 and x[0].numel() <= MOST_FEATURES
    positive = ball.eps >= torch.finfo(torch.float32).tiny
    return x.is_cuda and is_plain and fits and positive and has_triton()


def project_by_kernel(ball: LpBall, moved: Tensor, x: Tensor) -> Tensor:
    """Return the points (n,*) of the ball around x (n,*) that are nearest to `moved` (n,*).

    They are NaN for an example outside the bounds."""
    from otad.attacks.kernels import project_kernel

    given, dim = (moved.contiguous(), x.contiguous()), x[0].numel()
    nearest = torch.empty_like(given[1])
    numbers = _numbers(ball.norm, ball.eps, *(ball.bounds or (0.0, 0.0)), device=x.device)
    how = {"norm": ball.norm, "bounded": ball.bounds is not None, "fillings": FILLINGS}
    how |= {"halvings": round(-math.log2(FIRST_SHRINK)), "width": 1 << (dim - 1).bit_length()}
    with torch.cuda.device_of(x):
        project_kernel[(len(x),)](*given, numbers, nearest, dim, **how)
    return nearest


@cache  # and never forgotten, as graphs read them
def _numbers(norm: str, eps: float, low: float, high: float, *, device: torch.device) -> Tensor:
    """Return what the kernel needs, in float64: plain arguments would be rounded to float32."""
    most = eps if norm == "linf" else eps**2 * (1 - ROOM)
    numbers = eps, low, high, 2 * FIRST_SHRINK, most
    return torch.tensor(numbers, dtype=torch.float64, device=device)
