"""Scores, abstentions and the JSON of an assessment; the account is tested with the model."""

from __future__ import annotations

import json

import pytest
import torch
from report.evaluations import ROWS, Small

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import ExactCip
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.diagnostics import neighborhood_smoothness
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report.assessment import assess


def test_scores_do_not_depend_on_batches(small: Small) -> None:
    model, x, y = small.model, small.dataset.test_x[:ROWS], small.dataset.test_y[:ROWS]
    predictors = {NET: model.backbone, DEFENDED: model}
    predictors |= {MAJORITY: MajorityKnn(model), MEAN_FEATURE: MeanFeatureKnn(model)}
    with torch.no_grad():
        right = {name: predictor(x).argmax(1) == y for name, predictor in predictors.items()}
    expected = {name: int(rows.sum()) / ROWS for name, rows in right.items()}
    assert small.assessment.scores == pytest.approx(expected)
    assert len(small.assessment) == ROWS


def test_the_account_is_that_of_the_rows(small: Small) -> None:
    found, x = small.assessment, small.dataset.test_x[:ROWS]
    least = neighborhood_smoothness(small.model, x)
    torch.testing.assert_close(found.least_smoothness, least)
    raised = float((least > small.model.smoothness).double().mean())
    assert found.share_raised == pytest.approx(raised)
    assert 0 < raised < 1
    record = found.to_dict()
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
    steps: list[tuple[int, int]] = []
    found = assess(model, x[30:], y[30:], progress=lambda *it: steps.append(it))
    with torch.no_grad():
        expected = (model(x[30:]) - y[30:]).square().mean()
    assert found.metric == "mse"
    assert found.scores[DEFENDED] == pytest.approx(float(expected))
    assert steps == [(8, 20), (16, 20), (20, 20)]
