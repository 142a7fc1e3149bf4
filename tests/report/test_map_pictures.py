"""Pictures in the plane: the maps have the properties that the pictures show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draw_scopes import both_scopes, draw_scopes, field_of
from PIL import Image

from otad.cip import CipProblem, ExactCip
from otad.model.otad import OTAD
from otad.report import map_pictures
from otad.report.map_pictures import draw_map

INPUTS, FEATURES, LABELS = BANK = map_pictures.make_bank()


@pytest.fixture(scope="module")
def models() -> list[OTAD]:
    return both_scopes(size=100, epochs=20)


def nearest(points: torch.Tensor) -> torch.Tensor:
    apart = torch.cdist(points, INPUTS)
    return apart.topk(map_pictures.MAP_NEIGHBORS, largest=False).indices


def test_images_are_means_of_the_nearest_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pairs of the bank are met."""
    rows, smoothness = nearest(INPUTS), map_pictures.MAP_SMOOTHNESS
    problem = CipProblem(INPUTS, INPUTS[rows], FEATURES[rows], smoothness)
    torch.testing.assert_close(ExactCip()(problem).image, FEATURES, rtol=0, atol=1e-6)
    monkeypatch.setattr(map_pictures, "LINES", 9)
    monkeypatch.setattr(map_pictures, "EVERY", 2)
    nodes, images, smoothness = map(torch.from_numpy, map_pictures.interpolate_grid(BANK))
    assert nodes.shape == images.shape == (17, 17, 2)
    assert bool((smoothness >= map_pictures.MAP_SMOOTHNESS).all())
    features = FEATURES[nearest(nodes.reshape(-1, 2))]
    assert bool((images.reshape(-1, 2) >= features.amin(1) - 1e-9).all())
    assert bool((images.reshape(-1, 2) <= features.amax(1) + 1e-9).all())


def test_the_global_map_is_lipschitz_and_local_maps_jump(models: list[OTAD]) -> None:
    assert [model.scope for model in models] == ["local", "global"]
    assert torch.equal(models[0].bank_features, models[1].bank_features)
    assert models[0].smoothness == models[1].smoothness
    for model in models:
        right = model(model.bank_inputs[:, :2].float()).argmax(1) == model.bank_labels
        assert float(right.double().mean()) > 0.8
    local, whole = (field_of(model.double(), nodes=90)[1].max() for model in models)
    constant = models[1].smoothness - 1
    assert 0.5 * constant < whole <= constant * (1 + 1e-9)
    assert local > 2 * constant
    _, finer = field_of(models[0].double(), nodes=270)
    assert finer.max() > 2 * local, "the slope of a jump grows with the grid"


def test_pictures_are_drawn(models: list[OTAD], tmp_path: Path) -> None:
    draw_map(tmp_path / "new" / "map.png")
    draw_scopes(tmp_path / "new" / "scopes.png", models=models, nodes=40)
    for name in ("map", "scopes"):
        with Image.open(tmp_path / "new" / f"{name}.png") as picture:
            assert picture.size[0] > 1000
