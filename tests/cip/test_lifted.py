"""Lifted banks against brute force, sweeps, an independent solver and finite differences."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from cip.instances import gaps
from cip.test_whole_bank import full_program
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from otad.cip.whole_bank import contradictions
from otad.cip.whole_bank.contradictions import vertex_cover
from otad.cip.whole_bank.lifted_bank import (
    least_lipschitz,
    lifted_levels,
    lifted_map,
    lifted_potential,
    steep_pairs,
)
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import integrate_most
from otad.errors import InputError, SolverError


def parts(
    size: int, dim: int, lift: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    answers = torch.tanh(points @ torch.randn(dim, lift, generator=generator, dtype=torch.float64))
    return (3 + points).to(dtype), answers.to(dtype)


def lifted(points: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([points, torch.zeros_like(answers)], 1), torch.cat([points, answers], 1)


def ratios(points: Tensor, answers: Tensor) -> Tensor:
    """All ratios (N,N) by plain differences, 0 on the diagonal."""
    run = (points[:, None].double() - points[None].double()).norm(dim=2)
    rise = (answers[:, None].double() - answers[None].double()).norm(dim=2)
    return torch.where(rise > 0, rise / run, 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 7, 40, 333])
def test_the_least_constant_is_that_of_brute_force(size, dtype, monkeypatch) -> None:
    monkeypatch.setitem(contradictions.BLOCK, "cpu", 50)
    for seed in range(4):
        points, answers = parts(size, 1 + seed, 3, seed, dtype)
        expected = float(ratios(points, answers).max())
        assert least_lipschitz(points, answers) == pytest.approx(expected, rel=1e-13)


def test_the_closest_points_count_though_float32_cannot_tell_them_apart() -> None:
    points, answers = parts(60, 5, 3, 0)
    points = points + 1e4
    points[41] = points[7] + 1e-7
    answers[41] = answers[7] + 1e-6
    expected = float(ratios(points, answers).max())
    assert expected > 4
    assert least_lipschitz(points, answers) == pytest.approx(expected, rel=1e-13)
    assert steep_pairs(points, answers, expected * 0.999).tolist() == [[7, 41]]


def test_equal_points_need_equal_answers() -> None:
    points, answers = parts(20, 3, 2, 0)
    points[4], answers[4] = points[9], answers[9]
    assert math.isfinite(least_lipschitz(points, answers))
    answers[4] += 1e-12
    assert least_lipschitz(points, answers) == math.inf
    with pytest.raises(SolverError, match=r"features: .*equal"):
        lifted_potential(*lifted(points, answers), 2)
    left = lifted_potential(*lifted(points, answers), 2, 1e6).left_out
    assert left.tolist() in ([4], [9])


@settings(max_examples=20)
@given(st.integers(2, 60), st.floats(0.2, 0.9), st.integers(0, 10**6))
def test_all_steep_pairs_are_found_and_covered(size, share, seed) -> None:
    points, answers = parts(size, 3, 2, seed)
    table = ratios(points, answers)
    cap = share * float(table.max())
    found = steep_pairs(points, answers, cap)
    expected = {(i, j) for i, j in (table > cap).nonzero().tolist() if i < j}
    assert {(i, j) for i, j in found.tolist()} == expected
    gone = vertex_cover(found, size)
    assert all(i in gone or j in gone for i, j in found)


def test_the_cover_is_nearly_the_least_in_small_cases() -> None:
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        pairs = torch.combinations(torch.arange(8))
        pairs = pairs[torch.rand(len(pairs), generator=generator) < 0.25]
        found = len(vertex_cover(pairs, 8))
        least = next(
            count
            for count in range(9)
            for chosen in itertools.combinations(range(8), count)
            if all(i in chosen or j in chosen for i, j in pairs.tolist())
        )
        assert least <= found <= least + 1
    star = torch.tensor([[0, 1], [0, 2], [0, 3], [3, 4]])
    assert vertex_cover(star, 6).tolist() == [0, 3]


def test_a_cover_of_all_pairs_leaves_one_point_and_is_found_soon() -> None:
    everyone = torch.combinations(torch.arange(1500))
    start = time.process_time()
    assert len(vertex_cover(everyone, 1500)) == 1499
    assert time.process_time() - start < 10  # a pass over all pairs for each point takes minutes
    assert len(vertex_cover(everyone[:0], 1500)) == 0


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_sweeps_agree_on_which_constants_will_do(scale: float) -> None:
    for seed in range(5):
        points, answers = parts(40, 4, 3, seed)
        inputs, features = lifted(points, scale * answers)
        potential = lifted_potential(inputs, features, 3)
        k = potential.smoothness - 1
        assert potential.strong_convexity == pytest.approx(1 - k)
        slack = gaps(inputs, features, potential.levels, 1 + k, 1 - k)
        assert float(slack.min()) > -1e-12
        above = integrate_most(inputs, features, 1 + 1.01 * k, 1 - k)
        assert len(above.left_out) == 0
        assert (potential.sweeps, potential.violation, len(potential.left_out)) == (0, 0.0, 0)
        below = integrate_most(inputs, features, 1 + 0.99 * k, 1 - 0.99 * k)
        assert len(below.left_out) > 0


def queries(count: int, dim: int, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 1.2 * torch.randn(count, dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.15, 0.5, 0.8, 1.0, 2.0])
def test_the_map_equals_the_full_program(share: float) -> None:
    for seed in range(8):
        points, answers = parts(20 + 12 * seed, 2 + seed % 4, 3, seed)
        x, z = lifted(points, answers)
        k = share * least_lipschitz(points, answers)
        potential = lifted_potential(x, z, 3, k)
        query = queries(20, points.shape[1], seed)
        padded = torch.cat([query, torch.zeros(20, 3, dtype=torch.float64)], 1)
        found = WholeBank(x, z, potential)(padded).solution
        value, image = full_program(x, z, potential, padded[0])
        assert float(found.value[0]) == pytest.approx(value, abs=1e-8)
        assert_close(found.image[0], torch.from_numpy(image), rtol=0, atol=1e-6)
        included = ~potential.levels.isnan()
        differentiable = lifted_map(query, points[included], answers[included], k)
        assert_close(differentiable, found.image[:, -3:], rtol=0, atol=1e-7)


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_the_map_is_lipschitz_with_the_constant_and_passes_through_the_rest(share: float) -> None:
    points, answers = parts(120, 4, 3, 5)
    x, z = lifted(points, answers)
    k = share * least_lipschitz(points, answers) * (1 + 1e-12)
    potential = lifted_potential(x, z, 3, k)
    whole = WholeBank(x, z, potential)
    off = (whole(x).solution.image[:, 4:] - answers).norm(dim=1)
    included = torch.ones(120, dtype=torch.bool)
    included[potential.left_out] = False
    assert off[included].max() < 1e-6
    assert (len(potential.left_out) > 0) == (share < 1)
    generator = torch.Generator().manual_seed(0)
    query = 3 + 1.5 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    near = query + 0.01 * torch.randn(300, 4, generator=generator, dtype=torch.float64)
    both = torch.cat([query, near])
    image = whole(torch.cat([both, torch.zeros(600, 3, dtype=torch.float64)], 1)).solution.image
    run, rise = torch.cdist(both, both), torch.cdist(image[:, 4:], image[:, 4:])
    assert bool((rise <= k * run + 1e-6).all())


def test_equal_answers_need_no_constant() -> None:
    points, answers = parts(10, 3, 2, 0)
    potential = lifted_potential(*lifted(points, torch.ones_like(answers)), 2)
    assert (potential.smoothness, potential.strong_convexity) == (2.0, 0.0)


def test_refusals() -> None:
    points, answers = parts(10, 3, 2, 0)
    inputs, features = lifted(points, answers)
    query = queries(4, 3)
    for message, work in (
        ("lift: .*5 .*5", lambda: lifted_potential(inputs, features, 5)),
        ("lift: .*1, got 0", lambda: lifted_potential(inputs, features, 0)),
        ("inputs: .*not lifted", lambda: lifted_potential(inputs, features, 1)),
        ("inputs: .*not lifted", lambda: lifted_potential(features, features, 2)),
        ("answers: .*shape", lambda: least_lipschitz(points, answers[:9])),
        ("points: .*shape", lambda: lifted_map(query[:, :2], points, answers)),
        ("answers: .*shape", lambda: lifted_map(query, points, answers[:5])),
        ("points: .*float64", lambda: lifted_map(query, points.float(), answers)),
    ):
        with pytest.raises(InputError, match=message):
            work()
    for constant in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match=f"lipschitz: .*{constant}"):
            lifted_potential(inputs, features, 2, constant)
        with pytest.raises(InputError, match=f"lipschitz: .*{constant}"):
            lifted_map(query, points, answers, constant)


def test_far_from_the_origin_the_map_is_the_same() -> None:
    points, answers = parts(60, 4, 3, 2)
    points, query = (part.mul(2**20).round() / 2**20 for part in (points, queries(50, 4)))
    expected = lifted_map(query, points, answers, 0.7)
    for away in (2.0**13, 2.0**20):
        found = lifted_map(query + away, points + away, answers, 0.7)
        assert_close(found, expected, rtol=0, atol=1e-7)
        near, far = (lifted_levels(points + shift) for shift in (0.0, away))
        tilt = away * (points - points.mean(0)).sum(1)
        change = far - tilt - near
        assert_close(change, change[:1].expand(60), rtol=0, atol=1e-8)


def test_gradients_are_those_of_finite_differences() -> None:
    given = queries(4, 3), *parts(10, 3, 2, 1)
    for part in given:
        part.requires_grad_()
    assert torch.autograd.gradcheck(lambda *p: lifted_map(*p, 1.3), given, atol=2e-5)
    for slope in torch.autograd.grad(lifted_map(*given, 1.3).square().sum(), given):
        assert slope.abs().max() > 1e-2


def test_equal_points_do_not_break_it() -> None:
    points, answers = parts(20, 3, 2, 1)
    twice = torch.cat([points, points]).requires_grad_()
    found = lifted_map(queries(8, 3), twice, torch.cat([answers, answers]), 1.3)
    assert_close(found, lifted_map(queries(8, 3), points, answers, 1.3))
    found.sum().backward()
    assert bool(twice.grad.isfinite().all())
