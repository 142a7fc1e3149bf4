"""Rows at the edge: repeated points, flat data, nearly infeasible ones, extreme scales."""

from __future__ import annotations

import math

import pytest
import torch
from cip.instances import converted, normal, random_problem, rows_of
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip, Status, least_smoothness
from otad.errors import SolverError

DOUBLE = torch.float64
BOTH_MODES = pytest.mark.parametrize("mode", ["consistent", "paper"])
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
LOWS = (-0.5, 0.0, 0.3)


def check(problem: CipProblem, solution: CipSolution) -> None:
    """Both residuals of every row."""
    limit = 1e-9 if problem.query.dtype == DOUBLE else 1e-5
    assert float(solution.residual.max()) <= limit
    assert float(problem.residual(solution).max()) <= limit


@BOTH_MODES
@BOTH_DTYPES
def test_one_neighbor(dtype, mode, generator) -> None:
    """h(x) = u + <z, x - x_1> + l/2 |x - x_1|^2 is the lowest potential."""
    for low in LOWS:
        problem = random_problem(generator, 8, 1, 5, smoothness=1.0, strong_convexity=low)
        problem = converted(problem, dtype)
        solution = ExactCip(mode=mode)(problem)
        gap = problem.query - problem.anchors[:, 0]
        assert_close(solution.image, problem.images[:, 0] + low * gap)
        assert_close(solution.value, ((problem.images[:, 0] + low / 2 * gap) * gap).sum(1))
        assert solution.multipliers.tolist() == [[1.0]] * 8
        assert solution.potentials.tolist() == [[0.0]] * 8
        assert solution.status.tolist() == [Status.SOLVED] * 8
        assert least_smoothness(problem).tolist() == [low] * 8
        check(problem, solution)


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("dim", [2, 784])
@pytest.mark.parametrize("low", LOWS)
def test_repeated_pairs_change_nothing(low, dim, dtype, mode, generator) -> None:
    """All neighbors twice: the same mean of paths, hence potentials, hence answer."""
    order = [3, 0, 1, 2, 2, 3, 4, 4, 0, 1]
    tolerance = 1e-9 if dtype == DOUBLE else 1e-3
    problem = random_problem(generator, 8, 5, dim, smoothness=1.3, strong_convexity=low)
    problem = converted(problem, dtype)
    arrays = problem.anchors[:, order], problem.images[:, order]
    twice = CipProblem(problem.query, *arrays, 1.3, low)
    expected, found = ExactCip(mode=mode)(problem), ExactCip(mode=mode)(twice)
    check(twice, found)
    assert found.status.tolist() == expected.status.tolist()
    assert_close(found.smoothness, expected.smoothness, rtol=min(tolerance, 1e-5), atol=0)
    size = problem.images.norm(dim=-1).amax(1)
    assert float(((found.image - expected.image).norm(dim=1) / size).max()) <= tolerance
    weights = torch.zeros_like(expected.multipliers)
    weights.scatter_add_(1, torch.tensor(order).expand(8, -1), found.multipliers)
    assert_close(weights, expected.multipliers, rtol=0, atol=tolerance)
    levels = (found.potentials - expected.potentials[:, order]).abs().amax(1)
    assert float((levels / size.square()).max()) <= tolerance


@BOTH_DTYPES
@pytest.mark.parametrize("dim", [2, 784])
@pytest.mark.parametrize("low", LOWS)
def test_contradicting_images_of_one_anchor(low, dim, dtype, generator) -> None:
    problem = random_problem(generator, 10, 15, dim, strong_convexity=low)
    anchors = problem.anchors.clone()
    anchors[:, 14] = anchors[:, 7]
    twins = converted(CipProblem(problem.query, anchors, problem.images, 2.4, low), dtype)
    assert least_smoothness(twins).tolist() == [math.inf] * 10
    with pytest.raises(SolverError, match=r"10 of 10 rows have no solution: 0 \(INFEASIBLE\)"):
        ExactCip()(twins)
    if dtype == DOUBLE:  # in single precision a very large L is as good as none
        solution = ExactCip(climb=(0.5, 0.0), on_failure="abstain")(twins)
        assert solution.status.tolist() == [Status.INFEASIBLE] * 10


@BOTH_MODES
@BOTH_DTYPES
def test_all_images_equal(dtype, mode, generator) -> None:
    for low in (-0.5, 0.0):
        problem = random_problem(generator, 6, 7, 4, smoothness=1.0, strong_convexity=low)
        flat = problem.images[:, :1].expand(-1, 7, -1).contiguous()
        constant = converted(CipProblem(problem.query, problem.anchors, flat, 1.0, low), dtype)
        solution = ExactCip(mode=mode)(constant)
        assert solution.status.tolist() == [Status.SOLVED] * 6
        check(constant, solution)
    assert_close(solution.image, constant.images[:, 0])
    assert least_smoothness(constant).tolist() == [0.0] * 6


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("slope", [0.3, -0.5, 1.0])
def test_images_on_the_lower_curvature(slope, dtype, mode, generator) -> None:
    """z_i = l x_i + c: the potential is the parabola itself, whatever L > l."""
    tolerance = 1e-12 if dtype == DOUBLE else 1e-5
    for count, dim in ((1, 3), (5, 4), (10, 784)):
        anchors = normal(generator, 6, count, dim)
        for query in (normal(generator, 6, dim), torch.zeros(6, dim, dtype=DOUBLE)):
            for shift in (0.0, 1.0):
                images = slope * anchors + shift
                problem = CipProblem(query, anchors, images, slope + 1.5, slope)
                problem = converted(problem, dtype)
                solution = ExactCip(mode=mode)(problem)
                assert solution.smoothness.tolist() == [slope + 1.5] * 6
                expected = slope * problem.query + shift
                assert_close(solution.image, expected, rtol=0, atol=tolerance)
                least = least_smoothness(problem)
                assert_close(least, torch.full_like(least, slope), rtol=0, atol=100 * tolerance)
                check(problem, solution)


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("slope", [0.5, 2.0])
def test_linear_map(slope, dtype, mode, generator) -> None:
    """z_i = s x_i with l = 0: the least L is s, every cycle of two is critical."""
    anchors = normal(generator, 20, 8, 3)
    problem = CipProblem(normal(generator, 20, 3), anchors, slope * anchors, slope)
    problem = converted(problem, dtype)
    least = least_smoothness(problem)
    tolerance = 1e-12 if dtype == DOUBLE else 1e-5
    assert_close(least, torch.full_like(least, slope), rtol=tolerance, atol=0)
    solution = ExactCip(mode=mode)(problem)
    check(problem, solution)
    inside = solution.multipliers.gt(0).sum(1) > 3  # in the hull of its neighbors: exact
    assert bool(inside.any())
    error = (solution.image - problem.query * slope)[inside].norm(dim=1)
    assert float(error.max()) <= (1e-6 if dtype == DOUBLE else 1e-2)


@BOTH_MODES
@BOTH_DTYPES
def test_collinear_images(dtype, mode, generator) -> None:
    """The Gram matrix has rank one: many multipliers give the same image."""
    direction = torch.nn.functional.normalize(normal(generator, 12, 1, 6), dim=-1)
    anchors = normal(generator, 12, 9, 6)
    height = (anchors * direction).sum(-1, keepdim=True)
    images = (height + 0.5 * height.tanh()) * direction
    problem = converted(CipProblem(normal(generator, 12, 6), anchors, images, 1.6), dtype)
    solution = ExactCip(mode=mode)(problem)
    assert solution.status.tolist() == [Status.SOLVED] * 12
    check(problem, solution)
    off = solution.image - (solution.image * direction[:, 0]).sum(1, keepdim=True) * direction[:, 0]
    assert float(off.norm(dim=1).max()) <= (1e-12 if dtype == DOUBLE else 1e-5)


@BOTH_MODES
@BOTH_DTYPES
def test_more_neighbors_than_dimensions(dtype, mode, generator) -> None:
    for dim in (1, 2):
        for low in LOWS:
            problem = random_problem(generator, 8, 25, dim, smoothness=1.0, strong_convexity=low)
            problem = converted(problem, dtype)
            solution = ExactCip(mode=mode)(problem)
            check(problem, solution)
            assert int(solution.multipliers.gt(1e-6).sum(1).max()) <= dim + 2


def test_the_worst_of_many_rows(generator) -> None:
    """In the plane, among thousands of rows some supports are nearly dependent."""
    generator.manual_seed(24)
    curvature = {"smoothness": 1.3, "strong_convexity": -0.5}
    problem = random_problem(generator, 3000, 10, 2, **curvature, noise=0.1)
    solution = ExactCip(mode="paper", on_failure="abstain")(problem)
    solved = ~solution.failed
    assert float(solved.double().mean()) > 0.9
    assert float(solution.residual[solved].max()) <= 1e-9
    assert float(problem.residual(solution)[solved].max()) <= 1e-9


@BOTH_MODES
@pytest.mark.parametrize("margin", [1e-3, 1e-6, 1e-9, 1e-12, 0.0])
def test_nearly_infeasible(margin, mode, generator) -> None:
    """Asked for a hair above and a hair below the least smoothness."""
    problem = random_problem(generator, 30, 6, 3, noise=0.05)
    least = least_smoothness(problem)
    problem, least = rows_of(problem, least.isfinite()), least[least.isfinite()]
    arrays = (problem.query, problem.anchors, problem.images)
    above, below = (CipProblem(*arrays, least * (1 + sign * margin)) for sign in (1, -1))
    solved, raised = ExactCip(mode=mode)(above), ExactCip(mode=mode)(below)
    check(above, solved)
    check(below, raised)
    if margin > 1e-12:
        assert solved.status.eq(Status.SOLVED).all()
        assert raised.status.eq(Status.RAISED).all()
    assert_close(raised.smoothness, least, rtol=1e-11, atol=0)
    assert_close(solved.smoothness, least, rtol=margin + 1e-11, atol=0)


def test_nearly_contradicting(generator) -> None:
    """Two neighbors a hair apart with different images: a least L of any size, found exactly."""
    for gap in (1e-2, 1e-5, 1e-8):
        problem = random_problem(generator, 10, 6, 4)
        anchors, images = problem.anchors.clone(), problem.images.clone()
        step = torch.nn.functional.normalize(normal(generator, 10, 4), dim=-1)
        anchors[:, 5] = anchors[:, 4] + gap * step
        images[:, 5] = images[:, 4] + step
        near = CipProblem(problem.query, anchors, images, 2.4)
        solution = ExactCip(on_failure="abstain")(near)
        assert bool((least_smoothness(near) >= (1 - 1e-6) / gap).all())
        solved = ~solution.failed
        assert bool(solved.any())
        assert float(near.residual(solution)[solved].max()) <= 1e-9


@BOTH_MODES
@pytest.mark.parametrize("far", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("high", [1e-6, 1.0, 1e6])
@BOTH_DTYPES
def test_scales(dtype, high, far, mode, generator) -> None:
    """Anchors times s and images times t: curvature times t/s, values times s t."""
    slope, tolerance = high / far, 1e-8 if dtype == DOUBLE else 2e-3
    units = {"image": high, "value": high * far, "potentials": high * far, "multipliers": 1.0}
    for low in (0.0, 0.3):
        problem = random_problem(generator, 10, 8, 5, smoothness=1.4, strong_convexity=low)
        arrays = far * problem.query, far * problem.anchors, high * problem.images
        scaled = converted(CipProblem(*arrays, slope * 1.4, slope * low), dtype)
        found, expected = ExactCip(mode=mode)(scaled), ExactCip(mode=mode)(problem)
        check(scaled, found)
        assert found.status.tolist() == expected.status.tolist()
        for name, unit in (units | {"smoothness": slope}).items():
            one, other = getattr(found, name).double() / unit, getattr(expected, name)
            assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("distance", [1e2, 1e4])
def test_query_far_from_all_anchors(distance, generator) -> None:
    for low in LOWS:
        problem = random_problem(generator, 10, 8, 5, smoothness=1.4, strong_convexity=low)
        query = distance * normal(generator, 10, 5)
        far = CipProblem(query, problem.anchors, problem.images, 1.4, low)
        solution, near = ExactCip()(far), ExactCip()(problem)
        check(far, solution)
        assert_close(solution.smoothness, near.smoothness, rtol=1e-13 * distance**2, atol=0)


@pytest.mark.parametrize("seed", [25, 33])
def test_many_pivots_leave_no_rounding_behind(seed: int) -> None:
    """Images that depend on each other are solved by pivots alone, and some rows take many."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(2000, 25, 3, generator=generator).to(DOUBLE)
    query = 0.5 * torch.randn(2000, 3, generator=generator).to(DOUBLE)
    problem = CipProblem(query, anchors, anchors.clone(), 1.00005)
    assert float(problem.residual(ExactCip()(problem)).max()) <= 1e-9
