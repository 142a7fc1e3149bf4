"""What is measured of a row is what the model itself, the attack or the certificate says."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import factories
import pytest
import torch
from torch import Tensor, nn

from otad.attacks import ATTACKS, L2
from otad.attacks.pgd import Bpda, Pgd
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.certify import certify, certify_values
from otad.cip import BankProblem, ExactCip
from otad.cip.surrogate import CipNet
from otad.data import Dataset, load
from otad.errors import InputError
from otad.evaluate.identity import generator_for
from otad.experiments import names
from otad.experiments import probe as probe_module
from otad.experiments.experiment import read_experiment
from otad.experiments.probe import time_steps
from otad.experiments.records import AttackedScore, RowRecord
from otad.experiments.rows import (
    RowContext,
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

SEED, WINE, DIABETES = 3, load("wine"), load("diabetes")


def defended(data: Dataset, outputs: int, seed: int) -> OTAD:
    options: dict[str, Any] = {"mean": data.train_x.mean(0), "std": data.train_x.std(0)}
    net = fc_resnet(data.input_shape, outputs, task=data.task, blocks=2, seed=seed, **options)
    return defend(net, data.train_x, data.train_y, n_neighbors=4)


@pytest.fixture(scope="module")
def model() -> OTAD:
    solver = ExactCip(mode="paper", climb=(0.2, 0.0), on_failure="fallback")
    return defended(WINE, 3, seed=3).replace(smoothness=1.2, solver=solver)


@pytest.fixture(scope="module")
def regression() -> OTAD:
    return defended(DIABETES, 1, seed=1)


MODELS: dict[str, Callable[[OTAD], nn.Module]] = {
    "net": lambda model: model.backbone,
    "otad": lambda model: model,
    "mean_feature_knn": lambda model: MeanFeatureKnn(model, 4).eval(),
    "majority_knn": lambda model: MajorityKnn(model, 4).eval(),
}


def measured(model: OTAD, data: Dataset, method: str = "otad", **settings: Any) -> RowRecord:
    row, predictor = RowSpec("one", method, **settings), MODELS[method](model)  # type: ignore[arg-type]
    return measure_row(row, RowContext(predictor, model.backbone, data, 0, Mock()), None)


def test_score_and_account_are_those_of_the_model(model: OTAD) -> None:
    builder = AccountBuilder(model, potentials=True, relative_error=True)
    trace, record = builder.add(WINE.test_x), measured(model, WINE)
    assert record.score == score_of(trace.outputs, WINE.test_y)
    account = record.account
    assert account == builder.account()
    assert account.relative_error is not None
    assert 0 < account.statuses["raised"] <= 1
    assert points_of(50, 10, 1).tolist() == points_of(50, 30, 1)[:10].tolist()


def test_local_lipschitz_is_of_the_features(model: OTAD) -> None:
    spec = LipschitzSpec(radius=1e-2, points=5, steps=10)
    record = measured(model, WINE, "net", lipschitz=spec)
    assert record.score == score_of(model.backbone(WINE.test_x), WINE.test_y)
    assert record.account is None
    assert record.lipschitz is not None
    assert record.lipschitz.count == 5
    slopes = []
    for point in model.backbone.embed(WINE.test_x):
        jacobian = torch.autograd.functional.jacobian(
            lambda e: model.backbone.transport(e[None])[0][0], point
        )
        slopes.append(float(torch.linalg.matrix_norm(jacobian, 2)))
    assert record.lipschitz.most <= 1.05 * max(slopes)
    assert record.lipschitz.least >= 0.8 * min(slopes)


def test_regularity_is_that_of_the_bank(model: OTAD) -> None:
    found = measure_regularity(RowContext(model, model.backbone, WINE, 0, Mock()))
    assert found.energy is not None
    assert found.least_smoothness is not None
    energy = transport_energy(model.backbone, WINE.train_x).double()
    assert found.energy.mean == pytest.approx(float(energy.mean()))
    least = neighborhood_smoothness(model, WINE.test_x)
    assert found.least_smoothness.most == pytest.approx(float(least.max()))
    every = torch.arange(len(WINE.train_x))
    assert found.violations == pytest.approx(monotonicity_violations(model, every))


def test_certified_scores_are_those_of_certify(model: OTAD, regression: OTAD) -> None:
    spec = CertifySpec((0.01, 0.1), "std")
    found = certified_scores(model, WINE.test_x, WINE.test_y, spec, Mock())
    certificate = certify(model, WINE.test_x, unit=model.backbone.std)
    for radius in spec.eps:
        share = certificate.holds(WINE.test_y, radius).double().mean()
        assert found[f"{radius:g}"].value == pytest.approx(100 * float(share))
    whole = regression.replace(scope="global")
    x, y = DIABETES.test_x, DIABETES.test_y
    errors = certified_scores(whole, x, y, CertifySpec((0.001,)), Mock())
    bound = certify_values(whole, x, 0.001)
    worst = torch.maximum((bound.low - y).abs(), (bound.high - y).abs()).double()
    assert errors["0.001"].value == pytest.approx(float(worst.square().mean()), rel=1e-5)


def spec(name: str, **settings: Any) -> AttackSpec:
    return AttackSpec(**({"name": name, "eps": 1.0, "unit": "std", "points": 12} | settings))


def under(spec: AttackSpec, method: str, model: OTAD, data: Dataset) -> AttackedScore:
    context = RowContext(MODELS[method](model), model.backbone, data, SEED, Mock())
    return attack_row(spec, context, None)


def points(data: Dataset) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(data.test_x), generator=generator)[:12]
    return data.test_x[chosen], data.test_y[chosen]


@pytest.mark.parametrize("method", list(MODELS))
def test_score_under_attack_is_that_of_a_direct_call(model: OTAD, method: str) -> None:
    found = under(spec("bpda", eps=4.0, options={"steps": 5}), method, model, WINE)
    (x, y), net, predictor = points(WINE), model.backbone, MODELS[method](model)
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


def test_a_random_step_has_its_length(regression: OTAD, model: OTAD) -> None:
    found = under(spec(RANDOM_STEP, eps=0.5), "otad", regression, DIABETES)
    assert found.distance is not None
    assert found.distance.least == pytest.approx(0.5, rel=1e-3)
    assert found.distance.most <= 0.5
    assert (found.forwards, found.backwards) == (0, 0)
    far = under(spec(RANDOM_STEP, eps=30.0), "majority_knn", model, WINE)
    assert far.score.value < far.clean.value


@pytest.mark.parametrize("method", list(MODELS))
def test_a_regression_gets_the_adversarial_examples_of_its_net(
    regression: OTAD, method: str
) -> None:
    found = under(spec("pgd", on="net", options={"steps": 4}), method, regression, DIABETES)
    (x, y), net, predictor = points(DIABETES), regression.backbone, MODELS[method](regression)
    generator = generator_for(SEED, "pgd", repr(1.0), 0)
    direct = Pgd(steps=4)(net, x, y, L2(1.0, scale=net.std), generator=generator)
    with torch.no_grad():
        outputs, clean = predictor(direct.inputs), predictor(x)
    assert found.score.metric == "mse"
    assert found.score.value == pytest.approx(float((outputs - y).square().mean()), rel=1e-4)
    assert found.metrics["E"] == pytest.approx(float((outputs - clean).abs().mean()), rel=1e-3)
    assert found.metrics["SMAPE"] > 0
    assert found.score.n == found.clean.n == 12


def test_an_adaptive_attack_on_a_regression_is_at_least_as_strong(regression: OTAD) -> None:
    steps = {"steps": 5}
    transferred = under(spec("pgd", on="net", options=steps), "otad", regression, DIABETES)
    adaptive = spec("pgd", options=steps, also={"bpda": steps, "straight": {"points": 2}})
    found = under(adaptive, "otad", regression, DIABETES)
    assert found.score.value > transferred.score.value > transferred.clean.value


def test_what_does_not_fit_a_row_is_refused(model: OTAD) -> None:
    with pytest.raises(InputError, match="straight: "):
        under(spec("straight"), "net", model, WINE)
    with pytest.raises(InputError, match=r"pgd.*speed"):
        under(spec("pgd", options={"speed": 9}), "otad", model, WINE)


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


QUERIES = factories.points(20, seed=5)  # so many that they are solved in steps
STEPS = ["search", "products", "potentials and QP", "image"]


class FirstFeatures(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


def on_disk(tmp_path: Path, **options: Any) -> OTAD:
    return factories.model(resident=False, bank_path=str(tmp_path / "bank.safetensors"), **options)


def test_names(tmp_path: Path) -> None:
    found = time_steps(factories.model(), QUERIES)
    assert list(found) == STEPS
    assert all(seconds >= 0 for seconds in found.values())
    assert list(time_steps(on_disk(tmp_path), QUERIES)) == ["search", "rows", *STEPS[1:]]
    network = factories.model(solver=CipNet(factories.D, 6, width=8, blocks=1, heads=2))
    assert list(time_steps(network, QUERIES)) == ["search", "network"]
    assert list(time_steps(factories.model(scope="global"), QUERIES)) == ["global map"]


def test_a_gpu_times_keys_and_neighbors_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def recorded(steps: list[Callable[[], None]], device: torch.device) -> list[Callable[[], None]]:
        for step in steps:
            step()  # as a recording does
        return [lambda step=step: ran.append(step.__name__) for step in steps]

    monkeypatch.setattr(probe_module, "can_capture", lambda model: True)
    monkeypatch.setattr(probe_module, "has_room", lambda device: True)
    monkeypatch.setattr(probe_module, "recorded", recorded)
    names = ["search", "keys, by a graph", "neighbors, by a graph", *STEPS[1:]]
    assert list(time_steps(factories.model(metric=FirstFeatures()), QUERIES)) == names
    assert ran == ["make_keys", "make_keys", "find_neighbors", "find_neighbors"]


WATCHED: dict[str, list[tuple[type, str]]] = {
    "search": [(FirstFeatures, "forward"), (OTAD, "neighbors")],
    "rows": [(BankProblem, "fetched")],
    "products": [(ExactCip, "_products")],
    "potentials and QP": [(ExactCip, "_dual")],
    "image": [(ExactCip, "_solution")],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each watched call takes a time of its own on a clock that stands still otherwise."""
    calls: list[tuple[str, int]] = []
    now, spent = [0], count(1)

    def watch(owner: type, name: str, step: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            seconds = 2 ** next(spent)
            now[0] += seconds
            calls.append((step, seconds))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for step, owners in WATCHED.items():
        for owner, name in owners:
            watch(owner, name, step)
    clock = SimpleNamespace(perf_counter=lambda: float(now[0]))
    monkeypatch.setattr(probe_module, "time", clock)
    return calls


@pytest.mark.parametrize("climb", [None, (1.0, 1.0)])
def test_the_steps_are_the_calls_of_a_prediction(
    tmp_path: Path, calls: list[tuple[str, int]], climb: tuple[float, float] | None
) -> None:
    solver = ExactCip(climb=climb, on_failure="fallback")
    ours = on_disk(tmp_path, metric=FirstFeatures(), solver=solver)
    calls.clear()
    ours(QUERIES)
    predicted = [step for step, _ in calls]
    assert set(predicted) == set(WATCHED)
    calls.clear()
    found = time_steps(ours, QUERIES)
    assert [step for step, _ in calls] == predicted, "nothing else is timed"
    assert found == {step: sum(spent for name, spent in calls if name == step) for step in WATCHED}
