"""A score under attack is what a direct call of the attack says."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch

from otad.attacks import L2
from otad.attacks.pgd import Bpda, Pgd
from otad.data import Dataset, load
from otad.errors import InputError
from otad.evaluate.suite import ATTACKS, make_attack
from otad.experiments import attacked as attacked_module
from otad.experiments import names
from otad.experiments.attack_records import AttackedScore
from otad.experiments.attacked import attack_row, ball_of, points_of
from otad.experiments.config import RowSpec, read_experiment
from otad.experiments.rows import predictor
from otad.experiments.specs import RANDOM_STEP, AttackSpec
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

SEED = 3
ROWS = {
    "net": RowSpec(net="one", method="net"),
    "otad": RowSpec(net="one", method="otad", n_neighbors=4),
    "mean_feature_knn": RowSpec(net="one", method="mean_feature_knn", n_neighbors=4),
    "majority_knn": RowSpec(net="one", method="majority_knn", n_neighbors=4),
}


@pytest.fixture(scope="module")
def wine() -> Dataset:
    return load("wine")


@pytest.fixture(scope="module")
def base(wine: Dataset) -> OTAD:
    mean, std = wine.train_x.mean(0), wine.train_x.std(0)
    net = fc_resnet((13,), 3, blocks=2, mean=mean, std=std, seed=3)
    return defend(net, wine.train_x, wine.train_y, n_neighbors=1)


@pytest.fixture(scope="module")
def diabetes() -> Dataset:
    return load("diabetes")


@pytest.fixture(scope="module")
def regression(diabetes: Dataset) -> OTAD:
    mean, std = diabetes.train_x.mean(0), diabetes.train_x.std(0)
    net = fc_resnet((10,), 1, task="regression", blocks=1, mean=mean, std=std, seed=1)
    return defend(net, diabetes.train_x, diabetes.train_y)


def under(spec: AttackSpec, row: str, base: OTAD, data: Dataset) -> AttackedScore:
    reports: list[tuple[int, int]] = []
    found = attack_row(
        spec,
        ROWS[row],
        base,
        data,
        bank_rows=None,
        seed=SEED,
        report=lambda *step: reports.append(step),
    )
    assert reports[-1] == (len(spec.runs) * spec.points, len(spec.runs) * spec.points)
    return found


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def spec(name: str, **settings: object) -> AttackSpec:
    return AttackSpec(**({"name": name, "eps": 1.0, "unit": "std", "points": 12} | settings))


@pytest.mark.parametrize("row", list(ROWS))
def test_score_is_that_of_a_direct_call(base: OTAD, wine: Dataset, row: str) -> None:
    found = under(spec("bpda", eps=4.0, options={"steps": 5}), row, base, wine)
    chosen = torch.randperm(len(wine.test_x), generator=seeded())[:12]
    x, y = wine.test_x[chosen], wine.test_y[chosen]
    model = predictor(base, ROWS[row])
    net = base.backbone
    attack = Pgd(steps=5) if row == "net" else Bpda(steps=5, network=net)
    direct = attack(model, x, y, L2(4.0, scale=net.std), generator=seeded())
    assert found.score.value == pytest.approx(100 * direct.accuracy)
    assert found.score.n == 12
    assert found.forwards == int(direct.forwards.sum())
    assert found.backwards == int(direct.backwards.sum())
    with torch.no_grad():
        right = model(x).argmax(1) == y
    assert found.clean.value == pytest.approx(100 * float(right.double().mean()))
    assert found.score.value < found.clean.value, "the attack does something"
    assert found.distance is not None
    assert found.distance.count == int((right & direct.broken).sum())
    assert found.distance.most == pytest.approx(float(direct.distance[right & direct.broken].max()))
    assert found.settings["replaced"] == ({"bpda": "pgd"} if row == "net" else {})


def test_the_worst_of_several_counts_and_batches_change_little(
    base: OTAD, wine: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"noise": {"draws": 10}, "straight": {"points": 3}}
    alone = [
        under(spec(name, eps=0.7, options=how), "otad", base, wine).score.value
        for name, how in few.items()
    ]
    both = spec("noise", eps=0.7, options=few["noise"], also={"straight": few["straight"]})
    together = under(both, "otad", base, wine)
    assert together.score.value <= min(alone)
    assert together.settings["attacks"] == few
    monkeypatch.setattr(attacked_module, "BATCH", 5)
    assert under(both, "otad", base, wine).score.value == together.score.value


def test_points_are_the_same_for_every_row_and_fewer_are_the_first_of_more() -> None:
    assert points_of(50, 10, 1).tolist() == points_of(50, 30, 1)[:10].tolist()
    assert points_of(50, 10, 1).tolist() != points_of(50, 10, 2).tolist()
    assert len(set(points_of(50, 50, 1).tolist())) == 50
    with pytest.raises(InputError, match="points: expected at most the 50 test points, got 51"):
        points_of(50, 51, 1)


def test_without_a_radius_the_whole_box() -> None:
    net = fc_resnet((2, 8), 3, blocks=1, bounds=(-1.0, 2.0))
    corners = torch.full((1, 2, 8), -1.0), torch.full((1, 2, 8), 2.0)
    for norm in ("l2", "linf"):
        ball = ball_of(AttackSpec("pgd", norm=norm), net)
        assert float(ball.distance(*corners)) == pytest.approx(ball.eps)
    assert ball_of(AttackSpec("pgd"), net).eps == pytest.approx(math.sqrt(16) * 3)
    with pytest.raises(InputError, match="expected a radius where inputs are unbounded"):
        ball_of(AttackSpec("pgd"), fc_resnet((4,), 3, blocks=1))


def test_a_random_step_has_its_length_in_standardized_features(
    regression: OTAD, diabetes: Dataset
) -> None:
    found = under(spec("random_step", eps=0.5), "otad", regression, diabetes)
    assert found.distance is not None
    assert found.distance.least == pytest.approx(0.5, rel=1e-3)
    assert found.distance.most <= 0.5
    assert (found.forwards, found.backwards) == (0, 0)


def test_a_random_step_may_turn_a_right_answer_wrong(base: OTAD, wine: Dataset) -> None:
    found = under(spec("random_step", eps=30.0), "majority_knn", base, wine)
    assert found.score.value < found.clean.value


@pytest.mark.parametrize("row", list(ROWS))
def test_a_regression_is_given_what_was_found_on_its_net(
    regression: OTAD, diabetes: Dataset, row: str
) -> None:
    found = under(spec("pgd", on="net", options={"steps": 4}), row, regression, diabetes)
    chosen = points_of(len(diabetes.test_x), 12, SEED)
    x, y = diabetes.test_x[chosen], diabetes.test_y[chosen]
    net, model = regression.backbone, predictor(regression, ROWS[row])
    direct = Pgd(steps=4)(net, x, y, L2(1.0, scale=net.std), generator=seeded())
    with torch.no_grad():
        moved, clean = model(direct.inputs), model(x)
    assert found.score.metric == "mse"
    assert found.score.value == pytest.approx(float((moved - y).square().mean()), rel=1e-5)
    assert found.metrics["E"] == pytest.approx(float((moved - clean).abs().mean()), rel=1e-4)
    assert found.metrics["SMAPE"] > 0


def test_an_adaptive_attack_on_a_regression_is_at_least_as_strong(
    regression: OTAD, diabetes: Dataset
) -> None:
    steps = {"steps": 15}
    transferred = under(spec("pgd", on="net", options=steps), "otad", regression, diabetes)
    adaptive = spec("pgd", options=steps, also={"bpda": steps, "straight": {"points": 2}})
    found = under(adaptive, "otad", regression, diabetes)
    assert found.score.value > transferred.score.value > transferred.clean.value


def test_what_does_not_fit_a_row_is_refused(base: OTAD, wine: Dataset) -> None:
    with pytest.raises(InputError, match="straight: it needs a model that answers from a bank"):
        under(spec("straight"), "net", base, wine)
    with pytest.raises(InputError, match="expected options of pgd"):
        under(spec("pgd", options={"speed": 9}), "otad", base, wine)


@pytest.mark.parametrize("name", names())
def test_attacks_of_shipped_experiments_can_be_made(base: OTAD, name: str) -> None:
    """A wrong option is found here, not hours into a run."""
    experiment = read_experiment(name)
    models = {method: predictor(base, row) for method, row in ROWS.items()}
    asked = [
        (models["net" if attack.on == "net" else row.method], run, options)
        for row in experiment.rows.values()
        for attack in row.attacks.values()
        for run, options in attack.runs.items()
    ]
    if experiment.evaluate is not None:
        asked += [(models["otad"], *one) for one in experiment.evaluate.attacks.items()]
    for model, run, options in asked:
        package = None if run == RANDOM_STEP else ATTACKS[run].needs.package
        if run == RANDOM_STEP or (package is not None and find_spec(package) is None):
            continue
        run = "pgd" if run == "bpda" and model is base.backbone else run
        assert attacked_module.made_attack(run, model, options).name == run


def test_lists_of_a_file_become_tuples(base: OTAD) -> None:
    made = attacked_module.made_attack("straight", predictor(base, ROWS["otad"]), {"shares": [1.0]})
    expected = make_attack("straight", base, shares=(1.0,))
    assert vars(made) == vars(expected)
    assert vars(made)["shares"] == (1.0,)
