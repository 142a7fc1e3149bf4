"""The global potential: every pair's inequality, the least L, cycles, points left out."""

from __future__ import annotations

import math

import pytest
import torch
from cip.instances import gaps, is_feasible
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from otad.cip.whole_bank import contradictions, potential
from otad.cip.whole_bank import pairs as bank_pairs
from otad.cip.whole_bank.contradictions import (
    PairCurvatures,
    cycle_bound,
    heaviest_point,
    vertex_cover,
)
from otad.cip.whole_bank.lifted_bank import steep_pairs
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import (
    BankPotential,
    integrate_most,
    least_bank_smoothness,
)
from otad.errors import InputError, SolverError

BENDS = (0.0, -0.5, 0.3)


def smooth_bank(
    size: int, dim: int, seed: int, noise: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Inputs far from the origin, and the gradient there of log sum exp(<c_k, x>) + 0.25 |x|^2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    corners = torch.randn(4, dim, generator=generator, dtype=torch.float64)
    z = torch.softmax(x @ corners.T, 1) @ corners + x / 2
    z += noise * torch.randn(size, dim, generator=generator, dtype=torch.float64)
    return (x + 2.0).to(dtype), (z - 3.0).to(dtype)


def assert_satisfied(x: Tensor, z: Tensor, found: BankPotential) -> None:
    """Every inequality of the points that were not left out, for l = 0."""
    kept = ~found.levels.isnan()
    slack = gaps(x[kept], z[kept], found.levels[kept], found.smoothness, 0.0)
    assert float(slack.min()) > -1e-9


BANKS = {"seed": st.integers(0, 10_000), "size": st.integers(2, 60), "dim": st.integers(1, 6)}


@settings(max_examples=20)
@given(**BANKS, bend=st.sampled_from(BENDS), dtype=st.just(torch.float64))
@example(seed=9, size=30, dim=3, bend=0.0, dtype=torch.float32)
@example(seed=9, size=30, dim=3, bend=0.0, dtype=torch.float16)
def test_every_pair_is_satisfied_where_levels_are_found(seed, size, dim, bend, dtype) -> None:
    """Banks of any precision, all computed in float64."""
    x, z = smooth_bank(size, dim, seed, dtype=dtype)
    found = least_bank_smoothness(x, z, bend)
    assert found.levels.dtype == torch.float64
    assert float(gaps(x, z, found.levels, found.smoothness, bend).min()) > -1e-9
    assert found.violation < 1e-9
    assert abs(float(found.levels.mean())) < 1e-9
    assert len(found.left_out) == 0


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize("seed", range(4))
def test_feasible_exactly_where_a_linear_program_is(seed: int, bend: float) -> None:
    x, z = smooth_bank(9, 2, seed)
    least = least_bank_smoothness(x, z, bend, tolerance=1e-6).smoothness
    above, below = bend + 1.001 * (least - bend), bend + 0.999 * (least - bend)
    assert is_feasible(x, z, above, bend)
    assert not is_feasible(x, z, below, bend)
    assert len(integrate_most(x, z, above, bend).left_out) == 0
    assert len(integrate_most(x, z, below, bend).left_out) > 0


def test_a_quadratic_needs_its_own_curvature_and_a_constant_none() -> None:
    x, z = smooth_bank(40, 3, 1)
    found = least_bank_smoothness(x, 1.7 * x, tolerance=1e-6)
    assert found.smoothness == pytest.approx(1.7, rel=2e-6)
    exact = 0.85 * x.square().sum(1)
    assert_close(found.levels, exact - exact.mean(), rtol=1e-6, atol=1e-6)
    assert 0 < least_bank_smoothness(x, 0 * z + 5.0).smoothness < 1e-5
    assert len(least_bank_smoothness(x[:1], z[:1]).levels) == 1


def test_a_contradiction_is_a_cycle_of_positive_weight(monkeypatch) -> None:
    x, z = smooth_bank(50, 3, 5, noise=0.3)
    weights = -gaps(x, z, torch.zeros(50, dtype=torch.float64), 3.0, 0.0)
    cycles: list[Tensor] = []

    def noting(pairs: Pairs, cycle: Tensor, modulus: float) -> int:
        cycles.append(cycle)
        return heaviest_point(pairs, cycle, modulus)

    monkeypatch.setattr(contradictions, "heaviest_point", noting)
    integrate_most(x, z, 3.0)
    assert cycles
    for cycle in cycles:
        # each point was raised by the next
        assert float(weights[cycle, cycle.roll(-1)].sum()) > 0
        assert len(set(cycle.tolist())) == len(cycle) > 1


def test_what_is_left_out_is_reported_and_the_rest_is_integrated(monkeypatch) -> None:
    x, z = smooth_bank(60, 3, 6)
    z[17] += 5.0  # one feature far from where a smooth map could put it
    found = integrate_most(x, z, 2.0)
    assert 17 in found.left_out.tolist()
    assert int(found.levels.isnan().sum()) == len(found.left_out) < 5
    assert_satisfied(x, z, found)
    monkeypatch.setattr(potential, "MOST_LEFT_OUT", 0.0)
    with pytest.raises(SolverError, match=r"smoothness: .* 0 of 60 .*2\.0"):
        integrate_most(x, z, 2.0)


def test_the_sweeps_go_on_where_all_that_rose_is_left_out(monkeypatch) -> None:
    monkeypatch.setattr(potential, "MOST_LEFT_OUT", 0.8)
    x = torch.tensor([[1, 1], [0, 0], [-2, 0], [1, -2], [-2, -1]]).double()
    z = torch.tensor([[2, 0], [0, 2], [1, -1], [-1, -1], [-1, 1]]).double()
    found = integrate_most(x, z, 2.0)
    assert 2 <= 5 - len(found.left_out) < 5
    assert_satisfied(x, z, found)


@pytest.mark.parametrize("bend", BENDS)
@pytest.mark.parametrize(("wide", "high"), [(1e4, 1e-4), (1e-4, 1e4), (1e5, 1e5)])
def test_the_least_curvature_is_in_the_units_of_the_bank(wide, high, bend, monkeypatch) -> None:
    monkeypatch.setattr(potential, "STEEPEST", 1e12)
    x, z = smooth_bank(30, 3, 12)
    unit = high / wide
    least = least_bank_smoothness(x, z, bend).smoothness
    found = least_bank_smoothness(wide * x, high * z, unit * bend)
    assert found.smoothness / unit == pytest.approx(least, rel=1e-6)


def test_blocks_make_no_difference_and_every_sweep_is_reported(monkeypatch) -> None:
    x, z = smooth_bank(45, 4, 7)
    reported: list[tuple[int, float]] = []
    whole = integrate_most(x, z, 3.0, progress=lambda *step: reported.append(step))
    assert [sweep for sweep, _ in reported] == list(range(1, whole.sweeps + 1))
    assert reported[-1][1] <= whole.violation + 1e-15
    monkeypatch.setattr(bank_pairs, "BLOCK_BYTES", 16 * 4 * 7)
    pieces = integrate_most(x, z, 3.0)
    assert_close(whole.levels, pieces.levels, rtol=0, atol=1e-12)


X, Z = smooth_bank(20, 3, 2)
TWINS = torch.cat([X, X[4:5]]), torch.cat([Z, Z[11:12]])


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (lambda: least_bank_smoothness(*TWINS), SolverError, "equal inputs"),
        (lambda: least_bank_smoothness(X, X / 2, 0.6), SolverError, r"strong_convexity \(0.6\)"),
        (lambda: integrate_most(X, Z, -1.0), InputError, "smoothness: .*above strong_convexity"),
        (lambda: integrate_most(X, Z[:5], 2.0), InputError, r"features: .*\(20, 3\)"),
        (lambda: integrate_most(X * torch.nan, Z, 2.0), InputError, "inputs: .*finite.*nan"),
    ],
)
def test_refusals(work, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        work()
    assert PairCurvatures(Pairs(*TWINS, 0.0)).largest() == math.inf
    assert least_bank_smoothness(X, X / 2, 0.4).smoothness == pytest.approx(0.5, rel=1e-3)


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


def test_too_many_contradictions_and_steep_pairs_are_not_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contradictions, "MOST_PAIRS", 20)
    x, z = smooth_bank(30, 3, 5)
    with pytest.raises(SolverError, match=r"smoothness: .*0.1.* 20 pairs"):
        integrate_most(x, z, 0.1)
    with pytest.raises(SolverError, match=r"lipschitz.*1e-06.*20 pairs"):
        steep_pairs(x, z, 1e-6)
