"""Prototypes: a net that is the map of its own bank; means, rivals and heights against loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training.small_vision import moons

from otad.cip.whole_bank.lifted_bank import least_lipschitz, lifted_potential
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.model.prototypes import (
    PrototypeNet,
    class_means,
    label_heights,
    nearest_rivals,
    prototype_net,
)
from otad.nets import lifted_net
from otad.training import TrainConfig, train
from otad.training.margins import scaled_margins


def prototypes(x: Tensor, y: Tensor, **options: int) -> PrototypeNet:
    return prototype_net(lifted_net((2,), 2, blocks=0, mean=0.5, std=2.0), x, y, **options)


def model_of(net: PrototypeNet) -> OTAD:
    bank = net.bank()
    potential = lifted_potential(bank.inputs, bank.features, net.lift)
    return OTAD(net, bank, scope="global", potential=potential).eval()


def test_all_inputs_or_some_of_each_class_are_smoothed() -> None:
    x, y = moons(60)
    everything = prototypes(x, y, neighbors=3)
    expected = class_means((x - 0.5) / 2, y, 3, torch.arange(60))
    torch.testing.assert_close(everything.points.detach(), expected)
    assert torch.equal(everything.labels, y)
    some = prototypes(x, y, neighbors=3, per_class=7)
    assert torch.bincount(some.labels).tolist() == [7, 7]
    taken = torch.cdist(some.points.detach(), expected).argmin(1)
    torch.testing.assert_close(some.points.detach(), expected[taken])
    assert torch.equal(some.labels, y[taken])


def test_points_with_the_same_neighbors_have_equal_means() -> None:
    """Sums in another order would differ in the last digit, and their answers be far too steep."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(50, 1, 3, generator=generator) * 100
    x = (groups + torch.randn(50, 5, 3, generator=generator)).flatten(0, 1)
    means = class_means(x, torch.zeros(250, dtype=torch.int64), 5, torch.arange(250))
    assert (means.view(50, 5, 3) == means.view(50, 5, 3)[:, :1]).all()


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
    for seed in range(5):
        drawn_by = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 2, generator=drawn_by)
        net = prototypes(x, torch.arange(40) % 2, neighbors=1)
        model = OTAD(net, net.bank(), scope="global", smoothness=2.0).eval()
        assert len(model.potential.left_out) == 0
        torch.testing.assert_close(net(x), model(x), rtol=0, atol=1e-5)


def test_training_widens_the_margins_of_the_very_model() -> None:
    x, y = moons(400)
    x, y, test, labels = x[:200], y[:200], x[200:], y[200:]
    net = prototypes(x, y, neighbors=2, per_class=6)
    before = scaled_margins(model_of(net)(test), labels, net.head)
    config = TrainConfig(
        epochs=12, batch_size=50, optimizer="adamw", learning_rate=0.02, weight_decay=0.0,
        loss="margin", target_margin=0.12,
    )  # fmt: skip
    train(net, (x, y, test, labels), config)
    after = scaled_margins(model_of(net)(test), labels, net.head)
    assert after.clamp(0, 0.12).mean() > 1.1 * before.clamp(0, 0.12).mean()
    assert model_of(net).smoothness == pytest.approx(2, abs=1e-5)


def test_rivals_are_never_stale_in_evaluation() -> None:
    x, y = moons(40)
    net, drawn_by = prototypes(x, y, neighbors=1).eval(), torch.Generator().manual_seed(0)

    def refreshed(net: PrototypeNet) -> PrototypeNet:
        fresh = PrototypeNet((2,), 2, n_points=40, mean=0.5, std=2.0).eval()
        fresh.load_state_dict(net.state_dict())
        return fresh

    before = net(x)
    net.labels.copy_(y[torch.randperm(40, generator=drawn_by)])
    assert torch.equal(net(x), refreshed(net)(x))
    net.labels = y.clone()
    assert torch.equal(net(x), before)
    with torch.no_grad():
        net.points.mul_(-3).add_(torch.rand(40, 2, generator=drawn_by))
    assert torch.equal(net(x), refreshed(net)(x))


def test_modes_of_the_caller_do_not_matter() -> None:
    x, y = moons(40)
    with torch.inference_mode():
        net = prototypes(x, y, neighbors=1).eval()
        plain = net(x)
    query = x.clone().requires_grad_()
    net(query).sum().backward()
    assert query.grad is not None
    torch.testing.assert_close(net(x), plain, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(net(x).float(), plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda x, y: prototypes(x, y, per_class=0), "per_class: .* at least 1, got 0"),
        (lambda x, y: prototypes(x, y, neighbors=0), "neighbors: .* at least 1, got 0"),
        (
            lambda x, y: prototype_net(lifted_net((2,), 1, task="regression"), x, x[:, 0]),
            "neighbors: expected 1 in regression.* neighbors 20",
        ),
        (lambda x, y: prototypes(x, torch.zeros_like(y))(x), "labels: .*two classes.* only 0"),
        (lambda x, y: label_heights(x, y[:4]), r"labels: expected shape \(40,\)"),
    ],
)
def test_refusals(act: Callable[[Tensor, Tensor], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        act(*moons(40))


def test_a_net_in_float64_gives_points_in_float64() -> None:
    x = torch.rand(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = prototype_net(lifted_net((4,), 2, blocks=0).double(), x, torch.arange(30) % 2)
    assert points.points.dtype == torch.float64
    model = OTAD(points, points.bank(), scope="global")
    torch.testing.assert_close(model(x), points(x), rtol=1e-5, atol=1e-6)


def labeled(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 3
    return torch.rand(size, 5, generator=generator) + labels[:, None], labels


def prototypes_at(points: Tensor, labels: Tensor) -> PrototypeNet:
    net = PrototypeNet((5,), 3, n_points=len(points))
    with torch.no_grad():
        net.points.copy_(points)
        net.labels.copy_(labels)
    return net


def test_means_are_over_the_nearest_of_the_class() -> None:
    points, labels = labeled(40)
    every = torch.arange(40)
    means = class_means(points, labels, 4, every)
    for row in range(40):
        members = points[labels == labels[row]]
        nearest = members[(members - points[row]).norm(dim=1).argsort()[:4]]
        torch.testing.assert_close(means[row], nearest.mean(0))
    torch.testing.assert_close(class_means(points, labels, 1, every), points, rtol=0, atol=0)
    centers = torch.stack([points[labels == label].mean(0) for label in range(3)])
    torch.testing.assert_close(class_means(points, labels, 99, every), centers[labels])


def test_rivals_are_the_nearest_of_other_classes() -> None:
    points, labels = labeled(40)
    rivals, heights = nearest_rivals(points, labels), label_heights(points, labels)
    for row in range(40):
        others = (labels != labels[row]).nonzero()[:, 0]
        apart = (points[others].double() - points[row].double()).norm(dim=1)
        assert rivals[row] == others[apart.argmin()]
        assert float(heights[row]) == pytest.approx(float(apart.min()) / math.sqrt(2), rel=1e-14)


@settings(max_examples=20)
@given(st.integers(3, 60), st.integers(0, 10**6), st.integers(1, 5))
def test_the_answers_are_1_lipschitz_and_the_highest_that_are(
    size: int, seed: int, neighbors: int
) -> None:
    points, labels = labeled(size, seed)
    points = class_means(points, labels, neighbors, torch.arange(size))
    bank = prototypes_at(points, labels).bank()
    assert torch.equal(bank.inputs, torch.nn.functional.pad(points, (0, 3)))
    assert torch.equal(bank.features[:, :5], points)
    answers, points = bank.features[:, 5:].double(), points.double()
    run, rise = torch.cdist(points, points), torch.cdist(answers, answers)
    assert bool((rise <= run * (1 + 1e-6) + 1e-6).all())
    # Half of the way to the nearest point of another class is certified, and no map can do more.
    margins = answers.gather(1, labels[:, None])[:, 0]
    assert torch.equal(answers.sum(1), margins)
    apart = run.masked_fill(labels[:, None] == labels, math.inf).amin(1)
    torch.testing.assert_close(margins / math.sqrt(2), apart / 2, rtol=1e-5, atol=1e-6)


def test_equal_points_of_two_classes_are_told() -> None:
    x, y = torch.tensor([[0.0], [1.0], [1.0], [2.0]]), torch.tensor([0, 1, 2, 2])
    net = prototype_net(lifted_net((1,), 3, blocks=0), x, y, neighbors=1)
    with pytest.warns(UserWarning, match="2 of 4 equal a point of another class"):
        answers = net.bank().features[:, 1:]
    assert (answers.norm(dim=1) > 0).tolist() == [True, False, False, True]
