"""Prototypes: a net that is the map of its own bank, trained for wide margins."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from training.small_vision import moons

from otad.cip.whole_bank.lifted_potential import least_lipschitz, lifted_potential
from otad.errors import InputError
from otad.model.otad import OTAD, load
from otad.model.prototypes import PrototypeNet, class_means, prototype_net
from otad.nets import build, lifted_net
from otad.training import TrainConfig, train
from otad.training.backbone import scaled_margins


def prototypes(x: Tensor, y: Tensor, **options: int) -> PrototypeNet:
    return prototype_net(lifted_net((2,), 2, blocks=0, mean=0.5, std=2.0), x, y, **options)


def model_of(net: PrototypeNet) -> OTAD:
    bank = net.bank()
    potential = lifted_potential(bank.inputs, bank.features, net.lift)
    return OTAD(net, bank, scope="global", potential=potential).eval()


def test_all_inputs_or_some_of_each_class_are_smoothed() -> None:
    x, y = moons(60)
    everything = prototypes(x, y, neighbors=3)
    expected = class_means((x - 0.5) / 2, y, 3)
    torch.testing.assert_close(everything.points.detach(), expected)
    assert torch.equal(everything.labels, y)
    some = prototypes(x, y, neighbors=3, per_class=7)
    assert torch.bincount(some.labels).tolist() == [7, 7]
    taken = torch.cdist(some.points.detach(), expected).argmin(1)
    torch.testing.assert_close(some.points.detach(), expected[taken])
    assert torch.equal(some.labels, y[taken])


def test_the_net_is_the_model_of_its_bank() -> None:
    x, y = moons(80)
    net = prototypes(x, y, neighbors=3)
    model = model_of(net)
    assert model.smoothness == pytest.approx(2, abs=1e-5)
    test = moons(300)[0][100:] + 0.2
    torch.testing.assert_close(net(test), model(test), rtol=0, atol=1e-5)
    at_points = model(net.points.detach() * 2 + 0.5)
    assert torch.equal(at_points.argmax(1), y)
    assert least_lipschitz(test, net(test).detach()) <= 0.5 + 1e-5  # in units of the input


def test_a_smoothness_of_two_leaves_no_point_out() -> None:
    """As is proved for exact heights: none may be rounded up."""
    for seed in range(10):
        drawn_by = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 2, generator=drawn_by)
        net = prototypes(x, torch.arange(40) % 2, neighbors=1)
        model = OTAD(net, net.bank(), scope="global", smoothness=2.0).eval()
        assert len(model.potential.left_out) == 0
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-5)


def test_training_widens_the_margins_of_the_very_model() -> None:
    x, y = moons(400)
    net = prototypes(x[:200], y[:200], neighbors=2, per_class=6)
    x, y, test, labels = x[:200], y[:200], x[200:], y[200:]
    before = scaled_margins(model_of(net)(test), labels, net.head)
    config = TrainConfig(
        epochs=12,
        batch_size=50,
        optimizer="adamw",
        learning_rate=0.02,
        weight_decay=0.0,
        loss="margin",
        target_margin=0.12,
    )
    train(net, (x, y, test, labels), config)
    after = scaled_margins(model_of(net)(test), labels, net.head)
    assert after.clamp(0, 0.12).mean() > 1.1 * before.clamp(0, 0.12).mean()
    assert model_of(net).smoothness == pytest.approx(2, abs=1e-5)


def test_rivals_are_never_stale_in_evaluation() -> None:
    x, y = moons(40)
    net = prototypes(x, y, neighbors=1).eval()
    net(x)
    with torch.no_grad():
        net.points.mul_(-3).add_(torch.rand(40, 2, generator=torch.Generator().manual_seed(0)))
    fresh = PrototypeNet((2,), 2, n_points=40, mean=0.5, std=2.0).eval()
    fresh.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(x), fresh(x), rtol=0, atol=0)


def test_answers_in_inference_mode_leave_gradients_possible() -> None:
    x, y = moons(40)
    with torch.inference_mode():
        net = prototypes(x, y, neighbors=1).eval()
        plain = net(x)
    query = x.clone().requires_grad_()
    net(query).sum().backward()
    assert query.grad is not None
    torch.testing.assert_close(net(x), plain, rtol=0, atol=0)


def test_rivals_follow_the_labels_in_evaluation() -> None:
    x, y = moons(40)
    net = prototypes(x, y, neighbors=1).eval()
    before = net(x)
    net.labels.copy_(y[torch.randperm(40, generator=torch.Generator().manual_seed(0))])
    fresh = PrototypeNet((2,), 2, n_points=40, mean=0.5, std=2.0).eval()
    fresh.load_state_dict(net.state_dict())
    torch.testing.assert_close(net(x), fresh(x), rtol=0, atol=0)
    net.labels = y.clone()
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)


def test_autocast_changes_nothing() -> None:
    x, y = moons(40)
    net = prototypes(x, y, neighbors=2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = net(x)
    torch.testing.assert_close(inside.float(), net(x), rtol=1e-2, atol=1e-2)


def test_config_and_state_make_it_again() -> None:
    x, y = moons(40)
    net = prototypes(x, y, per_class=5)
    again = build(json.loads(json.dumps(net.config())))
    again.load_state_dict(net.state_dict())
    torch.testing.assert_close(again(x), net(x), rtol=0, atol=0)


def test_a_model_is_saved_and_loaded_with_its_prototypes(tmp_path) -> None:
    x, y = moons(40)
    model = model_of(prototypes(x, y, neighbors=2))
    model.save(tmp_path)
    loaded = load(tmp_path)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)


def test_refusals() -> None:
    x, y = moons(40)
    with pytest.raises(InputError, match="per_class: expected an integer of at least 1, got 0"):
        prototypes(x, y, per_class=0)
    with pytest.raises(InputError, match="task: expected 'classification', got 'regression'"):
        PrototypeNet((2,), 1, n_points=3, task="regression")
    with pytest.raises(InputError, match="labels: expected two classes at least"):
        prototypes(x, torch.zeros_like(y))(x)
    assert math.isfinite(float(prototypes(x, y).bank().features.sum()))


def test_a_net_in_float64_gives_points_in_float64() -> None:
    x = torch.rand(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = prototype_net(lifted_net((4,), 2, blocks=0).double(), x, torch.arange(30) % 2)
    assert points.points.dtype == torch.float64
    model = OTAD(points, points.bank(), scope="global")
    torch.testing.assert_close(model(x), points(x), rtol=1e-5, atol=1e-6)
