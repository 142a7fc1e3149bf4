"""The report on a model: scores, abstentions, the JSON of its assessment, pictures of its maps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pictures import defended, field_of
from PIL import Image
from report.evaluations import ROWS, Small

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import CipProblem, ExactCip
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report import map_pictures
from otad.report.assessment import assess

INPUTS, FEATURES, LABELS = BANK = map_pictures.make_bank()


def test_scores_do_not_depend_on_batches(small: Small) -> None:
    model, x, y = small.model, small.dataset.test_x[:ROWS], small.dataset.test_y[:ROWS]
    predictors = {NET: model.backbone, DEFENDED: model}
    predictors |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
    with torch.no_grad():
        right = {name: predictor(x).argmax(1) == y for name, predictor in predictors.items()}
    expected = {name: int(rows.sum()) / ROWS for name, rows in right.items()}
    assert small.assessment.scores == pytest.approx(expected)
    assert len(small.assessment) == ROWS


def test_the_record_is_plain_json(small: Small) -> None:
    record = small.assessment.to_dict()
    assert 0 < record["share_raised"] < 1
    assert sum(record["status"].values()) == record["rows"] == ROWS
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["least_smoothness"]["median"] <= record["smoothness"]["median"]
    assert 0 < record["largest_residual"] < 1e-5


@pytest.mark.parametrize(("task", "outputs", "score"), [
    ("classification", 3, 0.0), ("regression", 1, torch.inf),
])  # fmt: skip
def test_an_abstention_is_never_right(task: str, outputs: int, score: float) -> None:
    """One input with two features: no map passes through both."""
    net = fc_resnet((2,), outputs, task=task)
    labels = torch.zeros(2, dtype=torch.int64 if outputs > 1 else torch.float32)
    bank = FeatureBank(torch.zeros(2, 2), torch.eye(2), labels, "contradiction")
    model = OTAD(net, bank, n_neighbors=2, solver=ExactCip(on_failure="abstain"))
    found = assess(model, torch.zeros(2, 2), labels)
    assert found.scores[DEFENDED] == score
    if task == "classification":
        assert found.predictions.tolist() == [-1, -1]
    else:
        assert bool(found.predictions.isnan().all())
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record[DEFENDED] == (None if score else 0.0)
    assert (record["largest_residual"], record["smoothness"]) == (None, None)
    assert record["least_smoothness"]["median"] is None
    assert record["share_raised"] == 0.0


def test_regression_scores_are_mean_squared_errors(generator: torch.Generator, monkeypatch) -> None:
    monkeypatch.setattr("otad.report.assessment.BATCH", 8)
    x, y = torch.randn(50, 3, generator=generator), torch.randn(50, generator=generator)
    model = defend(fc_resnet((3,), 1, task="regression"), x[:30], y[:30], n_neighbors=4)
    found = assess(model, x[30:], y[30:])
    with torch.no_grad():
        expected = (model(x[30:]) - y[30:]).square().mean()
    assert found.metric == "mse"
    assert found.scores[DEFENDED] == pytest.approx(float(expected))


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


def test_the_global_map_is_lipschitz_and_local_maps_jump() -> None:
    local, whole = (defended(scope, epochs=20) for scope in ("local", "global"))
    assert [model.scope for model in (local, whole)] == ["local", "global"]
    head = whole.backbone.head.weight.detach()
    constant = float(torch.linalg.matrix_norm(head, 2)) * (whole.smoothness - 1)
    assert 0.5 * constant < field_of(whole, nodes=60)[1].max() <= constant * (1 + 1e-9)
    coarse, fine = (field_of(local, nodes=nodes)[1].max() for nodes in (60, 180))
    assert coarse > 2 * constant
    assert fine > 2 * coarse, "the slope of a jump grows with the grid"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    map_pictures.draw_map(tmp_path / "new" / "map.png")
    with Image.open(tmp_path / "new" / "map.png") as picture:
        assert picture.size[0] > 1000
