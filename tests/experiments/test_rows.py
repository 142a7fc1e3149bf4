"""A line of a table says what the model itself says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.cip import ExactCip
from otad.data import Dataset, load
from otad.experiments.config import LipschitzSpec, RowSpec
from otad.experiments.records import RowRecord
from otad.experiments.rows import defended, evaluate_row, measure_regularity
from otad.model.defend import defend
from otad.model.diagnostics import (
    monotonicity_violations,
    neighborhood_smoothness,
    relative_error,
    transport_energy,
)
from otad.model.otad import OTAD
from otad.nets import fc_resnet

ROUGH = {"n_neighbors": 6, "smoothness": 1.2, "mode": "paper", "climb": (0.2, 0.0)}


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load("wine")


@pytest.fixture(scope="module")
def base(data: Dataset) -> OTAD:
    std = data.train_x.std(0)
    net = fc_resnet((13,), 3, blocks=2, mean=data.train_x.mean(0), std=std, seed=3)
    return defend(net, data.train_x, data.train_y, n_neighbors=1)


def evaluated(base: OTAD, data: Dataset, **settings: object) -> RowRecord:
    row = RowSpec(net="one", **settings)
    return evaluate_row(row, base, data, "wine", seed=0, report=lambda done, total: None)


def accuracy(outputs: Tensor, data: Dataset) -> float:
    return 100 * float((outputs.argmax(1) == data.test_y).double().mean())


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("net", lambda base: base.backbone),
        ("mean_feature_knn", lambda base: MeanFeatureKnn(base, 6)),
        ("majority_knn", lambda base: MajorityKnn(base, 6)),
        ("otad", lambda base: defended(base, RowSpec(net="one", method="otad", **ROUGH))),
    ],
)
def test_scores_are_those_of_the_model(
    base: OTAD, data: Dataset, method: str, model: Callable[[OTAD], torch.nn.Module]
) -> None:
    record = evaluated(base, data, method=method, **ROUGH)
    with torch.no_grad():
        assert record.score.value == pytest.approx(accuracy(model(base)(data.test_x), data))
    assert record.score.n == len(data.test_x)
    assert (record.account is None) == (method != "otad")


def test_account_of_otad(base: OTAD, data: Dataset) -> None:
    record = evaluated(base, data, method="otad", **ROUGH)
    solver = ExactCip(mode="paper", climb=(0.2, 0.0), on_failure="fallback")
    model = defend(
        base.backbone, data.train_x, data.train_y, n_neighbors=6, smoothness=1.2, solver=solver
    )
    with torch.no_grad():
        solution = model.trace(data.test_x).solution
    account = record.account
    assert account is not None
    assert account.smoothness is not None
    assert account.relative_error is not None
    assert sum(account.statuses.values()) == pytest.approx(1.0)
    assert account.statuses["raised"] == pytest.approx(
        float((solution.status == 1).double().mean())
    )
    assert 0 < account.statuses["raised"] <= 1
    assert account.smoothness.most == pytest.approx(float(solution.smoothness.max()))
    assert account.residual == pytest.approx(float(solution.residual.max()))
    error = relative_error(model, data.test_x)
    assert account.relative_error.mean == pytest.approx(float(error.double().mean()), rel=1e-5)
    assert record.settings["climb"] == [0.2, 0.0]


def test_share_of_predictions_that_hang_on_the_potential(base: OTAD, data: Dataset) -> None:
    record = evaluated(base, data, method="otad", smoothness=40.0)
    images = []
    for potential in ("lowest", "highest"):
        solver = ExactCip(potential=potential, on_failure="fallback")
        model = OTAD(base.backbone, base.bank, smoothness=40.0, solver=solver)
        images.append(model(data.test_x).argmax(1))
    share = float((images[0] != images[1]).double().mean())
    assert record.account is not None
    assert record.account.changed_by_potential == pytest.approx(share)
    assert share > 0


def test_regression_has_an_error_and_no_vote(generator: torch.Generator) -> None:
    data = load("diabetes")
    mean, std = data.train_x.mean(0), data.train_x.std(0)
    net = fc_resnet((10,), 1, task="regression", blocks=1, mean=mean, std=std)
    record = evaluated(defend(net, data.train_x, data.train_y), data, method="otad")
    assert record.score.metric == "mse"
    assert record.account is not None
    assert record.account.changed_by_potential is None


def test_local_lipschitz_is_of_the_features(base: OTAD, data: Dataset) -> None:
    spec = LipschitzSpec(radius=1e-2, points=5, steps=10)
    record = evaluated(base, data, method="net", lipschitz=spec)
    assert record.lipschitz is not None
    assert record.lipschitz.count == 5
    slopes = []
    for point in base.backbone.embed(data.test_x):
        jacobian = torch.autograd.functional.jacobian(
            lambda e: base.backbone.transport(e[None])[0][0], point
        )
        slopes.append(float(torch.linalg.matrix_norm(jacobian, 2)))
    assert record.lipschitz.most <= 1.05 * max(slopes)
    assert record.lipschitz.least >= 0.8 * min(slopes)


def test_regularity_is_that_of_the_bank(base: OTAD, data: Dataset) -> None:
    model = defended(base, RowSpec(net="one", method="otad", **ROUGH))
    rows = torch.arange(0, len(data.train_x), 3)
    found = measure_regularity(model, data, rows, report=lambda done, total: None)
    assert found.energy is not None
    assert found.least_smoothness is not None
    energy = transport_energy(base.backbone, data.train_x).double()
    assert found.energy.mean == pytest.approx(float(energy.mean()))
    least = neighborhood_smoothness(model, data.test_x)
    assert found.least_smoothness.most == pytest.approx(float(least.max()))
    assert (found.violations, found.violation_rows) == (
        monotonicity_violations(model, rows),
        len(rows),
    )
