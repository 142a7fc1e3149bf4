"""The solver and the search on a GPU against the same on a CPU, and how often the host waits."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from cip.instances import FIELDS, assert_same, changed, random_problem, rows_of
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status
from otad.cip.local.products import products_of
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
    return CipProblem(*(getattr(problem, name).cuda() for name in FIELDS))


def found_on_gpu(problem: CipProblem, solver: ExactCip) -> CipSolution:
    """The fields of the solution on the CPU."""
    solution = solver(on_gpu(problem))
    fields = {name: part.cpu() for name, part in vars(solution).items() if name != "mode"}
    return CipSolution(**fields, mode=solution.mode)


def torch_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a row was solved in torch")

    monkeypatch.setattr(ExactCip, "_solve", refuse)


@pytest.mark.parametrize(("solver", "count", "dim", "low"), CASES)
def test_kernel_equals_the_cpu(solver, count, dim, low, generator, monkeypatch) -> None:
    problem = random_problem(
        generator, 100, count, dim, smoothness=2.4, strong_convexity=low, noise=0.2
    )
    rows = rows_of(problem, ~replace(solver, on_failure="abstain")(problem).failed)
    expected = solver(rows)
    torch_forbidden(monkeypatch)
    assert_same(found_on_gpu(rows, solver), expected, rows, 1e-9)


@pytest.mark.parametrize(
    "solver",
    [ExactCip(on_failure="fallback"), ExactCip(on_failure="abstain", max_smoothness=2.6, spares=1)],
)
def test_some_rows_by_each_way(solver, generator) -> None:
    """Solved, raised, repaired, infeasible and out of range, side by side."""
    problem = random_problem(generator, 60, 5, 40, smoothness=2.4, noise=0.3)
    problem.anchors[3, 1] = problem.anchors[3, 0]
    problem.images[59] *= 1e160
    expected, found = solver(problem), found_on_gpu(problem, solver)
    assert len(set(expected.status.tolist())) >= 3
    assert expected.status[59] == found.status[59] == int(Status.UNSOLVED)
    fine = slice(0, 59)
    assert_same(found.rows(fine), expected.rows(fine), rows_of(problem, fine), 1e-8)


def test_gradient_equals_the_cpu(generator, monkeypatch) -> None:
    problem = random_problem(generator, 50, 10, 60, smoothness=1.5, noise=0.5)
    grads = []
    for arrays in (problem, on_gpu(problem)):
        query = arrays.query.clone().requires_grad_()
        solution = ExactCip()(changed(arrays, query=query))
        weight = torch.linspace(-1, 1, 60, dtype=torch.float64, device=query.device)
        ((solution.image * weight).sum() + solution.value.sum()).backward()
        grads.append(query.grad.cpu())
        torch_forbidden(monkeypatch)
    assert_close(grads[1], grads[0], rtol=1e-8, atol=1e-8)


def bank(dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(500, dim, generator=generator)
    noise = torch.randn(500, dim, generator=generator)
    return inputs.half().cuda(), (inputs.clamp(-1, 1) + noise).half().cuda()


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
        assert waits(lambda: BankProblem(queries, inputs, features, found.indices, 2.0)) == 0
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
        with pytest.raises(InputError, match=rf"queries: .*{wrong} at \(2, 1"):
            TorchSearch(points)(queries, 10)
    indices = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    with pytest.raises(InputError, match=rf"query: .*{wrong} at \(2, 1"):
        ExactCip()(BankProblem(queries, inputs, features, indices, 2.0))
    indices[1, 2] = 500
    with pytest.raises(InputError, match=r"indices: .*0 to 499.*0 to 500"):
        ExactCip()(BankProblem(torch.zeros_like(queries), inputs, features, indices, 2.0))


# Neighbors, dimensions (5000: several segments of features), l, L.
SHAPES = [
    *[(1, 5, 0.0, 3.0), (3, 17, 0.0, 3.0), (10, 784, 0.0, 3.0), (10, 784, -0.5, 3.0)],
    *[(33, 500, 0.3, 3.0), (64, 300, -0.3, 3.0), (10, 5000, 0.0, 0.6)],
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "dim", "low", "high"), SHAPES)
def test_streamed_answers_equal_gathered_ones(count, dim, low, high, dtype, generator) -> None:
    inputs = torch.randn(200, dim, generator=generator)
    noise = 0.01 * torch.randn(200, dim, generator=generator)
    features = (inputs.clamp(-1, 1) + low * inputs + noise).to("cuda", dtype)
    inputs = inputs.to("cuda", dtype)
    indices = torch.rand(40, 200, generator=generator).argsort(1)[:, :count].cuda()
    bank = BankProblem(inputs[indices].float().mean(1), inputs, features, indices, high, low)
    everyone = slice(0, 40)
    anchors, images = bank.anchors_of(everyone).float(), bank.images_of(everyone).float()
    dense = CipProblem(bank.query, anchors, images, high, low)
    assert can_stream(bank)
    assert not can_stream(dense)
    solver = ExactCip(on_failure="fallback")
    streamed, gathered = solver(bank), solver(dense)
    solved = ~streamed.failed & ~gathered.failed
    assert bool(solved.any())
    assert bool((streamed.status == int(Status.RAISED)).all()) or high > 1
    size = gathered.image.norm(dim=1).max()
    assert float((streamed.image - gathered.image)[solved].norm(dim=1).max() / size) < 1e-4
    assert float(bank.residual(streamed)[solved].max()) < 1e-5


@pytest.mark.parametrize("count", [14, 20, 50])
def test_matrix_units_multiply_with_the_precision_of_float32(count, generator) -> None:
    bank = torch.randn(400, 784, generator=generator)
    query, indices = bank[:30] + 0.1, torch.randint(400, (30, count), generator=generator)
    problem = BankProblem(*(part.cuda() for part in (query, bank, bank.tanh(), indices)), 2.0)
    values = products_of(problem, None, with_offsets=False).values.sum(0).cpu().double()
    anchors, images = bank[indices].double(), bank.tanh()[indices].double()
    first = images[:, :1]
    stack = torch.cat((anchors - query[:, None].double(), first, images[:, 1:] - first), 1)
    expected = stack[:, count:] @ stack.mT
    assert (values - expected).abs().max() < 2e-6 * expected.abs().max()
