"""Seeded, stratified splits and per-class subsets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otad.data import Dataset, holdout, most_central, split, subset_per_class
from otad.errors import InputError


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    fraction=st.floats(0.05, 0.6),
    seed=st.integers(0, 2**31),
)
def test_a_stratified_split_is_a_fair_partition(
    sizes: list[int], fraction: float, seed: int
) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    total = len(labels)
    expected = math.ceil(fraction * total - 1e-9)
    if expected > total - len(sizes):
        with pytest.raises(InputError, match=f"fraction: .*({total - len(sizes)}|all {total})"):
            holdout(labels, fraction, seed, task="classification")
        return
    kept, held = holdout(labels, fraction, seed, task="classification")
    assert len(held) == expected
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(total))
    assert bool((kept.diff() > 0).all())
    assert bool((held.diff() > 0).all())
    for label, size in enumerate(sizes):
        count = int((labels[held] == label).sum())
        assert count < size  # every class keeps a row
        if 1 not in sizes:  # one-row classes push their share onto the others
            assert abs(count - expected * size / total) < 2


def test_shares_are_exact_when_they_divide_evenly() -> None:
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    _, held = holdout(labels, 0.1, 3, task="classification")
    assert torch.bincount(labels[held]).tolist() == [5, 3, 2]
    assert len(holdout(torch.zeros(100), 0.07, 0, task="regression")[1]) == 7


def test_the_seed_decides_the_rows() -> None:
    values = torch.arange(200.0)
    one = holdout(values, 0.2, 1, task="regression")[1]
    assert torch.equal(one, holdout(values, 0.2, 1, task="regression")[1])
    assert not torch.equal(one, holdout(values, 0.2, 2, task="regression")[1])
    before = torch.random.get_rng_state()
    holdout(values, 0.2, 1, task="regression")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan"), 0.5])
def test_a_fraction_outside_the_open_unit_interval_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match=f"fraction: .*{fraction}"):
        holdout(torch.zeros(1), fraction, 0, task="regression")  # half a row keeps none


def test_split_cuts_the_train_part_only() -> None:
    x = torch.arange(20.0).unsqueeze(1)
    y = torch.arange(20) % 2
    dataset = Dataset("t", x, y, x[:2] + 100, y[:2], "classification", "a test", ("a", "b"))
    for seed in range(3):
        train_x, train_y, validation_x, validation_y = split(dataset, validation=0.2, seed=seed)
        assert torch.equal(torch.cat([train_x, validation_x]).sort(dim=0).values, x)
        assert torch.equal(train_x.flatten().long() % 2, train_y)
        assert torch.equal(validation_x.flatten().long() % 2, validation_y)
        assert torch.bincount(validation_y).tolist() == [2, 2]


def test_subset_per_class_draws_that_many_of_each() -> None:
    labels = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(0))
    rows = subset_per_class(labels, 10, torch.Generator().manual_seed(1))
    assert torch.bincount(labels[rows]).tolist() == [10] * 5
    assert bool((rows.diff() > 0).all())
    assert torch.equal(rows, subset_per_class(labels, 10, torch.Generator().manual_seed(1)))
    assert not torch.equal(rows, subset_per_class(labels, 10, torch.Generator().manual_seed(2)))
    for count, message in ((3, "at most 2, .*class 7, got 3"), (0, "per_class: .*1.*0")):
        with pytest.raises(InputError, match=message):
            subset_per_class(torch.tensor([4, 4, 4, 7, 7]), count, torch.Generator())


def test_the_most_central_rows_are_those_nearest_to_the_mean_of_their_class() -> None:
    points = torch.tensor([[0.0], [10.0], [1.0], [2.0], [30.0], [11.0]])
    labels = torch.tensor([0, 5, 0, 0, 5, 5])
    assert most_central(points, labels, 1).tolist() == [2, 5]
    assert most_central(points, labels, 2).tolist() == [0, 1, 2, 5]  # of 0 and 3, the first
    with pytest.raises(InputError, match="at most 3, the rows of class 0, got 4"):
        most_central(points, labels, 4)
    with pytest.raises(InputError, match="labels: expected shape"):
        most_central(points, labels[:5], 1)
