"""The slow twin itself: its contract, and answers known in closed form."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from cip.instances import normal, random_problem, rows_of

from otad.cip import BankProblem, CipProblem, Status
from otad.cip.reference import (
    CvxpyCip,
    canonical_potentials,
    difference_bounds,
    least_smoothness_by_lp,
)
from otad.errors import MissingExtraError, SolverError

cvxpy = pytest.importorskip("cvxpy", reason="needs the extra 'reference' (cvxpy, clarabel)")


def test_one_neighbor_in_closed_form(generator) -> None:
    problem = random_problem(generator, 2, 1, 4, smoothness=1.0, strong_convexity=0.3)
    solution = CvxpyCip()(problem)
    gap = problem.query - problem.anchors[:, 0]
    torch.testing.assert_close(solution.image, problem.images[:, 0] + 0.3 * gap)
    value = (problem.images[:, 0] * gap).sum(1) + 0.15 * gap.square().sum(1)
    torch.testing.assert_close(solution.value, value)
    assert solution.multipliers.tolist() == [[1.0]] * 2


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
    torch.testing.assert_close(solution.image, expected)
    value = torch.tensor([-1.0, -1.0, -0.75, 0.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(solution.value, value)


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


def test_contract(generator) -> None:
    problem = random_problem(generator, 3, 4, 5, smoothness=1.0)
    solution = CvxpyCip(mode="paper")(problem)
    assert solution.mode == "paper"
    assert (solution.image.shape, solution.value.shape) == ((3, 5), (3,))
    assert solution.multipliers.shape == solution.potentials.shape == (3, 4)
    assert solution.status.tolist() == [Status.RAISED] * 3
    assert torch.equal(solution.residual, problem.residual(solution))
    assert float(solution.residual.max()) <= 1e-9
    single = CipProblem(
        problem.query.float().requires_grad_(), problem.anchors.float(), problem.images.float(), 1.0
    )
    rough = CvxpyCip()(single)
    assert (rough.image.dtype, rough.smoothness.dtype) == (torch.float32, torch.float64)
    assert not rough.image.requires_grad
    assert float(rough.residual.max()) <= 1e-5


def test_bank_problem(generator) -> None:
    inputs = normal(generator, 8, 3)
    indices = torch.tensor([[0, 1, 2], [5, 3, 1]])
    query = normal(generator, 2, 3)
    bank = CvxpyCip()(BankProblem(query, inputs, inputs.tanh(), indices, 1.5))
    dense = CvxpyCip()(CipProblem(query, inputs[indices], inputs.tanh()[indices], 1.5))
    assert torch.equal(bank.image, dense.image)


def test_given_potentials_are_used(generator) -> None:
    problem = rows_of(random_problem(generator, 1, 3, 2, smoothness=2.0), slice(0, 1))
    own = CvxpyCip()(problem)
    raised = CvxpyCip()(
        problem,
        potentials=own.potentials + 5.0,
        smoothness=torch.tensor([4.0]),
        strong_convexity=torch.tensor([-1.0]),
    )
    assert raised.smoothness.tolist() == [4.0]
    assert raised.strong_convexity.tolist() == [-1.0]
    assert float(raised.residual) <= 1e-9  # feasible for more than they were made for
    assert torch.equal(raised.potentials, own.potentials + 5.0)
    lifted = CvxpyCip()(problem, potentials=own.potentials + 5.0)
    torch.testing.assert_close(lifted.value, own.value + 5.0)
    torch.testing.assert_close(lifted.image, own.image)


def test_rows_without_a_solution(generator) -> None:
    problem = random_problem(generator, 3, 4, 2)
    images = problem.images.clone()
    images[1] = -problem.anchors[1]
    mixed = CipProblem(problem.query, problem.anchors, images, 2.4)
    with pytest.raises(SolverError, match="INFEASIBLE"):
        CvxpyCip()(mixed)
    abstained, fallen = (CvxpyCip(on_failure=rule)(mixed) for rule in ("abstain", "fallback"))
    expected = [Status.SOLVED, Status.INFEASIBLE, Status.SOLVED]
    for solution in (abstained, fallen):
        assert solution.status.tolist() == expected
        assert solution.residual.isinf().tolist() == [False, True, False]
        assert bool(solution.smoothness[1].isnan())
    assert bool(abstained.image[1].isnan().all())
    nearest = (problem.anchors[1] - problem.query[1]).norm(dim=1).argmin()
    torch.testing.assert_close(fallen.image[1], images[1, nearest])
    assert int(fallen.multipliers[1].argmax()) == int(nearest)


def test_a_stuck_conic_solver_is_a_status(generator, monkeypatch) -> None:
    def stuck(self: object, **options: object) -> None:
        raise cvxpy.SolverError("stuck")

    problem = random_problem(generator, 1, 3, 2)
    monkeypatch.setattr(cvxpy.Problem, "solve", stuck)
    solution = CvxpyCip(on_failure="abstain")(problem)
    assert solution.status.tolist() == [Status.UNSOLVED]


def test_missing_cvxpy_names_the_extra(generator, monkeypatch) -> None:
    problem = random_problem(generator, 1, 3, 2)
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(MissingExtraError, match=r"'cvxpy' .*otad\[reference\]"):
        CvxpyCip()(problem)
