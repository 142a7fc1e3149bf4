"""`Dataset`, `Standardizer` against scikit-learn's scaler, seeded splits and per-class subsets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from otad.data import Dataset, Standardizer, holdout, most_central, split, subset_per_class
from otad.data.dataset import in_working_dtype
from otad.errors import InputError


def parts(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "name": "tiny",
        "train_x": torch.rand(6, 3, generator=generator),
        "train_y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "test_x": torch.rand(2, 3, generator=generator),
        "test_y": torch.tensor([0, 1]),
        "task": "classification",
        "source": "a test",
        "classes": ("a", "b", "c"),
        "bounds": (0.0, 1.0),
        "feature_names": ("u", "v", "w"),
    }
    return values | changes


def test_a_good_dataset_is_kept_as_given_and_frozen() -> None:
    dataset = Dataset(**parts())
    assert dataset.input_shape == (3,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"  # type: ignore[misc]
    images = torch.zeros(6, 1, 4, 4)
    dataset = Dataset(**parts(train_x=images, test_x=images[:2], feature_names=None))
    assert dataset.input_shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": torch.full((6, 3), float("nan"))}, "train_x: expected finite"),
        ({"train_x": torch.zeros(6, 3, dtype=torch.float16)}, "expected dtype float32"),
        ({"train_x": torch.zeros(6, 3, dtype=torch.float64)}, "test_x: expected dtype float64"),
        ({"bounds": (0.0, 0.5, 1.0)}, "bounds: expected"),
        ({"train_x": torch.zeros(6, 3, 2)}, "expected 2 axes"),
        ({"train_x": torch.zeros(0, 3)}, "at least one entry along N"),
        ({"test_x": torch.zeros(2, 4)}, r"expected shape \(2, 3\) to match train_x"),
        ({"train_y": torch.zeros(5, dtype=torch.int64)}, "expected 6 targets .* got 5"),
        ({"train_y": torch.zeros(6)}, "expected dtype int64, got float32"),
        ({"test_y": torch.tensor([0, 3])}, r"test_y: .*\[0, 2\], got \[0, 3\]"),
        ({"test_y": torch.tensor([-1, 0])}, r"test_y: .*\[0, 2\], got \[-1, 0\]"),
        ({"train_x": torch.full((6, 3), 1.5)}, r"expected values in \[0.0, 1.0\]"),
        ({"train_y": torch.ones(6, dtype=torch.int64)}, "two classes in the train part, got 'b'"),
        ({"classes": ("a",)}, "two classes or more"),
        ({"classes": ("a", "b", "a")}, "tiny classes: .*repeated a"),
        ({"feature_names": ("u",)}, "one name for each feature"),
        ({"feature_names": ("u", "v", "u")}, "tiny feature_names: .*repeated u"),
        ({"task": "clustering"}, "task: expected one of"),
        ({"task": "regression"}, "no classes for regression"),
        ({"task": "regression", "classes": ()}, "expected dtype float32, got int64"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset(**parts(**changes))


def test_the_fingerprint_sees_contents_and_not_the_name() -> None:
    first = Dataset(**parts()).fingerprint()
    assert first == Dataset(**parts(name="renamed", source="elsewhere")).fingerprint()
    one_pixel = parts()["train_x"]
    one_pixel[3, 1] = 0.5
    others = [
        {"train_x": one_pixel},
        {"test_y": torch.tensor([0, 2])},
        {"classes": ("a", "b", "d")},
        {"bounds": None},
        {"feature_names": ("u", "w", "v")},
    ]
    prints = {Dataset(**parts(**change)).fingerprint() for change in others}
    assert len(prints) == len(others)
    assert first not in prints
    strided = parts()["train_x"].t().contiguous().t()
    assert not strided.is_contiguous()
    assert Dataset(**parts(train_x=strided)).fingerprint() == first


@pytest.fixture
def table() -> torch.Tensor:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 7 + 1000
    x[:, 2] = 0.1  # constant, and not exact in binary
    return x


def test_features_match_scikit_learn(table: torch.Tensor) -> None:
    ours = Standardizer.fit(table)
    expected = torch.from_numpy(StandardScaler().fit_transform(table.double().numpy()))
    torch.testing.assert_close(ours(table).double(), expected, atol=1e-4, rtol=0)
    assert float(ours.std[2]) == 1.0
    assert float(ours(table)[:, 2].abs().max()) == 0.0
    scale = Standardizer.fit(table.double())
    torch.testing.assert_close(scale.inverse(scale(table.double())), table.double())


def test_a_constant_is_known_through_rounding() -> None:
    """Averaging 0.1 some number of times is not always 0.1, so its std is not always zero."""
    for rows in range(2, 40):
        scale = Standardizer.fit(torch.full((rows, 1), 0.1, dtype=torch.float64))
        assert float(scale.std) == 1.0


@pytest.mark.parametrize(("offset", "dtype"), [(1e3, torch.float32), (1.7e9, torch.float64)])
@pytest.mark.parametrize("of_targets", [False, True])
def test_float64_where_float32_is_too_coarse(
    table: torch.Tensor, offset: float, dtype: torch.dtype, of_targets: bool
) -> None:
    x, y = table.double(), table[:, 0].double()
    moved = y + offset if of_targets else x + offset
    found = in_working_dtype(x, moved) if of_targets else in_working_dtype(moved, y)
    assert {part.dtype for part in found} == {dtype}
    kept = in_working_dtype(table + offset, torch.arange(50))  # rounded already; labels
    assert [part.dtype for part in kept] == [torch.float32, torch.int64]


@pytest.mark.filterwarnings("error")
def test_features_below_the_resolution_are_named(table: torch.Tensor) -> None:
    names = ("a", "time", "c", "d")
    shift = torch.tensor([0.0, 1.7e8, 0.0, 0.0], dtype=torch.float64)
    Standardizer.fit(table, names=names)  # a constant is none
    Standardizer.fit(table.double() + shift, names=names)
    for x in ((table + shift).float(), table + 3e8 * shift):
        with pytest.raises(UserWarning, match=f"{x.dtype}.*: time"):
            Standardizer.fit(x, names=names)


def test_one_pair_a_channel_or_one_for_all() -> None:
    images = torch.rand(9, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    images[:, 1] += 2
    channels = Standardizer.fit(images, per="channel")
    assert channels.mean.shape == (3, 1, 1)
    torch.testing.assert_close(channels(images).mean(dim=(0, 2, 3)), torch.zeros(3))
    torch.testing.assert_close(
        channels(images).std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0
    )
    whole = Standardizer.fit(images, per="all")
    assert whole.mean.shape == ()
    torch.testing.assert_close(whole(images).mean(), torch.tensor(0.0))


def test_refusals_of_standardizer(table: torch.Tensor) -> None:
    for mean, std, message in (
        (torch.zeros(2), torch.tensor([1.0, 0.0]), "std: .*positive"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "mean: .*finite"),
        (torch.zeros(2), torch.ones(3), "std: .*like mean"),
    ):
        with pytest.raises(InputError, match=message):
            Standardizer(mean, std)
    with pytest.raises(InputError, match="per: expected one of"):
        Standardizer.fit(table, per="row")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="4 axes"):
        Standardizer.fit(table, per="channel")
    table[0, 0] = float("inf")
    with pytest.raises(InputError, match="finite"):
        Standardizer.fit(table)


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


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError, match=r"task: .*'regresion'"):
        holdout(torch.arange(10), 0.2, 0, task="regresion")  # type: ignore[arg-type]


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
    among = torch.tensor([True, True, False, True, True, False])
    assert most_central(points, labels, 1, among=among).tolist() == [0, 1]
    with pytest.raises(InputError, match="at most 2, the rows of class 0, got 3"):
        most_central(points, labels, 3, among=among)
    with pytest.raises(InputError, match=r"among: .*each class, got none of \[5\]"):
        most_central(points, labels, 1, among=labels == 0)
    with pytest.raises(InputError, match="at most 3, the rows of class 0, got 4"):
        most_central(points, labels, 4)
    with pytest.raises(InputError, match="labels: expected shape"):
        most_central(points, labels[:5], 1)
