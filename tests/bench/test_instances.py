"""The instances: repeatable, and hard enough to be worth timing."""

from __future__ import annotations

import pytest
import torch

from otad.bench.instances import random_bank, random_instance
from otad.cip import BankProblem, ExactCip, Status


@pytest.mark.parametrize("strong_convexity", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 10, 16), (20, 30, 16), (10, 10, 200)])
def test_potentials_exist_and_several_neighbors_have_a_say(
    shape: tuple[int, int, int], strong_convexity: float, generator: torch.Generator
) -> None:
    instance = random_instance(*shape, generator=generator, strong_convexity=strong_convexity)
    problem, solution = instance.problem(), instance.solution
    assert problem.shape == shape
    assert (solution.status == Status.SOLVED).all()
    assert problem.residual(solution).max() < 1e-9
    assert (solution.multipliers > 1e-6).sum(1).double().mean() > 2


def test_seed_decides() -> None:
    def images(seed: int) -> torch.Tensor:
        return random_instance(3, 2, 4, generator=torch.Generator().manual_seed(seed)).images

    assert torch.equal(images(1), images(1))
    assert not torch.equal(images(1), images(2))


def test_bank_is_half_precision_and_solvable(generator: torch.Generator) -> None:
    bank = random_bank(50, 20, 10, 64, dtype=torch.float16, generator=generator)
    assert bank.inputs.dtype == bank.features.dtype == torch.float16
    assert bank.query.dtype == torch.float32
    problem = BankProblem(bank.query, bank.inputs, bank.features, bank.indices, 2.0)
    solution = ExactCip()(problem)
    assert (solution.status == Status.SOLVED).all()
    assert problem.residual(solution).max() < 1e-5


@pytest.mark.parametrize(("size", "neighbors"), [(50, 10), (11, 10), (10, 10)])
def test_neighbors_of_a_bank_query_are_distinct(
    size: int, neighbors: int, generator: torch.Generator
) -> None:
    bank = random_bank(size, 200, neighbors, 2, dtype=torch.bfloat16, generator=generator)
    assert all(len(set(row)) == neighbors for row in bank.indices.tolist())
    assert set(bank.indices.flatten().tolist()) == set(range(size))  # all of the bank is in use
