"""The whole protocol on models whose neighbors are searched by a metric: tiny images, tiny nets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attacks.bank_models import SHAPE, keyed_model, tiles, token_net
from evaluate.small import context_of, timeless, verdicts
from torch import Tensor

from otad.attacks import L2
from otad.attacks.adaptive import Keys, Straight
from otad.attacks.random_search import RandomNoise
from otad.baselines import MajorityKnn
from otad.errors import InputError
from otad.evaluate import attack_flags, evaluate, make_attack
from otad.evaluate.attack_flags import plant, planted_example
from otad.evaluate.records import CERTIFICATE_CHECK, FAIL, NOT_RUN, PASS
from otad.evaluate.suite import suite
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import LipschitzMetric

BALL = L2(0.15, (0.0, 1.0))
QUICK = Keys(steps=10, targets=1, temperatures=(0.1,), restarts=1, polish=5)


@pytest.fixture(scope="module")
def proved() -> tuple[OTAD, Tensor]:
    """Neighbors by an orthogonal net, and the training inputs."""
    metric = LipschitzMetric(SHAPE, widths=(8, 16), depth=1, key_dim=8, bounds=(0.0, 1.0))
    return keyed_model(metric=metric, neighbors=3)


@pytest.mark.parametrize("preset", ["quick", "standard", "full"])
def test_suites_have_what_a_metric_needs(proved: tuple[OTAD, Tensor], preset: str) -> None:
    model, train_x = proved
    names = {"keys", "soft_knn", "metric", "bpda", "pgd", "transfer", "random_search", "noise"}
    without, missing = suite(model, preset, SHAPE, "classification", BALL)
    assert names <= {attack.name for attack in without}
    assert "train_x" in missing["straight"]
    with_inputs, missing = suite(model, preset, SHAPE, "classification", BALL, train_x)
    assert names | {"straight"} <= {attack.name for attack in with_inputs}
    assert not {"straight", "region", "bisector", "keys"} & set(missing)


def test_the_record_has_certificates_below_attacks_above_and_flags_beside(
    proved: tuple[OTAD, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attack_flags, "STEPS", 3)
    model, train_x = proved
    attacks = [QUICK, "straight", replace(make_attack("soft_knn", model), steps=10, polish=5)]
    arguments = (model, *tiles(18, 3), L2(0.5, (0.0, 1.0)))
    options = {"eps": [0.02, 0.5], "attacks": attacks, "train_x": train_x, "folder": tmp_path}
    found = evaluate(*arguments, **options)
    assert found.is_sound
    assert any("LipschitzMetric" in text for text in found.certificate.assumptions)
    assert 0 < found.certified_accuracy(0.02).value <= found.worst_case(0.02).value
    assert found.worst_case(0.5).value < found.clean["otad"].value
    raised = verdicts(found)
    assert raised[CERTIFICATE_CHECK] == PASS
    assert raised["planted adversarial example is found"] == PASS
    assert raised["a large eps drives accuracy to chance"] == PASS
    not_run = [name for name, verdict in raised.items() if verdict == NOT_RUN]
    assert not_run == ["white-box at least as strong as black-box"]
    again = evaluate(*arguments, **options | {"flags": False})  # from the saved batches
    assert timeless(replace(found, flags=())) == timeless(replace(again, flags=()))


def test_a_metric_without_a_constant_is_certified_where_one_is_stated() -> None:
    model, _ = keyed_model(neighbors=3)
    x, y = tiles(6, 4)
    options = {"attacks": [RandomNoise(draws=2)], "flags": False}
    silent = evaluate(model, x, y, BALL, **options)
    assert silent.certificate is None
    assert "Bent" in silent.missing["certificate"]
    constant = float(torch.linalg.matrix_norm(model.metric.weight, ord=2)) * 1.01  # tanh adds none
    stated = evaluate(model, x, y, BALL, metric_lipschitz=constant, **options)
    assert stated.certificate is not None
    assert max(stated.certificate.radius) > 0
    for given, pattern in (
        ({"metric_lipschitz": 1.0}, r"metric_lipschitz.*1\.0 for VisionTransformer"),
        ({"train_x": x}, "train_x.*None"),
    ):
        with pytest.raises(InputError, match=pattern):
            evaluate(model.backbone, x, y, BALL, **given, attacks=["pgd"])
    with pytest.raises(InputError, match=r"train_x.*row 0"):
        make_attack("straight", model, train_x=tiles(90, 99)[0])


@pytest.mark.parametrize("rule", ["otad", "k-nn"])
def test_planted_keys_are_found_by_who_looks_for_them_alone(rule: str) -> None:
    model, train_x = keyed_model()
    attacked = model if rule == "otad" else MajorityKnn(model, 5).eval()
    x, y = tiles(30, 5)
    ball = L2(0.1, (0.0, 1.0))
    if rule == "otad":
        context = context_of(model, x, y, ball, train_x=train_x)
        (planted,) = plant(context, model, *context.sample(4))
        assert len(planted.train_x) == len(planted.model.bank_labels) > 90
        keys, embedded = model.query_keys(planted.train_x), model.backbone.embed(planted.train_x)
        torch.testing.assert_close(keys, planted.model.bank_keys)
        torch.testing.assert_close(embedded, planted.model.bank_inputs)
    for attack in (QUICK, Straight(points=12, train_x=train_x), make_attack("soft_knn", model)):
        context = context_of(attacked, x, y, ball, attacks=(attack,), train_x=train_x)
        flag = planted_example(context)
        assert flag.verdict == PASS, (attack.name, flag.found)
    blind = planted_example(context_of(attacked, x, y, ball, attacks=(RandomNoise(draws=1),)))
    assert blind.verdict == FAIL


def test_one_map_behind_an_embedding_is_attacked_the_same_way() -> None:
    x, y = tiles(60, 0)
    model = defend(token_net(x, y), x, y, scope="global")
    attacks, _ = suite(model, "quick", SHAPE, "classification", BALL, x)
    assert {"straight", "keys"} <= {attack.name for attack in attacks}
    context = context_of(model, *tiles(30, 9), BALL, train_x=x)
    for attack in (QUICK, Straight(points=6, train_x=x)):
        result = attack(model, *context.sample(), L2(1.5, (0.0, 1.0)), generator=torch.Generator())
        assert result.accuracy < 0.7, attack.name
    for planted in plant(context, model, *context.sample(2)):
        assert planted.train_x is not None
        embedded = model.backbone.embed(planted.train_x)
        torch.testing.assert_close(embedded, planted.model.bank_inputs)
