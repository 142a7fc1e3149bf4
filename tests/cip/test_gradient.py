"""Derivatives against central differences, and what holds for every fixed set of neighbors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cip.instances import (
    CONVEXITIES,
    changed,
    converted,
    convex_map,
    normal,
    random_problem,
    rows_of,
)  # fmt: skip
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip, Status
from otad.cip.judge import map_curvature
from otad.cip.reference import difference_bounds

STEP = 1e-6
BOTH_MODES = pytest.mark.parametrize("mode", ["consistent", "paper"])


def jacobians(problem: CipProblem, solver: ExactCip) -> tuple[Tensor, Tensor, Tensor]:
    """By autograd: of image (B,d,d), value (B,d) and multipliers (B,K,d) in the query."""
    query = problem.query.clone().requires_grad_()
    solution = solver(changed(problem, query=query))

    def rows(output: Tensor) -> Tensor:
        parts = (part.sum() for part in output.unbind(1))
        return torch.stack([torch.autograd.grad(p, query, retain_graph=True)[0] for p in parts], 1)

    return rows(solution.image), rows(solution.value[:, None])[:, 0], rows(solution.multipliers)


def differences(problem: CipProblem, solver: ExactCip) -> tuple[Tensor, Tensor, Tensor]:
    """The same by central differences, all moved queries in one batch."""
    batch, _, dim = problem.shape
    moves = STEP * torch.eye(dim, dtype=torch.float64)
    queries = problem.query + torch.cat((moves, -moves))[:, None]  # (2d,B,d)
    many = rows_of(problem, torch.arange(batch).repeat(2 * dim))
    solution = solver(changed(many, query=queries.flatten(0, 1)))

    def slopes(output: Tensor) -> Tensor:
        ahead, behind = output.unflatten(0, (2, dim, batch))
        return ((ahead - behind) / (2 * STEP)).movedim(0, -1)

    return slopes(solution.image), slopes(solution.value), slopes(solution.multipliers)


@BOTH_MODES
@pytest.mark.parametrize("strong_convexity", CONVEXITIES)
@pytest.mark.parametrize("smoothness", [1.2, 3.0])
@pytest.mark.parametrize(("count", "dim"), [(1, 3), (4, 2), (6, 9), (12, 20)])
def test_against_differences(count, dim, smoothness, strong_convexity, mode, generator) -> None:
    problem = random_problem(
        generator, 12, count, dim, smoothness=smoothness, strong_convexity=strong_convexity
    )
    solver = ExactCip(mode=mode)
    image, value, multipliers = jacobians(problem, solver)
    expected = differences(problem, solver)
    for found, wanted in zip((image, value, multipliers), expected, strict=True):
        assert float((found - wanted).abs().max()) <= 1e-5
    solution = solver(problem)
    assert_close(value, solution.image, rtol=0, atol=1e-12)  # dv/dx' = z'
    assert_close(image, image.mT, rtol=0, atol=1e-12)
    high, low = map_curvature(problem, solution)
    assert torch.equal(high, problem.smoothness if mode == "paper" else solution.smoothness)
    eigenvalues = torch.linalg.eigvalsh(image)
    assert bool((eigenvalues >= low[:, None] - 1e-9).all())
    assert bool((eigenvalues <= high[:, None] + 1e-9).all())
    rank = (eigenvalues - strong_convexity > 1e-9).sum(1)
    assert torch.equal(rank, ((solution.multipliers > 0).sum(1) - 1).clamp_max(dim))
    if count > 1:
        assert float(image.diagonal(dim1=1, dim2=2).sum(1).sub(dim * low).max()) > 0.1


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"max_smoothness": 2.0}, Status.REPAIRED),
        ({"climb": (0.2, 0.1)}, Status.RAISED),
        ({"potential": "lowest"}, Status.RAISED),
    ],
)
def test_neighbors_left_out_and_a_climb(options, status, generator) -> None:
    problem = random_problem(generator, 40, 6, 4, noise=0.3, smoothness=1.5)
    solver = ExactCip(on_failure="abstain", **options)
    solution = solver(problem)
    assert bool((solution.status == status).any())
    exact, rough = jacobians(problem, solver), differences(problem, solver)
    for found, expected in zip(exact, rough, strict=True):
        assert float((found - expected)[~solution.failed].abs().max()) <= 1e-5


@BOTH_MODES
def test_single_precision(mode, generator) -> None:
    for dim in (5, 128, 784):
        problem = random_problem(generator, 6, 10, dim, smoothness=1.3, strong_convexity=0.2)
        directions = torch.randn(6, dim, generator=generator, dtype=torch.float64)
        grads = []
        for dtype in (torch.float64, torch.float32):
            cast = converted(problem, dtype)
            query = cast.query.clone().requires_grad_()
            solution = ExactCip(mode=mode)(changed(cast, query=query))
            (solution.image * directions.to(dtype)).sum().backward()
            assert query.grad.dtype == dtype
            grads.append(query.grad.double())
        error = (grads[0] - grads[1]).norm(dim=1) / directions.norm(dim=1)
        assert float(error.max()) <= 1e-4


def test_failed_rows_leave_the_gradient_of_others_alone(generator) -> None:
    problem = random_problem(generator, 3, 4, 3)
    problem.images[1] = -problem.anchors[1]  # decreasing: no potential for l = 0
    grads = []
    for rows in ([0, 1, 2], [0, 2]):
        query = problem.query[rows].clone().requires_grad_()
        mixed = changed(rows_of(problem, rows), query=query)
        solution = ExactCip(on_failure="abstain")(mixed)
        assert solution.failed.tolist() == [row == 1 for row in rows]
        solution.image[~solution.failed].square().sum().backward()
        grads.append(query.grad)
    assert_close(grads[0][[0, 2]], grads[1], rtol=0, atol=1e-14)
    assert float(grads[0][1].abs().max()) == 0.0


def test_gradient_can_be_switched_off_and_second_derivatives_are_refused(generator) -> None:
    problem = random_problem(generator, 2, 3, 4)
    query = problem.query.clone().requires_grad_()
    with torch.no_grad():
        assert not ExactCip()(changed(problem, query=query)).image.requires_grad
    assert not ExactCip()(problem).image.requires_grad
    solution = ExactCip()(changed(problem, query=query))
    assert not solution.potentials.requires_grad
    (grad,) = torch.autograd.grad(solution.image.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


MODES = st.sampled_from(["consistent", "paper"])
PROBLEMS = st.builds(
    lambda seed, **sizes: random_problem(torch.Generator().manual_seed(seed), 1, **sizes),
    seed=st.integers(0, 2**31),
    count=st.integers(1, 12),
    dim=st.sampled_from([1, 2, 3, 11, 60]),
    smoothness=st.floats(0.5, 4.0),
    strong_convexity=st.sampled_from(CONVEXITIES),
    noise=st.sampled_from([0.0, 0.01]),
)
SPREADS = st.sampled_from([1e-3, 0.1, 1.0, 10.0])


def solved(problem: CipProblem, **options: str) -> CipSolution:
    """The solution of a problem that has one: others are no examples."""
    solution = ExactCip(on_failure="abstain", **options)(problem)
    assume(not bool(solution.failed.any()))
    return solution


def at_queries(problem: CipProblem, queries: Tensor) -> CipProblem:
    """Many queries with the neighbors of the one row."""
    return changed(rows_of(problem, torch.zeros(len(queries), dtype=torch.int64)), query=queries)


@settings(max_examples=40)
@given(problem=PROBLEMS, mode=MODES, spread=SPREADS, seed=st.integers(0, 2**31))
def test_map_is_lipschitz_and_monotone(problem, mode, spread, seed) -> None:
    """l |dx|^2 <= <dz, dx> and |dz| <= max(L, -l) |dx|, with the curvature of the map."""
    generator = torch.Generator().manual_seed(seed)
    queries = problem.query + spread * normal(generator, 12, problem.shape[2])
    queries[6:] = queries[:6] + 1e-3 * spread * normal(generator, 6, problem.shape[2])
    many = at_queries(problem, queries)
    solution = solved(many, mode=mode)
    high, low = map_curvature(many, solution)
    if mode == "paper":
        assert torch.equal(high, many.smoothness)
    assert_close(solution.smoothness, solution.smoothness[:1].expand(12))
    dx = queries[:, None] - queries
    dz = solution.image[:, None] - solution.image
    length = dx.norm(dim=-1)
    rounding = 1e-10 * (1 + problem.images.norm(dim=-1).max()) * (1 + spread)
    assert bool((dz.norm(dim=-1) <= torch.maximum(high, -low) * length + rounding).all())
    assert bool(((dz * dx).sum(-1) >= low * length.square() - rounding * length).all())


@settings(max_examples=40)
@given(problem=PROBLEMS)
def test_consistent_map_passes_through_its_anchors(problem) -> None:
    many = at_queries(problem, problem.anchors[0])
    solution = solved(many)
    size = problem.images.norm(dim=-1).max()
    assert float((solution.image - problem.images[0]).norm(dim=1).max() / size) <= 1e-8
    assert float(many.residual(solution).max()) <= 1e-9
    levels = solution.potentials[0]
    scale = size * (1 + size)
    assert float((solution.value - levels).abs().max() / scale) <= 1e-9


@settings(max_examples=40)
@given(problem=PROBLEMS, mode=MODES, rule=st.sampled_from(["canonical", "lowest", "highest"]))
def test_potentials_satisfy_eq_2(problem, mode, rule) -> None:
    solution = solved(problem, mode=mode, potential=rule)
    high, low = float(solution.smoothness[0]), float(solution.strong_convexity[0])
    bounds = difference_bounds(problem.anchors[0].numpy(), problem.images[0].numpy(), high, low)
    levels = solution.potentials[0].numpy()
    slack = levels[:, None] - levels - bounds
    assert slack.min() >= -1e-11 * (1 + np.abs(bounds).max())
    assert float(solution.residual) <= 1e-9
    assert float(problem.residual(solution)) <= 1e-9


@BOTH_MODES
@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-8])
def test_nearly_equal_anchors(gap, mode, generator) -> None:
    """Compared at a curvature that is given. One that is raised to the least possible moves by
    rounding, by about 1e-16 / gap^2, and then differences measure that movement."""
    problem = random_problem(generator, 40, 6, 5, smoothness=1.5)
    anchors = problem.anchors.clone()
    anchors[:, [1, 3]] = anchors[:, [0, 2]] + gap * normal(generator, 40, 2, 5)
    problem = changed(problem, anchors=anchors, images=convex_map(anchors, generator))
    solver = ExactCip(mode=mode)
    given = changed(problem, smoothness=solver(problem).smoothness * (1 + 1e-4))
    assert bool((solver(given).status == Status.SOLVED).all())
    found, expected = jacobians(given, solver)[0], differences(given, solver)[0]
    assert float((found - expected).abs().max()) <= 1e-4
