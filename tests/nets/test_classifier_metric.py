"""A classifier as a metric: its keys in closed form, gradients, the folder of a model, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import refuses
from torch import Tensor, nn

import otad
from otad.nets import Backbone, build_metric
from otad.nets.classifier_metric import KEYS

CLASSES = 5


def classifier(task: str = "classification") -> Backbone:
    outputs = CLASSES if task == "classification" else 1
    options = {"blocks": 2, "hidden": 8, "seed": 3, "task": task, "mean": 0.5, "std": 0.2}
    return otad.nets.fc_resnet((2, 3), outputs, bounds=(0.0, 1.0), **options).eval()


def inputs(rows: int = 200, seed: int = 0) -> Tensor:
    return torch.rand(rows, 2, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keys", ["logits", "softmax"])
def test_the_nearest_corner_is_the_class_that_the_classifier_predicts(keys: str) -> None:
    """|k - c e_j|^2 = |k|^2 - 2 c k_j + c^2 is least for the largest k_j."""
    net, x = classifier(), inputs()
    found = otad.metric_of(net, keys=keys)(x)
    corners = 3.0 * torch.eye(CLASSES)
    predicted = net(x).argmax(1)
    assert len(predicted.unique()) > 2
    assert torch.equal(torch.cdist(found, corners).argmin(1), predicted)


def test_keys_are_what_the_definitions_say() -> None:
    net, x = classifier(), inputs()
    features = net.transport(net.embed(x))[0].double().detach().numpy()
    weight, bias = (one.double().detach().numpy() for one in (net.head.weight, net.head.bias))
    logits = features @ weight.T + bias
    free = {keys: otad.metric_of(net, keys=keys)(x).detach() for keys in KEYS}
    centered = logits - logits.mean(1, keepdims=True)
    np.testing.assert_allclose(free["logits"], centered, atol=1e-5)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(free["softmax"], shares, atol=1e-6)
    # Distances of projected features, by the pseudo-inverse of the differences of rows.
    rows = weight - weight.mean(0)
    projected = features @ np.linalg.pinv(rows) @ rows
    expected = torch.cdist(*[torch.from_numpy(projected)] * 2)
    assert free["features"].shape[1] == CLASSES - 1
    found = torch.cdist(*[free["features"].double()] * 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # What the projection leaves out never changes the order of the logits.
    assert np.array_equal((projected @ rows.T + bias).argmax(1), logits.argmax(1))
    unit = otad.metric_of(net, keys="features", key_norm="unit")(x)
    torch.testing.assert_close(unit, nn.functional.normalize(free["features"], dim=1))


@pytest.mark.parametrize("keys", KEYS)
def test_gradients_agree_with_finite_differences(keys: str) -> None:
    metric = otad.metric_of(classifier().double(), keys=keys)
    assert metric(inputs(2).double()).dtype == torch.float64
    assert torch.autograd.gradcheck(metric, (inputs(3).double().requires_grad_(),))


class Own(nn.Module):
    """A network whose class is the user's own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.scale * self.first(x.flatten(1))))


@pytest.mark.parametrize("keys", KEYS)
def test_a_model_with_such_a_metric_is_saved_and_loaded(keys: str, tmp_path: Path) -> None:
    net, x, y = classifier(), inputs(60), torch.arange(60) % CLASSES
    metric = otad.metric_of(net, keys=keys)
    model = otad.defend(net, x, y, metric=metric, n_neighbors=4)
    model.save(tmp_path)
    loaded, new = otad.load(tmp_path), inputs(20, seed=1)
    assert torch.equal(loaded(new), model(new))
    assert torch.equal(loaded.query_keys(new), metric(new))
    assert loaded.metric is not None
    assert loaded.metric.std.unique() == net.std.unique()
    attacked = otad.attack(loaded, new, y[:20], otad.L2(0.5), attack="keys", steps=3)
    assert 0 < float(attacked.distance.max()) <= 0.5 + 1e-6


def test_a_user_s_own_network_as_metric_is_loaded_with_its_class(tmp_path: Path) -> None:
    own, x, y = Own().eval(), inputs(60), torch.arange(60) % CLASSES
    with pytest.warns(UserWarning, match="defense"):
        model = otad.defend(own, x, y, metric=otad.metric_of(own, input_shape=(2, 3)))
    assert model.metric is not None
    with torch.no_grad():
        model.metric.classifier.embedding.net.first.weight.mul_(1.5)  # as training might
    model.save(tmp_path)
    refuses(otad.load, tmp_path, match="class.*Own")
    refuses(otad.load, tmp_path, net=Own(2.0), match="net: expected a module that gives")
    loaded = otad.load(tmp_path, net=Own)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.query_keys(x), model.query_keys(x))
    assert not torch.equal(loaded.query_keys(x), otad.metric_of(own, input_shape=(2, 3))(x))


def test_what_is_no_classifier_is_refused() -> None:
    net = classifier()
    refuses(otad.metric_of, classifier("regression"), match="classifier.*regression")
    refuses(otad.metric_of, net, keys="hidden", match="keys.*'hidden'")
    refuses(otad.metric_of, net, key_norm="cube", match="key_norm.*'cube'")
    two = otad.nets.fc_resnet((6,), 2, blocks=1)
    refuses(otad.metric_of, two, keys="logits", key_norm="unit", match="keys on a line, got 'unit'")
    refuses(otad.metric_of, net, bounds=(0.0, 1.0), match="options.*bounds")
    refuses(otad.metric_of, nn.Flatten(), input_shape=(2, 3), match="Linear")
    with torch.no_grad():
        net.head.weight.copy_(net.head.weight[:1].expand(CLASSES, -1))
        refuses(otad.metric_of, net, match="logits differ.*equal rows")
        net.head.weight[0, 0] = torch.nan
    refuses(otad.metric_of, net, match="head.weight.*nan")


def test_damaged_descriptions_are_refused() -> None:
    config = json.loads(json.dumps(otad.metric_of(classifier(), keys="features").config()))
    assert build_metric(config).key_dim == CLASSES - 1
    for name, value in (("keys", "hidden"), ("key_dim", 0), ("kind", "os")):
        refuses(build_metric, config | {name: value}, match=name)
    refuses(build_metric, config | {"classifier": {"kind": "os"}}, match="kind.*'os'")
    refuses(build_metric, {"kind": "classifier", "keys": "logits"}, match="options of classifier")
