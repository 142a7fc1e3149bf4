"""Potentials and the least smoothness against linear programs, the climb against counting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cip.instances import CONVEXITIES, random_problem
from scipy.optimize import linprog
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status, least_smoothness
from otad.cip.reference import canonical_potentials, difference_bounds, least_smoothness_by_lp


def feasible_by_lp(anchors: np.ndarray, images: np.ndarray, high: float, low: float) -> bool:
    """Whether HiGHS finds potentials that satisfy eq. (2)."""
    bounds, unknowns = difference_bounds(anchors, images, high, low), np.eye(len(anchors))
    i, j = np.nonzero(unknowns == 0)
    if len(i) == 0:
        return True
    rows, room = unknowns[j] - unknowns[i], -bounds[i, j] / np.abs(bounds).max()
    options = {"primal_feasibility_tolerance": 1e-10}
    answer = linprog(0 * unknowns[0], rows, room, bounds=(None, None), options=options)
    assert answer.status in (0, 2)
    return answer.status == 0


def arrays(problem: CipProblem, row: int) -> tuple[np.ndarray, np.ndarray]:
    return problem.anchors[row].numpy(), problem.images[row].numpy()


@pytest.mark.parametrize("spread", [1e-3, 1e-5])
@pytest.mark.parametrize("kind", ["dense", "bank"])
def test_rounding_of_long_sums_makes_nothing_infeasible(kind, spread, generator) -> None:
    """Images of one brightness each, all brighter than the query: terms that are all alike are
    all rounded alike, and float32 products lose more digits than the anchors differ in."""
    shades = 1 + spread * torch.rand(40, generator=generator)
    bank = shades[:, None].expand(40, 24576).contiguous()
    query, indices = torch.full((4, 24576), 0.3), torch.arange(40).view(4, 10)
    for smoothness, expected in ((2.0, Status.SOLVED), (0.5, Status.RAISED)):
        problem: CipProblem | BankProblem
        problem = BankProblem(query, bank, bank, indices, smoothness)
        if kind == "dense":
            problem = CipProblem(query, bank[indices], bank[indices], smoothness)
        least = least_smoothness(problem)
        assert_close(least, torch.ones_like(least), rtol=1e-6, atol=0)
        solution = ExactCip()(problem)
        assert solution.status.tolist() == [expected] * 4
        used = torch.full_like(least, max(1.0, smoothness))
        assert_close(solution.smoothness, used, rtol=1e-6, atol=0)


@pytest.mark.parametrize("strong_convexity", CONVEXITIES)
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dim", [2, 11, 128])
def test_least_smoothness_and_feasibility(dim, noise, strong_convexity, generator) -> None:
    """27 cases of 14 rows: 378 in all, with and without potentials."""
    generator.manual_seed(dim + int(10 * noise) + CONVEXITIES.index(strong_convexity))
    for count in (1, 2, 3, 5, 8, 11, 15):
        curvature = {"smoothness": 2.0, "strong_convexity": strong_convexity}
        problem = random_problem(generator, 2, count, dim, noise=noise, **curvature)
        least = least_smoothness(problem)
        status = ExactCip(on_failure="abstain")(problem).status
        for row in range(2):
            pair = arrays(problem, row)
            expected = least_smoothness_by_lp(*pair, strong_convexity)
            assert float(least[row]) == pytest.approx(expected, rel=1e-7)
            assert feasible_by_lp(*pair, 2.0, strong_convexity) == (expected <= 2.0)
            if 2.0 < expected < 50.0:  # beyond, one percent is less than HiGHS can tell
                assert feasible_by_lp(*pair, 1.01 * expected, strong_convexity)
                assert not feasible_by_lp(*pair, 0.99 * expected, strong_convexity)
            too_small = Status.INFEASIBLE if expected == np.inf else Status.RAISED
            assert status[row] == (Status.SOLVED if expected <= 2.0 else too_small)


def test_extreme_potentials_enclose_the_canonical(generator) -> None:
    """Lowest and highest differ by what eq. (2) leaves open; the canonical is their middle."""
    problem = random_problem(generator, 20, 5, 4, smoothness=3.0)
    levels = {
        rule: ExactCip(potential=rule)(problem).potentials
        for rule in ("canonical", "lowest", "highest")
    }
    middle = (levels["lowest"] + levels["highest"]) / 2
    assert_close(levels["canonical"], middle, rtol=0, atol=1e-12)
    assert float((levels["highest"] - levels["lowest"]).abs().amax(1).min()) > 1e-3
    for row in range(20):
        bounds = difference_bounds(*arrays(problem, row), 3.0, 0.0)
        expected, _ = canonical_potentials(bounds)
        np.testing.assert_allclose(levels["canonical"][row].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("steps", [(0.25, 0.0), (0.1, 0.05), (2.0, 1.0)])
@pytest.mark.parametrize("strong_convexity", [-0.2, 0.0, 0.3])
def test_climb_stops_at_the_first_feasible_step(steps, strong_convexity, generator) -> None:
    requested, (up, down) = 1.1, steps
    curvature = {"smoothness": requested, "strong_convexity": strong_convexity}
    problem = random_problem(generator, 40, 4, 3, noise=0.2, **curvature)
    solution = ExactCip(climb=steps, on_failure="abstain")(problem)
    taken = []
    for row in range(40):
        pair = arrays(problem, row)
        if down == 0 and least_smoothness_by_lp(*pair, strong_convexity) == np.inf:
            assert solution.status[row] == Status.INFEASIBLE
            continue
        step = 0
        while True:  # until there is no positive cycle
            bounds = difference_bounds(*pair, requested + step * up, strong_convexity - step * down)
            if canonical_potentials(bounds)[1] <= 1e-12:
                break
            step += 1
        taken.append(step)
        assert float(solution.smoothness[row]) == pytest.approx(requested + step * up, rel=1e-12)
        low = pytest.approx(strong_convexity - step * down, rel=1e-12, abs=1e-12)
        assert float(solution.strong_convexity[row]) == low
        assert solution.status[row] == (Status.RAISED if step else Status.SOLVED)
    assert max(taken) >= (2 if up < 1 else 1)
    if down > 0:
        assert float(solution.strong_convexity.min()) < 0
    assert float(problem.residual(solution)[~solution.failed].max()) <= 1e-9


def test_climb_of_the_strong_convexity_alone(generator) -> None:
    """h is L-smooth and l-weakly convex iff L/2 |x|^2 - h is convex and (L - l)-smooth."""
    problem = random_problem(generator, 60, 4, 3, noise=0.2, smoothness=2.0)
    solution = ExactCip(climb=(0.0, 0.2), on_failure="abstain")(problem)
    steps = []
    for row in range(60):
        anchors, images = arrays(problem, row)
        span = least_smoothness_by_lp(anchors, 2.0 * anchors - images, 0.0)
        if span == np.inf:  # a slope above L: no strong convexity helps
            assert solution.status[row] == Status.INFEASIBLE
        else:
            steps.append(max(0, int(np.ceil((span - 2.0) / 0.2))))
            assert float(solution.strong_convexity[row]) == pytest.approx(-0.2 * steps[-1])
            assert float(solution.smoothness[row]) == 2.0
    assert len(steps) < 60
    assert max(steps) > 1


def test_climb_in_paper_mode_keeps_the_requested_curvature(generator) -> None:
    """Potentials for (L_t, l_t), the map with (L, l): Algorithm 2 as printed."""
    problem = random_problem(generator, 30, 5, 3, smoothness=1.0, strong_convexity=0.1)
    consistent, paper = (
        ExactCip(mode=mode, climb=(0.2, 0.1))(problem) for mode in ("consistent", "paper")
    )
    assert torch.equal(consistent.smoothness, paper.smoothness)
    assert torch.equal(consistent.potentials, paper.potentials)
    raised = paper.status == Status.RAISED
    assert bool(raised.any())
    assert float((paper.image - consistent.image)[raised].norm(dim=1).min()) > 1e-9
    assert float(problem.residual(paper).max()) <= 1e-9
