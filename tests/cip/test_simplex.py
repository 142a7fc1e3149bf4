"""The quadratic program on the simplex against all supports."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from cip.instances import normal
from torch import Tensor
from torch.testing import assert_close

from otad.cip.local.simplex_qp import maximize_on_simplex, pivot_to_optimum

TOLERANCE = 1e-13


def objective(gram: np.ndarray, linear: np.ndarray, weights: np.ndarray) -> float:
    return float(linear @ weights - weights @ gram @ weights / 2)


def brute_force(gram: np.ndarray, linear: np.ndarray, active: np.ndarray) -> float:
    """The largest objective among the stationary points of every face with weights >= 0.

    On a face with a singular matrix some optimum lies on a smaller face, so these suffice.
    """
    best = -np.inf
    allowed = np.nonzero(active)[0]
    for size in range(1, len(allowed) + 1):
        for chosen in map(list, combinations(allowed, size)):
            system = np.block(
                [[gram[np.ix_(chosen, chosen)], np.ones((size, 1))], [np.ones((1, size)), 0.0]]
            )
            found = np.linalg.lstsq(system, np.append(linear[chosen], 1.0), rcond=None)[0][:-1]
            if found.min() < -1e-9:
                continue
            weights = np.zeros(len(gram))
            weights[chosen] = found.clip(0.0) / found.clip(0.0).sum()
            best = max(best, objective(gram, linear, weights))
    return best


def gram_of(vectors: Tensor) -> Tensor:
    return torch.einsum("bik,bjk->ijb", vectors, vectors)


def solve_and_check(vectors: Tensor, linear: Tensor, active: Tensor | None = None) -> Tensor:
    """Optimality of every column against brute force; returns the weights (K,B)."""
    gram = gram_of(vectors)
    active = torch.ones_like(linear, dtype=torch.bool) if active is None else active
    best = maximize_on_simplex(gram, linear, active, TOLERANCE)
    weights = best.weights
    assert bool(best.solved.all())
    assert float(weights.min()) >= 0.0
    assert float((weights.sum(0) - 1).abs().max()) <= 1e-12
    assert float(weights[~active].abs().sum()) == 0.0
    for column in range(linear.shape[1]):
        matrix, line = gram[..., column].numpy(), linear[:, column].numpy()
        expected = brute_force(matrix, line, active[:, column].numpy())
        found = objective(matrix, line, weights[:, column].numpy())
        size = np.abs(matrix).max() + np.abs(line).max()
        assert found == pytest.approx(expected, abs=1e-11 * size)
    return weights


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dim", [1, 2, 3, 10])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_all_supports(count, dim, size, generator) -> None:
    """Regular matrices for dim >= count, singular ones below; short and long linear terms."""
    vectors, linear = normal(generator, 15, count, dim), size * normal(generator, count, 15)
    weights = solve_and_check(vectors, linear)
    if count > 1 and size == 1e3:
        assert float(weights.amax(0).min()) > 0.5  # long linear terms win
    if count == 6 and dim == 10 and size == 1e-3:
        assert int((weights > 0).sum(0).max()) >= 4


@pytest.mark.parametrize("dim", [2, 8])
def test_only_active_neighbors_take_part(dim, generator) -> None:
    vectors, linear = normal(generator, 30, 6, dim), normal(generator, 6, 30)
    active = torch.rand(6, 30, generator=generator) < 0.5
    active[torch.randint(6, (30,), generator=generator), torch.arange(30)] = True
    linear[~active] += 100.0  # however tempting
    solve_and_check(vectors, linear, active)


@pytest.mark.parametrize("kind", ["repeated", "zero", "on a sphere", "1e-3", "1e-5", "1e-7"])
def test_dependent_vectors(kind, generator) -> None:
    """They leave the optimum, or its weights, open."""
    vectors, linear = normal(generator, 30, 6, 4), 0.1 * normal(generator, 6, 30)
    if kind == "repeated":
        vectors[:, 3:] = vectors[:, :1]
        linear[5] = linear[3]
    elif kind == "zero":
        vectors.zero_()
    elif kind == "on a sphere":  # with the origin inside the hull or not
        vectors = torch.nn.functional.normalize(vectors[..., :2], dim=-1)
        linear.fill_(7.0)
    else:
        gap = float(kind)
        vectors[:, 3:] = vectors[:, :3] + gap * normal(generator, 30, 3, 4)
        linear[3:] = linear[:3] + gap * normal(generator, 3, 30)
    weights = solve_and_check(vectors, linear)
    if kind == "zero":
        assert torch.equal(weights.argmax(0), linear.argmax(0))
        assert float(weights.amax(0).min()) == 1.0


def assert_optimal(gram: Tensor, linear: Tensor, weights: Tensor, active: Tensor) -> None:
    """By the optimality conditions, where brute force would take too long."""
    slope = linear - (gram * weights).sum(1)
    level = (slope * weights).sum(0)
    assert float((slope - level)[active].max()) <= 1e-10
    assert float((weights * (slope - level).abs()).max()) <= 1e-10


@pytest.mark.parametrize("dim", [3, 40])
def test_many_neighbors(dim, generator) -> None:
    vectors, linear = normal(generator, 50, 40, dim), normal(generator, 40, 50)
    active = torch.ones(40, 50, dtype=torch.bool)
    best = maximize_on_simplex(gram_of(vectors), linear, active, TOLERANCE)
    assert bool(best.solved.all())
    assert_optimal(gram_of(vectors), linear, best.weights, active)


@pytest.mark.parametrize("dim", [2, 9])
def test_sensitivity(dim, generator) -> None:
    """d weights / d linear against central differences."""
    vectors, linear = normal(generator, 20, 5, dim), normal(generator, 5, 20)
    gram = gram_of(vectors)
    active = torch.ones(5, 20, dtype=torch.bool)
    exact = maximize_on_simplex(gram, linear, active, TOLERANCE).sensitivity
    for k in range(5):
        step = torch.zeros_like(linear)
        step[k] = 1e-6
        ahead, behind = (
            maximize_on_simplex(gram, linear + sign * step, active, TOLERANCE).weights
            for sign in (1, -1)
        )
        assert_close(exact[:, k], (ahead - behind) / 2e-6, rtol=0, atol=1e-5)
    assert_close(exact, exact.transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 3, 12])
def test_pivoting_alone(dim, generator) -> None:
    """The method of last resort finds the same optimum from the first row on."""
    vectors, linear = normal(generator, 60, 9, dim), normal(generator, 9, 60)
    gram = gram_of(vectors)
    gram, linear = gram / gram.amax((0, 1)), linear / gram.amax((0, 1))
    active = torch.ones(9, 60, dtype=torch.bool)
    active[3] = False
    weights, _, solved = pivot_to_optimum(gram, linear, active, TOLERANCE)
    expected = maximize_on_simplex(gram, linear, active, TOLERANCE).weights
    assert bool(solved.all())
    assert_optimal(gram, linear, weights, active)
    image, other = (torch.einsum("kb,bkd->bd", w, vectors) for w in (weights, expected))
    assert_close(image, other, rtol=0, atol=1e-9)


def test_rows_do_not_disturb_each_other(generator: torch.Generator) -> None:
    vectors, linear = normal(generator, 50, 6, 3), normal(generator, 6, 50)
    gram = gram_of(vectors)
    active = torch.ones(6, 50, dtype=torch.bool)
    together = maximize_on_simplex(gram, linear, active, TOLERANCE)
    gram[..., 7] = torch.nan
    linear[:, 8] = torch.inf
    mixed = maximize_on_simplex(gram, linear, active, TOLERANCE)
    good = torch.ones(50, dtype=torch.bool)
    good[7:9] = False
    assert mixed.solved.tolist() == good.tolist()
    assert torch.equal(mixed.weights[:, good], together.weights[:, good])
