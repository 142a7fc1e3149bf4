"""Evaluations: what a record says, wrong arguments, and models with neighbors by a metric."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.bank_models import SHAPE, keyed_model, tiles
from evaluate import small
from evaluate.small import (
    QUICK_CHECKS,
    Plane,
    Slope,
    Walk,
    Wander,
    plane_data,
    run_plane,
    timeless,
    two_sides,
)  # fmt: skip
from factories import refuses
from safetensors.torch import load_file
from torch import Tensor

from otad.attacks import L2, Linf
from otad.attacks.adaptive import Keys, Straight
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomNoise, RandomSearch
from otad.baselines import MajorityKnn, MeanFeatureKnn
from otad.certify import certify
from otad.cip import Status
from otad.evaluate import Evaluation, attack, evaluate, make_attack, runner
from otad.evaluate.flags import CHECKS
from otad.evaluate.records import CERTIFICATE_CHECK, NOT_RUN, PASS
from otad.evaluate.suite import suite
from otad.model.otad import OTAD
from otad.nets import FCResNet, LipschitzMetric


@pytest.mark.parametrize("flags", [True, False])
def test_progress_rises_to_the_end_with_a_falling_worst_case(flags: bool) -> None:
    reported: list[tuple[str, int, int, float]] = []
    record = run_plane(eps=(0.4,), flags=flags, progress=lambda *now: reported.append(now))
    count = len(CHECKS) - 1 if flags else 1  # but one, for randomized models
    assert [now[0] for now in reported if now[0].startswith("flag ")] == [
        f"flag {place} of {count}" for place in range(1, count + 1)
    ]
    assert [now[:2] for now in reported[:2]] == [("certificates", 0), ("slant, eps 0.4", 1)]
    assert reported[-1][0] == "done"
    done, worst = [now[1] for now in reported], [now[3] for now in reported]
    assert done == sorted(done)
    assert done[-1] == reported[-1][2]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] == record.worst_case_accuracy


def test_an_embedding_of_its_own_is_certified_by_its_constant() -> None:
    class Twice(FCResNet):
        def embed(self, x: Tensor) -> Tensor:
            return 2 * super().embed(x)

    model, x, y = two_sides()
    model.backbone.__class__ = Twice
    options = {"attacks": [RandomNoise(draws=3)], "flags": False, "undefended": False}
    without = evaluate(model, x, y, L2(0.1), **options)
    assert without.certificate is None
    assert "embedding_lipschitz" in without.missing["certificate"]
    stated = evaluate(model, x, y, L2(0.1), embedding_lipschitz=2.0, **options).certificate
    proved = certify(model, x, embedding_lipschitz=2.0)
    assert stated.assumptions == proved.assumptions
    assert stated.radius == tuple(proved.radius.tolist())
    assert max(stated.radius) > 0


def test_regression_records_errors_of_all_rows(tmp_path: Path) -> None:
    x, _ = plane_data()
    y = 2 * x[:, 0] - 0.5  # the model is too high by 0.5, and Walk makes it higher
    record = evaluate(
        Slope().eval(), x, y, L2(0.3), eps=(0.1, 0.3, 0.6), attacks=[Walk()], folder=tmp_path
    )
    assert record.task == "regression"
    assert record.clean_right == tuple(range(len(x)))
    assert record.clean_errors == pytest.approx([0.5] * len(x), abs=1e-6)
    for one in record.attacks:
        assert one.broken == ()
        assert one.errors == pytest.approx([0.5 + 2 * one.eps] * len(x), abs=1e-5)
    assert record.worst_errors() == pytest.approx([1.1] * len(x), abs=1e-5)
    kept = load_file(tmp_path / "adversarial.safetensors")
    assert len(kept["rows"]) == len(x)
    assert L2(1.0).distance(kept["inputs"], x) == pytest.approx([0.3] * len(x), abs=1e-6)
    refuses(record.worst_case, match=r"accuracy.*regression")
    refuses(record.worst_errors, 0.7, match=r"eps: expected 0 to 0.6, .*attacked, got 0.7")


def test_nothing_is_said_about_an_eps_beyond_those_that_were_attacked() -> None:
    record = run_plane(eps=(0.1, 0.4))
    for call in (record.worst_case, lambda eps: record.accuracy_under(None, eps)):
        refuses(call, 0.41, match=r"eps: expected 0 to 0.4, .*attacked, got 0.41")
        refuses(call, math.nan, match=r"eps: expected 0 to 0.4, .*attacked, got nan")


def test_otad_is_compared_with_its_relatives_and_accounts_for_its_solver() -> None:
    model, x, y = two_sides()
    attacks = [Straight(points=3, shares=(1.0,)), RandomNoise(draws=3)]
    options = {"eps": (0.05, 0.2), "attacks": attacks, "flags": False, "batch_size": 11}
    options["undefended"] = False
    record = evaluate(model, x, y, L2(0.2), **options)
    assert max(record.certificate.radius) > 0
    for eps in record.eps:  # the truth is between what is certified and what was attacked
        assert record.certified_accuracy(eps).value <= record.worst_case(eps).value
    assert record.is_sound
    with torch.no_grad():
        answers = {
            "net": model.backbone(x),
            "otad": model(x),
            "knn_majority": MajorityKnn(model)(x),
            "knn_mean_feature": MeanFeatureKnn(model)(x),
        }
        trace = model.trace(x)
    for name, outputs in answers.items():
        right = (outputs.argmax(1) == y).double().mean()
        assert record.clean[name].value == pytest.approx(100 * float(right))
    assert next(iter(record.clean)) == record.model["kind"] == "otad"
    assert record.threat["bounds"] == [-1.0, 1.0]  # the model's own
    solved = float((trace.solution.status == Status.SOLVED).double().mean())
    assert record.solver.statuses["solved"] == pytest.approx(solved)
    assert record.solver.residual < 1e-5


def test_a_knn_rule_is_evaluated_by_the_bank_it_shares() -> None:
    model, x, y = two_sides()
    knn = MajorityKnn(model).eval()
    record = evaluate(knn, x, y, L2(0.3), attacks=[Straight(points=3)], flags=False)
    assert record.model["kind"] == "knn_majority"
    assert record.solver is None
    assert "certificate" in record.missing
    assert record.worst_case_accuracy < record.clean["knn_majority"].value / 100


def test_a_foreign_module_has_neither_bank_nor_certificate() -> None:
    x, y = plane_data()
    record = evaluate(Plane().eval(), x, y, Linf(0.3), attacks="quick", flags=False)
    assert {"straight", "soft_knn", "bpda", "transfer", "square"} <= set(record.missing)
    assert "bank" in record.missing["straight"]
    assert record.certificate is None
    assert record.attacks[0].attack == "pgd"
    right = len(record.clean_right)
    survivors = sum(float(x[row, 0].abs()) > 0.3 for row in record.clean_right)
    assert survivors < right
    assert record.worst_case_accuracy == pytest.approx(survivors / record.n)


def test_training_inputs_of_a_network_are_only_compared_with_the_examples() -> None:
    x, y = plane_data()
    given = {"attacks": ["pgd"], "flags": False}
    alone = evaluate(Plane().eval(), x[:20], y[:20], Linf(0.3), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = evaluate(Plane().eval(), x[:20], y[:20], Linf(0.3), **given, train_x=x[20:])
    assert timeless(other) == timeless(alone)
    known = x[17:].double().numpy()
    with pytest.warns(UserWarning, match="3 of 20 examples equal training points"):
        evaluate(Plane().eval(), x[:20], y[:20], Linf(0.3), **given, train_x=known)
    message = r"train_x: .*\(40, 3\).*\(40, 2\)"
    refuses(evaluate, Plane().eval(), x, y, Linf(0.3), train_x=x[:, :2], match=message)


def test_an_eps_beyond_the_range_of_inputs_is_remarked_once() -> None:
    model, x, y = two_sides()
    low, high = float(x.min()), float(x.max())
    for run in (
        lambda ball: evaluate(model, x, y, ball, attacks=["pgd"], flags=False),
        lambda ball: attack(model, x, y, ball, attack="pgd"),
    ):
        with pytest.warns(UserWarning, match="eps = 8 allows every input") as caught:
            run(Linf(8.0, bounds=(low, high)))
        said = [one for one in caught if "eps" in str(one.message)]
        assert [Path(one.filename).name for one in said] == ["test_runner.py"]


@pytest.mark.parametrize(
    ("bounds", "says"), [(None, "inputs unbounded"), ((-9, 9), "inputs in [-9, 9]")]
)
def test_the_result_says_which_inputs_were_allowed(bounds: Any, says: str) -> None:
    ball, how = L2(0.5, bounds=bounds), {"attacks": ["noise"], "flags": False}
    found = evaluate(Plane().eval(), *plane_data(), ball, **how)
    assert f" examples, l2 eps 0.5, {says}: clean" in repr(found)


def test_a_unit_for_all_features_is_recorded_for_each() -> None:
    model, x, y = two_sides()
    short, full = (
        evaluate(model, x, y, L2(0.2, scale=scale), attacks=["pgd"], flags=False)
        for scale in (torch.tensor([0.5]), torch.tensor([0.5, 0.5]))
    )
    assert short.threat["scale"] == [0.5, 0.5]
    assert short.certificate is not None
    assert timeless(short) == timeless(full)


def test_an_eps_of_zero_and_a_model_that_is_never_right_are_no_special_cases() -> None:
    x, _ = plane_data()
    still = run_plane(eps=(0.0, 0.4))
    assert still.worst_case(0.0).value == still.clean["model"].value
    wrong = evaluate(Plane().eval(), x, 1 - (x[:, 0] > 0).long(), L2(0.4), attacks=[Walk()])
    assert wrong.worst_case_accuracy == 0.0
    assert wrong.attacks[0].attacked == ()


def test_expensive_attacks_skip_what_is_proved_and_nothing_else() -> None:
    model, x, y = two_sides(scope="global", points=60, examples=24)
    attacks = [Pgd(steps=3), Straight(points=2, shares=(1.0,)), RandomSearch(queries=5)]
    settings = {"eps": (0.1, 0.2, 0.3), "attacks": attacks, "flags": False, "undefended": False}
    assert evaluate(model, x, y, L2(0.2), **settings | {"eps": None}).skipped_proved == ()
    named_twice = ["straight", "random_search", "straight"]
    record = evaluate(model, x, y, L2(0.2), skip_proved=named_twice, **settings)
    assert record.skipped_proved == ("straight", "random_search")
    assert record.certificate is not None
    radius, skipped = record.certificate.radius, 0
    nearest = replace(record, attacks=()).distances()
    for one in record.attacks:
        survivors = [row for row in record.clean_right if nearest[row] > one.eps]
        unproved = [row for row in survivors if radius[row] <= one.eps]
        assert list(one.attacked) == (survivors if one.attack == "pgd" else unproved)
        skipped += len(survivors) - len(one.attacked)
        for row, distance in zip(one.broken, one.distances, strict=True):
            nearest[row] = min(nearest[row], distance)
    assert skipped > 10
    assert sum(len(one.broken) for one in record.attacks if one.attack != "pgd") > 0


SPARE = {"skip_proved": ["wander"]}


def sides(**options: Any) -> dict[str, Any]:
    return dict(zip(("model", "x", "y"), two_sides(points=30, **options), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": ()}, "eps.* at least one"),
        ({"eps": (0.3, 0.2)}, r"eps.*ascending.*0\.3, 0\.2"),
        ({"eps": (0.3, math.inf)}, "eps.*finite.*inf"),
        ({"attacks": "thorough"}, "attacks.*quick.*thorough"),
        ({"attacks": ["pdg"]}, "attack.*pdg"),
        ({"attacks": ["straight"]}, "straight.*bank"),
        ({"attacks": ["bpda"]}, "bpda.*pgd"),
        ({"attacks": ["pixle"]}, "pixle.*images"),
        ({"attacks": [Walk(), Walk()]}, "each name once"),
        ({"attacks": []}, "attacks.*at least one"),
        ({"attacks": [3]}, r"attacks: .*\[3\]"),
        ({"batch_size": 0}, "batch_size.*1"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y.*40.*3"),
        ({"y": torch.full((40,), 2)}, "y.*0 to 1.*2"),
        ({"x": torch.full((40, 3), torch.inf)}, "x.*finite"),
        ({"x": {0.0}}, "x: expected "),
        ({"threat": 0.1}, "threat.*float"),
        ({"model": Plane().train()}, "evaluation mode"),
        ({"model": len}, "model.*Module"),
        (lambda: sides() | {"threat": L2(0.1, bounds=(-2.0, 1.0))}, r"threat.*-2\.0"),
        ({"embedding_lipschitz": 1.0}, r"embedding_lipschitz.*1\.0 for Plane"),
        (lambda: sides() | {"embedding_lipschitz": 1.0}, r"embedding_lipschitz.*1\.0"),
        (lambda: sides() | {"skip_proved": ["square"]}, "skip_proved.*wander.*square"),
        (lambda: sides() | SPARE | {"certificate": False}, "skip_proved.*wander"),
        (lambda: sides(task="regression") | SPARE, "skip_proved.*regression.*wander"),
    ],
)
def test_wrong_arguments_are_refused(change: Any, message: str, monkeypatch) -> None:
    """Before any attack is run."""
    monkeypatch.setattr(small, "BATCHES_LEFT", [0])
    x, y = plane_data()
    given = {"model": Plane().eval(), "x": x, "y": y, "threat": L2(0.1), "attacks": [Wander()]}
    refuses(evaluate, **given | (change() if callable(change) else change), match=message)


def test_reports_of_the_evaluation_that_is_replaced_are_named(tmp_path: Path) -> None:
    x, y = plane_data()
    given = {"attacks": [Walk()], "folder": tmp_path}
    evaluate(Plane().eval(), x, y, L2(0.1), **given)
    (tmp_path / "report.html").write_text("the first evaluation")
    message = "report.html may show an earlier evaluation: remove it"
    with pytest.warns(UserWarning, match=message) as said:
        evaluate(Plane().eval(), x, y, L2(0.2), **given)
    assert [one.filename for one in said] == [__file__]
    assert Evaluation.read(tmp_path / "evaluation.json").eps == (0.2,)


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    model, x, y = two_sides()
    given = {"attacks": [Wander()], "flags": False, "undefended": False}
    record = evaluate(model, x, y, L2(0.1), folder=tmp_path, **given)
    path = tmp_path / "evaluation.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["spared_proved"] = [*content.pop("skipped_proved"), "square"]
    whole = content["solver"].pop("smoothness")
    read = []
    for used in ([1.5, 1.5, 1.6, 2.0, 2.5], []):
        content["solver"]["smoothness"] = used
        path.write_text(json.dumps(content), encoding="utf-8")
        read.append(Evaluation.read(path).solver.smoothness)
    assert Evaluation.read(path).skipped_proved == ("square",)
    assert [read[0].least, read[0].median, read[0].most] == [1.5, 1.5, 2.5]
    assert read[0].count == record.n == whole["count"]
    assert read[1] is None
    path.write_text(json.dumps({"format": "something-else"}), encoding="utf-8")
    refuses(Evaluation.read, path, match=r"evaluation\.json.*something-else")


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
    monkeypatch.setattr(runner, "CHECKS", QUICK_CHECKS)
    model, train_x = proved
    straight = make_attack("straight", model, train_x=train_x, points=4)
    soft = make_attack("soft_knn", model, temperatures=(0.1,), steps=10, polish=5)
    attacks = [QUICK, straight, soft]
    arguments = (model, *tiles(9, 3), L2(0.5, (0.0, 1.0)))
    options = {"eps": [0.02, 0.5], "attacks": attacks, "train_x": train_x, "folder": tmp_path}
    options["undefended"] = False
    found = evaluate(*arguments, **options)
    assert found.is_sound
    assert any("LipschitzMetric" in text for text in found.certificate.assumptions)
    assert 0 < found.certified_accuracy(0.02).value <= found.worst_case(0.02).value
    assert found.worst_case(0.5).value < found.clean["otad"].value
    raised = {flag.name: flag.verdict for flag in found.flags}
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
    options = {"attacks": [RandomNoise(draws=2)], "flags": False, "undefended": False}
    silent = evaluate(model, x, y, BALL, **options)
    assert silent.certificate is None
    assert "Bent" in silent.missing["certificate"]
    constant = float(torch.linalg.matrix_norm(model.metric.weight, ord=2)) * 1.01  # tanh adds none
    stated = evaluate(model, x, y, BALL, metric_lipschitz=constant, **options)
    assert stated.certificate is not None
    assert max(stated.certificate.radius) > 0
    pattern = r"metric_lipschitz.*1\.0 for VisionTransformer"
    refuses(evaluate, model.backbone, x, y, BALL, metric_lipschitz=1.0, match=pattern)
    refuses(make_attack, "straight", model, train_x=tiles(90, 99)[0], match=r"train_x.*row 0")
