"""Every answer of a regressor within eps lies in its interval."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from certify.small import keyed_plane, plane_model, queries, ring

from otad.certify import certify_values

SETTINGS: dict[str, dict[str, Any]] = {
    "one neighbor": {"n_neighbors": 1},
    "four": {"n_neighbors": 4},
    "curved down": {"n_neighbors": 3, "strong_convexity": -0.5},
    "curved up": {"n_neighbors": 3, "strong_convexity": 0.4, "solver": {"mode": "paper"}},
    "copies and spares": {
        "n_neighbors": 2, "copies": 8, "solver": {"spares": 1, "max_smoothness": 3.0}
    },
    "other scales": {"n_neighbors": 2, "std": (0.3, 4.0)},
    "all neighbors": {"n_neighbors": 12, "points": 12, "noise": 0.02, "bend": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.8])
@pytest.mark.parametrize("make", [plane_model, keyed_plane], ids=["plain", "keyed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_interval_holds_every_answer(name: str, make: Any, eps: float) -> None:
    for seed in range(2):
        model = make(seed, task="regression", **SETTINGS[name])
        x = queries(model, 6, seed)
        found = certify_values(model, x, eps)
        for row in range(len(x)):
            with torch.no_grad():
                answers = model(x[row] + ring(eps)).double()
            assert answers.min() >= found.low[row]
            assert answers.max() <= found.high[row]


@pytest.mark.parametrize("make", [plane_model, keyed_plane], ids=["plain", "keyed"])
def test_interval_grows_with_eps_and_is_narrow_for_one_neighbor(make: Any) -> None:
    model = make(3, task="regression", n_neighbors=1)
    x = queries(model, 15, 3)
    widths = [certify_values(model, x, eps) for eps in (0.0, 0.1, 0.4)]
    spans = [found.high - found.low for found in widths]
    assert (spans[0] <= spans[1]).all()
    assert (spans[1] <= spans[2]).all()
    assert spans[0].median() < 1e-4
    assert spans[2].max() > 0.1


def test_one_map_changes_no_faster_than_its_lipschitz_constant() -> None:
    """Where all points are neighbors the interval is not their range but the Lipschitz bound."""
    model = plane_model(0, task="regression", n_neighbors=12, points=12, noise=0.02, bend=0.5)
    x = queries(model, 10, 0)[2:]
    found = certify_values(model, x, 0.05)
    slope = float(model.backbone.head.weight.detach().norm()) * model.smoothness
    value = model(x).detach().double()
    assert (found.high - value >= 0).all()
    assert (found.high - found.low).median() < 2 * 0.05 * slope * 3
    votes = model.backbone.head(model.bank_features).detach()
    assert (found.high - found.low).median() < 0.7 * float(votes.max() - votes.min())
    assert any("cell" in words for words in found.assumptions)


def test_an_interval_too_narrow_is_caught() -> None:
    """The grid does find the ends: half the interval does not hold all answers."""
    model = plane_model(1, task="regression", n_neighbors=1, points=60)
    x = queries(model, 12, 1)
    found = certify_values(model, x, 0.4)
    missed = 0
    for row in range(len(x)):
        answers = model(x[row] + ring(0.4)).double()
        middle, span = (found.low + found.high)[row] / 2, (found.high - found.low)[row]
        missed += bool(((answers - middle).abs() > 0.35 * span).any())
    assert missed >= 8
