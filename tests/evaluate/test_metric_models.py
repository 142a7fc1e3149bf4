"""The whole protocol on models whose neighbors are searched by a metric: tiny images, tiny nets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attacks.keyed import SHAPE, keyed_model, tiles, token_net
from evaluate.small import context_of, timeless, verdicts
from torch import Tensor

from otad.attacks import L2
from otad.attacks.adaptive import Keys, Straight
from otad.attacks.random_search import RandomNoise
from otad.baselines import MajorityKnn
from otad.errors import InputError
from otad.evaluate import evaluate, make_attack
from otad.evaluate.model_flags import finite_differences, neighbor_changes
from otad.evaluate.planted import plant, planted_example
from otad.evaluate.records import FAIL, NOT_RUN, PASS
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
    if preset != "quick":
        names |= {"apgd"}
    without, missing = suite(model, preset, SHAPE, "classification", BALL)
    assert names <= {attack.name for attack in without}
    assert "train_x" in missing["straight"]
    with_inputs, missing = suite(model, preset, SHAPE, "classification", BALL, train_x)
    assert names | {"straight"} <= {attack.name for attack in with_inputs}
    assert not {"straight", "region", "bisector", "keys"} & set(missing)


def test_the_record_has_certificates_below_and_attacks_above(
    proved: tuple[OTAD, Tensor], tmp_path: Path
) -> None:
    model, train_x = proved
    x, y = tiles(24, 3)
    attacks = [QUICK, "straight", RandomNoise(draws=5)]
    arguments = (model, x, y, L2(0.6, (0.0, 1.0)))
    options = {"eps": [0.02, 0.6], "attacks": attacks, "train_x": train_x, "flags": False}
    found = evaluate(*arguments, folder=tmp_path, **options)
    assert found.is_sound
    assert found.certificate is not None
    assert any("LipschitzMetric" in words for words in found.certificate.assumptions)
    proof = found.certified_accuracy(0.02)
    assert proof is not None
    assert 0 < proof.value <= found.worst_case(0.02).value
    assert found.worst_case(0.6).value < found.clean["otad"].value
    again = evaluate(*arguments, folder=tmp_path, **options)  # from the parts that are kept
    assert timeless(found) == timeless(again)


def test_a_metric_without_a_constant_is_certified_where_one_is_stated() -> None:
    model, _ = keyed_model(neighbors=3)
    x, y = tiles(6, 4)
    options = {"attacks": [RandomNoise(draws=2)], "flags": False}
    silent = evaluate(model, x, y, BALL, **options)
    assert silent.certificate is None
    assert "got a metric (Bent) without" in silent.missing["certificate"]
    constant = float(torch.linalg.matrix_norm(model.metric.weight, ord=2)) * 1.01  # tanh adds none
    stated = evaluate(model, x, y, BALL, metric_lipschitz=constant, **options)
    assert stated.certificate is not None
    assert max(stated.certificate.radius) > 0
    with pytest.raises(InputError, match="metric_lipschitz: expected None, as only OTAD models"):
        evaluate(model.backbone, x, y, BALL, metric_lipschitz=1.0, attacks=["pgd"])
    with pytest.raises(InputError, match="train_x: expected None, as the model has no bank"):
        evaluate(model.backbone, x, y, BALL, train_x=x, attacks=["pgd"])
    with pytest.raises(InputError, match=r"train_x.*row 0"):
        make_attack("straight", model, train_x=tiles(90, 99)[0])


@pytest.mark.parametrize("rule", ["otad", "k-nn"])
def test_planted_keys_are_found_by_who_looks_for_them_alone(rule: str) -> None:
    model, train_x = keyed_model()
    attacked = model if rule == "otad" else MajorityKnn(model, 5).eval()
    x, y = tiles(30, 5)
    ball = L2(0.1, (0.0, 1.0))
    for attack in (QUICK, Straight(points=12, train_x=train_x), make_attack("soft_knn", model)):
        context = context_of(attacked, x, y, ball, attacks=(attack,), train_x=train_x)
        flag = planted_example(context)
        assert flag.verdict == PASS, (attack.name, flag.found)
    blind = planted_example(context_of(attacked, x, y, ball, attacks=(RandomNoise(draws=1),)))
    assert blind.verdict == FAIL


def test_planted_training_inputs_are_those_of_the_planted_bank() -> None:
    model, train_x = keyed_model()
    context = context_of(model, *tiles(30, 6), L2(0.1, (0.0, 1.0)), train_x=train_x)
    (planted,) = plant(context, model, *context.sample(4))
    assert isinstance(planted.model, OTAD)
    assert planted.train_x is not None
    assert len(planted.train_x) == len(planted.model.bank_labels) > 90
    torch.testing.assert_close(planted.model.query_keys(planted.train_x), planted.model.bank_keys)
    embedded = planted.model.backbone.embed(planted.train_x)
    torch.testing.assert_close(embedded, planted.model.bank_inputs)


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


def test_flags_look_at_neighbors_by_key() -> None:
    model, _ = keyed_model()
    x, y = tiles(40, 7)
    for eps, share in ((1e-7, "0%"), (2.0, "100%")):
        found = neighbor_changes(context_of(model, x, y, L2(eps, (0.0, 1.0)))).found
        assert found.startswith(f"for {share}")
    flag = finite_differences(context_of(model, x, y, BALL))
    assert flag.verdict == PASS
    assert "float64" in flag.found


def test_all_flags_are_raised_on_a_metric_model(proved: tuple[OTAD, Tensor]) -> None:
    model, train_x = proved
    x, y = tiles(16, 8)
    attacks = [QUICK, "straight", replace(make_attack("soft_knn", model), steps=10, polish=5)]
    found = evaluate(model, x, y, L2(0.3, (0.0, 1.0)), attacks=attacks, train_x=train_x)
    raised = verdicts(found)
    assert raised["certificate sandwich"] == PASS
    assert raised["planted adversarial example is found"] == PASS
    assert raised["a large eps drives accuracy to chance"] == PASS
    not_run = [name for name, verdict in raised.items() if verdict == NOT_RUN]
    assert not_run == ["white-box at least as strong as black-box"]
    assert found.is_sound
