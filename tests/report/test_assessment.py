"""Scores, statuses and residuals against their definitions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from report.small import Small

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import ExactCip, Status
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.diagnostics import neighborhood_smoothness
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report.assessment import DEFENDED, MAJORITY, MEAN_FEATURE, NET, assess


def test_scores_are_shares_of_right_answers_whatever_the_batches(small: Small) -> None:
    model, x, y = small.model, small.dataset.test_x[:120], small.dataset.test_y[:120]
    predictors = {
        NET: model.backbone,
        DEFENDED: model,
        MAJORITY: MajorityKnn(model),
        MEAN_FEATURE: MeanFeatureKnn(model),
    }
    with torch.no_grad():
        expected = {
            name: int((predictor(x).argmax(1) == y).sum()) / 120
            for name, predictor in predictors.items()
        }
    assert small.assessment.scores == pytest.approx(expected)
    assert len(small.assessment) == 120


def test_smoothness_residual_and_status_are_those_of_the_trace(small: Small) -> None:
    x = small.dataset.test_x[:120]
    with torch.no_grad():
        solution = small.model.trace(x).solution
    torch.testing.assert_close(small.assessment.smoothness, solution.smoothness)
    assert torch.equal(small.assessment.status, solution.status)
    least = neighborhood_smoothness(small.model, x)
    torch.testing.assert_close(small.assessment.least_smoothness, least)
    raised = float((least > small.model.smoothness).double().mean())
    assert small.assessment.share_raised == pytest.approx(raised)
    assert 0 < raised < 1  # else the line above says little
    worst = small.assessment.largest_residual
    assert worst is not None
    assert 0 < worst < 1e-5


def test_a_wrong_answer_has_a_large_residual(small: Small) -> None:
    x, y = small.dataset.test_x[:10], small.dataset.test_y[:10]

    class Careless(ExactCip):
        def __call__(self, problem):  # type: ignore[no-untyped-def]
            solution = super().__call__(problem)
            return replace(solution, image=solution.image + 0.1)

    model = small.model
    careless = OTAD(model.backbone, model.bank, n_neighbors=5, solver=Careless())
    worst = assess(careless, x, y).largest_residual
    assert worst is not None
    assert worst > 1e-3


def test_statuses_are_counted_and_json_is_plain(small: Small) -> None:
    record = small.assessment.to_dict()
    assert sum(record["status"].values()) == 120
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["least_smoothness"]["median"] <= record["smoothness"]["median"]
    status = small.assessment.status.clone()
    status[:7] = Status.UNSOLVED
    assert replace(small.assessment, status=status).status_counts["unsolved"] == 7


def test_without_any_solution_there_is_nothing_to_grade(small: Small) -> None:
    count = len(small.assessment)
    failed = replace(
        small.assessment,
        smoothness=torch.full((count,), torch.nan),
        least_smoothness=torch.full((count,), torch.inf),
        residual=torch.full((count,), torch.inf),
        status=torch.full((count,), int(Status.INFEASIBLE)),
    )
    assert failed.largest_residual is None
    record = json.loads(json.dumps(failed.to_dict(), allow_nan=False))
    assert record["smoothness"] is None
    assert record["least_smoothness"]["median"] is None
    assert record["share_raised"] == 0.0


def test_an_abstention_is_no_answer_and_never_right() -> None:
    """One place with two features: no map passes through both."""
    net = fc_resnet((2,), 3, seed=0)
    place = torch.zeros(2, 2)
    bank = FeatureBank(place, torch.eye(2), torch.zeros(2).long(), "contradiction")
    model = OTAD(net, bank, n_neighbors=2, solver=ExactCip(on_failure="abstain")).eval()
    found = assess(model, place, torch.zeros(2).long())
    assert found.predictions.tolist() == [-1, -1]
    assert found.scores[DEFENDED] == 0.0


def test_an_abstention_of_a_regression_is_infinitely_wrong() -> None:
    net = fc_resnet((2,), 1, task="regression")
    bank = FeatureBank(torch.zeros(2, 2), torch.eye(2), torch.zeros(2), "contradiction")
    model = OTAD(net, bank, n_neighbors=2, solver=ExactCip(on_failure="abstain"))
    found = assess(model, torch.zeros(1, 2), torch.zeros(1))
    assert found.scores[DEFENDED] == torch.inf
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))[DEFENDED] is None


def test_regression_scores_are_mean_squared_errors(generator: torch.Generator) -> None:
    x, y = torch.randn(50, 3, generator=generator), torch.randn(50, generator=generator)
    model = defend(fc_resnet((3,), 1, task="regression"), x[:30], y[:30], n_neighbors=4)
    steps: list[tuple[int, int]] = []
    found = assess(
        model,
        x[30:],
        y[30:],
        batch_size=8,
        progress=lambda done, total: steps.append((done, total)),
    )
    with torch.no_grad():
        expected = (model(x[30:]) - y[30:]).square().mean()
    assert found.metric == "mse"
    assert found.scores[DEFENDED] == pytest.approx(float(expected))
    assert steps == [(8, 20), (16, 20), (20, 20)]
