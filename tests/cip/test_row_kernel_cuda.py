"""The solver and the search on a GPU against the same on a CPU, and how often the host waits."""

from __future__ import annotations

import warnings

import pytest
import torch
from cip.instances import assert_same, random_problem
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status
from otad.cip.local.stream_triton import can_stream
from otad.errors import InputError
from otad.search import neighbors
from otad.search.neighbors import TorchSearch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Each combination takes seconds to compile.
CASES = [
    (ExactCip(), 1, 3, 0.0),
    (ExactCip(), 7, 11, 0.0),
    (ExactCip(), 10, 300, 0.3),
    (ExactCip(potential="highest"), 24, 100, 0.0),
    (ExactCip(mode="paper", climb=(1.0, 1.0)), 10, 300, 0.0),
    (ExactCip(climb=(0.1, 0.0), potential="lowest"), 16, 200, 0.0),
    (ExactCip(climb=(0.0, 0.25)), 7, 11, 0.3),
]


def on_gpu(problem: CipProblem) -> CipProblem:
    arrays = (problem.query, problem.anchors, problem.images)
    curvature = (problem.smoothness, problem.strong_convexity)
    return CipProblem(*(part.cuda() for part in (*arrays, *curvature)))


def on_cpu(problem: CipProblem, solver: ExactCip):
    """The solution found on the GPU, its fields on the CPU."""
    solution = solver(on_gpu(problem))
    names = (name for name in solution.__dataclass_fields__ if name != "mode")
    fields = {name: getattr(solution, name).cpu() for name in names}
    return type(solution)(**fields, mode=solution.mode)


def torch_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a row was solved in torch")

    monkeypatch.setattr(ExactCip, "_solve", refuse)


@pytest.mark.parametrize(("solver", "count", "dim", "low"), CASES)
def test_kernel_equals_the_cpu(solver, count, dim, low, generator, monkeypatch) -> None:
    problem = random_problem(
        generator, 100, count, dim, smoothness=2.4, strong_convexity=low, noise=0.2
    )
    expected = ExactCip(**{**solver.__dict__, "on_failure": "abstain"})(problem)
    solved = ~expected.failed
    rows = CipProblem(
        *(part[solved] for part in (problem.query, problem.anchors, problem.images)), 2.4, low
    )
    expected = solver(rows)
    torch_forbidden(monkeypatch)
    assert_same(on_cpu(rows, solver), expected, rows, 1e-9)


def test_some_rows_by_each_way(generator) -> None:
    """Solved, raised, repaired, infeasible and out of range, side by side."""
    problem = random_problem(generator, 60, 5, 40, smoothness=2.4, noise=0.3)
    anchors, images = problem.anchors.clone(), problem.images.clone()
    anchors[3, 1] = anchors[3, 0]
    images[7] *= 1e160
    problem = CipProblem(problem.query, anchors, images, 2.4)
    for solver in (
        ExactCip(on_failure="fallback"),
        ExactCip(on_failure="abstain", max_smoothness=2.6, spares=1),
    ):
        expected, found = solver(problem), on_cpu(problem, solver)
        assert len(set(expected.status.tolist())) >= 3
        assert int(Status.UNSOLVED) in expected.status
        assert found.status.tolist() == expected.status.tolist()
        assert torch.equal(found.active, expected.active)
        fine = [row for row in range(60) if row != 7]
        for name in ("image", "multipliers", "potentials", "smoothness"):
            one, other = (getattr(part, name)[fine] for part in (found, expected))
            assert_close(one, other, rtol=1e-8, atol=1e-8, equal_nan=True)


def test_gradient_equals_the_cpu(generator, monkeypatch) -> None:
    problem = random_problem(generator, 50, 10, 60, smoothness=1.5, noise=0.5)
    grads = []
    for arrays in (problem, on_gpu(problem)):
        query = arrays.query.clone().requires_grad_(True)
        made = CipProblem(query, arrays.anchors, arrays.images, 1.5)
        solution = ExactCip()(made)
        weight = torch.linspace(-1, 1, 60, dtype=torch.float64, device=query.device)
        ((solution.image * weight).sum() + solution.value.sum()).backward()
        grads.append(query.grad.cpu())
        torch_forbidden(monkeypatch)
    assert_close(grads[1], grads[0], rtol=1e-8, atol=1e-8)


def bank(dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(500, dim, generator=generator)
    noise = torch.randn(500, dim, generator=generator)
    return inputs.half().cuda(), (inputs.clamp(-1, 1) + noise).half().cuda()


def test_streamed_problem_in_float32(generator, monkeypatch) -> None:
    """Products over several segments of features; every row needs a larger L."""
    inputs, features = bank(5000, generator)
    indices = torch.rand(64, 500, generator=generator).argsort(1)[:, :10].cuda()
    query = inputs[indices].float().mean(1)
    problem = BankProblem(query, inputs, features, indices, 1.2)
    dense = CipProblem(
        query.double().cpu(), inputs[indices].double().cpu(), features[indices].double().cpu(), 1.2
    )
    expected = ExactCip()(dense)
    torch_forbidden(monkeypatch)
    found = ExactCip()(problem)
    assert found.status.tolist() == [int(Status.RAISED)] * 64
    assert_close(found.smoothness.cpu(), expected.smoothness, rtol=1e-4, atol=0)
    size = expected.image.norm(dim=1).max()
    assert float((found.image.cpu() - expected.image).norm(dim=1).max() / size) < 1e-4
    assert float(problem.residual(found).max()) < 1e-5


def waits(work) -> int:
    """How often the host waits for the device."""
    work()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)


def test_the_host_waits_but_once_or_twice_for_each_step(generator) -> None:
    inputs, features = bank(300, generator)
    queries = torch.randn(32, 300, generator=generator).cuda()
    search = TorchSearch(inputs)
    found = search(queries, 10)
    problem = BankProblem(queries, inputs, features, found.indices, 2.0)
    with torch.no_grad():
        assert waits(lambda: search(queries, 10)) <= 2
        assert waits(lambda: BankProblem(queries, inputs, features, found.indices, 2.0)) <= 1
        assert waits(lambda: ExactCip()(problem)) <= 1


def test_search_finds_what_it_finds_on_a_cpu(generator, monkeypatch) -> None:
    points = torch.randn(3000, 37, generator=generator)
    points[100:200] = points[:100]
    queries = torch.cat([torch.randn(50, 37, generator=generator), points[:20]])
    for size in (2**28, 2**17):
        monkeypatch.setattr(neighbors, "WORKING_BYTES", size)
        there = TorchSearch(points.cuda())(queries.cuda(), 9)
        here = TorchSearch(points)(queries, 9)
        assert torch.equal(there.indices.cpu(), here.indices)
        assert torch.equal(there.distances.cpu(), here.distances)  # to the bit


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(wrong, generator) -> None:
    inputs, features = bank(30, generator)
    queries = torch.zeros(4, 30, device="cuda")
    queries[2, 1] = wrong
    for points in (inputs, inputs[:12]):  # fewer than a first shortlist
        with pytest.raises(InputError, match=rf"queries: .* finite values, got {wrong} at \(2, 1"):
            TorchSearch(points)(queries, 10)
    indices = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    with pytest.raises(InputError, match=rf"query: .* finite values, got {wrong} at \(2, 1"):
        BankProblem(queries, inputs, features, indices, 2.0)
    indices[1, 2] = 500
    with pytest.raises(InputError, match="indices: expected bank rows 0 to 499, got 0 to 500"):
        BankProblem(torch.zeros_like(queries), inputs, features, indices, 2.0)


SHAPES = [
    (1, 5, 0.0),
    (3, 17, 0.0),
    (10, 784, 0.0),
    (10, 784, -0.5),
    (33, 500, 0.3),
    (64, 300, -0.3),
]


def bank_problem(count: int, dim: int, low: float, dtype: torch.dtype, device: str) -> BankProblem:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(200, dim, generator=generator)
    noise = 0.01 * torch.randn(200, dim, generator=generator)
    features = (inputs.clamp(-1, 1) + low * inputs + noise).to(device, dtype)
    inputs = inputs.to(device, dtype)
    indices = torch.rand(40, 200, generator=generator).argsort(1)[:, :count].to(device)
    query = inputs[indices].float().mean(1)
    return BankProblem(query, inputs, features, indices, 3.0, low)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "dim", "low"), SHAPES)
def test_streamed_answers_equal_gathered_ones(count, dim, low, dtype) -> None:
    bank = bank_problem(count, dim, low, dtype, "cuda")
    everyone = slice(0, 40)
    anchors, images = bank.anchors_of(everyone).float(), bank.images_of(everyone).float()
    dense = CipProblem(bank.query, anchors, images, 3.0, low)
    assert can_stream(bank)
    assert not can_stream(dense)
    solver = ExactCip(on_failure="fallback")
    streamed, gathered = solver(bank), solver(dense)
    solved = ~streamed.failed & ~gathered.failed
    assert bool(solved.any())
    size = gathered.image.norm(dim=1).max()
    assert float((streamed.image - gathered.image)[solved].norm(dim=1).max() / size) < 1e-4
    assert float(bank.residual(streamed)[solved].max()) < 1e-5
