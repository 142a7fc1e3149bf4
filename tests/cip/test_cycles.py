"""Cycles of bank points, and the bounds on the curvature that they prove."""

from __future__ import annotations

import math

import pytest
import torch
from cip.test_bank_potential import BENDS, smooth_bank

from otad.cip.whole_bank import contradictions
from otad.cip.whole_bank.contradictions import PairCurvatures, cycle_bound, cycles_of, vertex_cover
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import integrate_most, least_bank_smoothness
from otad.errors import SolverError


def test_all_cycles_of_a_map_are_found_once() -> None:
    parents = torch.tensor([1, 2, 0, 3, 3, 6, 5, 2, 8])
    found = sorted(tuple(sorted(cycle.tolist())) for cycle in cycles_of(parents))
    assert found == [(0, 1, 2), (5, 6)]
    assert cycles_of(torch.arange(4)) == ()


@pytest.mark.parametrize("bend", BENDS)
def test_the_pair_bound_is_the_steepest_pair(bend: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contradictions.BLOCK, "cpu", 16)
    x, z = smooth_bank(60, 4, 1)
    images = z - bend * x
    steps, turns = x[:, None] - x[None], images[:, None] - images[None]
    ratios = turns.square().sum(2) / (turns * steps).sum(2)
    expected = float(ratios.nan_to_num(0.0).max())
    pairs = Pairs(x, z, bend)
    assert PairCurvatures(pairs).largest() == pytest.approx(expected, rel=1e-12)
    assert least_bank_smoothness(x, z, bend).modulus >= expected * (1 - 1e-12)
    first, second = divmod(int(ratios.nan_to_num(0.0).argmax()), 60)
    assert cycle_bound(pairs, torch.tensor([first, second])) == pytest.approx(expected, rel=1e-9)


def test_equal_inputs_with_different_features_allow_no_curvature() -> None:
    x, z = smooth_bank(20, 3, 2)
    x[4] = x[11]
    pairs = Pairs(x, z, 0.0)
    assert PairCurvatures(pairs).largest() == math.inf
    assert cycle_bound(pairs, torch.tensor([4, 11])) == math.inf
    assert cycle_bound(pairs, torch.tensor([4])) == 0.0


def test_without_the_contradicting_points_no_pair_contradicts() -> None:
    x, z = smooth_bank(80, 3, 3, noise=0.1)
    pairs = Pairs(x, z, 0.0)
    gone = vertex_cover(PairCurvatures(pairs).above(3.0, "", 0.0), 80)
    assert 0 < len(gone) < 60
    assert len(set(gone.tolist())) == len(gone)
    pairs.included[gone] = False
    assert PairCurvatures(pairs).largest() <= 3.0
    assert len(PairCurvatures(pairs).above(3.0, "", 0.0)) == 0
    assert set(gone.tolist()) <= set(integrate_most(x, z, 3.0).left_out.tolist())


def test_too_many_contradictions_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contradictions, "MOST_PAIRS", 20)
    x, z = smooth_bank(30, 3, 5)
    with pytest.raises(SolverError, match=r"smoothness: .*0.1.* 20 pairs"):
        integrate_most(x, z, 0.1)


def test_constant_features_need_no_curvature() -> None:
    x, z = smooth_bank(12, 3, 4)
    found = least_bank_smoothness(x, 0 * z + 5.0)
    assert 0 < found.smoothness < 1e-5
    assert len(least_bank_smoothness(x[:1], z[:1]).levels) == 1
