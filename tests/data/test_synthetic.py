"""The synthetic Gaussians follow their law."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from otad.data import Dataset, load
from otad.errors import InputError


def draw(**options: Any) -> Dataset:
    return load("synthetic", **{"train_size": 20_000, "test_size": 1_000, "dim": 16} | options)


def test_centers_lie_on_the_sphere_and_the_noise_has_the_std() -> None:
    dataset = draw(std=0.3, classes=5, radius=2.0)
    assert torch.bincount(dataset.train_y).tolist() == [4_000] * 5
    for label in range(5):
        rows = dataset.train_x[dataset.train_y == label]
        # 4,000 draws fix a mean to 0.3 / sqrt(4000) = 0.005 an axis, a std to one part in 90.
        assert abs(float(rows.mean(dim=0).norm()) - 2.0) < 0.03
        assert bool(((rows.std(dim=0) - 0.3).abs() < 0.02).all())


def test_train_and_test_share_the_centers() -> None:
    dataset = draw(std=0.05)
    centers = torch.stack([dataset.train_x[dataset.train_y == k].mean(dim=0) for k in range(10)])
    nearest = torch.cdist(dataset.test_x, centers).argmin(dim=1)
    assert torch.equal(nearest, dataset.test_y)


def test_only_the_noise_scale_changes_with_std() -> None:
    one, two, three = (draw(std=std, train_size=100) for std in (0.1, 0.2, 0.3))
    assert torch.equal(one.train_y, two.train_y)
    torch.testing.assert_close(two.train_x - one.train_x, three.train_x - two.train_x)


def test_the_seed_decides_the_draw() -> None:
    assert draw(seed=1).fingerprint() == draw(seed=1).fingerprint()
    assert draw(seed=1).fingerprint() != draw(seed=2).fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": 0.0}, "std: expected a positive number"),
        ({"std": float("nan")}, "std: expected a positive number"),
        ({"radius": -1.0}, "radius: expected a positive number"),
        ({"classes": 1}, "classes: expected an integer of at least 2"),
        ({"train_size": 5}, "train_size: expected an integer of at least 10"),
        ({"dim": 1.5}, "dim: expected an integer"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw(**options)
