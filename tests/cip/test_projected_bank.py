"""Global maps of banks whose products are bounded by few coordinates, with and without these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from otad.cip.whole_bank import contradictions, pricing, projected_pairs
from otad.cip.whole_bank.contradictions import PairCurvatures
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import integrate_most, least_bank_smoothness
from otad.cip.whole_bank.pricing import Prices
from otad.search import projection
from otad.search.projection import Projection

COUNT, DIM, RANK = 330, 24, 5


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    limits = {"FEWEST_ROWS": 300, "FEWEST_COLUMNS": 20, "FEWEST_QUERIES": 10}
    for name, value in (limits | {"PRODUCTS_AT_ONCE": 9000}).items():
        monkeypatch.setattr(projection, name, value)
    monkeypatch.setattr(Projection.__init__, "__defaults__", (RANK + 2,))
    monkeypatch.setitem(contradictions.BLOCK, "cpu", 100)
    monkeypatch.setitem(pricing.GATHERED_AT_ONCE, "cpu", 40 * DIM)  # a row or two of a map


def bank(generator: torch.Generator, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """Points near a subspace, and features close to the gradient of a convex function there."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    basis, corners = normal(RANK, DIM), normal(4, DIM) / 3
    points = normal(COUNT, RANK) @ basis + 0.1 * normal(COUNT, DIM)
    features = points + torch.softmax(points @ corners.T, 1) @ corners
    return points, features + noise * normal(COUNT, DIM)


def without_coordinates(monkeypatch) -> None:
    monkeypatch.setattr(projection, "FEWEST_ROWS", math.inf)


@pytest.mark.parametrize("low", [0.0, 0.4])
def test_potential_and_map_are_the_same(low, generator, monkeypatch) -> None:
    points, features = bank(generator)
    queries = points[:60] + torch.randn(60, DIM, generator=generator) / 10
    asked = []
    above = Projection.above
    monkeypatch.setattr(
        Projection, "above", lambda *given, **how: asked.append(1) or above(*given, **how)
    )
    found = least_bank_smoothness(points, features, low)
    made = WholeBank(points, features, found)(queries)
    assert asked
    without_coordinates(monkeypatch)
    expected = least_bank_smoothness(points, features, low)
    assert (found.smoothness, found.sweeps) == (expected.smoothness, expected.sweeps)
    assert_close(found.levels, expected.levels, rtol=1e-11, atol=1e-11)
    again = WholeBank(points, features, expected)(queries)
    assert_close(made.solution.image, again.solution.image, rtol=1e-5, atol=1e-5)
    assert bool((made.gap <= 1e-9).all() & (made.solution.status == 0).all())


def test_rows_with_few_and_many_points_are_solved_side_by_side(generator, monkeypatch) -> None:
    """A row or two at a time, with as many columns as they have points themselves."""
    points, features = bank(generator)
    made = WholeBank(points, features, least_bank_smoothness(points, features))
    queries = torch.cat([points[:30], points[:60] + torch.randn(60, DIM, generator=generator)])
    expected = made(queries)
    for prices in (pricing.Prices, pricing.LikelyPrices):
        monkeypatch.setattr(prices, "count", 1)
    found = made(queries)
    spread = found.solution.active.sum(1)
    assert int(spread.max()) > int(spread.min()) + 3
    assert bool((found.gap <= 1e-9).all() & (found.solution.status == 0).all())
    assert_close(found.solution.image, expected.solution.image, rtol=1e-5, atol=1e-5)


def test_the_same_points_are_left_out(generator, monkeypatch) -> None:
    points, features = bank(generator, noise=0.15)
    found = integrate_most(points, features, 1.6)
    without_coordinates(monkeypatch)
    expected = integrate_most(points, features, 1.6)
    assert 0 < len(found.left_out) < 100
    assert torch.equal(found.left_out, expected.left_out)
    assert_close(found.levels, expected.levels, rtol=1e-11, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("most", [0, 2**14])
def test_no_steep_pair_is_missed(most, generator, monkeypatch) -> None:
    """If there are too many of them, all ratios of the block are bounded instead."""
    monkeypatch.setattr(projected_pairs, "MOST_STEEP", most)
    points, features = bank(generator)
    points[7], features[7] = points[200], features[200]  # equal points
    pairs = Pairs(points, features, 0.0)
    bounds = Prices(pairs).bounds_of_pairs()
    steps, changes = (part.double()[:, None] - part.double()[None] for part in (points, features))
    ratios = changes.square().sum(2) / (changes * steps).sum(2)
    ratios = torch.where(ratios < 0, torch.inf, ratios).triu(1).nan_to_num(nan=0.0, posinf=math.inf)
    curvatures = PairCurvatures(pairs, bounds)
    assert curvatures.largest() == pytest.approx(float(ratios.max()), rel=1e-12)
    limit = float(ratios.flatten().topk(50).values[-1]) * (1 - 1e-9)
    steep = curvatures.above(limit, "smoothness", limit)
    steep = steep[(steep[:, 0] * COUNT + steep[:, 1]).argsort()]
    assert torch.equal(steep, (ratios > limit).nonzero())
    confirmed = bounds.steep(slice(0, 100), slice(100, 200), limit)
    assert (confirmed is None) == (most == 0)


def test_points_with_too_many_bounds_above_are_priced_in_full(generator, monkeypatch) -> None:
    points, features = bank(generator)
    expected = least_bank_smoothness(points, features)
    monkeypatch.setattr(projection, "MOST_GROUPS", 1)
    found = least_bank_smoothness(points, features)
    assert found.smoothness == expected.smoothness
    assert_close(found.levels, expected.levels, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("most", [2, 256])
@pytest.mark.parametrize("count", [1, 6])
def test_entrants_include_the_largest_price(most, count, generator, monkeypatch) -> None:
    """Also if it is shared by more points than are asked for, or by too many."""
    monkeypatch.setattr(projection, "MOST_GROUPS", most)
    points, features = bank(generator)
    features[10:18] = features[3]
    prices = Prices(Pairs(points, features, 0.0))
    lines = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    lines[10:18] = lines[3] + 1e-11 * torch.arange(8)  # float32 cannot order these
    queries = torch.randn(40, DIM, generator=generator, dtype=torch.float64)
    queries[:20] = 30 * prices.pairs.images(torch.tensor([3]))
    every = lines + queries @ prices.pairs.images(slice(None)).T
    current = every.topk(3, dim=1).indices[:, 1:]  # not the first, which is shared in some rows
    current[::2, 0] = every[::2].argmax(1)
    others = every.scatter(1, current, -torch.inf)
    largest, place = others.max(1)
    floors = largest - torch.rand(40, generator=generator, dtype=torch.float64)
    floors[30:] = largest[30:] + 1  # which no other point reaches
    found = prices.entrants(queries, lines, count, floors, current)
    assert len(prices.projection.coordinates) == COUNT
    assert found.shape == (40, count)
    assert bool((found == place[:, None]).any(1)[:30].all())
    if most > 2:
        assert bool((found[30:] == current[30:, :1]).all())
        assert not bool((found[:30, :1] == current[:30, 1:]).any())
