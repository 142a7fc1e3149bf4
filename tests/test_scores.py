"""Scores and their intervals against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from otad.scores import Score, score_of, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 10), (10, 10), (963, 1000), (1, 3), (9630, 10000)]
)
def test_wilson_interval(successes: int, n: int) -> None:
    theirs = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_accuracy_is_in_percent() -> None:
    outputs = torch.eye(4)[torch.tensor([0, 1, 2, 3, 3])]
    score = score_of(outputs, torch.tensor([0, 1, 2, 3, 0]))
    assert (score.metric, score.value, score.n) == ("accuracy", 80.0, 5)
    assert score.low < 80.0 < score.high <= 100.0


def test_an_abstention_is_never_right() -> None:
    silent = torch.full((3, 2), math.nan)
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


def test_one_value_says_nothing_about_its_spread() -> None:
    score = score_of(torch.tensor([1.0]), torch.tensor([0.0]))
    assert (score.low, score.value, score.high) == (0.0, 1.0, math.inf)


def test_rank_puts_the_better_first() -> None:
    assert Score("accuracy", 97.0, 96.0, 98.0, 9).rank > Score("accuracy", 96.0, 95.0, 97.0, 9).rank
    assert Score("mse", 0.3, 0.2, 0.4, 9).rank > Score("mse", 0.4, 0.3, 0.5, 9).rank
