"""The Lipschitz map of a lifted bank, differentiable in the bank itself.

For points x_i with answers g_i, i = 1..N, and k the map of
`otad.cip.whole_bank.lifted_potential` gives a query x' the value sum_i lambda_i g_i, where lambda
minimizes over the simplex, with y_i = k (x_i - x'),

    |sum_i lambda_i y_i|^2 + |sum_i lambda_i g_i|^2 + sum_i lambda_i (|y_i|^2 - |g_i|^2).

It is the dual problem of the global map, without the terms that are the same for all i.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_alike, check_shape, check_tensor
from otad.cip.whole_bank.lifted_potential import lifted_levels
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError

STEADY = 1e-10  # of the largest entry, added to the diagonal of a nearly singular system


def lifted_map(query: Tensor, points: Tensor, answers: Tensor, lipschitz: float = 1.0) -> Tensor:
    """Values (B,C) at queries (B,p) of the k-Lipschitz map of points (N,p) and answers (N,C).

    It passes through the pairs where `least_lipschitz` is at most k, and is k-Lipschitz either way.
    Gradients reach the query, the points and the answers: lambda solves the linear system of its
    support, which stays the same nearby.
    """
    check_tensor(query, "query", "B,p")
    check_tensor(points, "points", "N,p")
    check_tensor(answers, "answers", "N,C")
    check_shape(points, "points", (len(points), query.shape[1]), "like the queries")
    check_shape(answers, "answers", (len(points), answers.shape[1]), "one for each point")
    for name, part in (("points", points), ("answers", answers)):
        check_alike(part, name, query, "query")
    if not 0 < lipschitz < torch.inf:
        raise InputError(f"lipschitz: expected a positive finite number, got {lipschitz!r}")
    with torch.no_grad():
        indices, active = _support(query, points, answers, lipschitz)
    steps = lipschitz * (points[indices].double() - query.double()[:, None])
    values = answers[indices].double()
    weights = _weights(steps, values, active.double())
    return (weights[:, :, None] * values).sum(1).to(query.dtype)


def _support(
    query: Tensor, points: Tensor, answers: Tensor, lipschitz: float
) -> tuple[Tensor, Tensor]:
    """The points (B,W) with weight, and which of them have it."""
    lift = answers.shape[1]
    nothing = torch.zeros(0, dtype=torch.int64, device=query.device)
    levels = lifted_levels(points)
    potential = BankPotential(levels, 1 + lipschitz, 1 - lipschitz, nothing, 0, 0.0)
    inputs = functional.pad(points, (0, lift))
    features = torch.cat([points, answers], dim=1)
    found = WholeBank(inputs, features, potential)(functional.pad(query, (0, lift)))
    return found.indices, found.solution.multipliers > 0


def _weights(steps: Tensor, values: Tensor, active: Tensor) -> Tensor:
    """lambda (B,W) on its support: 2 Q lambda + c = mu, sum lambda = 1, with Q of all (y_i, g_i)
    and 1 on the diagonal for points without weight."""
    gram = steps @ steps.mT + values @ values.mT
    slope = steps.square().sum(2) - values.square().sum(2)
    gram = gram * active[:, :, None] * active[:, None]
    idle = torch.diag_embed(1 - active)
    largest = gram.detach().diagonal(dim1=1, dim2=2).amax(1)[:, None, None]
    eye = torch.eye(active.shape[1], dtype=gram.dtype, device=gram.device)
    system = 2 * gram + idle + STEADY * largest * eye
    system = torch.cat([system, active[:, :, None]], dim=2)
    last = functional.pad(active, (0, 1))[:, None]
    right = functional.pad(-slope * active, (0, 1), value=1.0)
    solved = torch.linalg.solve(torch.cat([system, last], dim=1), right[:, :, None])
    weights: Tensor = solved[:, :-1, 0] * active
    return weights
