"""The estimators follow scikit-learn's conventions, and answer like the models they fit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator

import otad
from otad.errors import InputError
from otad.estimators import OTADClassifier, OTADRegressor

Estimator = OTADClassifier | OTADRegressor
BOTH = [OTADClassifier, OTADRegressor]
QUICK: dict[str, Any] = {
    "n_neighbors": 5, "n_blocks": 2, "epochs": 5, "batch_size": 16, "learning_rate": 0.01,
}  # fmt: skip


def tables(kind: type[Estimator], rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """float64 inputs of unlike scale, and three classes with names or a target far from 0."""
    x = np.random.default_rng(0).normal([5, -300, 0.01], [1, 50, 0.002], (rows, 3))
    level = (x[:, 0] - 5) + (x[:, 1] + 300) / 50
    names = np.array(["low", "middle", "high"])
    return x, names[np.digitize(level, [-0.8, 0.8])] if kind is OTADClassifier else 900 + 40 * level


def quick(kind: type[Estimator], **options: Any) -> Any:
    return kind(**(QUICK | {"random_state": 0} | options))


@pytest.mark.parametrize("kind", BOTH)
def test_scikit_learn_has_no_complaint(kind: type[Estimator]) -> None:
    # enough for the accuracy that is asked for, and for classes of extreme weights
    brief = {"epochs": 4, "learning_rate": 0.12}
    if kind is OTADRegressor:
        brief = {"epochs": 3, "learning_rate": 0.02, "batch_size": 32}
    repeated = "a repeated row is several neighbors, one of a larger weight is one"
    expected = {"check_sample_weight_equivalence_on_dense_data": repeated}
    made = kind(**QUICK | {"n_blocks": 1} | brief)
    results = check_estimator(made, on_skip=None, expected_failed_checks=expected)
    assert len(results) > 50
    # One check is not for an estimator but for arrays of other libraries, where these are set up.
    others = {(r["check_name"], r["status"]) for r in results if r["status"] != "passed"}
    known = {("check_array_api_input", "skipped")} | {(name, "xfail") for name in expected}
    assert others <= known


def test_the_state_of_the_caller_does_not_matter() -> None:
    x, y = tables(OTADClassifier)
    expected = quick(OTADClassifier).fit(x, y).predict_proba(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            within = quick(OTADClassifier).fit(x, y)
        assert np.array_equal(within.predict_proba(x), expected)
        queries = torch.tensor(x, dtype=torch.float32).requires_grad_()
        within.module_(queries).sum().backward()
        assert queries.grad is not None
    torch.set_default_dtype(torch.float64)
    try:
        within = quick(OTADClassifier).fit(x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert within.module_.backbone.mean.dtype == torch.float32
    assert np.array_equal(within.predict_proba(x), expected)


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_an_offset_costs_nothing(kind: type[Estimator], target: bool, tmp_path) -> None:
    """Seconds since 1970 and the like, which float32 rounds to multiples of 128."""
    x, y = tables(kind, 120)
    moves = np.array([0, 1.7e9, 0]) * (not target)
    far = y + 1.7e9 if (shifted := target and kind is OTADRegressor) else y
    model, near = quick(kind).fit(x[:80] + moves, far[:80]), quick(kind).fit(x[:80], y[:80])
    assert abs(model.score(x[80:] + moves, far[80:]) - near.score(x[80:], y[80:])) < 0.01
    wide = shifted or not target
    assert model.module_.backbone.mean.dtype == (torch.float64 if wide else torch.float32)
    model.module_.save(tmp_path)
    queries = torch.tensor(x[80:] + moves).to(model.module_.backbone.mean.dtype)
    assert torch.equal(otad.load(tmp_path)(queries), model.module_(queries))
    if shifted:
        labels = [it.label for it in model.explain(x[80:81])[0].neighbors]
        assert set(labels) <= set(far)


def test_features_that_their_dtype_rounds_away_are_named() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = tables(OTADClassifier)
    late = pandas.DataFrame({"time": 1.7e9 + 99 * x[:, 0], "id": 1e16 + 2 * np.round(x[:, 0])})
    with pytest.warns(UserWarning, match=r"float64, got 1 .*: id"):
        quick(OTADClassifier).fit(late, y)
    with pytest.warns(UserWarning, match=r"float32, got 1 .*: time"):
        quick(OTADClassifier).fit(late.assign(id=x[:, 1]).astype(np.float32), y)


def test_classifier_on_a_real_table() -> None:
    x, y = load_wine(return_X_y=True)
    parts = train_test_split(x, y, random_state=0, stratify=y)
    model = OTADClassifier(random_state=0).fit(parts[0], parts[2])
    assert model.score(parts[1], parts[3]) >= 0.95
    solved = [one.status.name for one in model.explain(parts[1])]
    assert solved.count("SOLVED") >= 0.8 * len(solved)


def test_regressor_on_a_real_table() -> None:
    x, y = load_diabetes(return_X_y=True)
    parts = train_test_split(x, y, random_state=0)
    model = OTADRegressor(random_state=0, epochs=10).fit(parts[0], parts[2])
    assert model.score(parts[1], parts[3]) >= 0.25
    assert 20 < model.predict(parts[1]).mean() < 350


def test_images_give_pictures() -> None:
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8) / 16
    model = quick(OTADClassifier, epochs=8, bounds=(0, 1)).fit(x[:400], y[:400])
    assert model.score(x[400:600], y[400:600]) >= 0.8
    backwards = model.predict(x[405:395:-1])  # torch alone takes no array of negative strides
    np.testing.assert_array_equal(backwards, model.predict(x[396:406])[::-1])
    assert model.module_.backbone.input_shape == (1, 8, 8)
    assert model.module_.backbone.mean.unique().numel() == 1  # one mean for the channel
    one, *_ = model.explain(x[400:402])
    assert len(one.figure(top=2).axes) == 5  # query, and two neighbors with their bars
    np.testing.assert_allclose(one.neighbors[0].inputs, x[one.neighbors[0].index], atol=1e-6)
    with pytest.raises(InputError, match=r"X: expected shape \(2, 1, 8, 8\)"):
        model.predict(x[:2, :, :4])
    with pytest.raises(InputError, match="within the declared bounds"):
        model.predict(x[:2] * 16)


def test_classifier_outputs_belong_together() -> None:
    x, y = tables(OTADClassifier)
    model = quick(OTADClassifier).fit(x, y)
    with torch.no_grad():
        logits = model.module_(torch.tensor(x, dtype=torch.float32)).double().numpy()
    assert model.classes_.tolist() == ["high", "low", "middle"]
    np.testing.assert_array_equal(model.decision_function(x), logits)
    np.testing.assert_array_equal(model.predict(x), model.classes_[logits.argmax(1)])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(x), shares, rtol=1e-12)
    two = quick(OTADClassifier).fit(x, y == "low")
    margin = two.decision_function(x)
    assert margin.shape == (60,)
    np.testing.assert_allclose(two.predict_proba(x)[:, 1], 1 / (1 + np.exp(-margin)), rtol=1e-12)
    np.testing.assert_array_equal(two.predict(x), margin > 0)
    assert two.predict(x).dtype == bool


def test_regressor_answers_in_the_targets_units() -> None:
    """The target is standardized for training alone: module, bank and backbone do not know it."""
    x, y = tables(OTADRegressor)
    model = quick(OTADRegressor, epochs=20).fit(x, y)
    assert model.score(x, y) > 0.9
    inputs = torch.tensor(x, dtype=torch.float32)
    with torch.no_grad():
        np.testing.assert_array_equal(model.predict(x), model.module_(inputs).double().numpy())
        np.testing.assert_allclose(model.module_.backbone(inputs).numpy(), y, atol=40)
    np.testing.assert_allclose(model.module_.bank_labels.numpy(), y, rtol=1e-6)
    assert model.history_[-1].loss < y.var()
    same = quick(OTADRegressor, epochs=20).fit(x, (y - 900) / 40)
    np.testing.assert_allclose(same.predict(x) * 40 + 900, model.predict(x), rtol=1e-4)
    (single,), (batch,) = model.explain(x[3]), model.explain(x[3:4])
    assert single.to_dict() == batch.to_dict()
    assert single.neighbors[0].index == 3
    assert single.prediction == pytest.approx(model.predict(x[3:4])[0])
    constant = quick(OTADRegressor).fit(x, np.full(60, 7.5))
    np.testing.assert_allclose(constant.predict(x), 7.5, atol=1.0)


@pytest.mark.parametrize("kind", BOTH)
def test_standardization_is_inside_and_validation_rows_are_left_out(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    x[:, 1] = 0.1  # constant
    model = quick(kind).fit(x, y)
    inputs, backbone = model.module_.bank_inputs, model.module_.backbone
    torch.testing.assert_close(inputs.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    spread = torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(inputs.std(0, correction=0), spread, atol=1e-4, rtol=0)
    assert backbone.std[1] == 1
    assert all(record.val_score is None for record in model.history_)
    model = quick(kind, validation_fraction=0.25).fit(x, y)
    assert len(model.module_.bank_inputs) == 45
    assert model.n_iter_ == len(model.history_) == 5
    assert all(record.val_score is not None for record in model.history_)


@pytest.mark.parametrize("kind", BOTH)
def test_random_state_decides(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    outputs = "predict" if kind is OTADRegressor else "predict_proba"
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = getattr(quick(kind).fit(x, y), outputs)(x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for source in (0, np.random.RandomState(0)):
        again = getattr(quick(kind, random_state=source).fit(x, y), outputs)(x)
        np.testing.assert_array_equal(first, again)
    other = getattr(quick(kind, random_state=1).fit(x, y), outputs)(x)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("kind", BOTH)
def test_pipeline_and_grid_search(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    name = kind.__name__.lower()
    grid = {f"{name}__n_neighbors": np.array([2, 4]), f"{name}__smoothness": np.array([1.5])}
    search = GridSearchCV(make_pipeline(MinMaxScaler(), quick(kind)), grid, cv=2)
    search.fit(x, y)
    assert search.best_params_[f"{name}__n_neighbors"] in (2, 4)
    assert search.best_estimator_[-1].module_.smoothness == 1.5
    assert search.predict(x).shape == (60,)


def test_names_of_columns_reach_explanations_and_cards(tmp_path) -> None:
    pd = pytest.importorskip("pandas", reason="comes with the extra singlecell")
    x, y = tables(OTADClassifier)
    frame = pd.DataFrame(x, columns=["acid", "heat", "salt"])
    model = quick(OTADClassifier).fit(frame, y)
    assert model.feature_names_in_.tolist() == ["acid", "heat", "salt"]
    (one,) = model.explain(frame[:1])
    assert one.feature_names == ("acid", "heat", "salt")
    assert one.prediction == model.predict(frame[:1])[0]
    assert one.neighbors[0].label == y[one.neighbors[0].index]
    np.testing.assert_allclose(one.neighbors[0].inputs, x[one.neighbors[0].index], rtol=1e-5)
    model.module_.save(tmp_path)
    loaded = otad.load(tmp_path)
    assert loaded.notes["classes"] == ["high", "low", "middle"]
    assert loaded.notes["feature_names"] == ["acid", "heat", "salt"]
    inputs = torch.tensor(x, dtype=torch.float32)
    assert torch.equal(loaded(inputs), model.module_(inputs))


def test_parameters_reach_the_model(capsys) -> None:
    x, y = tables(OTADClassifier)
    solving = {
        "mode": "paper", "climb": (0.25, 0.125), "max_smoothness": 8.0, "on_failure": "raise",
    }  # fmt: skip
    others = {"smoothness": 1.5, "strong_convexity": -0.25, "hidden": 7, "verbose": 1}
    module = quick(OTADClassifier, **solving, **others).fit(x, y).module_
    assert (module.n_neighbors, module.smoothness, module.strong_convexity) == (5, 1.5, -0.25)
    assert {name: getattr(module.solver, name) for name in solving} == solving
    assert (len(module.backbone.blocks), module.backbone.hidden) == (2, 7)
    assert "epoch 5: loss" in capsys.readouterr().err
    quick(OTADClassifier).fit(x, y)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_neighbors": 61}, "n_neighbors: expected at most the 60 points .* got 61"),
        ({"n_neighbors": 50, "validation_fraction": 0.2}, "at most the 48 points .* got 50"),
        ({"n_neighbors": 2.5}, "n_neighbors: expected an integer"),
        ({"max_smoothness": 1.0}, "max_smoothness: expected at least the smoothness 2.0, got 1.0"),
        ({"mode": "fast"}, "mode: expected one of consistent, paper, got 'fast'"),
        ({"scope": "regional"}, "scope: expected one of local, global, got 'regional'"),
        ({"scope": "global", "max_smoothness": 4.0}, r"scope: .*local.*max_smoothness"),
        ({"on_failure": "abstain"}, "on_failure: expected one of fallback, raise, got 'abstain'"),
        ({"hidden": 0}, "hidden: expected an integer of at least 1, got 0"),
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"device": "abacus"}, "device: expected a device such as 'cpu', got 'abacus'"),
        (
            {"validation_fraction": 1.5},
            "^validation_fraction: expected a number between 0 and 1, got 1.5",
        ),
        ({"n_blocks": 0}, "^n_blocks: expected an integer of at least 1, got 0"),
        ({"bounds": (0.0, 1.0)}, r"^X: expected values within the declared bounds \(0.0, 1.0\)"),
    ],
)
def test_parameters_and_data_are_refused_before_training(
    kind: type[Estimator], options: dict[str, Any], message: str, monkeypatch
) -> None:
    monkeypatch.setattr("otad.training.loop.Training.run_epoch", None)
    x, y = tables(kind)
    with pytest.raises(InputError, match=message):
        quick(kind, **options).fit(x, y)
    with pytest.raises(InputError, match=r"X: expected vectors .* got \(60, 3, 1\)"):
        quick(kind).fit(x[:, :, None], y)
    if kind is OTADClassifier:
        with pytest.raises(InputError, match="y: expected at least two classes, got one class"):
            quick(kind).fit(x, np.full(60, "low"))


@pytest.mark.parametrize("kind", BOTH)
def test_errors_name_the_argument_of_the_method_that_was_called(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    given = {"eps": 0.1} if kind is OTADRegressor else {}
    model = quick(kind).fit(x, y)
    with pytest.raises(InputError, match=r"^X: expected at least one entry along c, got"):
        quick(kind).fit(np.zeros((60, 0, 2, 2)), y)
    for wrong in (1e300 * x, None):
        with pytest.raises(InputError, match=r"^X: expected "):
            model.explain(wrong)
        with pytest.raises(InputError, match=r"^X: expected "):
            model.certify(wrong, **given)
    for answer in (model.predict, model.distance):
        with pytest.raises(InputError, match=r"^X: expected finite values, got -?inf at \("):
            answer(1e300 * x)
    with pytest.raises(InputError, match=r"^x: expected finite values"):
        otad.evaluate(model, 1e300 * x, y, otad.L2(0.1))
    if kind is OTADRegressor:
        for values in (1e300 * y, 1e39 * y):
            with pytest.raises(InputError, match=r"^y: expected finite values, got -?inf at \("):
                quick(kind).fit(x, values)


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_is_answered_before_fit(kind: type[Estimator]) -> None:
    model, x = quick(kind, n_neighbors=61), np.zeros((2, 3))
    with pytest.raises(InputError, match="n_neighbors"):
        model.fit(*tables(kind))
    for name in ("predict", "explain", "certify", "predict_proba", "decision_function"):
        if method := getattr(model, name, None):
            with pytest.raises(NotFittedError):
                method(x, 0.1) if (kind, name) == (OTADRegressor, "certify") else method(x)


@pytest.mark.parametrize(
    ("options", "columns"), [({"n_neighbors": 1000}, 3), ({"learning_rate": 1e9}, 3), ({}, 0)]
)
@pytest.mark.parametrize("kind", BOTH)
def test_a_refused_fit_loses_nothing_of_an_earlier_one(
    kind: type[Estimator], options: dict[str, Any], columns: int
) -> None:
    """Refused before the training, in it, or at the sight of the data."""
    x, y = tables(kind)
    model = quick(kind).fit(x, y)
    before, answers = dict(vars(model)), model.predict(x)
    model.set_params(**options)
    others = np.array(["ant", "bee"])[np.arange(60) % 2] if kind is OTADClassifier else -y
    with pytest.raises(ValueError):  # noqa: PT011 - scikit-learn's errors and ours
        model.fit(np.hstack([x, x])[:, : 2 * columns], others)
    assert vars(model) == before | options
    np.testing.assert_array_equal(model.predict(x), answers)


@pytest.mark.parametrize("kind", BOTH)
def test_certificates_are_those_of_the_module(kind: type[Estimator]) -> None:
    x, y = tables(kind, 80)
    model, unit = quick(kind).fit(x[:60], y[:60]), x.std(axis=0)
    more = {} if kind is OTADClassifier else {"eps": 0.1}
    found = model.certify(x[60:], unit=unit, **more)
    certify = otad.certify if kind is OTADClassifier else otad.certify_values
    options = more | {"unit": torch.tensor(unit, dtype=torch.float32)}
    expected = certify(model.module_, torch.tensor(x[60:], dtype=torch.float32), **options)
    for name in ("low", "high") if more else ("radius", "prediction"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert (found.low < found.high).all() if more else (found.radius > 0.01).sum() >= 5
    with pytest.raises(InputError, match="unit: expected shape"):
        model.certify(x, unit=np.ones(2), **more)


@pytest.mark.parametrize("kind", BOTH)
def test_a_global_map_of_all_training_points(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    model = quick(kind, scope="global", energy_weight=1.0).fit(x, y)
    module = model.module_
    assert (module.scope, module.n_neighbors) == ("global", 5)
    assert module.potential.smoothness == module.smoothness < 20
    assert module.potential.left_out.tolist() == []
    net = module.backbone(torch.tensor(x, dtype=torch.float32)).detach().numpy()
    if kind is OTADClassifier:
        np.testing.assert_array_equal(model.predict(x), model.classes_[net.argmax(1)])
    else:
        np.testing.assert_allclose(model.predict(x), net, rtol=1e-5)
    explained = model.explain(x[3])[0]
    assert (explained.scope, explained.neighbors[0].index) == ("global", 3)
    restored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(restored.predict(x), model.predict(x))
    assert (OTADClassifier().smoothness, quick(kind).fit(x, y).module_.smoothness) == (None, 2.0)
    least = module.smoothness
    smooth = {"scope": "global", "energy_weight": 1.0, "smoothness": 0.9 * least}
    less = quick(kind, **smooth).fit(x, y).module_
    assert less.smoothness == 0.9 * least
    assert 0 < len(less.potential.left_out) < 30
