"""Compiled code solves rows on a CPU, with the answers of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cip.instances import (
    CONVEXITIES,
    assert_same,
    changed,
    converted,
    normal,
    random_problem,
    rows_of,
)
from numba import njit
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status, execution
from otad.cip.execution import show_compiling
from otad.cip.kernels import cpu_products
from otad.cip.local import products, read_compiled
from otad.cip.local.products import products_of
from otad.cip.local.solve_compiled import solve_compiled
from otad.cip.local.solver import _worst_noise
from otad.errors import InputError, SolverError

SINGLE, DOUBLE = torch.float32, torch.float64
SIZES = [(1, 3), (2, 1), (3, 5), (6, 4), (10, 30), (25, 60)]


def both_ways(
    problem: CipProblem, monkeypatch: pytest.MonkeyPatch, **options
) -> Iterator[CipSolution]:
    """By compiled code and by torch, each until the next one is asked for."""
    for compiles in (True, False):
        with monkeypatch.context() as patch:
            for module in ("products", "feature"):
                name = f"otad.cip.local.{module}.can_compile"
                patch.setattr(name, lambda tensor, yes=compiles: yes)
            yield ExactCip(**options)(problem)


def left_over(problem: CipProblem | BankProblem, **options) -> list[int]:
    solver = ExactCip(**options)
    products, curvature = solver._products(problem), (problem.smoothness, problem.strong_convexity)
    how = solver.relaxation, solver.potential, solver.mode
    errors = products.noise, _worst_noise(problem)
    found, count = solve_compiled(products.arrays, *curvature, *how, errors, sensitive=False)
    rows: list[int] = (found.status < 0).nonzero()[:, 0].tolist()
    assert len(rows) == count
    return rows


def types_of(solution: CipSolution) -> list[tuple[torch.dtype, torch.Size]]:
    parts = [part for name, part in vars(solution).items() if name != "mode"]
    return [(part.dtype, part.shape) for part in parts]


@pytest.mark.parametrize("low", CONVEXITIES)
@pytest.mark.parametrize(("count", "dim"), SIZES)
def test_compiled_rows_have_the_answers_of_torch(count, dim, low, generator, monkeypatch) -> None:
    problem = random_problem(generator, 12, count, dim, smoothness=6.0, strong_convexity=low)
    for dtype, tolerance in ((DOUBLE, 1e-11), (SINGLE, 1e-5)):
        given = converted(problem, dtype)
        assert dim < count or left_over(given) == []  # else images may be affinely dependent
        found, expected = both_ways(given, monkeypatch)
        assert_same(found, expected, given, tolerance)
        assert types_of(found) == types_of(expected)
        assert found.residual.max() <= tolerance
        assert given.residual(found).max() <= (1e-9 if dtype == DOUBLE else 1e-5)
        alone = rows_of(given, slice(3, 4))
        assert_same(ExactCip()(alone), found.rows(slice(3, 4)), alone, tolerance)


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("potential", ["canonical", "lowest", "highest"])
@pytest.mark.parametrize("low", CONVEXITIES)
def test_raised_rows(low, potential, mode, generator, monkeypatch) -> None:
    """Most of them need a larger L than the one asked for."""
    problem = random_problem(generator, 30, 8, 12, smoothness=1.2, strong_convexity=low, noise=0.1)
    options = {"mode": mode, "potential": potential, "max_smoothness": 20.0}
    assert left_over(problem, **options) == []
    found, expected = both_ways(problem, monkeypatch, **options)
    assert Status.RAISED in found.status.tolist()
    assert_same(found, expected, problem, 1e-10)
    assert problem.residual(found).max() <= 1e-9


@pytest.mark.parametrize("smoothness", [6.0, 1.2])
@pytest.mark.parametrize("low", CONVEXITIES)
def test_derivatives_are_those_of_torch(low, smoothness, generator, monkeypatch) -> None:
    """Of the image, the value and the multipliers, for solved and for raised rows. The gradients
    are computed by compiled code and by torch, too."""
    curvature = {"smoothness": smoothness, "strong_convexity": low}
    problem = random_problem(generator, 20, 7, 11, **curvature)
    sensitive = changed(problem, query=problem.query.clone().requires_grad_())
    weights = normal(generator, 20, 11), normal(generator, 20), normal(generator, 20, 7)
    slopes = []
    for solution in both_ways(sensitive, monkeypatch):
        made = solution.image, solution.value, solution.multipliers
        total = sum((part * weight).sum() for part, weight in zip(made, weights, strict=True))
        slopes.append(torch.autograd.grad(total, sensitive.query)[0])
    assert_close(*slopes, rtol=1e-8, atol=1e-8)
    assert slopes[0].abs().min() > 0


def test_rows_left_over_are_solved_by_torch(generator) -> None:
    """With affinely dependent images, with numbers that overflow, without a potential within the
    largest L or for any."""
    problem = random_problem(generator, 5, 6, 9, smoothness=6.0)
    images, anchors = problem.images.clone(), problem.anchors.clone()
    images[0] *= 9
    images[1, 3:], anchors[1, 3:] = images[1, :3], anchors[1, :3]
    anchors[2, 1], images[2, 2] = 1e200, -1e200
    anchors[3, 1] = anchors[3, 2]
    mixed = changed(problem, anchors=anchors, images=images)
    statuses = [Status.RAISED, Status.SOLVED, Status.UNSOLVED, Status.INFEASIBLE, Status.SOLVED]
    assert left_over(mixed) == [1, 2, 3]
    found = ExactCip(on_failure="abstain")(mixed)
    assert found.status.tolist() == statuses
    assert mixed.residual(found)[[0, 1, 4]].max() <= 1e-9
    capped = {"max_smoothness": 10.0}
    assert left_over(mixed, **capped) == [0, 1, 2, 3]
    assert ExactCip(on_failure="abstain", **capped)(mixed).status[0] == Status.REPAIRED
    climbing = {"climb": (1.0, 0.0)}
    assert left_over(mixed, **climbing) == [0, 1, 2, 3]
    climbed = ExactCip(on_failure="abstain", **climbing)(mixed)
    assert climbed.smoothness[0] == math.ceil(found.smoothness[0])


def test_float32_leaves_a_doubtful_row_to_float64(generator, monkeypatch) -> None:
    """The slopes of a map are L everywhere, so that rounding decides; here none is expected."""
    monkeypatch.setitem(products.NOISE, SINGLE, 1e-9)
    anchors = (normal(generator, 40, 6, 400) + 3).float().double()
    images = 2 * anchors
    single = converted(CipProblem(anchors.mean(1), anchors, images, 2.0), SINGLE)
    found = ExactCip()(single)
    assert len(left_over(single)) > 0
    assert found.status.tolist() == [Status.SOLVED] * 40
    assert single.residual(found).max() <= 1e-5


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, SINGLE, DOUBLE])
def test_neighbors_from_a_bank(storage, dtype, generator, monkeypatch) -> None:
    """Compiled code reads a bank of its own dtype in place."""
    problem = random_problem(generator, 1, 8, 20, smoothness=6.0, strong_convexity=0.2)
    inputs, features = (part[0].to(storage) for part in (problem.anchors, problem.images))
    indices = torch.tensor([[7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7]])
    query = problem.query.to(dtype).expand(2, -1)
    bank = BankProblem(query, inputs, features, indices, 6.0, 0.2)
    calls: list[slice] = []
    gather = read_compiled._gathered
    monkeypatch.setattr(read_compiled, "_gathered", lambda *at: calls.append(at[1]) or gather(*at))
    found = ExactCip()(bank)
    products_and_combinations = 3  # with l, of images and of anchors
    assert calls == [slice(0, 2)] * (0 if storage == dtype else products_and_combinations)
    rows = inputs[indices].to(dtype), features[indices].to(dtype)
    dense = CipProblem(query.contiguous(), *rows, 6.0, 0.2)
    assert_same(found, ExactCip()(dense), dense, 0.0)
    assert bank.residual(found).max() <= (1e-5 if dtype == SINGLE else 1e-9)


@pytest.mark.parametrize("low", [0.0, 0.3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
def test_products_of_any_number_of_neighbors(count, low, generator, monkeypatch) -> None:
    """Of rows that are longer than one part of the sums, beside those of torch."""
    dim, found = 2 * cpu_products._WIDTH + 5, []
    problem = random_problem(generator, 3, count, dim, strong_convexity=low)
    for compiles in (True, False):
        monkeypatch.setattr(products, "can_compile", lambda tensor, yes=compiles: yes)
        found.append(products_of(problem, 2, with_offsets=low != 0))
    assert_close(found[0].values, found[1].values, rtol=0, atol=1e-9)
    assert_close(found[0].squares, found[1].squares)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("otad.cip.local.read_compiled._FEWEST_NUMBERS", 1)
    monkeypatch.setattr("otad.cip.local.solve_compiled._FEWEST_STEPS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_threads_share_rows_of_every_kind(generator, monkeypatch) -> None:
    """Rows that no thread may leave out: solved, raised, dependent, without a solution."""
    problem = random_problem(generator, 32, 6, 9, smoothness=6.0)
    images, anchors = problem.images.clone(), problem.anchors.clone()
    images[3] *= 9
    images[12, 3:], anchors[12, 3:] = images[12, :3], anchors[12, :3]
    anchors[30, 1] = anchors[30, 2]
    mixed = changed(problem, anchors=anchors, images=images)
    found, expected = both_ways(mixed, monkeypatch, on_failure="fallback")
    statuses = [Status.RAISED, Status.SOLVED, Status.INFEASIBLE]
    assert found.status[[3, 12, 30]].tolist() == statuses
    for part in (slice(0, 12), slice(13, 32)):
        assert_same(found.rows(part), expected.rows(part), rows_of(mixed, part), 1e-10)
    # How the multiplier of a point is shared with its copy is not determined.
    both = [one.multipliers[12].view(2, 3).sum(0) for one in (found, expected)]
    assert_close(*both, rtol=0, atol=1e-10)
    assert_close(found.image[12], expected.image[12], rtol=0, atol=1e-9)
    with pytest.raises(SolverError, match=r"1 of 32 rows .* 30 \(INFEASIBLE\)"):
        ExactCip()(mixed)
    images[31, 2, 4] = torch.nan
    with pytest.raises(InputError, match=r"images: .* got nan at \(31, 2, 4\)"):
        CipProblem(mixed.query, anchors, images, 6.0)


def test_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch) -> None:
    """In a read-only installation numba finds no folder for compiled code, and raises an error."""
    compile_now = cpu_products.njit

    def njit(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_now(**options)

    monkeypatch.setattr(cpu_products, "njit", njit)
    assert cpu_products.compiled()(lambda x: x + 1)(2) == 3


def test_a_bar_is_drawn_while_code_of_this_package_is_compiled(monkeypatch) -> None:
    drawn = []

    @contextmanager
    def part_bars():
        yield lambda *given: drawn.append(given)
        drawn.append("end")

    monkeypatch.setattr(execution, "part_bars", part_bars)
    show_compiling()
    for module, expected in (
        ("elsewhere", []),
        ("otad.new", [("compiling the solver, once", 0), "end"]),
    ):
        function = lambda x: x + 1  # noqa: E731
        function.__module__ = module
        assert njit(function)(1) == 2
        assert drawn == expected


def test_a_solution_is_its_own(generator) -> None:
    """Nothing in it shares memory with the problem."""
    problem = random_problem(generator, 2, 3, 4, strong_convexity=0.1)
    found = ExactCip()(problem)
    found.strong_convexity.zero_()
    assert problem.strong_convexity.tolist() == [0.1, 0.1]
    assert replace(found, mode="paper").mode == "paper"
