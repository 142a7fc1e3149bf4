"""The frozen `Dataset`: what it accepts, what it refuses, what its fingerprint sees."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from otad.data import Dataset
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
        ({"train_x": torch.zeros(6, 3, dtype=torch.float64)}, "expected dtype float32"),
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
