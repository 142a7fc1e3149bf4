"""A bank elsewhere: each row the batch needs is read once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cip.instances import convex_map, normal
from torch import Tensor
from torch.testing import assert_close

from otad.cip import BankProblem, ExactCip
from otad.cip import problem as problem_module
from otad.io.mapped_rows import FileRows, in_file
from otad.model.bank import FeatureBank

N, D, B, K = 60, 9, 12, 5
SOLVERS = (ExactCip(), ExactCip(mode="paper", climb=(1.0, 1.0)), ExactCip(chunk=4))
Asked = list[list[int]]


@pytest.fixture
def bank(tmp_path: Path) -> FeatureBank:
    """In a file."""
    generator = torch.Generator().manual_seed(0)
    inputs = normal(generator, N, D)
    features = convex_map(inputs[None], generator)[0] + 0.1 * normal(generator, N, D)
    labels = torch.zeros(N, dtype=torch.int64)
    FeatureBank(inputs.half(), features.half(), labels, "net").save(tmp_path / "bank")
    return FeatureBank.load(tmp_path / "bank")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The rows of every read."""
    lists: Asked = []
    read = FileRows.read

    def told(self: FileRows, rows: Tensor, *, pinned: bool = False) -> Tensor:
        lists.append(rows.tolist())
        return read(self, rows, pinned=pinned)

    monkeypatch.setattr(FileRows, "read", told)
    return lists


def problem_of(bank: FeatureBank, change: Callable[[Tensor], Tensor] | None = None) -> BankProblem:
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(N, generator=generator)[:K] for _ in range(B)])
    query = bank.inputs[indices].float().mean(1)
    parts = (part if change is None else change(part) for part in (bank.inputs, bank.features))
    return BankProblem(query, *parts, indices, 2.4, 0.1)


def solved(problem: BankProblem, solver: ExactCip) -> tuple[Tensor, ...]:
    query = problem.query.requires_grad_()
    solution = solver(problem)
    (slope,) = torch.autograd.grad(solution.image.square().sum() + solution.value.sum(), query)
    return solution.image, solution.value, solution.multipliers, solution.potentials, slope


@pytest.mark.parametrize("solver", SOLVERS)
def test_answers_and_gradients_are_those_of_a_bank_in_memory(bank, solver, asked) -> None:
    problem = problem_of(bank)
    found = solved(problem, solver)
    rows = problem.indices.unique().tolist()
    assert asked == [rows, rows]  # inputs and features: for products, image and gradient together
    expected = solved(problem_of(bank, torch.clone), solver)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("solver", SOLVERS)
def test_more_rows_than_fit_are_read_by_blocks(bank, solver, asked, monkeypatch) -> None:
    expected = solved(problem_of(bank, torch.clone), solver)
    needed = 2 * len(problem_of(bank).indices.unique()) * D * 2
    monkeypatch.setattr(problem_module, "_FETCHED_BYTES", needed)
    assert in_file(problem_of(bank).fetched().inputs) is None
    asked.clear()
    monkeypatch.setattr(problem_module, "_FETCHED_BYTES", needed - 1)
    problem = problem_of(bank)
    assert problem.fetched() is problem
    for mine, theirs in zip(solved(problem, solver), expected, strict=True):
        assert torch.equal(mine, theirs)
    block = B if solver.chunk is None else solver.chunk
    assert {len(rows) for rows in asked} == {block * K}


def test_what_is_brought_is_the_same_problem(bank: FeatureBank) -> None:
    in_memory = problem_of(bank, torch.clone)
    assert in_memory.fetched() is in_memory
    problem = problem_of(bank)
    near = problem.fetched()
    rows = slice(2, 7)
    assert torch.equal(near.anchors_of(rows), problem.anchors_of(rows))
    assert torch.equal(near.images_of(rows), problem.images_of(rows))
    assert near.query is problem.query
    assert (near.shape, near.has_strong_convexity) == (problem.shape, problem.has_strong_convexity)
    solution = ExactCip()(problem)
    assert torch.equal(near.residual(solution), problem.residual(solution))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", [None, torch.clone])
def test_rows_come_to_the_gpu(bank: FeatureBank, change: Callable[[Tensor], Tensor] | None) -> None:
    """From a file or from the memory of the host."""
    here = problem_of(bank, change)
    pairs, indices = (here.inputs, here.features), here.indices.cuda()
    away = BankProblem(here.query.cuda(), *pairs, indices, 2.4, 0.1)
    assert away.fetched().inputs.is_cuda
    near = BankProblem(here.query.cuda(), *(part.cuda() for part in pairs), indices, 2.4, 0.1)
    for mine, theirs in zip(solved(away, ExactCip()), solved(near, ExactCip()), strict=True):
        assert_close(mine, theirs)
