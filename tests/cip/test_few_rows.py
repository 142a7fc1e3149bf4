"""Rows are solved in NumPy one by one or side by side, with the answers of torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cip.instances import CONVEXITIES, assert_same, changed, converted, random_problem, rows_of

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status, execution
from otad.cip.local.solve_arrays import solve_arrays
from otad.cip.local.solve_numpy import solve_numpy
from otad.errors import InputError, SolverError


def whole(problem, **options) -> CipSolution:
    """By torch, because only answers without gradients are found in NumPy."""
    query = problem.query.clone().requires_grad_()
    solution = ExactCip(**options)(changed(problem, query=query))
    parts = {name: getattr(solution, name).detach() for name in ("image", "value", "multipliers")}
    return replace(solution, **parts)


def types_of(solution: CipSolution) -> list[tuple[torch.dtype, torch.Size]]:
    parts = [part for name, part in vars(solution).items() if name != "mode"]
    return [(part.dtype, part.shape[1:]) for part in parts]


@pytest.mark.parametrize("low", CONVEXITIES)
@pytest.mark.parametrize(("count", "dim"), [(1, 3), (2, 1), (6, 4), (10, 30), (25, 60)])
def test_few_rows_have_the_answers_of_a_batch(count, dim, low, generator) -> None:
    problem = random_problem(generator, 12, count, dim, smoothness=6.0, strong_convexity=low)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        given = converted(problem, dtype)
        together, own = whole(given), solve_numpy(given, "consistent")
        if own is not None or dim > count:  # otherwise images may be affinely dependent
            assert_same(own, together, given, tolerance)
        for row in range(12):
            part = rows_of(given, slice(row, row + 1))
            alone = ExactCip()(part)
            assert_same(alone, together.rows(slice(row, row + 1)), part, tolerance)
            assert alone.residual.item() <= tolerance
            assert part.residual(alone).item() <= (1e-9 if dtype == torch.float64 else 1e-5)
            assert types_of(alone) == types_of(together)


def test_rows_left_over_are_solved_by_torch(generator) -> None:
    """Without a potential, with affinely dependent images, with numbers that overflow."""
    problem = random_problem(generator, 4, 6, 9, smoothness=6.0)
    images, anchors = problem.images.clone(), problem.anchors.clone()
    images[0] *= 9
    images[1, 3:], anchors[1, 3:] = images[1, :3], anchors[1, :3]
    anchors[2, 1], images[2, 2] = 1e200, -1e200
    mixed = changed(problem, anchors=anchors, images=images)
    solver = ExactCip(on_failure="abstain")
    found = solver(mixed)
    statuses = [Status.RAISED, Status.SOLVED, Status.UNSOLVED, Status.SOLVED]
    assert found.status.tolist() == statuses
    for row, status in enumerate(statuses):
        part = rows_of(mixed, slice(row, row + 1))
        assert (solve_numpy(part, "paper") is None) == (row < 3)
        assert_same(solver(part), found.rows(slice(row, row + 1)), part, 1e-11)
        assert status == Status.UNSOLVED or part.residual(solver(part)).item() <= 1e-9


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float64])
def test_a_query_with_neighbors_from_a_bank(storage, generator) -> None:
    problem = random_problem(generator, 1, 8, 20, smoothness=6.0, strong_convexity=0.2)
    inputs, features = (part[0].to(storage) for part in (problem.anchors, problem.images))
    indices = torch.arange(7, -1, -1)[None]
    for dtype in (torch.float32, torch.float64):
        bank = BankProblem(problem.query.to(dtype), inputs, features, indices, 6.0, 0.2)
        found = solve_numpy(bank, "consistent")
        assert found is not None
        assert found.image.dtype == dtype
        assert bank.residual(found).item() <= (1e-5 if dtype == torch.float32 else 1e-9)
        rows = inputs[indices].to(dtype), features[indices].to(dtype)
        dense = changed(converted(problem, dtype), anchors=rows[0], images=rows[1])
        assert_same(found, whole(dense), dense, 1e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("low", CONVEXITIES)
@pytest.mark.parametrize(("count", "dim"), [(1, 3), (2, 1), (6, 9), (10, 30), (20, 60)])
def test_rows_side_by_side_have_the_answers_of_torch(count, dim, low, generator) -> None:
    problem = random_problem(generator, 40, count, dim, smoothness=6.0, strong_convexity=low)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        given, solver = converted(problem, dtype), ExactCip()
        found, left = solve_arrays(
            solver.products(given).gram(), given.smoothness, given.strong_convexity
        )
        assert dim < count or len(left) == 0
        assert found.residual.max() <= tolerance
        together = solver(given)
        assert_same(together, whole(given), given, tolerance)
        assert given.residual(together).max() <= (1e-9 if dtype == torch.float64 else 1e-5)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "_FEWEST_ROWS", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_threads_share_rows_of_every_kind(generator) -> None:
    """Rows that no thread may leave out: solved, raised, dependent, without a solution."""
    problem = random_problem(generator, 32, 6, 9, smoothness=6.0)
    images, anchors = problem.images.clone(), problem.anchors.clone()
    images[3] *= 9
    images[12, 3:], anchors[12, 3:] = images[12, :3], anchors[12, :3]
    anchors[30, 1] = anchors[30, 2]
    mixed = changed(problem, anchors=anchors, images=images)
    found = ExactCip(on_failure="fallback")(mixed)
    assert found.status[[3, 12, 30]].tolist() == [
        Status.RAISED,
        Status.SOLVED,
        Status.INFEASIBLE,
    ]
    assert_same(found, whole(mixed, on_failure="fallback"), mixed, 1e-11)
    with pytest.raises(SolverError, match=r"1 of 32 rows .* 30 \(INFEASIBLE\)"):
        ExactCip()(mixed)
    images[31, 2, 4] = torch.nan
    with pytest.raises(InputError, match=r"images: .* got nan at \(31, 2, 4\)"):
        CipProblem(mixed.query, anchors, images, 6.0)
