"""What a row's company must not change: its neighbors' order, other rows, chunks, the bank."""

from __future__ import annotations

import math

import pytest
import torch
from cip.instances import assert_same, converted, normal, random_problem, rows_of
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status, least_smoothness
from otad.errors import SolverError

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BOTH_MODES = pytest.mark.parametrize("mode", ["consistent", "paper"])


@BOTH_MODES
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_order_of_neighbors(dtype, mode, generator) -> None:
    tolerance = 1e-10 if dtype == DOUBLE else 1e-3
    order = torch.randperm(9, generator=generator)
    solver = ExactCip(mode=mode)
    for low in (-0.5, 0.0, 0.3):
        problem = random_problem(generator, 20, 9, 6, smoothness=1.4, strong_convexity=low)
        problem = converted(problem, dtype)
        arrays = problem.query, problem.anchors[:, order], problem.images[:, order]
        expected, found = solver(problem), solver(CipProblem(*arrays, 1.4, low))
        for name in ("image", "value", "smoothness", "status", "multipliers", "potentials"):
            one, other = getattr(found, name), getattr(expected, name)
            if name in ("multipliers", "potentials"):
                other = other[:, order]
            assert_close(one, other, rtol=tolerance, atol=tolerance)


def poisoned(problem: CipProblem, kind: str) -> CipProblem:
    """The same with rows 1 and 4 made bad."""
    query, anchors, images = (t.clone() for t in (problem.query, problem.anchors, problem.images))
    for row in (1, 4):
        if kind == "decreasing":
            images[row] = -2 * anchors[row]
        elif kind == "contradicting":
            anchors[row, 2] = anchors[row, 0]
        elif kind == "overflow":
            anchors[row, 1] = 1e200
            images[row, 2] = -1e200
        elif kind == "nearly overflow":
            images[row] *= 1e152
        elif kind == "far query":
            query[row] = 1e300
        else:
            for part in (query, anchors, images):
                part[row] *= 1e-120
    return CipProblem(query, anchors, images, problem.smoothness, problem.strong_convexity)


STATUSES = {
    "decreasing": Status.INFEASIBLE,
    "contradicting": Status.INFEASIBLE,
    "overflow": Status.UNSOLVED,
    "far query": Status.UNSOLVED,
}


@pytest.mark.parametrize("kind", [*STATUSES, "nearly overflow", "tiny"])
@pytest.mark.parametrize("on_failure", ["abstain", "fallback"])
@pytest.mark.parametrize("options", [{}, {"climb": (0.5, 0.1)}, {"max_smoothness": 1.6}])
def test_a_bad_row_never_disturbs_a_good_one(kind, on_failure, options, generator) -> None:
    low = 0.0 if on_failure == "abstain" else 0.2
    problem = random_problem(generator, 6, 5, 4, smoothness=1.4, strong_convexity=low)
    mixed = poisoned(problem, kind)
    solver = ExactCip(on_failure=on_failure, **options)
    expected, found = solver(problem), solver(mixed)
    for name in expected.__dataclass_fields__.keys() - {"mode"}:
        one, other = (getattr(solution, name)[[0, 2, 3, 5]] for solution in (found, expected))
        assert_close(one, other, rtol=0, atol=1e-12, equal_nan=True)
    bad = found.rows(slice(1, 2))
    if bool(bad.failed):
        assert bad.residual.tolist() == [math.inf]
        assert bool((bad.value + bad.smoothness).isnan())
        assert mixed.residual(found)[1] == math.inf
        assert bool(bad.image.isnan().all()) == (on_failure == "abstain")
    else:
        assert float(mixed.residual(found)[1]) <= 1e-9


@pytest.mark.parametrize("kind", STATUSES)
def test_statuses_of_bad_rows(kind, generator) -> None:
    status = STATUSES[kind]
    mixed = poisoned(random_problem(generator, 6, 5, 4), kind)
    solution = ExactCip(on_failure="abstain")(mixed)
    assert solution.status[[1, 4]].tolist() == [status] * 2
    assert solution.failed.tolist() == [False, True, False, False, True, False]
    listed = rf"2 of 6 rows have no solution: 1 \({status.name}\), 4 \({status.name}\)\. "
    with pytest.raises(SolverError, match=listed):
        ExactCip()(mixed)


def test_fallback_answers_with_the_nearest_neighbor(generator) -> None:
    anchors = normal(generator, 12, 6, 3)
    problem = CipProblem(normal(generator, 12, 3), anchors, -2 * anchors, 1.0)
    solution = ExactCip(on_failure="fallback")(problem)
    nearest = (anchors - problem.query[:, None]).norm(dim=-1).argmin(1)
    assert solution.status.tolist() == [Status.INFEASIBLE] * 12
    assert torch.equal(solution.multipliers.argmax(1), nearest)
    assert torch.equal(solution.image, problem.images[torch.arange(12), nearest])


@BOTH_MODES
@pytest.mark.parametrize("low", [0.0, -0.3])
def test_batch_and_chunk_change_nothing(low, mode, generator) -> None:
    curvature = {"smoothness": 1.3, "strong_convexity": low}
    problem = random_problem(generator, 64, 7, 30, **curvature, noise=0.2)
    together = ExactCip(mode=mode)(problem)
    for chunk in (1, 5, 64, 1000):
        assert_same(ExactCip(mode=mode, chunk=chunk)(problem), together, problem, 1e-12)
    for row in (0, 31, 63):
        at = slice(row, row + 1)
        alone = ExactCip(mode=mode)(rows_of(problem, at))
        assert_same(alone, together.rows(at), rows_of(problem, at), 1e-12)


@BOTH_MODES
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        (HALF, SINGLE),
        (torch.bfloat16, SINGLE),
        (SINGLE, SINGLE),
        (HALF, DOUBLE),
        (SINGLE, DOUBLE),
        (DOUBLE, DOUBLE),
    ],
)
def test_bank_equals_dense(storage, dtype, mode, generator) -> None:
    """A bank of any precision has the answer of its gathered rows, converted."""
    inputs = normal(generator, 50, 12)
    inputs, features = inputs.to(storage), (inputs + inputs.tanh()).to(storage)
    indices = torch.stack([torch.randperm(50, generator=generator)[:6] for _ in range(20)])
    query = normal(generator, 20, 12).to(dtype)
    tolerance = 1e-12 if dtype == DOUBLE else 1e-6
    for low in (0.0, 0.4):
        bank = BankProblem(query, inputs, features, indices, 1.7, low)
        rows = inputs[indices].to(dtype), features[indices].to(dtype)
        dense = CipProblem(query, *rows, 1.7, low)
        assert bank.shape == dense.shape == (20, 6, 12)
        for chunk in (None, 3):
            solver = ExactCip(mode=mode, chunk=chunk)
            found, expected = solver(bank), solver(dense)
            assert_same(widened(found), widened(expected), converted(dense, DOUBLE), tolerance)
            assert_close(bank.residual(found), dense.residual(found), rtol=0, atol=1e-14)
        assert_close(least_smoothness(bank), least_smoothness(dense), rtol=tolerance, atol=0)


def widened(solution: CipSolution) -> CipSolution:
    parts = {name: part for name, part in vars(solution).items() if name != "mode"}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in parts.items()}
    return CipSolution(**wide, mode=solution.mode)


def test_curvature_per_row(generator) -> None:
    """One value per row is what as many problems with a number each would use."""
    problem = random_problem(generator, 5, 6, 4)
    high = torch.tensor([0.9, 1.3, 2.0, 3.0, 5.0], dtype=DOUBLE)
    low = torch.tensor([0.3, -0.5, 0.0, -1.0, 0.1], dtype=DOUBLE)
    arrays = (problem.query, problem.anchors, problem.images)
    solution = ExactCip()(CipProblem(*arrays, high, low))
    for row in range(5):
        at = slice(row, row + 1)
        alone = CipProblem(*(t[at] for t in arrays), float(high[row]), float(low[row]))
        assert_same(ExactCip()(alone), solution.rows(at), alone, 1e-12)
