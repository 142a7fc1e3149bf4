"""The picture of both scopes: what it shows is so, and it is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from otad.model.otad import OTAD
from otad.report.map_picture import both_scopes, draw_scopes, field_of, two_moons


@pytest.fixture(scope="module")
def models() -> list[OTAD]:
    return both_scopes(size=100, epochs=20)


def test_both_models_have_one_bank_and_one_curvature(models: list[OTAD]) -> None:
    local, whole = models
    assert (local.scope, whole.scope) == ("local", "global")
    assert torch.equal(local.bank_features, whole.bank_features)
    assert local.smoothness == whole.smoothness
    x, y = two_moons(200, seed=1)
    for model in models:
        assert float((model(x).argmax(1) == y).double().mean()) > 0.8


def test_one_map_is_nowhere_steeper_than_its_constant_and_local_ones_jump(
    models: list[OTAD],
) -> None:
    local, whole = (field_of(model.double(), nodes=120) for model in models)
    constant = models[1].smoothness - 1
    assert local.margin.shape == whole.margin.shape
    assert 0.5 * constant < whole.stretch.max() <= constant * (1 + 1e-9)
    assert local.stretch.max() > 2 * constant
    finer = field_of(models[0].double(), nodes=400)
    assert finer.stretch.max() > 2 * local.stretch.max(), (
        "a jump is the steeper the closer one looks"
    )


def test_the_picture_is_drawn(models: list[OTAD], tmp_path: Path) -> None:
    draw_scopes(tmp_path / "new" / "scopes.png", models=models, nodes=40)
    with Image.open(tmp_path / "new" / "scopes.png") as picture:
        assert picture.size[0] > 1000


def test_moons_are_two_and_reproducible() -> None:
    x, y = two_moons(100, noise=0.0)
    assert torch.bincount(y).tolist() == [50, 50]
    assert bool((x[y == 0, 1] >= 0).all())
    assert torch.allclose(x[y == 0].norm(dim=1), torch.ones(50))
    assert torch.equal(two_moons(100)[0], two_moons(100)[0])
