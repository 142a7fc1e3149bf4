"""What must not change an answer: other rows of the batch, chunks, a bank, the bank's file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cip.instances import assert_same, changed, converted, normal, random_problem, rows_of
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, CipSolution, ExactCip, Status, least_smoothness
from otad.cip import problem as problem_module
from otad.cip.local.products import products_of
from otad.errors import SolverError
from otad.io.mapped_rows import FileRows, in_file
from otad.model.bank import FeatureBank

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
BOTH_MODES = pytest.mark.parametrize("mode", ["consistent", "paper"])


def with_bad_rows(problem: CipProblem, kind: str) -> CipProblem:
    """The same with rows 1 and 4 made bad."""
    query, anchors, images = (t.clone() for t in (problem.query, problem.anchors, problem.images))
    bad = torch.tensor([1, 4])
    if kind == "decreasing":
        images[bad] = -2 * anchors[bad]
    elif kind == "contradicting":
        anchors[bad, 2] = anchors[bad, 0]
    elif kind == "overflow":
        anchors[bad, 1] = 1e200
        images[bad, 2] = -1e200
    elif kind == "nearly overflow":
        images[bad] *= 1e152
    elif kind == "far query":
        query[bad] = 1e300
    else:
        for part in (query, anchors, images):
            part[bad] *= 1e-120
    return changed(problem, query=query, anchors=anchors, images=images)


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
    mixed = with_bad_rows(problem, kind)
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
    status, mixed = STATUSES[kind], with_bad_rows(random_problem(generator, 6, 5, 4), kind)
    solution = ExactCip(on_failure="abstain")(mixed)
    assert solution.status[[1, 4]].tolist() == [status] * 2
    assert solution.failed.tolist() == [False, True, False, False, True, False]
    fallen, bad = ExactCip(on_failure="fallback")(mixed), torch.tensor([1, 4])
    nearest = (mixed.anchors - mixed.query[:, None]).norm(dim=-1).argmin(1)[bad]
    assert torch.equal(fallen.multipliers[bad].argmax(1), nearest)
    assert torch.equal(fallen.image[bad], mixed.images[bad, nearest])
    with pytest.raises(SolverError, match=rf"2 of 6 .*1 \({status.name}\), 4 \({status.name}\)"):
        ExactCip()(mixed)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_products_of_long_rows(generator, dtype: torch.dtype, with_offsets: bool) -> None:
    query, anchors, images = (normal(generator, 3, *more, 9_000) for more in ((), (8,), (8,)))
    problem = CipProblem(query.to(dtype), anchors.to(dtype), images.to(dtype), smoothness=2.0)
    products = products_of(problem, None, with_offsets=with_offsets)
    query, anchors, images = (vars(problem)[k].double() for k in ("query", "anchors", "images"))
    offsets, centered = anchors - query[:, None], images - images[:, :1]

    def inner(one: Tensor, other: Tensor) -> Tensor:
        return torch.einsum("bid,bjd->ijb", one, other)

    expected = [inner(centered, offsets), inner(centered, centered)]
    expected += [inner(images[:, :1], offsets)[0], offsets.square().sum(2).mT]
    expected += [images[:, 0].norm(dim=1), inner(offsets, offsets) if with_offsets else None]
    # einsum itself may add 9,000 products one by one, which is off by some hundred ulps.
    rounding = 20 * torch.finfo(dtype).eps * 9_000 if dtype == torch.float32 else 1e-8
    *found, _ = vars(products.gram()).values()
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, atol=rounding, rtol=0.0)


def test_threads_change_nothing(generator) -> None:
    """Of 600 rows, each thread solves a part. Some rows are raised."""
    problem = random_problem(generator, 600, 5, 6, smoothness=1.9, strong_convexity=0.1)
    allowed, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            solver = ExactCip()
            found.append((solver(problem), gradient(problem, solver)))
            problem.query.requires_grad_(False)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(allowed)
    assert set(found[0][0].status.tolist()) == {Status.SOLVED, Status.RAISED}
    assert_same(found[1][0], found[0][0], problem, 1e-12)
    assert_close(found[1][1], found[0][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [257, 513])
def test_threads_change_no_bit(generator, rows: int) -> None:
    """A row alone in its part, or the last that is left of it, is solved like all others."""
    problem = random_problem(generator, rows, 10, 30, smoothness=2.0, strong_convexity=0.0)
    allowed, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ExactCip()(problem))
    finally:
        torch.set_num_threads(allowed)
    assert found[0].image.dtype == torch.float64
    for other in found[1:]:
        assert torch.equal(other.image, found[0].image)
        assert torch.equal(other.multipliers, found[0].multipliers)


@BOTH_MODES
@pytest.mark.parametrize(
    ("storage", "dtype"),
    [(HALF, SINGLE), (torch.bfloat16, SINGLE), (SINGLE, SINGLE), (HALF, DOUBLE), (DOUBLE, DOUBLE)],
)
def test_bank_equals_dense(storage, dtype, mode, generator) -> None:
    """A bank of any precision has the answer and the gradient of its gathered rows, converted."""
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
            slopes = gradient(bank, solver), gradient(dense, solver)
            assert_close(*slopes, rtol=0, atol=100 * tolerance)
            assert float(slopes[0].abs().max()) > 0.1
        assert_close(least_smoothness(bank), least_smoothness(dense), rtol=tolerance, atol=0)


def widened(solution: CipSolution) -> CipSolution:
    parts = {name: part for name, part in vars(solution).items() if name != "mode"}
    wide = {name: part.double() if part.dtype == SINGLE else part for name, part in parts.items()}
    return CipSolution(**wide, mode=solution.mode)


def gradient(problem: CipProblem | BankProblem, solver: ExactCip) -> Tensor:
    """In the query, of all that has one."""
    problem.query.requires_grad_()
    found = solver(problem)
    total = found.image.square().sum() + found.multipliers.square().sum() + found.value.sum()
    return torch.autograd.grad(total, problem.query)[0]


N, D, B, K = 60, 9, 12, 5
SOLVERS = (ExactCip(), ExactCip(mode="paper", climb=(1.0, 1.0)), ExactCip(chunk=4))


@pytest.fixture
def bank(tmp_path: Path) -> FeatureBank:
    """In a file."""
    generator = torch.Generator().manual_seed(0)
    inputs = normal(generator, N, D)
    features = inputs + inputs.tanh() + 0.1 * normal(generator, N, D)
    labels = torch.zeros(N, dtype=torch.int64)
    FeatureBank(inputs.half(), features.half(), labels, "net").save(tmp_path / "bank")
    return FeatureBank.load(tmp_path / "bank")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of every read of the file."""
    lists: list[list[int]] = []
    read = FileRows.read

    def recorded(self: FileRows, rows: Tensor, *, pinned: bool = False) -> Tensor:
        lists.append(rows.tolist())
        return read(self, rows, pinned=pinned)

    monkeypatch.setattr(FileRows, "read", recorded)
    return lists


def problem_of(bank: FeatureBank, change: Callable[[Tensor], Tensor] | None = None) -> BankProblem:
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(N, generator=generator)[:K] for _ in range(B)])
    query = bank.inputs[indices].float().mean(1)
    parts = (part if change is None else change(part) for part in (bank.inputs, bank.features))
    return BankProblem(query, *parts, indices, 2.4, 0.1)


def solved(problem: BankProblem, solver: ExactCip) -> tuple[Tensor, ...]:
    solution = solver(problem)
    names = ("image", "value", "multipliers", "potentials")
    return gradient(problem, solver), *(getattr(solution, name) for name in names)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_bank_in_a_file_has_the_answers_of_one_in_memory(bank, solver, reads, monkeypatch):
    """Each row that the batch needs is read once; by blocks if they do not fit in memory."""
    in_memory = problem_of(bank, torch.clone)
    assert in_memory.fetched() is in_memory
    expected = solved(in_memory, solver)
    rows = problem_of(bank).indices.unique().tolist()
    needed = 2 * len(rows) * D * 2
    monkeypatch.setattr(problem_module, "_FETCHED_BYTES", needed)
    reads.clear()
    gradient(problem_of(bank), solver)
    assert reads == [rows, rows]  # inputs and features: for products, image and gradient together
    problem = problem_of(bank)
    near, rows = problem.fetched(), slice(2, 7)
    assert in_file(near.inputs) is None
    assert torch.equal(near.anchors_of(rows), problem.anchors_of(rows))
    assert torch.equal(near.images_of(rows), problem.images_of(rows))
    assert near.shape == problem.shape
    assert_close(solved(problem, solver), expected, rtol=0, atol=0)
    monkeypatch.setattr(problem_module, "_FETCHED_BYTES", needed - 1)
    problem = problem_of(bank)
    reads.clear()
    assert problem.fetched() is problem
    assert_close(solved(problem, solver), expected, rtol=0, atol=0)
    assert {len(rows) for rows in reads} == {K * (solver.chunk or B)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", [None, torch.clone])
def test_rows_come_to_the_gpu(bank: FeatureBank, change: Callable[[Tensor], Tensor] | None) -> None:
    """From a file or from the memory of the host."""
    here = problem_of(bank, change)
    pairs, indices = (here.inputs, here.features), here.indices.cuda()
    away = BankProblem(here.query.cuda(), *pairs, indices, 2.4, 0.1)
    assert away.fetched().inputs.is_cuda
    near = BankProblem(here.query.cuda(), *(part.cuda() for part in pairs), indices, 2.4, 0.1)
    assert_close(solved(away, ExactCip()), solved(near, ExactCip()))
