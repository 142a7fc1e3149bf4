"""The reference: answers known in closed form, and the exact solver against it (330 rows)."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from cip.instances import CONVEXITIES, changed, converted, normal, random_problem, value_size
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status
from otad.cip.reference import (
    CvxpyCip,
    canonical_potentials,
    difference_bounds,
    least_smoothness_by_lp,
)
from otad.errors import MissingExtraError, SolverError

cvxpy = pytest.importorskip("cvxpy", reason="needs the extra 'reference' (cvxpy, clarabel)")


def test_two_neighbors_on_a_line_in_closed_form() -> None:
    """z = x at x = 0 and x = 2 with l = 0, L = 2; then u_2 - u_1 may be 1 to 3, the middle is 2.

    The lowest convex 2-smooth function through them has slope 0 up to 0.5, then 2 x - 1, then 2
    from 1.5 on.
    """
    anchors = torch.tensor([[[0.0], [2.0]]], dtype=torch.float64).expand(5, 2, 1).contiguous()
    query = torch.tensor([[-1.0], [0.25], [1.0], [1.75], [3.0]], dtype=torch.float64)
    solution = CvxpyCip()(CipProblem(query, anchors, anchors.clone(), 2.0))
    assert solution.potentials.tolist() == [[-1.0, 1.0]] * 5
    expected = torch.tensor([[0.0], [0.0], [1.0], [2.0], [2.0]], dtype=torch.float64)
    assert_close(solution.image, expected)
    value = torch.tensor([-1.0, -1.0, -0.75, 0.5, 3.0], dtype=torch.float64)
    assert_close(solution.value, value)


def test_potentials_and_least_smoothness_of_a_parabola(generator) -> None:
    anchors = normal(generator, 6, 3).numpy()
    bounds = difference_bounds(anchors, 1.5 * anchors, 1.5, 0.0)
    levels, cycle = canonical_potentials(bounds)
    expected = 0.75 * np.square(anchors).sum(1)
    np.testing.assert_allclose(levels, expected - expected.mean(), atol=1e-12)
    assert abs(cycle) <= 1e-12
    assert least_smoothness_by_lp(anchors, 1.5 * anchors, 0.0) == pytest.approx(1.5, rel=1e-9)
    assert least_smoothness_by_lp(anchors, 1.5 * anchors, -0.5) == pytest.approx(1.5, rel=1e-9)
    assert least_smoothness_by_lp(anchors, -anchors, 0.0) == np.inf
    assert least_smoothness_by_lp(anchors, 0 * anchors, 0.0) == 0.0
    assert canonical_potentials(difference_bounds(anchors, 1.5 * anchors, 1.4, 0.0))[1] > 1e-3


def test_fields_of_the_solution(generator) -> None:
    problem = random_problem(generator, 3, 4, 5, smoothness=1.0)
    solution = CvxpyCip(mode="paper")(problem)
    assert (solution.mode, solution.status.tolist()) == ("paper", [Status.RAISED] * 3)
    assert torch.equal(solution.residual, problem.residual(solution))
    single = converted(problem, torch.float32)
    rough = CvxpyCip()(changed(single, query=single.query.requires_grad_()))
    assert (rough.image.dtype, rough.smoothness.dtype) == (torch.float32, torch.float64)
    assert not rough.image.requires_grad
    assert float(rough.residual.max()) <= 1e-5
    pairs = problem.anchors.flatten(0, 1), problem.images.flatten(0, 1)
    bank = BankProblem(problem.query, *pairs, torch.arange(12).view(3, 4), 1.0)
    assert torch.equal(CvxpyCip(mode="paper")(bank).image, solution.image)


def test_rows_without_a_solution(generator) -> None:
    problem = random_problem(generator, 3, 4, 2)
    problem.images[1] = -problem.anchors[1]
    with pytest.raises(SolverError, match="INFEASIBLE"):
        CvxpyCip()(problem)
    abstained, fallen = (CvxpyCip(on_failure=rule)(problem) for rule in ("abstain", "fallback"))
    for solution in (abstained, fallen):
        assert solution.status.tolist() == [Status.SOLVED, Status.INFEASIBLE, Status.SOLVED]
        assert solution.residual.isinf().tolist() == [False, True, False]
        assert bool(solution.smoothness[1].isnan())
    assert bool(abstained.image[1].isnan().all())
    nearest = (problem.anchors[1] - problem.query[1]).norm(dim=1).argmin()
    assert_close(fallen.image[1], problem.images[1, nearest])
    assert int(fallen.multipliers[1].argmax()) == int(nearest)


def test_a_stuck_conic_solver_is_a_status_and_a_missing_one_an_error(generator, monkeypatch):
    def stuck(self: object, **options: object) -> None:
        raise cvxpy.SolverError("stuck")

    problem = random_problem(generator, 1, 3, 2)
    monkeypatch.setattr(cvxpy.Problem, "solve", stuck)
    solution = CvxpyCip(on_failure="abstain")(problem)
    assert solution.status.tolist() == [Status.UNSOLVED]
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(MissingExtraError, match=r"'cvxpy' .*otad\[reference\]"):
        CvxpyCip()(problem)


COUNTS = (1, 2, 3, 5, 8, 11, 15)
CASES = [(2, COUNTS, 3), (11, COUNTS, 3), (128, COUNTS, 1), (784, (2, 5, 8, 10, 11, 15), 1)]


@pytest.mark.parametrize(
    ("strong_convexity", "mode"), [(-0.5, "paper"), (0.0, "consistent"), (0.3, "consistent")]
)
@pytest.mark.parametrize(("dim", "counts", "batch"), CASES, ids=["d2", "d11", "d128", "d784"])
def test_same_answer(dim, counts, batch, strong_convexity, mode, generator) -> None:
    """Potentials, least smoothness, value, image and multipliers, each found on its own, with the
    curvature of each row."""
    generator.manual_seed(100 * dim + 10 * CONVEXITIES.index(strong_convexity) + (mode == "paper"))
    raised = 0
    for count in counts:
        # Below, within and above the range in which the least smoothness lies.
        high = torch.tensor([3.0, 1.0, 1.6]).roll(count)[:batch].double()
        low = strong_convexity + torch.tensor([0.0, 0.05, -0.2])[:batch].double()
        curvature = {"smoothness": high, "strong_convexity": low}
        problem = random_problem(generator, batch, count, dim, **curvature)
        found, expected = ExactCip(mode=mode)(problem), CvxpyCip(mode=mode)(problem)
        raised += int((found.status == Status.RAISED).sum())
        assert found.status.tolist() == expected.status.tolist()

        size = problem.images.norm(dim=-1).amax(1)
        image_error = (found.image - expected.image).norm(dim=1) / size
        value_error = (found.value - expected.value).abs() / found.value.abs()
        assert float(image_error.max()) <= 1e-5
        assert float(value_error.max()) <= 1e-7
        assert_close(found.smoothness, expected.smoothness, rtol=1e-8, atol=0)
        assert_close(found.multipliers, expected.multipliers, rtol=0, atol=1e-5)
        level_error = (found.potentials - expected.potentials).abs().amax(1) / value_size(problem)
        assert float(level_error.max()) <= 1e-8

        for residual in (found.residual, problem.residual(found), expected.residual):
            assert float(residual.max()) <= 1e-9
        single = converted(problem, torch.float32)
        rough = ExactCip(mode=mode)(single)
        assert rough.image.dtype == torch.float32
        assert float(rough.residual.max()) <= 1e-5
        assert float(single.residual(rough).max()) <= 1e-5
    assert raised >= 3  # the test has seen both kinds


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("potential", ["lowest", "highest"])
def test_other_potentials_and_a_climb(mode, potential, generator) -> None:
    """Handed the potentials and the curvature that were found, eq. (3) has the same answer."""
    for count in (2, 5, 12):
        problem = random_problem(generator, 4, count, 7, smoothness=1.0, strong_convexity=0.2)
        solver = ExactCip(mode=mode, potential=potential, climb=(0.3, 0.1))
        found = solver(problem)
        expected = CvxpyCip(mode=mode)(problem, found)
        assert bool((found.status == Status.RAISED).any())
        assert float(problem.residual(found).max()) <= 1e-9
        assert float(problem.residual(expected).max()) <= 1e-9
        assert_close(found.value, expected.value, rtol=1e-7, atol=1e-7)
        assert_close(found.image, expected.image, rtol=0, atol=1e-5)
