"""Scores and their intervals against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from otad.scores import Score, regression_metrics, score_of, score_text, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 10), (10, 10), (963, 1000), (1, 3), (9630, 10000)]
)
def test_wilson_interval(successes: int, n: int) -> None:
    theirs = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_an_interval_contains_its_share() -> None:
    """Rounding took 1 from the intervals of 10 of 10 and 13 of 13."""
    for n in range(1, 200):
        for successes in (0, 1, n - 1, n):
            low, high = wilson_interval(successes, n)
            assert low <= successes / n <= high


def test_accuracy_is_in_percent() -> None:
    outputs = torch.eye(4)[torch.tensor([0, 1, 2, 3, 3])]
    score = score_of(outputs, torch.tensor([0, 1, 2, 3, 0]))
    assert (score.metric, score.value, score.n) == ("accuracy", 80.0, 5)
    assert score.low < 80.0 < score.high <= 100.0
    silent = torch.full((3, 2), math.nan)  # an abstention is never right
    assert score_of(silent, torch.tensor([0, 0, 1])).value == 0.0


@pytest.mark.parametrize("n", [1, 3])
def test_an_abstention_is_infinitely_wrong(n: int) -> None:
    values = torch.zeros(n)
    values[0] = math.nan
    score = score_of(values, torch.zeros(n))
    assert (score.low, score.value, score.high) == (math.inf,) * 3
    assert score.rank < score_of(torch.full((n,), 1e9), torch.zeros(n)).rank


def test_mean_squared_error(generator: torch.Generator) -> None:
    values, targets = torch.randn(2, 400, generator=generator)
    score = score_of(values, targets)
    errors = (values - targets).double().square().numpy()
    assert score.metric == "mse"
    assert score.value == pytest.approx(errors.mean())
    expected = stats.norm.interval(0.95, errors.mean(), stats.sem(errors))
    np.testing.assert_allclose((score.low, score.high), expected, rtol=1e-6)
    single = score_of(torch.tensor([1.0]), torch.tensor([0.0]))  # its spread is unknown
    assert (single.low, single.value, single.high) == (0.0, 1.0, math.inf)


def test_rank_puts_the_better_first() -> None:
    assert Score("accuracy", 97.0, 96.0, 98.0, 9).rank > Score("accuracy", 96.0, 95.0, 97.0, 9).rank
    assert Score("mse", 0.3, 0.2, 0.4, 9).rank > Score("mse", 0.4, 0.3, 0.5, 9).rank


def test_regression_metrics_by_hand() -> None:
    targets = torch.tensor([5.0, 6.0, 7.0])
    clean = torch.tensor([5.5, 6.0, 6.0])  # errors 0.5, 0, 1
    moved = torch.tensor([6.0, 6.2, 8.0])  # errors 1, 0.2, 1
    found = regression_metrics(moved, clean, targets)
    # |6 - 5.5|, |6.2 - 6|, |8 - 6|
    assert found["E"] == pytest.approx((0.5 + 0.2 + 2.0) / 3)
    # 2 * 0.5 / 1.5, 2 * 0.2 / 0.2, 0: the third moved far, but is as wrong as before
    assert found["SMAPE"] == pytest.approx((2 / 3 + 2 + 0) / 3, rel=1e-6)
    assert regression_metrics(targets, targets, targets) == {"E": 0.0, "SMAPE": 0.0}


def test_regression_metrics_of_abstentions_are_numbers() -> None:
    """Lost, gained, missing at both inputs, and a point that answers."""
    none = math.nan
    targets = torch.tensor([5.0, 6.0, 7.0, 8.0])
    clean = torch.tensor([5.5, none, none, 8.5])
    moved = torch.tensor([none, 6.0, none, 9.0])
    found = regression_metrics(moved, clean, targets)
    assert found == {"E": math.inf, "SMAPE": pytest.approx((2 + 2 + 0 + 2 / 3) / 4)}
    found = regression_metrics(moved[2:], clean[2:], targets[2:])
    assert found == {"E": pytest.approx(0.5 / 2), "SMAPE": pytest.approx((0 + 2 / 3) / 2)}


def test_the_paper_prints_these_regression_metrics(generator: torch.Generator) -> None:
    """Its undefended rows: normal errors of its clean MSE, moved by its E, give its SMAPE."""
    errors = torch.randn(200_000, generator=generator, dtype=torch.float64) * 0.404**0.5
    printed = ((0.086, 0.319, 0.507), (0.161, 0.474, 0.603), (0.340, 0.708, 0.871))
    for shift, printed_smape, printed_mse in printed:
        moved = errors + shift * errors.sign()
        found = regression_metrics(moved, errors, torch.zeros_like(errors))
        assert found["SMAPE"] == pytest.approx(printed_smape, rel=0.06)
        assert float(moved.square().mean()) == pytest.approx(printed_mse, rel=0.03)


def test_readers_see_accuracies_in_percent_and_errors_in_digits() -> None:
    assert score_text("accuracy", 0.98765) == "98.77%"
    assert score_text("train_accuracy", 1.0, digits=1) == "100.0%"
    assert score_text("mse", 0.123456) == "0.1235"
