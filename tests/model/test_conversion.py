"""Estimators, arrays, DataFrames and DataLoaders give what modules and tensors give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from factories import model, net, points, refuses
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import otad
from otad.estimators import OTADClassifier, OTADRegressor
from otad.evaluate import Evaluation
from otad.model import conversion
from otad.model.conversion import converted

pandas = pytest.importorskip("pandas", reason="comes with the extra singlecell")
NAMES = ["acid", "heat", "salt"]
THREAT = otad.L2(0.4)
pytestmark = pytest.mark.filterwarnings("ignore:X does not have valid feature names")


@pytest.fixture(scope="module", params=[OTADClassifier, OTADRegressor])
def fitted(request: Any) -> tuple[Any, Any, np.ndarray]:
    """A fitted estimator, a DataFrame and targets: labels that are no positions, or values."""
    x = np.random.default_rng(0).normal([5, -30, 1], [1, 5, 0.2], (50, 3))
    level = (x[:, 0] - 5) + (x[:, 1] + 30) / 5
    y = np.array([30, 10, 20])[np.digitize(level, [-0.8, 0.8])]
    if request.param is OTADRegressor:
        y = 9 + level
    frame = pandas.DataFrame(x, columns=NAMES)
    made = request.param(n_neighbors=5, n_blocks=1, epochs=3, random_state=0)
    return made.fit(frame, y), frame, y


def coded(estimator: Any, frame: Any, y: np.ndarray) -> tuple[Tensor, Tensor]:
    """By hand, what the module of an estimator is given."""
    x = torch.tensor(frame.to_numpy(), dtype=torch.float32)
    if isinstance(estimator, OTADRegressor):
        return x, torch.tensor(y, dtype=torch.float32)
    return x, torch.tensor([estimator.classes_.tolist().index(label) for label in y])


def test_every_kind_of_data_gives_the_same(fitted: Any) -> None:
    estimator, frame, labels = fitted
    module, (x, y) = estimator.module_, coded(estimator, frame, labels)
    given = torch.tensor(labels)
    kinds: list[tuple[Any, Any, Any]] = [
        (estimator, frame, pandas.Series(labels)),
        (estimator, x.double(), given),
        (estimator, frame.to_numpy().tolist(), labels.tolist()),
        (estimator, DataLoader(TensorDataset(x, given), batch_size=7), None),
        (module, x, y),
        (module, frame, y.numpy()),
        (module, frame.to_numpy(), y[:, None].numpy()),
        (module, DataLoader(list(zip(x, y, strict=True)), batch_size=7), None),
    ]
    if not y.is_floating_point():
        kinds += [
            (module, frame, labels.astype(str)),
            (module, x, labels.astype(str).astype(object)),
        ]
    for kind in kinds:
        found = converted(*kind)
        assert found.module is module
        assert torch.equal(found.x, x)
        assert found.y is not None
        assert torch.equal(found.y, y)
    frame = frame.rename(columns=dict.fromkeys(NAMES, "other"))
    refuses(converted, module, frame, match="x: .*acid, heat, salt, got other, other, other")


def test_what_needs_no_targets_does_not_read_those_of_a_loader(
    fitted: tuple[Any, Any, np.ndarray],
) -> None:
    estimator, frame, _ = fitted
    x = torch.tensor(frame.to_numpy()[:6]).float()
    unknown = DataLoader(TensorDataset(x, torch.full((6,), torch.nan)), batch_size=4)
    refuses(converted, estimator, unknown, match="y")
    assert torch.equal(otad.predict(estimator, unknown), otad.predict(estimator, x))
    assert len(otad.explain(estimator, unknown)) == 6
    moved = DataLoader(TensorDataset(x + 1, torch.full((6,), torch.nan)), batch_size=4)
    assert otad.distance_threshold(estimator, moved, quantile=0.5) > 0
    if isinstance(estimator, OTADClassifier):
        found = otad.certify(estimator, unknown).radius
        assert torch.equal(found, otad.certify(estimator, x).radius)
    else:
        found = otad.certify_values(estimator, unknown, 0.1).low
        assert torch.equal(found, otad.certify_values(estimator, x, 0.1).low)


def test_a_network_is_defended_with_every_kind_of_data() -> None:
    x, y = points(), torch.arange(len(points())) % 3
    kinds: list[tuple[Any, ...]] = [
        (x.double().numpy(), y.int().numpy()),
        (pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())),
        (x.tolist(), y.tolist()),
        (tuple(x), list(y)),
        (DataLoader(TensorDataset(x, y), batch_size=7),),
    ]
    for given, inputs in ((net(), "auto"), (None, "pixels")):
        expected = otad.defend(given, x, y, inputs=inputs, n_neighbors=5)
        for kind in kinds:
            made = otad.defend(given, *kind, inputs=inputs, n_neighbors=5)
            assert made.bank_fingerprint == expected.bank_fingerprint
    refuses(otad.defend, net(), x, match="y: expected one target per input, got None")
    for several in ((x, x), [x.numpy(), x[:, :1].numpy()]):
        got = f"{type(several).__name__} of 2: networks of several inputs"
        refuses(otad.defend, net(), several, y, match=f"x: expected one tensor, got a {got}")


def test_columns_of_a_frame_may_differ_in_their_kind_of_numbers() -> None:
    frame = pandas.DataFrame({"age": [1, 2], "big": [True, False], "old": [0.5, 1.5]})
    frame = frame.astype({"age": "Int64"})
    found = converted(net(), frame)
    assert torch.equal(found.x, torch.tensor([[1, 1, 0.5], [2, 0, 1.5]]))
    for column, message in (
        (["1", "2"], "x, column 'old', row 0: expected a number, got '1'"),
        ([1.5, None], "x, column 'old', row 1: expected a number, got a missing cell"),
        (pandas.to_datetime([1, 2]), "x, column 'old': expected no dates, got dtype datetime64"),
    ):
        refuses(converted, net(), frame.assign(old=column), match=message)


def values(found: Evaluation) -> Any:
    """Clean scores. The bits of a network can depend on where in memory its inputs are."""
    return pytest.approx({name: one.value for name, one in found.clean.items()}, rel=1e-4)


def test_estimators_are_evaluated_like_their_modules(fitted: Any) -> None:
    estimator, frame, labels = (part if k == 0 else part[:8] for k, part in enumerate(fitted))
    module, (x, y) = estimator.module_, coded(estimator, frame, labels)
    options: dict[str, Any] = {"attacks": [otad.attacks.Pgd(steps=3)], "flags": False}
    found = otad.evaluate(estimator, frame, labels, THREAT, **options)
    expected = otad.evaluate(module, x, y, THREAT, **options)
    assert values(found) == values(expected).expected
    assert found.attacks[0].broken == expected.attacks[0].broken
    assert found.attacks[0].errors == pytest.approx(expected.attacks[0].errors, rel=1e-4)
    loader = DataLoader(TensorDataset(x, torch.tensor(labels)), batch_size=6)
    again = otad.evaluate(estimator, loader, threat=THREAT, **options)
    assert values(again) == values(found).expected
    unit = frame.std().to_numpy()
    if isinstance(estimator, OTADClassifier):
        radii = [
            otad.certify(estimator, frame, unit=unit),
            otad.certify(module, x, unit=torch.tensor(unit)),
        ]
        torch.testing.assert_close(radii[0].radius, radii[1].radius)
        right = radii[1].holds(y, 0.01)
        assert 0 < right.sum() < len(right)
        for own in (labels, pandas.Series(labels), labels.tolist(), torch.tensor(labels)):
            assert torch.equal(radii[0].holds(own, 0.01), right)
        for own in (y.numpy(), pandas.Series(y.numpy()), labels.astype(str)):
            assert torch.equal(radii[1].holds(own, 0.01), right)
        refuses(radii[0].accuracy, y, 0.01, match="y: expected one of the labels 10, 20, 30, got ")
    else:
        ends = [otad.certify_values(estimator, loader, 0.1), otad.certify_values(module, x, 0.1)]
        torch.testing.assert_close(ends[0].low, ends[1].low)


def test_estimators_are_explained_like_their_modules(fitted: Any) -> None:
    estimator, frame, _ = fitted
    names = list(estimator.classes_) if isinstance(estimator, OTADClassifier) else None
    x = torch.tensor(frame.to_numpy()[:2], dtype=torch.float32)
    expected = otad.explain(estimator.module_, x, classes=names, feature_names=NAMES)
    for found in (otad.explain(estimator, frame[:2]), estimator.explain(frame[:2])):
        for one, other in zip(found, expected, strict=True):
            is_value = isinstance(other.prediction, float)
            answer = pytest.approx(other.prediction) if is_value else other.prediction
            assert one.prediction == answer
            assert [it.index for it in one.neighbors] == [it.index for it in other.neighbors]
            assert torch.equal(one.inputs, other.inputs)
            assert one.feature_names == other.feature_names
    refuses(otad.explain, net(), x, match="model: expected an OTAD model or an OTADC")


def test_one_attack_in_batches(fitted: Any) -> None:
    estimator, frame, labels = (part if k == 0 else part[:20] for k, part in enumerate(fitted))
    module, (x, y) = estimator.module_, coded(estimator, frame, labels)
    options: dict[str, Any] = {"attack": "pgd", "steps": 4}
    found = otad.attack(estimator, frame, labels, THREAT, batch_size=7, **options)
    again = otad.attack(module, x, y, THREAT, batch_size=7, **options)
    torch.testing.assert_close(found.inputs, again.inputs, rtol=1e-3, atol=1e-3)
    assert float(THREAT.distance(found.inputs, x).max()) <= 0.4
    answers = module(found.inputs)
    if isinstance(estimator, OTADClassifier):
        assert torch.equal(found.broken, answers.argmax(1) != y)
    else:
        torch.testing.assert_close(found.gain, (answers - y).abs())
    assert found.forwards.shape == (20,)
    made = otad.attacks.Pgd(steps=4)
    same = otad.attack(module, x, y, THREAT, attack=made, batch_size=7).inputs
    torch.testing.assert_close(same, found.inputs, rtol=1e-3, atol=1e-3)
    refuses(otad.attack, module, x, y, match="threat.*NoneType")
    refuses(otad.attack, module, x, y, THREAT, attack="nothing", match="attack.*nothing")


def test_a_bare_network_takes_arrays() -> None:
    bare, x = net().double(), points(8)
    found = converted(bare, x.numpy(), [0, 1, 2, 0, 1, 2, 0, 1])
    assert (found.x.dtype, found.y.dtype) == (torch.float64, torch.int64)
    plain = converted(torch.nn.Flatten(), x.numpy().astype(np.uint16))
    assert (plain.x.dtype, plain.y) == (torch.float32, None)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (points(1)[0] for _ in itertools.count())


def test_data_that_does_not_fit_is_refused(fitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, frame, labels = fitted
    if isinstance(estimator, OTADClassifier):
        refuses(converted, estimator, frame, labels - 1, match="y: .*10, 20, 30, got 9|19|29")
        refuses(
            converted, estimator.module_, frame, ["10", "x"], match="10, 20, 30, got 'x' in row 1"
        )
    made, x = model(), points(6)
    refuses(converted, made, x, np.array(["a"] * 6), match="y: .*numbers")
    refuses(converted, made, [[1, 2], [3]], match="x: expected an array")
    refuses(converted, made, np.array([["a"]]), match="x: expected numbers")
    refuses(converted, made, "text", match="x: expected ")
    refuses(converted, made, x.to_sparse(), match=r"x: expected a torch.Tensor \(dense")
    with pytest.raises(NotFittedError):
        otad.certify(OTADClassifier(), x)
    refuses(converted, object(), x, match="model: expected .*OTADRegressor, got object")
    refuses(otad.certify, net(), x, match="model: expected an OTAD model, or .* without one")
    steps = make_pipeline(estimator)
    refuses(otad.evaluate, steps, frame, labels, THREAT, match="got Pipeline: give its last step")
    dataset = TensorDataset(x, x[:, 0])
    refuses(otad.defend, net(), dataset, match="x: .*got TensorDataset: give a DataLoader of it")
    loader = DataLoader(dataset, batch_size=2)
    refuses(converted, made, loader, x, match="y: expected None")
    refuses(converted, made, DataLoader(TensorDataset(x, x, x)), match="x: .*3|Tensor.*Tensor")
    refuses(converted, made, DataLoader([]), match="x: .*none")
    refuses(otad.evaluate, made, DataLoader(TensorDataset(x)), threat=THREAT, match="y: .*NoneType")
    monkeypatch.setattr(conversion, "MOST_BYTES", 1000)
    refuses(converted, made, DataLoader(Endless(), batch_size=4), match="x: .*1,000 bytes")
