"""Largest prices: float32 may only help to find them."""

from __future__ import annotations

import pytest
import torch
from cip.test_bank_potential import smooth_bank
from torch import Tensor

from otad.cip.whole_bank import pricing
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.pricing import Prices


def setting(size: int, dim: int, seed: int) -> tuple[Pairs, Tensor, Tensor]:
    x, z = smooth_bank(size, dim, seed)
    generator = torch.Generator().manual_seed(seed)
    lines = torch.randn(size, generator=generator, dtype=torch.float64)
    asked = torch.randn(40, dim, generator=generator, dtype=torch.float64)
    return Pairs(x, z, 0.0), lines, asked


def all_prices(pairs: Pairs, lines: Tensor, asked: Tensor) -> Tensor:
    return lines + asked @ pairs.read(slice(None))[1].T


@pytest.mark.parametrize("count", [1, 5, 300])
def test_the_best_are_those_of_all_products(count: int) -> None:
    pairs, lines, asked = setting(200, 6, 0)
    places, close = Prices(pairs).best(asked, lines, count)
    expected = all_prices(pairs, lines, asked).topk(min(count, 200), dim=1)
    found = all_prices(pairs, lines, asked).gather(1, places)
    torch.testing.assert_close(found, expected.values, rtol=0, atol=1e-5)
    assert torch.equal(places[:, 0], expected.indices[:, 0])
    assert bool(close[:, 0].all())


def test_the_largest_is_right_where_float32_cannot_tell() -> None:
    """All points lie so close that their prices agree to twelve digits."""
    x, z = smooth_bank(120, 4, 1)
    z = z[:1] + 1e-12 * (z - z[:1])
    z[0] += 100.0  # far from the center, so that float32 keeps nothing of the differences
    pairs = Pairs(x, z, 0.0)
    lines = torch.zeros(120, dtype=torch.float64)
    asked = -torch.rand(10, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    top, place = Prices(pairs).largest(asked, lines)
    expected, whose = all_prices(pairs, lines, asked).max(1)
    assert torch.equal(place, whose)
    torch.testing.assert_close(top, expected, rtol=1e-15, atol=0)
    single = all_prices(pairs, lines, asked).float().argmax(1)
    assert not torch.equal(single, whose)


def test_points_that_float32_overflows_on_are_priced_in_float64() -> None:
    pairs, lines, asked = setting(50, 3, 3)
    top, place = Prices(pairs).largest(1e60 * asked, lines)
    expected, whose = all_prices(pairs, lines, 1e60 * asked).max(1)
    assert torch.equal(place, whose)
    torch.testing.assert_close(top, expected)


def test_points_left_out_are_never_best_and_blocks_make_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs, lines, asked = setting(90, 5, 4)
    lines[30:60] = -torch.inf
    whole = Prices(pairs).largest(asked, lines)
    assert not bool(((whole[1] >= 30) & (whole[1] < 60)).any())
    monkeypatch.setitem(pricing.POINTS_AT_ONCE, "cpu", 7)
    monkeypatch.setitem(pricing.PRODUCTS_AT_ONCE, "cpu", 21)
    monkeypatch.setattr(pricing, "CACHE_BYTES", 0)
    pieces = Prices(pairs).largest(asked, lines)
    assert torch.equal(whole[1], pieces[1])
    torch.testing.assert_close(whole[0], pieces[0], rtol=0, atol=1e-13)


def test_the_largest_of_a_few() -> None:
    pairs, lines, asked = setting(60, 4, 5)
    few = torch.tensor([3, 50, 17])
    top, place = Prices(pairs).largest_of(few, asked, lines)
    expected, where = all_prices(pairs, lines, asked)[:, few].max(1)
    torch.testing.assert_close(top, expected)
    assert torch.equal(place, few[where])
