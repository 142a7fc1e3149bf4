"""Labeled points: their means, nearest rivals and heights, against loops over all pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from otad.errors import InputError
from otad.model.prototypes import PrototypeNet, class_means, label_heights, nearest_rivals


def labeled(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 3
    return torch.rand(size, 5, generator=generator) + labels[:, None], labels


def prototypes_at(points: Tensor, labels: Tensor) -> PrototypeNet:
    net = PrototypeNet((5,), 3, n_points=len(points))
    with torch.no_grad():
        net.points.copy_(points)
        net.labels.copy_(labels)
    return net


def test_means_are_over_the_nearest_of_the_class() -> None:
    points, labels = labeled(40)
    means = class_means(points, labels, 4)
    for row in range(40):
        members = points[labels == labels[row]]
        nearest = members[(members - points[row]).norm(dim=1).argsort()[:4]]
        torch.testing.assert_close(means[row], nearest.mean(0))
    torch.testing.assert_close(class_means(points, labels, 1), points, rtol=0, atol=0)
    centers = torch.stack([points[labels == label].mean(0) for label in range(3)])
    torch.testing.assert_close(class_means(points, labels, 99), centers[labels])


def test_rivals_are_the_nearest_of_other_classes() -> None:
    points, labels = labeled(40)
    rivals, heights = nearest_rivals(points, labels), label_heights(points, labels)
    for row in range(40):
        others = (labels != labels[row]).nonzero()[:, 0]
        apart = (points[others].double() - points[row].double()).norm(dim=1)
        assert rivals[row] == others[apart.argmin()]
        assert float(heights[row]) == pytest.approx(float(apart.min()) / math.sqrt(2), rel=1e-14)


@pytest.mark.parametrize("offset", [0.0, 2000.0, -5e4])
def test_far_from_the_origin_the_nearest_are_still_found(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    points, labels = torch.rand(300, 3, generator=generator) + offset, torch.arange(300) % 2
    exact = points.double()
    apart = torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist")
    rivals = apart.masked_fill(labels[:, None] == labels, math.inf)
    found = apart.gather(1, nearest_rivals(points, labels)[:, None])[:, 0]
    assert torch.equal(found, rivals.amin(1))
    friends = apart.masked_fill(labels[:, None] != labels, math.inf)
    nearest = friends.topk(2, dim=1, largest=False).indices  # a point itself, and one more
    means = class_means(points, labels, 2).double()
    assert float((means - exact[nearest].mean(1)).abs().max()) <= 3e-7 * max(1, abs(offset))


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 60), st.integers(0, 10**6), st.integers(1, 5))
def test_the_answers_are_1_lipschitz_and_the_highest_that_are(
    size: int, seed: int, neighbors: int
) -> None:
    points, labels = labeled(size, seed)
    points = class_means(points, labels, neighbors)
    bank = prototypes_at(points, labels).bank()
    answers, points = bank.features[:, 5:].double(), points.double()
    run, rise = torch.cdist(points, points), torch.cdist(answers, answers)
    assert bool((rise <= run * (1 + 1e-6) + 1e-6).all())
    # Half of the way to the nearest point of another class is certified, and no map can do more.
    margins = answers.gather(1, labels[:, None])[:, 0]
    apart = run.masked_fill(labels[:, None] == labels, math.inf).amin(1)
    torch.testing.assert_close(margins / math.sqrt(2), apart / 2, rtol=1e-5, atol=1e-6)


def test_the_bank_is_lifted() -> None:
    points, labels = labeled(9)
    bank = prototypes_at(points, labels).bank()
    assert bank.inputs.shape == bank.features.shape == (9, 8)
    for part in (bank.inputs, bank.features):
        torch.testing.assert_close(part[:, :5], points, rtol=0, atol=0)
    assert not bank.inputs[:, 5:].any()
    heights = label_heights(points, labels).float()
    torch.testing.assert_close(bank.features[:, 5:], torch.eye(3)[labels] * heights[:, None])


def test_refusals() -> None:
    points, labels = labeled(9)
    with pytest.raises(InputError, match="labels: expected two classes at least, got only 0"):
        nearest_rivals(points, torch.zeros(9, dtype=torch.int64))
    with pytest.raises(InputError, match="labels: expected shape"):
        label_heights(points, labels[:4])
    with pytest.raises(InputError, match="neighbors: expected an integer of at least 1, got 0"):
        class_means(points, labels, 0)


def test_rivals_within_tight_clusters_are_the_nearest() -> None:
    """Where classes mix in clusters, float32 products cannot tell who is nearest; a rival that is
    not would make heights too large, and the least smoothness more than 2."""
    drawn_by = torch.Generator().manual_seed(0)
    places = torch.randn(4, 6, generator=drawn_by).repeat(40, 1)
    points = places + 1e-4 * torch.randn(160, 6, generator=drawn_by)
    labels = torch.randint(0, 3, (160,), generator=drawn_by)
    apart = (points.double()[:, None] - points.double()).norm(dim=2)
    apart.masked_fill_(labels[:, None] == labels, torch.inf)
    found = apart.gather(1, nearest_rivals(points, labels)[:, None])[:, 0]
    assert torch.equal(found, apart.amin(1))
