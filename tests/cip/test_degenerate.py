"""Rows at the edge: repeated points, flat data, nearly infeasible ones, extreme scales."""

from __future__ import annotations

import pytest
import torch
from cip.instances import CONVEXITIES, changed, converted, normal, random_problem, rows_of
from torch.nn.functional import normalize
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip, Status, least_smoothness

SINGLE, DOUBLE = torch.float32, torch.float64
BOTH_MODES = pytest.mark.parametrize("mode", ["consistent", "paper"])
BOTH_DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(SINGLE, 1e-5), (DOUBLE, 1e-12)], ids=["single", "double"]
)


def solved(problem: CipProblem, mode: str = "consistent") -> CipSolution:
    """With small residuals in every row, by the solver's own account and by the problem's."""
    solution = ExactCip(mode=mode)(problem)
    limit = 1e-9 if problem.query.dtype == DOUBLE else 1e-5
    assert float(solution.residual.max()) <= limit
    assert float(problem.residual(solution).max()) <= limit
    return solution


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("low", CONVEXITIES)
def test_one_neighbor(low, dtype, tolerance, mode, generator) -> None:
    """h(x) = u + <z, x - x_1> + l/2 |x - x_1|^2 is the lowest potential."""
    problem = random_problem(generator, 8, 1, 5, smoothness=1.0, strong_convexity=low)
    problem = converted(problem, dtype)
    solution = solved(problem, mode)
    gap = problem.query - problem.anchors[:, 0]
    assert_close(solution.image, problem.images[:, 0] + low * gap)
    assert_close(solution.value, ((problem.images[:, 0] + low / 2 * gap) * gap).sum(1))
    assert solution.multipliers.tolist() == [[1.0]] * 8
    assert solution.potentials.tolist() == [[0.0]] * 8
    assert solution.status.tolist() == [Status.SOLVED] * 8
    assert least_smoothness(problem).tolist() == [low] * 8


@BOTH_MODES
@pytest.mark.parametrize(
    ("dim", "dtype", "tolerance"), [(2, DOUBLE, 1e-9), (784, DOUBLE, 1e-9), (784, SINGLE, 1e-4)]
)
@pytest.mark.parametrize("low", CONVEXITIES)
def test_repeated_pairs_change_nothing(low, dim, dtype, tolerance, mode, generator) -> None:
    """All neighbors twice, in another order: the same mean of paths, potentials and answer.

    Not in the plane in float32: there the cycles of some rows nearly vanish, and rounding of the
    input moves the least smoothness by up to 1e-3. Over 14,000 rows the other cases stay a factor
    of ten below their tolerance.
    """
    order = [3, 0, 1, 2, 2, 3, 4, 4, 0, 1]
    problem = random_problem(generator, 8, 5, dim, smoothness=1.3, strong_convexity=low)
    problem = converted(problem, dtype)
    pairs = {"anchors": problem.anchors[:, order], "images": problem.images[:, order]}
    expected, found = solved(problem, mode), solved(changed(problem, **pairs), mode)
    assert found.status.tolist() == expected.status.tolist()
    assert_close(found.smoothness, expected.smoothness, rtol=tolerance, atol=0)
    size = problem.images.norm(dim=-1).amax(1)
    assert float(((found.image - expected.image).norm(dim=1) / size).max()) <= tolerance
    assert float(((found.value - expected.value) / size.square()).abs().max()) <= tolerance
    weights = torch.zeros_like(expected.multipliers)
    weights.scatter_add_(1, torch.tensor(order).expand(8, -1), found.multipliers)
    assert_close(weights, expected.multipliers, rtol=0, atol=tolerance)
    levels = (found.potentials - expected.potentials[:, order]).abs().amax(1)
    assert float((levels / size.square()).max()) <= tolerance


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("slope", [0.3, 0.0, -0.5, 1.0])
@pytest.mark.parametrize(("count", "dim"), [(1, 3), (5, 4), (10, 784)])
def test_images_on_the_lower_curvature(
    count, dim, slope, dtype, tolerance, mode, generator
) -> None:
    """z_i = l x_i + c: the potential is the parabola itself, whatever L > l."""
    anchors = normal(generator, 6, count, dim)
    for query in (normal(generator, 6, dim), torch.zeros(6, dim, dtype=DOUBLE)):
        for shift in (0.0, 1.0):
            problem = CipProblem(query, anchors, slope * anchors + shift, slope + 1.5, slope)
            problem = converted(problem, dtype)
            solution = solved(problem, mode)
            assert solution.smoothness.tolist() == [slope + 1.5] * 6
            assert solution.status.tolist() == [Status.SOLVED] * 6
            assert_close(solution.image, slope * problem.query + shift, rtol=0, atol=tolerance)
            least = least_smoothness(problem)
            assert_close(least, torch.full_like(least, slope), rtol=0, atol=100 * tolerance)


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("slope", [0.5, 2.0])
def test_linear_map(slope, dtype, tolerance, mode, generator) -> None:
    """z_i = s x_i with l = 0: the least L is s, every cycle of two is critical."""
    anchors = normal(generator, 20, 8, 3)
    problem = CipProblem(normal(generator, 20, 3), anchors, slope * anchors, slope)
    problem = converted(problem, dtype)
    least = least_smoothness(problem)
    assert_close(least, torch.full_like(least, slope), rtol=tolerance, atol=0)
    solution = solved(problem, mode)
    inside = solution.multipliers.gt(0).sum(1) > 3  # in the hull of its neighbors: exact
    assert bool(inside.any())
    error = (solution.image - problem.query * slope)[inside].norm(dim=1)
    assert float(error.max()) <= (1e-6 if dtype == DOUBLE else 1e-2)


@BOTH_MODES
@BOTH_DTYPES
def test_collinear_images(dtype, tolerance, mode, generator) -> None:
    """The Gram matrix has rank one: many multipliers give the same image."""
    direction = normalize(normal(generator, 12, 1, 6), dim=-1)
    anchors = normal(generator, 12, 9, 6)
    height = (anchors * direction).sum(-1, keepdim=True)
    images = (height + 0.5 * height.tanh()) * direction
    problem = converted(CipProblem(normal(generator, 12, 6), anchors, images, 1.6), dtype)
    solution = solved(problem, mode)
    assert solution.status.tolist() == [Status.SOLVED] * 12
    off = solution.image - (solution.image * direction[:, 0]).sum(1, keepdim=True) * direction[:, 0]
    assert float(off.norm(dim=1).max()) <= tolerance
    flat = {"images": problem.images[:, :1].expand(-1, 9, -1), "strong_convexity": -0.5}
    assert solved(changed(problem, **flat), mode).status.tolist() == [Status.SOLVED] * 12


@BOTH_MODES
@BOTH_DTYPES
@pytest.mark.parametrize("dim", [1, 2])
def test_more_neighbors_than_dimensions(dim, dtype, tolerance, mode, generator) -> None:
    for low in CONVEXITIES:
        problem = random_problem(generator, 8, 25, dim, smoothness=1.0, strong_convexity=low)
        solution = solved(converted(problem, dtype), mode)
        assert int(solution.multipliers.gt(1e-6).sum(1).max()) <= dim + 2


def test_the_worst_of_many_rows(generator) -> None:
    """In the plane, among thousands of rows some supports are nearly dependent."""
    generator.manual_seed(24)
    curvature = {"smoothness": 1.3, "strong_convexity": -0.5}
    problem = random_problem(generator, 3000, 10, 2, **curvature, noise=0.1)
    solution = ExactCip(mode="paper", on_failure="abstain")(problem)
    assert float(solution.failed.double().mean()) < 0.1
    for residual in (solution.residual, problem.residual(solution)):
        assert float(residual[~solution.failed].max()) <= 1e-9


@BOTH_MODES
@pytest.mark.parametrize("margin", [1e-3, 1e-6, 1e-9, 1e-12, 0.0])
def test_nearly_infeasible(margin, mode, generator) -> None:
    """A hair above and a hair below the least smoothness."""
    problem = random_problem(generator, 30, 6, 3, noise=0.05)
    least = least_smoothness(problem)
    problem, least = rows_of(problem, least.isfinite()), least[least.isfinite()]
    above, below = (
        solved(changed(problem, smoothness=least * (1 + sign * margin)), mode) for sign in (1, -1)
    )
    if margin > 1e-12:
        assert above.status.eq(Status.SOLVED).all()
        assert below.status.eq(Status.RAISED).all()
    assert_close(below.smoothness, least, rtol=1e-11, atol=0)
    assert_close(above.smoothness, least, rtol=margin + 1e-11, atol=0)


@pytest.mark.parametrize("gap", [1e-2, 1e-5, 1e-8])
def test_nearly_contradicting(gap, generator) -> None:
    """Two neighbors a hair apart with different images: a least L of any size, found exactly."""
    near = random_problem(generator, 10, 6, 4)
    step = normalize(normal(generator, 10, 4), dim=-1)
    near.anchors[:, 5] = near.anchors[:, 4] + gap * step
    near.images[:, 5] = near.images[:, 4] + step
    solution = ExactCip(on_failure="abstain")(near)
    assert bool((least_smoothness(near) >= (1 - 1e-6) / gap).all())
    assert not bool(solution.failed.all())
    assert float(near.residual(solution)[~solution.failed].max()) <= 1e-9


@BOTH_MODES
@pytest.mark.parametrize("far", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("high", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(SINGLE, 2e-3), (DOUBLE, 1e-8)])
def test_scales(dtype, tolerance, high, far, mode, generator) -> None:
    """Anchors times s and images times t: curvature times t/s, values times s t."""
    slope = high / far
    units = {"image": high, "value": high * far, "potentials": high * far, "multipliers": 1.0}
    for low in (0.0, 0.3):
        problem = random_problem(generator, 10, 8, 5, smoothness=1.4, strong_convexity=low)
        arrays = far * problem.query, far * problem.anchors, high * problem.images
        scaled = converted(CipProblem(*arrays, slope * 1.4, slope * low), dtype)
        found, expected = solved(scaled, mode), solved(problem, mode)
        assert found.status.tolist() == expected.status.tolist()
        for name, unit in (units | {"smoothness": slope}).items():
            one, other = getattr(found, name).double() / unit, getattr(expected, name)
            assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("distance", [1e2, 1e4])
@pytest.mark.parametrize("low", CONVEXITIES)
def test_query_far_from_all_anchors(low, distance, generator) -> None:
    problem = random_problem(generator, 10, 8, 5, smoothness=1.4, strong_convexity=low)
    far = solved(changed(problem, query=distance * normal(generator, 10, 5)))
    assert_close(far.smoothness, solved(problem).smoothness, rtol=1e-13 * distance**2, atol=0)


@pytest.mark.parametrize("seed", [25, 33])
def test_many_pivots_leave_no_rounding_behind(seed: int) -> None:
    """Images that depend on each other are solved by pivots alone, and some rows take many."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(2000, 25, 3, generator=generator).to(DOUBLE)
    query = 0.5 * torch.randn(2000, 3, generator=generator).to(DOUBLE)
    solved(CipProblem(query, anchors, anchors.clone(), 1.00005))
