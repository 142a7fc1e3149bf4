"""Derivatives through the query against central differences, and what they must be."""

from __future__ import annotations

import pytest
import torch
from cip.instances import CONVEXITIES, converted, random_problem, rows_of
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status
from otad.cip.judge import map_curvature

STEP = 1e-6


def solve_at(query: Tensor, problem: CipProblem, solver: ExactCip) -> CipSolution:
    constants = (problem.anchors, problem.images, problem.smoothness, problem.strong_convexity)
    return solver(CipProblem(query, *constants))


def jacobians(problem: CipProblem, solver: ExactCip) -> tuple[Tensor, Tensor, Tensor]:
    """By autograd: of image (B,d,d), value (B,d) and multipliers (B,K,d) in the query."""
    query = problem.query.clone().requires_grad_()
    solution = solve_at(query, problem, solver)

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
    solution = solve_at(queries.flatten(0, 1), many, solver)

    def slopes(output: Tensor) -> Tensor:
        ahead, behind = output.unflatten(0, (2, dim, batch))
        return ((ahead - behind) / (2 * STEP)).movedim(0, -1)

    return slopes(solution.image), slopes(solution.value), slopes(solution.multipliers)


@pytest.mark.parametrize("mode", ["consistent", "paper"])
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
    if mode == "paper":
        assert float(high.max()) == smoothness
    else:
        assert torch.equal(high, solution.smoothness)
    eigenvalues = torch.linalg.eigvalsh(image)
    assert bool((eigenvalues >= low[:, None] - 1e-9).all())
    assert bool((eigenvalues <= high[:, None] + 1e-9).all())
    rank = (eigenvalues - strong_convexity > 1e-9).sum(1)
    assert torch.equal(rank, ((solution.multipliers > 0).sum(1) - 1).clamp_max(dim))
    if count > 1:
        assert float(image.diagonal(dim1=1, dim2=2).sum(1).sub(dim * low).max()) > 0.1


def test_dropped_neighbors_and_a_climb(generator) -> None:
    problem = random_problem(generator, 40, 6, 4, noise=0.3, smoothness=1.5)
    for options in ({"max_smoothness": 2.0}, {"climb": (0.2, 0.1)}, {"potential": "lowest"}):
        solver = ExactCip(on_failure="abstain", **options)
        solution = solver(problem)
        kept = ~solution.failed
        exact, rough = jacobians(problem, solver), differences(problem, solver)
        for found, expected in zip(exact, rough, strict=True):
            assert float((found - expected)[kept].abs().max()) <= 1e-5
        if "max_smoothness" in options:
            assert bool((solution.status == Status.REPAIRED).any())


@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_single_precision(mode, generator) -> None:
    for dim in (5, 128, 784):
        problem = random_problem(generator, 6, 10, dim, smoothness=1.3, strong_convexity=0.2)
        directions = torch.randn(6, dim, generator=generator, dtype=torch.float64)
        grads = []
        for dtype in (torch.float64, torch.float32):
            cast = converted(problem, dtype)
            query = cast.query.clone().requires_grad_()
            solution = solve_at(query, cast, ExactCip(mode=mode))
            (solution.image * directions.to(dtype)).sum().backward()
            assert query.grad.dtype == dtype
            grads.append(query.grad.double())
        error = (grads[0] - grads[1]).norm(dim=1) / directions.norm(dim=1)
        assert float(error.max()) <= 1e-4


def test_bank_problem_has_the_gradient_of_its_rows(generator) -> None:
    inputs, features = torch.randn(2, 30, 7, generator=generator, dtype=torch.float64)
    features = inputs + 0.1 * features
    indices = torch.randint(30, (9, 5), generator=generator)
    grads = []
    for bank in (False, True):
        query = torch.zeros(9, 7, dtype=torch.float64, requires_grad=True)
        data = (inputs, features, indices) if bank else (inputs[indices], features[indices])
        problem = (BankProblem if bank else CipProblem)(query, *data, 2.0, -0.2)
        solution = ExactCip(on_failure="fallback", chunk=2 if bank else None)(problem)
        total = solution.image.square().sum() + solution.multipliers.square().sum()
        (total + solution.value.nan_to_num().sum()).backward()
        grads.append(query.grad)
    assert_close(*grads, rtol=0, atol=1e-12)
    assert float(grads[0].abs().max()) > 0.1


def test_failed_rows_leave_the_gradient_of_others_alone(generator) -> None:
    problem = random_problem(generator, 3, 4, 3)
    anchors, images = problem.anchors.clone(), problem.images.clone()
    images[1] = -anchors[1]  # decreasing: no potential for l = 0
    grads = []
    for rows in ([0, 1, 2], [0, 2]):
        query = problem.query[rows].clone().requires_grad_()
        mixed = CipProblem(query, anchors[rows], images[rows], 2.4)
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
        assert not solve_at(query, problem, ExactCip()).image.requires_grad
    assert not ExactCip()(problem).image.requires_grad
    solution = solve_at(query, problem, ExactCip())
    assert not solution.potentials.requires_grad
    (grad,) = torch.autograd.grad(solution.image.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
