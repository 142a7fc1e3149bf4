"""The map of a lifted bank as a function of the bank: the same answers, with gradients."""

from __future__ import annotations

import math

import pytest
import torch
from cip.test_pairwise import lifted, parts
from torch import Tensor

from otad.cip.whole_bank.lifted_map import lifted_map
from otad.cip.whole_bank.lifted_potential import least_lipschitz, lifted_levels
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import BankPotential
from otad.errors import InputError


def queries(count: int, dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return 3 + 1.2 * torch.randn(count, dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.7, 1.0, 2.0])
def test_answers_are_those_of_the_whole_bank(share: float) -> None:
    for seed in range(4):
        points, answers = parts(60, 4, 3, seed)
        k = share * least_lipschitz(points, answers)
        x, z = lifted(points, answers)
        nothing = torch.zeros(0, dtype=torch.int64)
        potential = BankPotential(lifted_levels(points), 1 + k, 1 - k, nothing, 0, 0.0)
        query = queries(50, 4)
        padded = torch.cat([query, torch.zeros(50, 3, dtype=torch.float64)], 1)
        expected = WholeBank(x, z, potential)(padded).solution.image[:, 4:]
        found = lifted_map(query, points, answers, k)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


def test_it_passes_through_the_pairs() -> None:
    points, answers = parts(60, 4, 3, 0)
    k = least_lipschitz(points, answers)
    torch.testing.assert_close(lifted_map(points, points, answers, k), answers, rtol=0, atol=1e-6)


def test_far_from_the_origin_the_map_is_the_same() -> None:
    points, answers = parts(60, 4, 3, 2)
    points, query = (part.mul(2**20).round() / 2**20 for part in (points, queries(50, 4)))
    expected = lifted_map(query, points, answers, 0.7)
    for away in (2.0**13, 2.0**20):
        found = lifted_map(query + away, points + away, answers, 0.7)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
        near, far = (lifted_levels(points + shift) for shift in (0.0, away))
        tilt = away * (points - points.mean(0)).sum(1)
        change = far - tilt - near
        torch.testing.assert_close(change, change[:1].expand(60), rtol=0, atol=1e-8)


def test_gradients_are_those_of_finite_differences() -> None:
    points, answers = parts(25, 3, 2, 1)
    query = queries(6, 3)
    direction = torch.randn(6, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    given = [part.requires_grad_() for part in (query, points, answers)]
    slopes = torch.autograd.grad((lifted_map(*given, 1.3) * direction).sum(), given)
    step = 1e-6
    for place, slope in enumerate(slopes):
        assert slope.abs().max() > 1e-2
        for entry in range(slope.numel()):
            ends = []
            for sign in (1, -1):
                moved = [part.detach().clone() for part in given]
                moved[place].view(-1)[entry] += sign * step
                ends.append((lifted_map(*moved, 1.3) * direction).sum())
            expected = float(ends[0] - ends[1]) / (2 * step)
            assert float(slope.flatten()[entry]) == pytest.approx(expected, abs=2e-5)


def test_equal_points_do_not_break_it() -> None:
    points, answers = parts(20, 3, 2, 1)
    twice = torch.cat([points, points]).requires_grad_()
    found = lifted_map(queries(8, 3), twice, torch.cat([answers, answers]), 1.3)
    torch.testing.assert_close(found, lifted_map(queries(8, 3), points, answers, 1.3))
    found.sum().backward()
    assert bool(twice.grad.isfinite().all())


def test_refusals() -> None:
    points, answers = parts(10, 3, 2, 0)
    query = queries(4, 3)
    with pytest.raises(InputError, match="points: expected shape"):
        lifted_map(query[:, :2], points, answers)
    with pytest.raises(InputError, match="answers: expected shape"):
        lifted_map(query, points, answers[:5])
    with pytest.raises(InputError, match="points: expected dtype float64 like query"):
        lifted_map(query, points.float(), answers)
    for constant in (0.0, math.inf):
        with pytest.raises(InputError, match="lipschitz: expected a positive finite number"):
            lifted_map(query, points, answers, constant)
