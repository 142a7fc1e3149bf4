"""Adversarial training: the ball, the ascent, perturbed weights, one step by hand."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training.small_vision import images, small_cnn, weights_print

from otad.errors import InputError
from otad.nets import PretrainedMetric
from otad.training import MetricConfig, train_metric
from otad.training.adversary import Adversary, perturbed_weights, steepest_perturbation
from otad.training.metric import encode
from otad.training.metric_losses import neighborhood_loss

SHARE = 0.1
ONE_STEP = MetricConfig(
    epochs=1, batch_size=24, optimizer="sgd", learning_rate=0.1, schedule="constant"
)
ORDERS = {"l2": 2, "linf": math.inf}


def straight(norm: str = "l2", share: float = 0.0) -> Adversary:
    return Adversary(0.3, steps=1, random_start=False, norm=norm, weight_share=share)


@pytest.mark.parametrize("norm", ORDERS)
@pytest.mark.parametrize("random_start", [True, False])
def test_the_adversary_stays_in_ball_and_bounds_and_climbs(norm: str, random_start: bool) -> None:
    metric, (x, y) = small_cnn().double(), images(48)
    x = x.double()
    references = encode(metric, x)

    def loss(keys: Tensor) -> Tensor:
        return neighborhood_loss(keys, y, references, y, own=torch.arange(len(y)))

    eps = {"l2": 0.5, "linf": 0.05}[norm]
    adversary = Adversary(eps, steps=10, random_start=random_start, norm=norm)
    metric.train()
    state = weights_print(metric)
    start = adversary.start(x, torch.Generator().manual_seed(0))
    moved = adversary.attack(metric, x, loss, start)
    assert torch.equal(start, x) is not random_start
    assert metric.training
    assert weights_print(metric) == state  # batch statistics did not change
    assert all(weight.grad is None for weight in metric.parameters())
    assert not moved.requires_grad
    lengths = (moved - x).flatten(1).norm(ORDERS[norm], dim=1)
    assert float(lengths.max()) <= eps + 1e-12
    assert 0 <= moved.min() <= moved.max() <= 1
    assert torch.equal(moved, adversary.attack(metric, x, loss, start))
    before, after = loss(encode(metric, x)).mean(), loss(encode(metric, moved)).mean()
    assert after > before + 0.1


@pytest.mark.parametrize(("step_size", "reached"), [(None, 0.6), (0.2, 0.2), (5.0, 0.6)])
@pytest.mark.parametrize(("norm", "direction"), [("l2", [2, -1, 2]), ("linf", [1, -1, 1])])
def test_one_step_on_a_linear_metric_is_the_exact_one(
    step_size: float | None, reached: float, norm: str, direction: list[int]
) -> None:
    metric = PretrainedMetric(nn.Identity(), input_shape=(3,), key_norm="free")
    slope = torch.tensor([2.0, -1.0, 2.0])
    adversary = Adversary(0.6, steps=1, step_size=step_size, random_start=False, norm=norm)
    x = torch.zeros(2, 3)
    moved = adversary.attack(metric, x, lambda keys: keys @ slope, x)
    unit = torch.tensor(direction) / torch.tensor(direction).double().norm(ORDERS[norm])
    torch.testing.assert_close(moved.double(), (reached * unit).expand(2, 3), rtol=1e-5, atol=1e-6)


def test_each_matrix_is_perturbed_by_its_share_along_its_gradient() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), frozen).double()
    net.register_parameter("unused", nn.Parameter(torch.ones(2, 2).double()))
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = steepest_perturbation(net(x).square().sum(), net, SHARE)
    net(x).square().sum().backward()
    perturbed = [net.unused, net[0].weight, net[1].weight]
    assert [id(weight) for weight, _ in pairs] == [id(weight) for weight in perturbed]
    assert not pairs[0][1].any()  # no gradient, no direction
    for weight, step in pairs[1:]:
        assert step.norm().item() == pytest.approx(SHARE * weight.norm().item())
        cosine = nn.functional.cosine_similarity(step.flatten(), weight.grad.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1.0)


def test_without_a_trained_matrix_there_is_nothing_to_perturb() -> None:
    metric = small_cnn()
    for weight in metric.parameters():
        weight.requires_grad_(weight.dim() == 1)
    config = replace(ONE_STEP, adversary=straight(share=SHARE))
    with pytest.raises(InputError, match=r"weight_share.*0\.1"):
        train_metric(metric, images(24), config)


def test_weights_are_restored_bit_for_bit_even_after_an_error() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 1e-8]]))

    def fail_within() -> None:
        with perturbed_weights([(weight, torch.tensor([[1e8, 1.0]]))]):
            assert weight.tolist() == [[1e8, 1.0]]
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert torch.equal(weight.detach(), torch.tensor([[1.0, 1e-8]]))


@pytest.mark.parametrize("norm", ORDERS)
def test_a_step_is_that_of_the_perturbed_weights_from_the_original_ones(norm: str) -> None:
    x, y = images(24)
    x, metric = x.double(), small_cnn().double()
    by_hand = copy.deepcopy(metric)
    adversary = straight(norm, SHARE)
    train_metric(metric, (x, y), replace(ONE_STEP, adversary=adversary))

    own = torch.arange(24)  # the order of a single batch does not matter

    def loss(keys: Tensor, references: Tensor) -> Tensor:
        keys, references = keys.float(), references.float()  # as in training
        return neighborhood_loss(keys, y, references, y, temperature=0.1, own=own)

    by_hand.eval()
    clean = by_hand(x).detach()
    moved = adversary.attack(by_hand, x, lambda keys: loss(keys, clean), x)
    elsewhere = copy.deepcopy(by_hand).train()
    loss(*elsewhere(torch.cat([moved, x])).chunk(2)).mean().backward()
    for weight in elsewhere.parameters():
        if weight.dim() > 1:
            weight.data += SHARE * weight.detach().norm() / weight.grad.norm() * weight.grad
    elsewhere.zero_grad()
    loss(*elsewhere(torch.cat([moved, x])).chunk(2)).mean().backward()
    for trained, weight, other in zip(
        metric.parameters(), by_hand.parameters(), elsewhere.parameters(), strict=True
    ):
        decayed = other.grad + ONE_STEP.weight_decay * weight.detach()
        expected = weight.detach() - ONE_STEP.learning_rate * decayed
        torch.testing.assert_close(trained.detach(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_the_loss_is_that_of_the_perturbed_weights_in_any_precision() -> None:
    def first_loss(share: float, mixed: bool) -> float:
        config = replace(ONE_STEP, adversary=straight(share=share), mixed_precision=mixed)
        return train_metric(small_cnn(), images(24), config).final.loss

    full, mixed = first_loss(0.02, False), first_loss(0.02, True)
    assert full > 1.3 * first_loss(0.0, False)
    assert mixed > 1.3 * first_loss(0.0, True)
    assert mixed == pytest.approx(full, rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("weight_share", value) for value in (-0.1, 1.0, math.nan, np.float32(0.1))),
        *(("eps", value) for value in (0.0, "1", None, np.float32(1))),  # no JSON number
        *(("step_size", -1), ("steps", 0), ("norm", "l1")),
    ],
)
def test_bad_adversaries_are_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name}: expected"):
        Adversary(**{"eps": 1.0} | {name: value})
