"""What is measured of a row is what the model itself, the attack or the certificate says."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from otad.attacks import ATTACKS, L2
from otad.attacks.pgd import Bpda, Pgd
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.certify import certify, certify_values
from otad.cip import ExactCip
from otad.data import Dataset, load
from otad.errors import InputError
from otad.evaluate.identity import generator_for
from otad.experiments import names
from otad.experiments.experiment import read_experiment
from otad.experiments.records import AttackedScore, RowRecord
from otad.experiments.rows import (
    Subject,
    attack_row,
    ball_of,
    certified_scores,
    make_attacks,
    measure_regularity,
    measure_row,
    points_of,
)
from otad.experiments.spec import RANDOM_STEP, AttackSpec, CertifySpec, LipschitzSpec, RowSpec
from otad.model.account import AccountBuilder
from otad.model.defend import defend
from otad.model.diagnostics import (
    monotonicity_violations,
    neighborhood_smoothness,
    transport_energy,
)
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.scores import score_of

SEED = 3


def silent(done: int, total: int) -> None:
    """A report that nobody reads."""


def defended(data: Dataset, outputs: int, seed: int) -> OTAD:
    options: dict[str, Any] = {"mean": data.train_x.mean(0), "std": data.train_x.std(0)}
    net = fc_resnet(data.input_shape, outputs, task=data.task, blocks=2, seed=seed, **options)
    return defend(net, data.train_x, data.train_y, n_neighbors=4)


@pytest.fixture(scope="module")
def wine() -> Dataset:
    return load("wine")


@pytest.fixture(scope="module")
def model(wine: Dataset) -> OTAD:
    solver = ExactCip(mode="paper", climb=(0.2, 0.0), on_failure="fallback")
    return defended(wine, 3, seed=3).replace(smoothness=1.2, solver=solver)


@pytest.fixture(scope="module")
def diabetes() -> Dataset:
    return load("diabetes")


@pytest.fixture(scope="module")
def regression(diabetes: Dataset) -> OTAD:
    return defended(diabetes, 1, seed=1)


MODELS: dict[str, Callable[[OTAD], nn.Module]] = {
    "net": lambda model: model.backbone,
    "otad": lambda model: model,
    "mean_feature_knn": lambda model: MeanFeatureKnn(model, 4).eval(),
    "majority_knn": lambda model: MajorityKnn(model, 4).eval(),
}


def measured(model: OTAD, data: Dataset, method: str = "otad", **settings: Any) -> RowRecord:
    row, predictor = RowSpec("one", method, **settings), MODELS[method](model)  # type: ignore[arg-type]
    return measure_row(row, Subject(predictor, model.backbone, data, 0, silent), None)


def test_score_and_account_are_those_of_the_model(model: OTAD, wine: Dataset) -> None:
    builder = AccountBuilder(model, potentials=True, relative_error=True)
    trace, record = builder.add(wine.test_x), measured(model, wine)
    assert record.score == score_of(trace.outputs, wine.test_y)
    account = record.account
    assert account == builder.account()
    assert account.relative_error is not None
    assert 0 < account.statuses["raised"] <= 1
    assert points_of(50, 10, 1).tolist() == points_of(50, 30, 1)[:10].tolist()


def test_local_lipschitz_is_of_the_features(model: OTAD, wine: Dataset) -> None:
    spec = LipschitzSpec(radius=1e-2, points=5, steps=10)
    record = measured(model, wine, "net", lipschitz=spec)
    assert record.score == score_of(model.backbone(wine.test_x), wine.test_y)
    assert record.account is None
    assert record.lipschitz is not None
    assert record.lipschitz.count == 5
    slopes = []
    for point in model.backbone.embed(wine.test_x):
        jacobian = torch.autograd.functional.jacobian(
            lambda e: model.backbone.transport(e[None])[0][0], point
        )
        slopes.append(float(torch.linalg.matrix_norm(jacobian, 2)))
    assert record.lipschitz.most <= 1.05 * max(slopes)
    assert record.lipschitz.least >= 0.8 * min(slopes)


def test_regularity_is_that_of_the_bank(model: OTAD, wine: Dataset) -> None:
    found = measure_regularity(Subject(model, model.backbone, wine, 0, silent))
    assert found.energy is not None
    assert found.least_smoothness is not None
    energy = transport_energy(model.backbone, wine.train_x).double()
    assert found.energy.mean == pytest.approx(float(energy.mean()))
    least = neighborhood_smoothness(model, wine.test_x)
    assert found.least_smoothness.most == pytest.approx(float(least.max()))
    every = torch.arange(len(wine.train_x))
    assert found.violations == pytest.approx(monotonicity_violations(model, every))


def test_certified_scores_are_those_of_certify(
    model: OTAD, wine: Dataset, regression: OTAD, diabetes: Dataset
) -> None:
    spec = CertifySpec((0.01, 0.1), "std")
    found = certified_scores(model, wine.test_x, wine.test_y, spec, silent)
    certificate = certify(model, wine.test_x, unit=model.backbone.std)
    for radius in spec.eps:
        share = certificate.holds(wine.test_y, radius).double().mean()
        assert found[f"{radius:g}"].value == pytest.approx(100 * float(share))
    whole = regression.replace(scope="global")
    x, y = diabetes.test_x, diabetes.test_y
    errors = certified_scores(whole, x, y, CertifySpec((0.001,)), silent)
    bound = certify_values(whole, x, 0.001)
    worst = torch.maximum((bound.low - y).abs(), (bound.high - y).abs()).double()
    assert errors["0.001"].value == pytest.approx(float(worst.square().mean()), rel=1e-5)


def spec(name: str, **settings: Any) -> AttackSpec:
    return AttackSpec(**({"name": name, "eps": 1.0, "unit": "std", "points": 12} | settings))


def under(spec: AttackSpec, method: str, model: OTAD, data: Dataset) -> AttackedScore:
    subject = Subject(MODELS[method](model), model.backbone, data, SEED, silent)
    return attack_row(spec, subject, None)


def points(data: Dataset) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(data.test_x), generator=generator)[:12]
    return data.test_x[chosen], data.test_y[chosen]


@pytest.mark.parametrize("method", list(MODELS))
def test_score_under_attack_is_that_of_a_direct_call(
    model: OTAD, wine: Dataset, method: str
) -> None:
    found = under(spec("bpda", eps=4.0, options={"steps": 5}), method, model, wine)
    (x, y), net, predictor = points(wine), model.backbone, MODELS[method](model)
    with torch.no_grad():
        right = predictor(x).argmax(1) == y
    attack = Pgd(steps=5) if method == "net" else Bpda(steps=5, network=net)
    ball = L2(4.0, scale=net.std)
    generator = generator_for(SEED, attack.name, repr(4.0), 0)
    direct = attack(predictor, x[right], y[right], ball, generator=generator)
    assert found.clean.value == pytest.approx(100 * float(right.double().mean()))
    assert found.score.value == pytest.approx(100 * int((~direct.broken).sum()) / 12)
    assert found.score.value < found.clean.value, "the attack does something"
    assert found.score.n == 12
    assert found.forwards == int(direct.forwards.sum())
    assert found.backwards == int(direct.backwards.sum())
    assert found.distance is not None
    assert found.distance.count == int(direct.broken.sum())
    assert found.distance.most == pytest.approx(float(direct.distance[direct.broken].max()))
    assert found.replaced == ({"bpda": "pgd"} if method == "net" else {})


def test_without_a_radius_the_whole_box() -> None:
    net = fc_resnet((2, 8), 3, blocks=1, bounds=(-1.0, 2.0))
    corners = torch.full((1, 2, 8), -1.0), torch.full((1, 2, 8), 2.0)
    for norm in ("l2", "linf"):
        ball = ball_of(AttackSpec("pgd", norm=norm), net)  # type: ignore[arg-type]
        assert float(ball.distance(*corners)) == pytest.approx(ball.eps)
    assert ball_of(AttackSpec("pgd"), net).eps == pytest.approx(math.sqrt(16) * 3)
    with pytest.raises(InputError, match="eps: expected a radius"):
        ball_of(AttackSpec("pgd"), fc_resnet((4,), 3, blocks=1))


def test_a_random_step_has_its_length(
    regression: OTAD, diabetes: Dataset, model: OTAD, wine: Dataset
) -> None:
    found = under(spec(RANDOM_STEP, eps=0.5), "otad", regression, diabetes)
    assert found.distance is not None
    assert found.distance.least == pytest.approx(0.5, rel=1e-3)
    assert found.distance.most <= 0.5
    assert (found.forwards, found.backwards) == (0, 0)
    far = under(spec(RANDOM_STEP, eps=30.0), "majority_knn", model, wine)
    assert far.score.value < far.clean.value


@pytest.mark.parametrize("method", list(MODELS))
def test_a_regression_gets_the_adversarial_examples_of_its_net(
    regression: OTAD, diabetes: Dataset, method: str
) -> None:
    found = under(spec("pgd", on="net", options={"steps": 4}), method, regression, diabetes)
    (x, y), net, predictor = points(diabetes), regression.backbone, MODELS[method](regression)
    generator = generator_for(SEED, "pgd", repr(1.0), 0)
    direct = Pgd(steps=4)(net, x, y, L2(1.0, scale=net.std), generator=generator)
    with torch.no_grad():
        outputs, clean = predictor(direct.inputs), predictor(x)
    assert found.score.metric == "mse"
    assert found.score.value == pytest.approx(float((outputs - y).square().mean()), rel=1e-4)
    assert found.metrics["E"] == pytest.approx(float((outputs - clean).abs().mean()), rel=1e-3)
    assert found.metrics["SMAPE"] > 0


def test_an_adaptive_attack_on_a_regression_is_at_least_as_strong(
    regression: OTAD, diabetes: Dataset
) -> None:
    steps = {"steps": 5}
    transferred = under(spec("pgd", on="net", options=steps), "otad", regression, diabetes)
    adaptive = spec("pgd", options=steps, also={"bpda": steps, "straight": {"points": 2}})
    found = under(adaptive, "otad", regression, diabetes)
    assert found.score.value > transferred.score.value > transferred.clean.value


def test_what_does_not_fit_a_row_is_refused(model: OTAD, wine: Dataset) -> None:
    with pytest.raises(InputError, match="straight: "):
        under(spec("straight"), "net", model, wine)
    with pytest.raises(InputError, match=r"pgd.*speed"):
        under(spec("pgd", options={"speed": 9}), "otad", model, wine)


@pytest.mark.parametrize("name", names())
def test_attacks_of_shipped_experiments_can_be_made(model: OTAD, name: str) -> None:
    """A wrong option is found here, not hours into a run."""
    experiment = read_experiment(name)
    asked = [
        ("net" if attack.on == "net" else row.method, run, options)
        for row in experiment.rows.values()
        for attack in row.attacks.values()
        for run, options in attack.runs.items()
    ]
    if experiment.evaluate is not None:
        asked += [("otad", *one) for one in experiment.evaluate.attacks.items()]
    for method, run, options in asked:
        package = None if run == RANDOM_STEP else ATTACKS[run].needs.package
        if run != RANDOM_STEP and (package is None or find_spec(package) is not None):
            run = "pgd" if (method, run) == ("net", "bpda") else run
            (made,) = make_attacks({run: options}, MODELS[method](model))
            assert made.name == run
    (straight,) = make_attacks({"straight": {"shares": [1.0]}}, model)
    assert vars(straight)["shares"] == (1.0,), "lists of a file become tuples"
