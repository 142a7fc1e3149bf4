"""Pruning, blocks and chunks leave the formula as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from certify.small import distance_to, global_model, plane_model, queries

from otad.certify import bisectors, certify, hull
from otad.certify.bisectors import BankBisectors
from otad.certify.hull import Entrance, joint_distance
from otad.model.bank import FeatureBank
from otad.model.otad import OTAD


def slow_radius(model: OTAD, x: torch.Tensor) -> np.ndarray:
    """min_i max(K-th largest_j b_ij, turn_i), as it is written down, in loops."""
    bank = model.bank_inputs.double().numpy()
    features = model.bank_features.double().numpy()
    weight = model.backbone.head.weight.detach().double().numpy()
    bias = model.backbone.head.bias.detach().double().numpy()
    low, sought = model.strong_convexity, model.n_searched
    std = model.backbone.std.double().numpy()
    chosen = model(x).argmax(1).numpy()
    result = []
    for query, c in zip(model.backbone.embed(x).double().numpy(), chosen, strict=True):
        squares = ((bank - query) ** 2).sum(1)
        radii = []
        for i in range(len(bank)):
            fronts = []
            for j in range(len(bank)):
                if j != i and np.any(bank[i] != bank[j]):
                    gap = np.linalg.norm((bank[i] - bank[j]) / std)
                    fronts.append((squares[i] - squares[j]) / (2 * gap))
            enter = max(0.0, sorted(fronts)[-sought]) if len(fronts) >= sought else 0.0
            vote = weight @ (features[i] + low * (query - bank[i])) + bias
            turn = np.inf
            for j in set(range(len(vote))) - {c}:
                margin = vote[c] - vote[j]
                pull = abs(low) * np.linalg.norm((weight[c] - weight[j]) / std)
                if margin <= 0:
                    turn = 0.0
                elif pull > 0:
                    turn = min(turn, margin / pull)
            radii.append(max(enter, turn))
        result.append(min(radii))
    return np.array(result)


@pytest.mark.parametrize("low", [0.0, -0.4, 0.3])
@pytest.mark.parametrize("sought", [1, 4])
def test_pruned_search_finds_the_least(
    monkeypatch: pytest.MonkeyPatch, low: float, sought: int
) -> None:
    model = plane_model(
        3, points=35, copies=4, n_neighbors=sought, strong_convexity=low, std=(0.5, 1.5)
    )
    x = queries(model, 10, 3)
    monkeypatch.setattr(hull, "GROUP", 1)  # the K-th largest, no groups
    monkeypatch.setattr(hull, "SPARE", 100)
    entrance_only = certify(model, x).radius.numpy()
    expected = slow_radius(model, x)
    hulls = np.array([rule == "hull" for rule in certify(model, x).rules])
    finite = np.isfinite(expected)
    assert np.allclose(entrance_only[hulls & finite], expected[hulls & finite], atol=3e-5)
    assert (hulls & finite & (expected > 0)).sum() >= 3
    assert (entrance_only >= expected - 3e-5).all()


def test_groups_only_help(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plane_model(4, points=80, n_neighbors=2, noise=0.2)
    x = queries(model, 30, 4)
    grouped = certify(model, x).radius
    monkeypatch.setattr(hull, "GROUP", 1)
    single = certify(model, x).radius
    assert (grouped >= single - 1e-9).all()
    assert (grouped > 1.02 * single).sum() >= 4


@pytest.mark.parametrize("scope", ["local", "global"])
def test_small_blocks_and_little_memory_change_nothing(
    monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    model = plane_model(6, points=150, n_neighbors=3, strong_convexity=-0.1)
    if scope == "global":
        model = global_model(6)
    x = queries(model, 25, 6)
    whole = certify(model, x)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(bisectors, "FIRST_BLOCK", 2)
    monkeypatch.setattr(bisectors, "LARGEST_BLOCK", 5)
    monkeypatch.setattr(bisectors, "BYTES", 2**10)
    parts = certify(model, x, batch_size=7, progress=lambda done, total: told.append((done, total)))
    rounding = 1e-9 if scope == "local" else 1e-5
    assert torch.allclose(parts.radius, whole.radius, rtol=rounding, atol=rounding / 100)
    assert parts.rules == whole.rules
    assert told == [(7, 25), (14, 25), (21, 25), (25, 25)]


def test_pruning_leaves_nothing_out() -> None:
    """Against every bank point measured at once."""
    model = plane_model(8, points=150, n_neighbors=2)
    x = queries(model, 20, 8)
    found = certify(model, x)
    embedded = model.backbone.embed(x).double()
    around = BankBisectors(embedded, model.bank_inputs, torch.ones(2, dtype=torch.float64))
    every = torch.arange(150).expand(20, 150)
    limit = torch.full((20,), torch.inf, dtype=torch.float64)
    entry = Entrance(around, 2)(torch.arange(20), every, limit)
    head = model.backbone.head
    votes = (model.bank_features @ head.weight.T + head.bias).argmax(1)
    entry[votes == found.prediction[:, None]] = torch.inf
    rows = torch.tensor([rule == "hull" for rule in found.rules])
    assert int(rows.sum()) >= 5
    assert torch.allclose(found.radius[rows], entry.amin(1)[rows], atol=1e-5)


def test_far_from_the_origin_the_nearest_are_still_the_rivals() -> None:
    """In float64, where the embedding loses nothing there."""
    drawn_by = torch.Generator().manual_seed(9)
    bank, place = torch.randn(400, 2, generator=drawn_by), torch.randn(20, 2, generator=drawn_by)
    stretch = torch.ones(2, dtype=torch.float64)
    every, limit = torch.arange(400).expand(20, 400), torch.full((20,), torch.inf).double()
    found = []
    for away in (0.0, 2.0**20):
        points = (bank.double() * 2**20).round() / 2**20 + away
        queries = (place.double() * 2**20).round() / 2**20 + away
        around = BankBisectors(queries, points, stretch)
        found.append(Entrance(around, 3)(torch.arange(20), every, limit))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_joint_distance_is_a_tight_bound(count: int) -> None:
    drawn = np.random.default_rng(count)
    ratios = []
    for _ in range(60):
        normals = drawn.normal(size=(count, 5)) + 1.0
        heights = drawn.uniform(-0.3, 1.0, size=count)
        exact = distance_to(normals, heights)
        gram = torch.tensor(normals @ normals.T)
        found = float(joint_distance(gram, torch.tensor(heights), gram.diagonal().clone(), 1e-12))
        assert found <= exact * (1 + 1e-9)
        if exact > 0.05:
            ratios.append(found / exact)
    assert np.mean(ratios) > 0.97


def test_joint_distance_of_nothing_is_nothing() -> None:
    zero = torch.zeros(2, 2, dtype=torch.float64)
    assert float(joint_distance(zero, zero[0], zero[0], 1e-9)) == 0


def test_a_bank_point_far_off_leaves_the_radii_of_others_as_they_are() -> None:
    """An entry that stands for a missing one, say: wherever it comes in the bank."""
    model = plane_model(3, points=200)
    x = queries(model, 10, 3)
    plain = certify(model, x).radius
    for place in (0, 100):
        kept = torch.arange(len(model.bank_inputs) + 1) != place
        with_far_one = []
        for part in (model.bank_inputs, model.bank_features, model.bank_labels):
            longer = part.new_full((len(kept), *part.shape[1:]), 0)
            longer[kept] = part
            with_far_one.append(longer)
        with_far_one[0][place] = 1e6
        bank = FeatureBank(*with_far_one, "one far off")
        found = certify(OTAD(model.backbone, bank, n_neighbors=3).eval(), x).radius
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    assert int((plain > 0.01).sum()) >= 3
