"""The kernel of one row against the steps in torch: compiled on a GPU, else interpreted."""

from __future__ import annotations

import math
import os

import pytest
import torch
from cip.instances import converted, normal, random_problem
from torch import Tensor
from torch.testing import assert_close

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

from otad.cip import BankProblem, CipProblem, ExactCip, Status  # noqa: E402
from otad.cip.local.products import Products, products_of  # noqa: E402
from otad.cip.local.relax import Relaxation  # noqa: E402
from otad.cip.local.solve_torch import DualSolution, solve_torch  # noqa: E402
from otad.cip.local.solver import solve_triton  # noqa: E402
from otad.cip.local.stream_triton import (  # noqa: E402
    streamed_combination,
    streamed_dots,
    streamed_products,
)

# NumPy, which interprets kernels here, warns of numbers that the kernel masks out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if HAS_CUDA else "cpu"
SOLVED, LEFT, FAILED = 1, 0, -1


Options = tuple[Relaxation, str, str]


def options(
    mode="consistent", potential="canonical", climb=None, cap=math.inf, spares=0
) -> Options:
    return Relaxation(climb, cap, spares), potential, mode


def both_ways(
    problem: CipProblem, how: Options, *, parts: int = 1
) -> tuple[DualSolution, DualSolution, list[int]]:
    """By the kernel and in torch, and the kernel's outcome; products in so many parts."""
    climb = how[0].climb
    lowers = climb is not None and climb[1] > 0
    found = products_of(problem, None, with_offsets=problem.has_strong_convexity or lowers)
    shares = torch.linspace(1, 2, parts, dtype=torch.float64).view(-1, 1, 1, 1)
    shares = shares / shares.sum()
    values = (found.values.double() * shares).to(found.values)
    squares = (found.squares.double() * shares[..., 0]).to(found.squares)
    products = Products(values.to(DEVICE), squares.to(DEVICE), found.with_offsets)
    curvature = problem.smoothness.to(DEVICE), problem.strong_convexity.to(DEVICE)
    solved, outcome = solve_triton(products, *curvature, *how, torch.float64, sensitive=True)
    return solved, solve_torch(products.gram(), *curvature, *how), outcome.tolist()


def assert_equal(answer: DualSolution, expected: DualSolution, rows: list[int]) -> None:
    """The same in these rows, each field beside its own size in each row."""
    curvature = ("smoothness", "strong_convexity", "map_convexity")
    for name in ("multipliers", "value", "potentials", *curvature, "sensitivity"):
        found, wanted = (getattr(part, name)[rows].cpu() for part in (answer, expected))
        size = wanted.nan_to_num().abs().reshape(len(rows), -1).amax(1).clamp_min(1e-300)
        size = size.view(-1, *[1] * (wanted.dim() - 1))
        assert_close(found / size, wanted / size, rtol=0, atol=1e-9, equal_nan=True, msg=name)
    assert answer.status[rows].tolist() == expected.status[rows].tolist()
    assert torch.equal(answer.active[rows], expected.active[rows])
    assert float(answer.residual[rows].max()) < 1e-9


def kernel_equals_torch(problem: CipProblem, how: Options, status: Status) -> DualSolution:
    answer, expected, outcome = both_ways(problem, how)
    assert outcome == [SOLVED] * len(outcome)
    assert set(answer.status.tolist()) == {int(status)}
    assert_equal(answer, expected, list(range(len(outcome))))
    return answer


@pytest.mark.parametrize(
    ("count", "dim", "dtype"),
    [
        (1, 5, torch.float32),
        (2, 3, torch.float64),
        (10, 128, torch.float32),
        (16, 40, torch.float64),
        (17, 30, torch.float32),
    ],
)
def test_feasible_rows(count, dim, dtype, generator) -> None:
    batch = 3 if count < 10 else 1
    problem = converted(random_problem(generator, batch, count, dim, smoothness=2.6), dtype)
    kernel_equals_torch(problem, options(), Status.SOLVED)


@pytest.mark.parametrize("potential", ["canonical", "lowest", "highest"])
def test_strong_convexity_and_the_choice_of_potentials(potential, generator) -> None:
    problem = random_problem(generator, 1, 5, 7, smoothness=2.6, strong_convexity=0.3)
    kernel_equals_torch(problem, options(potential=potential), Status.SOLVED)


@pytest.mark.parametrize(
    ("count", "low", "mode"),
    [(10, 0.0, "consistent"), (4, 0.0, "paper"), (5, 0.2, "consistent"), (5, -0.4, "paper")],
)
def test_the_exact_least_smoothness(count, low, mode, generator) -> None:
    problem = random_problem(
        generator, 2, count, 60, smoothness=1.2, strong_convexity=low, noise=1.0
    )
    problem = converted(problem, torch.float32 if count == 10 else torch.float64)
    answer = kernel_equals_torch(problem, options(mode=mode), Status.RAISED)
    assert float(answer.smoothness.min()) > 1.3


@pytest.mark.parametrize(
    ("climb", "mode", "high", "noise"),
    [
        ((1.0, 1.0), "paper", 1.0, 1.0),
        ((0.05, 0.0), "consistent", 1.0, 1.0),
        ((0.0, 0.1), "consistent", 8.0, 3.0),
    ],
)
def test_the_climb_of_the_paper(climb, mode, high, noise, generator) -> None:
    problem = random_problem(generator, 2, 5, 8, smoothness=high, noise=noise)
    answer = kernel_equals_torch(problem, options(mode=mode, climb=climb), Status.RAISED)
    steps = (answer.smoothness - high - answer.strong_convexity).cpu() / sum(climb)
    assert torch.allclose(steps, steps.round())
    assert float(steps.min()) >= 1


def test_images_that_depend_on_each_other(generator) -> None:
    """More neighbors than dimensions, and copies: many weights give the one answer."""
    anchors = normal(generator, 2, 8, 2)
    anchors[:, 5] = anchors[:, 1]
    problem = CipProblem(anchors[:, 2] + 0.1, anchors, 0.7 * anchors, 1.0)
    answer, expected, outcome = both_ways(problem, options())
    assert outcome == [SOLVED] * 2
    assert_close(image_of(answer, problem), image_of(expected, problem))
    assert_close(answer.value, expected.value)
    assert float(answer.residual.max()) < 1e-9


def image_of(answer: DualSolution, problem: CipProblem) -> Tensor:
    return (answer.multipliers.cpu()[:, None] @ problem.images)[:, 0]


def test_products_come_in_parts(generator) -> None:
    problem = random_problem(generator, 2, 4, 8, smoothness=1.2, strong_convexity=0.1, noise=0.5)
    answer, expected, outcome = both_ways(problem, options(), parts=3)
    assert outcome == [SOLVED] * 2
    assert_equal(answer, expected, [0, 1])


def test_rows_the_kernel_does_not_answer(generator) -> None:
    """A contradiction has no answer; overflow is for others to tell. Neighboring rows answer."""
    problem = random_problem(generator, 3, 3, 4, noise=0.1)
    anchors, images = problem.anchors.clone(), problem.images.clone()
    anchors[0, 1] = anchors[0, 0]
    images[2, 1] = 1e200
    problem = CipProblem(problem.query, anchors, images, 2.4)
    answer, expected, outcome = both_ways(problem, options())
    assert outcome == [FAILED, SOLVED, LEFT]
    assert expected.status[[0, 2]].tolist() == [int(Status.INFEASIBLE), int(Status.UNSOLVED)]
    assert answer.status[0] == int(Status.INFEASIBLE)
    assert_equal(answer, expected, [1])


def test_a_neighbor_to_leave_out_is_left_to_others(generator) -> None:
    """Within the cap the kernel answers, with the spares waiting outside."""
    problem = random_problem(generator, 2, 4, 30, smoothness=2.6)
    images = problem.images.clone()
    images[0, 1] += 3 * normal(generator, 30)
    problem = CipProblem(problem.query, problem.anchors, images, 2.6)
    answer, expected, outcome = both_ways(problem, options(cap=2.7, spares=1))
    assert outcome == [LEFT, SOLVED]
    assert expected.status.tolist() == [int(Status.REPAIRED), int(Status.SOLVED)]
    assert answer.active[1].tolist() == [True, True, True, False]
    assert math.isnan(float(answer.potentials[1, 3]))
    assert_equal(answer, expected, [1])


@pytest.mark.parametrize("low", [0.0, 0.3])
def test_streamed_products_equal_gathered_ones(low, generator, monkeypatch) -> None:
    """In several segments, the last of them not full."""
    monkeypatch.setattr("otad.cip.local.stream_triton._SEGMENT", 128)
    inputs, features = torch.randn(2, 20, 300, generator=generator).to(DEVICE)
    query = torch.randn(2, 300, generator=generator).to(DEVICE)
    indices = torch.tensor([[3, 1, 7], [0, 19, 2]], device=DEVICE)
    problem = BankProblem(query, inputs.half(), features.half(), indices, 2.0, low)
    rows = slice(0, 2)
    dense = CipProblem(
        query, problem.anchors_of(rows).float(), problem.images_of(rows).float(), 2.0, low
    )
    expected = products_of(dense, None, with_offsets=low != 0)
    values, squares = streamed_products(problem, with_offsets=low != 0)
    assert len(values) == 3
    assert_close(values.sum(0), expected.values[0], rtol=1e-5, atol=1e-3)
    assert_close(squares.sum(0), expected.squares[0], rtol=1e-5, atol=1e-3)
    weights = torch.tensor([[0.5, 0.0, 0.5], [0.2, 0.3, 0.5]], device=DEVICE)
    mean = (weights[:, None] @ problem.images_of(rows).float())[:, 0]
    assert_close(streamed_combination(problem.features, indices, weights), mean)
    dots = (problem.anchors_of(rows).double() @ query.double()[..., None])[..., 0]
    found = streamed_dots(problem.inputs, indices, query)
    assert_close(found, dots, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("low", [0.0, 0.3])
def test_gradient_of_a_streamed_problem(low, generator, monkeypatch) -> None:
    inputs = torch.randn(20, 50, generator=generator)
    features = (inputs.tanh() + low * inputs).to(DEVICE)
    indices = torch.tensor([[3, 1, 7], [0, 19, 2]], device=DEVICE)
    parts = inputs.to(DEVICE), features, indices
    weight = torch.linspace(-1, 1, 50).to(DEVICE)
    grads = []
    for streamed in (False, True):
        monkeypatch.setattr("otad.cip.local.feature.can_stream", lambda problem, yes=streamed: yes)
        query = inputs[[3, 0]].to(DEVICE).mul(0.5).requires_grad_(True)
        solution = ExactCip()(BankProblem(query, *parts, 1.4, low))
        loss = (solution.image * weight).sum() + solution.value.sum()
        (loss + solution.multipliers[:, 0].sum()).backward()
        grads.append(query.grad)
    assert float(grads[0].abs().min()) > 0
    assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on_failure", ["raise", "abstain", "fallback"])
def test_the_solver_puts_all_rows_together(on_failure, generator, monkeypatch) -> None:
    """Some rows by the kernel, some by torch, some without an answer."""
    problem = random_problem(generator, 3, 3, 4, noise=0.1)
    anchors, images = problem.anchors.clone(), problem.images.clone()
    images[2] *= 1e160
    if on_failure != "raise":
        anchors[0, 1] = anchors[0, 0]
    expected = attempt(problem.query, anchors, images, on_failure, "cpu")
    if not HAS_CUDA:
        monkeypatch.setattr("otad.cip.local.solver.can_solve", lambda products: True)
    found = attempt(problem.query, anchors, images, on_failure, DEVICE)
    if on_failure == "raise":
        assert found == expected == "1 of 3 rows have no solution: 2 (UNSOLVED)"
        return
    for one, other in zip(found, expected, strict=True):
        assert_close(one.cpu(), other, equal_nan=True)


def attempt(query: Tensor, anchors: Tensor, images: Tensor, on_failure: str, device: str):
    """Fields and gradient, or the beginning of the refusal."""
    query = query.detach().to(device, copy=True).requires_grad_(True)
    problem = CipProblem(query, anchors.to(device), images.to(device), 2.4)
    try:
        solution = ExactCip(on_failure=on_failure)(problem)
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    solution.image[:2].sum().backward()
    names = ("image", "value", "multipliers", "potentials", "smoothness", "status", "active")
    return [query.grad, *(getattr(solution, name).detach() for name in names)]
