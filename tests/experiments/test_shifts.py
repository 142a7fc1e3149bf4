"""E and SMAPE against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from otad.experiments.shifts import mean_shift, shifts, smape


def test_by_hand() -> None:
    targets = torch.tensor([5.0, 6.0, 7.0])
    clean = torch.tensor([5.5, 6.0, 6.0])  # errors 0.5, 0, 1
    moved = torch.tensor([6.0, 6.2, 8.0])  # errors 1, 0.2, 1
    # |6 - 5.5|, |6.2 - 6|, |8 - 6|
    assert mean_shift(moved, clean) == pytest.approx((0.5 + 0.2 + 2.0) / 3)
    # 2 * 0.5 / 1.5, 2 * 0.2 / 0.2, 0: the third moved far, but is as wrong as before
    assert smape(moved, clean, targets) == pytest.approx((2 / 3 + 2 + 0) / 3, rel=1e-6)
    assert shifts(moved, clean, targets) == {
        "E": mean_shift(moved, clean),
        "SMAPE": smape(moved, clean, targets),
    }


def test_nothing_moved_and_nothing_wrong() -> None:
    targets = torch.tensor([1.0, 2.0])
    assert smape(targets, targets, targets) == 0.0
    assert mean_shift(targets, targets) == 0.0


def test_abstentions_are_told() -> None:
    """Lost, gained, never there, and a point that answers: never NaN, which no table explains."""
    none = math.nan
    targets = torch.tensor([5.0, 6.0, 7.0, 8.0])
    clean = torch.tensor([5.5, none, none, 8.5])
    moved = torch.tensor([none, 6.0, none, 9.0])
    assert mean_shift(moved, clean) == math.inf
    assert smape(moved, clean, targets) == pytest.approx((2 + 2 + 0 + 2 / 3) / 4)
    assert mean_shift(moved[2:], clean[2:]) == pytest.approx(0.5 / 2)
    assert smape(moved[2:], clean[2:], targets[2:]) == pytest.approx((0 + 2 / 3) / 2)


def test_the_paper_prints_these_measures(generator: torch.Generator) -> None:
    """Its undefended rows: normal errors of its clean MSE, moved by its E, give its SMAPE."""
    errors = torch.randn(200_000, generator=generator, dtype=torch.float64) * 0.404**0.5
    targets = torch.zeros_like(errors)
    for shift, printed_smape, printed_mse in (
        (0.086, 0.319, 0.507),
        (0.161, 0.474, 0.603),
        (0.340, 0.708, 0.871),
    ):
        moved = errors + shift * errors.sign()
        assert smape(moved, errors, targets) == pytest.approx(printed_smape, rel=0.06)
        assert float(moved.square().mean()) == pytest.approx(printed_mse, rel=0.03)
