"""The kernel of one row against the steps in torch: compiled on a GPU, else interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from cip.instances import changed, converted, normal, random_problem
from torch import Tensor
from torch.testing import assert_close

HAS_CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

import triton  # noqa: E402
from triton import language as tl  # noqa: E402

from otad.cip import BankProblem, CipProblem, ExactCip, Status  # noqa: E402
from otad.cip.kernels import relax  # noqa: E402
from otad.cip.local.potentials import closure  # noqa: E402
from otad.cip.local.products import Products, products_of  # noqa: E402
from otad.cip.local.relax import Relaxation  # noqa: E402
from otad.cip.local.solve_torch import DualSolution, solve_torch  # noqa: E402
from otad.cip.local.solver import _settings, solve_triton  # noqa: E402
from otad.cip.local.stream_triton import (  # noqa: E402
    padded_count,
    streamed_combination,
    streamed_dots,
    streamed_products,
)
from otad.errors import InputError, SolverError  # noqa: E402

# NumPy, which interprets kernels here, warns of numbers that the kernel masks out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if HAS_CUDA else "cpu"
SOLVED, LEFT, FAILED = 1, 0, -1  # outcomes of the kernel
SINGLE, DOUBLE = torch.float32, torch.float64


def both_ways(
    problem: CipProblem, *, parts=1, climb=None, cap=math.inf, spares=0, **rules: str
) -> tuple[DualSolution, DualSolution, list[int]]:
    """By the kernel and in torch, and the kernel's outcome; products in so many parts."""
    lowers = climb is not None and climb[1] > 0
    found = products_of(problem, None, with_offsets=problem.has_strong_convexity or lowers)
    shares = torch.linspace(1, 2, parts, dtype=DOUBLE).view(-1, 1, 1, 1)
    shares = shares / shares.sum()
    values = (found.values.double() * shares).to(found.values)
    squares = (found.squares.double() * shares[..., 0]).to(found.squares)
    products = Products(values.to(DEVICE), squares.to(DEVICE), found.with_offsets)
    curvature = problem.smoothness.to(DEVICE), problem.strong_convexity.to(DEVICE)
    potential, mode = rules.get("potential", "canonical"), rules.get("mode", "consistent")
    how = Relaxation(climb, cap, spares), potential, mode
    solved, outcome = solve_triton(products, *curvature, *how, DOUBLE, sensitive=True)
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


# Sizes, L, l and noise of the problem, its dtype, options, and the status of every row.
FEASIBLE = [
    (3, 1, 5, 2.6, 0.0, 0.0, SINGLE, {}, Status.SOLVED),
    (3, 2, 3, 2.6, 0.0, 0.0, DOUBLE, {}, Status.SOLVED),
    (1, 10, 128, 2.6, 0.0, 0.0, SINGLE, {}, Status.SOLVED),
    (1, 16, 40, 2.6, 0.0, 0.0, DOUBLE, {}, Status.SOLVED),
    (1, 17, 30, 2.6, 0.0, 0.0, SINGLE, {}, Status.SOLVED),
    (1, 40, 60, 2.6, 0.2, 0.0, DOUBLE, {}, Status.SOLVED),
    (1, 5, 7, 2.6, 0.3, 0.0, DOUBLE, {}, Status.SOLVED),
    (1, 5, 7, 2.6, 0.3, 0.0, DOUBLE, {"potential": "lowest"}, Status.SOLVED),
    (1, 5, 7, 2.6, 0.3, 0.0, DOUBLE, {"potential": "highest"}, Status.SOLVED),
]
LEAST_SMOOTHNESS = [
    (1, 10, 60, 1.2, 0.0, 1.0, SINGLE, {}, Status.RAISED),
    (1, 4, 60, 1.2, 0.0, 1.0, DOUBLE, {"mode": "paper"}, Status.RAISED),
    (1, 5, 60, 1.2, 0.2, 1.0, DOUBLE, {}, Status.RAISED),
    (1, 5, 60, 1.2, -0.4, 1.0, DOUBLE, {"mode": "paper"}, Status.RAISED),
    (2, 4, 8, 1.2, 0.1, 0.5, DOUBLE, {"parts": 3}, Status.RAISED),
    (1, 20, 60, 1.2, 0.2, 1.0, DOUBLE, {"mode": "paper", "parts": 2}, Status.RAISED),
]
CLIMB = [
    (1, 5, 8, 1.0, 0.0, 1.0, DOUBLE, {"mode": "paper", "climb": (1.0, 1.0)}, Status.RAISED),
    (1, 5, 8, 1.0, 0.0, 1.0, DOUBLE, {"climb": (0.05, 0.0)}, Status.RAISED),
    (1, 5, 8, 8.0, 0.0, 3.0, DOUBLE, {"climb": (0.0, 0.1)}, Status.RAISED),
]


@pytest.mark.parametrize("case", FEASIBLE + LEAST_SMOOTHNESS + CLIMB)
def test_kernel_equals_torch(case, generator) -> None:
    *sizes, high, low, noise, dtype, how, status = case
    curvature = {"smoothness": high, "strong_convexity": low}
    problem = converted(random_problem(generator, *sizes, **curvature, noise=noise), dtype)
    answer, expected, outcome = both_ways(problem, **how)
    assert outcome == [SOLVED] * sizes[0]
    assert answer.status.tolist() == [int(status)] * sizes[0]
    assert_equal(answer, expected, list(range(sizes[0])))
    if "climb" in how:
        steps = (answer.smoothness - high - answer.strong_convexity).cpu() / sum(how["climb"])
        assert torch.allclose(steps, steps.round())
        assert float(steps.min()) >= 1
    elif status == Status.RAISED:
        assert float(answer.smoothness.min()) > 1.01 * high


def test_without_a_gradient_all_else_is_the_same(generator) -> None:
    problem = random_problem(generator, 3, 4, 6, smoothness=2.6)
    products = products_of(problem, None, with_offsets=False)
    products = Products(products.values.to(DEVICE), products.squares.to(DEVICE), False)
    curvature = problem.smoothness.to(DEVICE), problem.strong_convexity.to(DEVICE)
    how = products, *curvature, Relaxation(None, math.inf, 0), "canonical", "consistent", DOUBLE
    (solved, outcome), (plain, same) = (solve_triton(*how, sensitive=one) for one in (True, False))
    assert plain.sensitivity is None
    assert_close({**vars(plain), "sensitivity": solved.sensitivity}, vars(solved))
    assert torch.equal(same, outcome)


@triton.jit
def closed_kernel(weights, answer, count: tl.constexpr, padded: tl.constexpr):
    i = tl.arange(0, padded)
    place = weights + i[:, None] * count + i[None, :]
    edges = tl.load(place, mask=relax.pairs_of(count, padded), other=-float("inf"))
    tl.store(answer, relax.is_closed(edges, count, padded).to(tl.int32))


@pytest.mark.parametrize(
    ("count", "dim", "closed"), [(1, 5, True), (20, 200, True), (20, 3, False), (60, 4, False)]
)
def test_closed_paths_need_no_search(count, dim, closed, generator) -> None:
    """Neighbors in many dimensions are far from each other, so that no detour is longer."""
    problem = random_problem(generator, 1, count, dim, smoothness=2.6)
    gram = products_of(problem, None, with_offsets=False).gram()
    start = Relaxation(None, math.inf, 0).start(gram, problem.smoothness, problem.strong_convexity)
    weights = start.constraints(gram).weights(1 / problem.smoothness, exact=True)
    assert torch.equal(closure(weights), weights) == closed
    found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    edges = weights[..., 0].contiguous().to(DEVICE)
    closed_kernel[(1,)](edges, found, count=count, padded=padded_count(count))
    assert bool(found) == closed
    answer, expected, outcome = both_ways(problem)
    assert outcome == [SOLVED]
    assert_equal(answer, expected, [0])


def test_many_neighbors_with_weight(generator) -> None:
    problem = random_problem(generator, 1, 64, 1000, smoothness=2.6)
    answer, expected, outcome = both_ways(changed(problem, query=problem.anchors.mean(1)))
    assert outcome == [SOLVED]
    assert int((answer.multipliers > 0).sum()) > 48
    assert_equal(answer, expected, [0])


def test_images_that_depend_on_each_other(generator) -> None:
    """More neighbors than dimensions, and copies: many weights give the one answer."""
    anchors = normal(generator, 2, 8, 2)
    anchors[:, 5] = anchors[:, 1]
    problem = CipProblem(anchors[:, 2] + 0.1, anchors, 0.7 * anchors, 1.0)
    answer, expected, outcome = both_ways(problem)
    assert outcome == [SOLVED] * 2
    images = ((part.multipliers.cpu()[:, None] @ problem.images) for part in (answer, expected))
    assert_close(*images)
    assert_close(answer.value, expected.value)
    assert float(answer.residual.max()) < 1e-9


def test_rows_the_kernel_does_not_answer(generator) -> None:
    """A contradiction has no answer; overflow is left to torch. Other rows are answered."""
    problem = random_problem(generator, 3, 3, 4, noise=0.1)
    problem.anchors[0, 1] = problem.anchors[0, 0]
    problem.images[2, 1] = 1e200
    answer, expected, outcome = both_ways(problem)
    assert outcome == [FAILED, SOLVED, LEFT]
    assert expected.status[[0, 2]].tolist() == [int(Status.INFEASIBLE), int(Status.UNSOLVED)]
    assert answer.status[0] == int(Status.INFEASIBLE)
    assert_equal(answer, expected, [1])


def test_rows_beyond_the_cap_are_left_to_torch(generator) -> None:
    """Within the cap the kernel answers, without the spares."""
    problem = random_problem(generator, 2, 4, 30, smoothness=2.6)
    problem.images[0, 1] += 3 * normal(generator, 30)
    answer, expected, outcome = both_ways(problem, cap=2.7, spares=1)
    assert outcome == [LEFT, SOLVED]
    assert expected.status.tolist() == [int(Status.REPAIRED), int(Status.SOLVED)]
    assert answer.active[1].tolist() == [True, True, True, False]
    assert math.isnan(float(answer.potentials[1, 3]))
    assert_equal(answer, expected, [1])


@pytest.mark.parametrize("count", [3, 12])  # few neighbors without matrix units, more with them
@pytest.mark.parametrize("low", [0.0, 0.3])
def test_streamed_products_equal_gathered_ones(low, count, generator, monkeypatch) -> None:
    """In several segments, the last of them not full."""
    monkeypatch.setattr("otad.cip.local.stream_triton._SEGMENT", 512)
    inputs, features = torch.randn(2, 20, 300, generator=generator).to(DEVICE)
    query = torch.randn(2, 300, generator=generator).to(DEVICE)
    indices = torch.rand(2, 20, generator=generator).argsort(1)[:, :count].to(DEVICE)
    problem = BankProblem(query, inputs.half(), features.half(), indices, 2.0, low)
    anchors, images = (part(slice(0, 2)) for part in (problem.anchors_of, problem.images_of))
    dense = CipProblem(query, anchors.float(), images.float(), 2.0, low)
    expected = products_of(dense, None, with_offsets=low != 0).gram()
    values, squares = streamed_products(problem, with_offsets=low != 0)
    assert len(values) > 1
    found = Products(values, squares, with_offsets=low != 0).gram()
    for name, part in vars(expected).items():
        assert_close(getattr(found, name), part, rtol=1e-5, atol=1e-3, msg=name)
    weights = torch.rand(2, count, generator=generator).to(DEVICE)
    weights[0, 1] = 0
    mean = (weights[:, None] @ images.float())[:, 0]
    assert_close(streamed_combination(problem.features, indices, weights), mean)
    nearest, outside = torch.zeros_like(indices), torch.full_like(indices, -(2**40))
    nearest[0], outside[0] = 19, 2**40  # an index outside the bank, before it is refused
    found, expected = (streamed_combination(inputs, rows, weights) for rows in (outside, nearest))
    assert torch.equal(found, expected)
    dots = (anchors.double() @ query.double()[..., None])[..., 0]
    assert_close(streamed_dots(problem.inputs, indices, query), dots, rtol=1e-5, atol=1e-4)


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


def solved_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr("otad.cip.local.solver.can_solve", lambda products: True)


def attempt(problem: CipProblem, on_failure: str, device: str) -> list[Tensor]:
    """The gradient and what else was found."""
    parts = (problem.query, problem.anchors, problem.images)
    query, anchors, images = (part.to(device, copy=True) for part in parts)
    problem = CipProblem(query.requires_grad_(), anchors, images, 2.4)
    solution = ExactCip(on_failure=on_failure)(problem)
    solution.image[:2].sum().backward()
    names = ("image", "value", "multipliers", "potentials", "smoothness", "status", "active")
    return [query.grad.cpu(), *(getattr(solution, name).detach().cpu() for name in names)]


@pytest.mark.parametrize("on_failure", ["abstain", "fallback"])
def test_the_solver_puts_all_rows_together(on_failure, generator, monkeypatch) -> None:
    """Some rows by the kernel, some by torch, some without an answer."""
    problem = random_problem(generator, 3, 3, 4, noise=0.1)
    problem.anchors[0, 1] = problem.anchors[0, 0]
    problem.images[2] *= 1e160
    expected = attempt(problem, on_failure, "cpu")
    if not HAS_CUDA:
        solved_by_kernels(monkeypatch)
    assert_close(attempt(problem, on_failure, DEVICE), expected, equal_nan=True)
    with pytest.raises(SolverError, match=r"2 of 3 .*0 \(INFEASIBLE\), 2 \(UNSOLVED\)"):
        attempt(problem, "raise", DEVICE)


@pytest.mark.parametrize(("wrong", "count"), [(math.nan, 3), (-1, 3), (math.inf, 12), (20, 12)])
def test_wrong_values_are_found_by_the_kernels(wrong, count, generator, monkeypatch) -> None:
    """Nothing outside the bank is read, and the error is that of the constructor on a CPU."""
    for module in ("products", "feature"):
        monkeypatch.setattr(f"otad.cip.local.{module}.can_stream", lambda problem: True)
    solved_by_kernels(monkeypatch)
    inputs = torch.randn(20, 40, generator=generator).to(DEVICE)
    indices = torch.rand(2, 20, generator=generator).argsort(1)[:, :count].to(DEVICE)
    query = inputs[indices].mean(1)
    problem = BankProblem(query, inputs, inputs, indices, 2.0)
    problem.__dict__["_is_checked"] = False  # as on a GPU
    assert ExactCip()(problem).status.tolist() == [0, 0]
    if isinstance(wrong, int):
        indices[1, 2] = wrong
        message = rf"indices: expected bank rows 0 to 19, got .*{wrong}"
    else:
        query[1, 7] = wrong
        message = rf"query: .*{wrong} at \(1, 7"
    with pytest.raises(InputError, match=message):
        ExactCip()(problem)
    with pytest.raises(InputError, match=message):
        problem.anchors_of(slice(0, 1))


def test_settings_stay_where_a_graph_reads_them() -> None:
    device = torch.device("cpu")
    first = _settings(0.5, device=device)
    for number in range(100):
        _settings(float(number), device=device)
    assert _settings(0.5, device=device) is first
