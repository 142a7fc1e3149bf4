"""Weights of rows and classes in the estimators, and estimators that are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refuses
from sklearn.exceptions import NotFittedError
from sklearn.utils.class_weight import compute_sample_weight
from test_estimators import BOTH, Estimator, quick, tables

import otad
from otad.errors import InputError
from otad.estimators import OTADClassifier, OTADRegressor
from otad.nets import fc_resnet
from otad.training import TrainConfig, train


@pytest.mark.parametrize("kind", BOTH)
def test_rows_of_weight_zero_are_as_if_left_out(kind: type[Estimator]) -> None:
    x, y = tables(kind)
    used = np.arange(60) % 3 != 0
    model, same = quick(kind).fit(x, y, used), quick(kind).fit(x[used], y[used])
    assert len(model.module_.bank_inputs) == used.sum()
    np.testing.assert_allclose(model._outputs(x), same._outputs(x), rtol=1e-5)
    for weights, message in ((np.full(60, -1), "Negative"), (np.zeros(60), "zero|positive")):
        with pytest.raises(ValueError, match=message):
            quick(kind).fit(x, y, weights)


@pytest.mark.parametrize(
    ("task", "loss"),
    [("classification", "fit"), ("classification", "margin"), ("regression", "fit")],
)
def test_weights_act_like_repeated_rows_in_training(task: str, loss: str) -> None:
    """In one batch of all rows a weighted mean is the mean over rows repeated so many times."""
    x = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)).double()
    y, counts = torch.arange(12) % 3, torch.arange(12) % 4 + 1
    y = y.double() if task == "regression" else y
    config = TrainConfig(epochs=3, batch_size=100, energy_weight=0.3, loss=loss)
    once, often = torch.arange(12), torch.arange(12).repeat_interleave(counts)
    found = []
    for rows, weights in ((once, 0.1 * counts.double()), (often, None)):
        outputs = 1 if task == "regression" else 3
        net = fc_resnet((3,), outputs, task=task, blocks=1, seed=0).double()
        history = train(net, (x[rows], y[rows]), config, weights=weights).history
        found.append([[(one.loss, one.energy) for one in history], net.state_dict()])
    torch.testing.assert_close(*found)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def run(weights: torch.Tensor, **changes: Any) -> None:
        config, net = TrainConfig(epochs=1, **changes), fc_resnet((3,), 3, blocks=1, seed=0)
        x, y = torch.linspace(0, 1, 36).view(12, 3), torch.arange(12) % 3
        train(net, (x, y), config, weights=weights, checkpoint_dir=tmp_path)

    run(torch.ones(12))
    refuses(run, torch.arange(12.0) + 1, match="checkpoint")  # that of other weights
    refuses(run, torch.ones(11), match=r"weights.*\(12,\).*\(11,\)")
    refuses(run, torch.arange(12.0), match="weights.*positive.*0.0")
    refuses(run, torch.ones(12), pair_weight=0.1, match="pair_weight.*0.1")


def test_weights_of_classes() -> None:
    x, y = tables(OTADClassifier)
    rare = np.flatnonzero(y == "low")[3:]
    x, y = np.delete(x, rare, 0), np.delete(y, rare)
    plain = quick(OTADClassifier, class_weight={}).fit(x, y)
    favored = quick(OTADClassifier, class_weight={"low": 50}).fit(x, y)
    assert (favored.predict(x) == "low").sum() > (plain.predict(x) == "low").sum()
    by_hand = compute_sample_weight("balanced", y)
    balanced = quick(OTADClassifier, class_weight="balanced").fit(x, y).predict_proba(x)
    np.testing.assert_allclose(balanced, quick(OTADClassifier).fit(x, y, by_hand).predict_proba(x))
    two = quick(OTADClassifier, class_weight={"low": 0}).fit(x, y)
    assert two.classes_.tolist() == ["high", "middle"]
    for given in ("even", {"none": 1}, {"low": -1}, {"low": np.nan}, dict.fromkeys(set(y), 0)):
        with pytest.raises(InputError, match="class_weight"):
            quick(OTADClassifier, class_weight=given).fit(x, y)


@pytest.mark.parametrize("kind", BOTH)
def test_an_estimator_is_saved_and_loaded(kind: type[Estimator], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = tables(kind)
    frame = pandas.DataFrame(x, columns=["acid", "heat", "salt"])
    more = {"climb": (0.5, 0.0), "random_state": np.random.RandomState(0)}
    if kind is OTADClassifier:
        y = np.unique(y, return_inverse=True)[1] + 3
        more["class_weight"] = {np.int64(4): 2.5}
    model = quick(kind, **more).fit(frame, y)
    model.save(tmp_path)
    again = kind.load(tmp_path)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.predict(frame).dtype == model.predict(frame).dtype
    assert again.get_params() == model.get_params() | {"random_state": None}
    assert (again.history_, again.n_iter_) == (model.history_, 5)
    assert again.feature_names_in_.tolist() == ["acid", "heat", "salt"]
    assert again.n_features_in_ == 3
    inputs = torch.tensor(x, dtype=torch.float32)
    assert torch.equal(otad.load(tmp_path)(inputs), model.module_(inputs))
    other = OTADRegressor if kind is OTADClassifier else OTADClassifier
    refuses(other.load, tmp_path, match=f"{other.__name__}.save, got {kind.__name__}")
    model.module_.save(tmp_path / "module")
    refuses(kind.load, tmp_path / "module", match="OTAD.*save, got none")
    again.save(tmp_path)
    np.testing.assert_array_equal(kind.load(tmp_path).predict(frame), model.predict(frame))
    refuses(kind.load, 7, match="folder.*7")
    with pytest.raises(NotFittedError):
        quick(kind).save(tmp_path)


@pytest.mark.parametrize(
    "labels", [np.array(["b", "a"]), np.array(["b", "a"], object), [1.5, 0.5], [True, False]]
)
def test_labels_of_any_type_are_saved(labels: Any, tmp_path: Path) -> None:
    x, labels = tables(OTADClassifier)[0], np.asarray(labels)
    labels = labels.astype(np.int8) if labels.dtype.kind == "f" else labels
    model = quick(OTADClassifier, epochs=1).fit(x, labels[np.arange(60) % 2])
    model.save(tmp_path)
    found, expected = OTADClassifier.load(tmp_path).classes_, model.classes_
    assert (found.tolist(), found.dtype) == (expected.tolist(), expected.dtype)
