"""Rows at the edge: repeated points, flat data, nearly infeasible ones, extreme scales; and the
quadratic program on the simplex against all supports."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from cip.instances import CONVEXITIES, changed, converted, normal, random_problem, rows_of
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip, Status, least_smoothness
from otad.cip.local.simplex_qp import maximize_on_simplex, pivot_to_optimum

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


TOLERANCE = 1e-13


def objective(gram: np.ndarray, linear: np.ndarray, weights: np.ndarray) -> float:
    return float(linear @ weights - weights @ gram @ weights / 2)


def brute_force(gram: np.ndarray, linear: np.ndarray) -> float:
    """The largest objective among the stationary points of every face with weights >= 0.

    On a face with a singular matrix some optimum lies on a smaller face, so these suffice.
    """
    best = -np.inf
    for size in range(1, len(gram) + 1):
        for chosen in map(list, combinations(range(len(gram)), size)):
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


def solve_and_check(vectors: Tensor, linear: Tensor) -> Tensor:
    """Optimality of every column against brute force; returns the weights (K,B)."""
    gram, active = gram_of(vectors), torch.ones_like(linear, dtype=torch.bool)
    best = maximize_on_simplex(gram, linear, active, TOLERANCE)
    weights = best.weights
    assert bool(best.solved.all())
    assert float(weights.min()) >= 0.0
    assert float((weights.sum(0) - 1).abs().max()) <= 1e-12
    for column in range(linear.shape[1]):
        matrix, line = gram[..., column].numpy(), linear[:, column].numpy()
        expected = brute_force(matrix, line)
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
        vectors = normalize(vectors[..., :2], dim=-1)
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


NASTY = {
    "plain": lambda anchors, noise: anchors,
    "equal": lambda anchors, noise: anchors[:, [0, 0, 0, 3, 4, 5, 6, 7]],
    "collinear": lambda anchors, noise: anchors[:, :, :1] * noise[:, :1],
    "close together": lambda anchors, noise: anchors[:, :1] + 1e-3 * anchors,
    "nearly equal": lambda anchors, noise: anchors[:, [0, 0, 2, 2, 4, 5, 6, 7]] + 1e-4 * noise,
}


@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("dim", [3, 30])
def test_single_precision_far_from_the_origin(kind: str, dim: int, generator) -> None:
    """Solved rows satisfy the optimality conditions, judged in float64, to the rounding of a sum of
    d products; and the image is that of float64 up to 2 units in the last place of the largest
    coordinate of any image, beside 4 eps of the row's own size, which no offset changes. Between
    nearly equal or collinear anchors rounding decides: there to a tenth of the root of eps."""
    eps, compared = torch.finfo(SINGLE).eps, 0
    for offset, of_inputs, of_images in product((1, 1e2, 1e4, 1e6), (0, 1), (0, 1)):
        anchors, noise = (normal(generator, 60, 8, dim) for _ in range(2))
        anchors = NASTY[kind](anchors, noise)
        images = anchors * torch.rand(60, 1, dim, generator=generator, dtype=DOUBLE)
        query = anchors.mean(1) + 0.3 * normal(generator, 60, dim) + offset * of_inputs
        parts = query, anchors + offset * of_inputs, images + offset * of_images
        rough = CipProblem(*(part.float() for part in parts), 2.0)
        exact = CipProblem(*(part.float().double() for part in parts), 2.0)
        found, expected = (ExactCip(on_failure="abstain")(one) for one in (rough, exact))
        solved = found.status == Status.SOLVED
        assert bool((exact.residual(found) <= (dim + 10) * eps)[solved].all())
        both = solved & (expected.status == Status.SOLVED)
        compared += int(both.sum())
        error = (found.image.double() - expected.image).norm(dim=1)
        spread = (exact.images - exact.images.mean(1, keepdim=True)).norm(dim=-1).amax(1)
        reach = (exact.anchors - exact.query[:, None]).norm(dim=-1).amax(1)
        allowed = eps**0.5 / 10 if kind in ("nearly equal", "collinear") else 4 * eps
        bound = 2 * eps * dim**0.5 * exact.images.abs().amax((1, 2)) + allowed * (
            spread + 2 * reach
        )
        assert bool((error <= bound)[both].all())
    assert compared >= 300, "rounding of far rows left too few of 960 as they were"
