"""Weights moved for a step: closed forms, one step by hand, what autocast must not keep."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets.metric_nets import CNNMetric
from otad.training.adversary import Adversary, perturbed_weights, steepest_perturbation
from otad.training.metric import MetricConfig, train_metric
from otad.training.metric_losses import neighborhood_loss

SHARE = 0.1
ONE_STEP = MetricConfig(
    epochs=1, batch_size=24, optimizer="sgd", learning_rate=0.1, schedule="constant"
)
STRAIGHT = Adversary(0.3, steps=1, random_start=False)


def _images() -> tuple[Tensor, Tensor]:
    y = torch.arange(24) % 3
    x = 0.5 * torch.rand(24, 1, 8, 8, generator=torch.Generator().manual_seed(4))
    x[torch.arange(24), 0, 2 * y] += 0.5
    return x, y


def _metric() -> CNNMetric:
    return CNNMetric((1, 8, 8), widths=(4, 8), key_dim=5, bounds=(0, 1))


def test_each_matrix_moves_by_its_share_along_its_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    net.append(nn.Linear(2, 2).double().requires_grad_(False))
    net.register_parameter("unused", nn.Parameter(torch.ones(2, 2).double()))
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = steepest_perturbation(net(x).square().sum(), net, SHARE)
    net(x).square().sum().backward()
    assert [id(weight) for weight, _ in pairs] == [
        id(net.unused), id(net[0].weight), id(net[1].weight)
    ]  # fmt: skip
    assert not pairs[0][1].any()  # no gradient, no way to go
    for weight, shift in pairs[1:]:
        assert shift.norm().item() == pytest.approx(SHARE * weight.norm().item())
        cosine = nn.functional.cosine_similarity(shift.flatten(), weight.grad.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1.0)


def test_without_a_matrix_in_training_there_is_nothing_to_move() -> None:
    metric = _metric()
    for weight in metric.parameters():
        weight.requires_grad_(weight.dim() == 1)
    config = replace(ONE_STEP, adversary=replace(STRAIGHT, weight_share=SHARE))
    with pytest.raises(InputError, match=r"weight_share: expected 0 for a net .* got 0\.1"):
        train_metric(metric, _images(), config)


def test_weights_come_back_to_the_last_bit_even_from_an_error() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 1e-8]]))
    seen: list[list[list[float]]] = []

    def fail_within() -> None:
        with perturbed_weights([(weight, torch.tensor([[1e8, 1.0]]))]):
            seen.append(weight.tolist())
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert seen == [[[1e8, 1.0]]]
    assert torch.equal(weight.detach(), torch.tensor([[1.0, 1e-8]]))


def test_a_step_is_that_of_the_moved_weights_taken_from_the_old_ones() -> None:
    x, y = _images()
    metric = _metric()
    by_hand = copy.deepcopy(metric)
    adversary = replace(STRAIGHT, weight_share=SHARE)
    train_metric(metric, (x, y), replace(ONE_STEP, adversary=adversary))

    own = torch.arange(24)  # the order of a single batch is of no importance

    def loss(keys: Tensor, references: Tensor) -> Tensor:
        return neighborhood_loss(keys, y, references, y, temperature=0.1, own=own)

    by_hand.eval()
    clean = by_hand(x).detach()
    moved = STRAIGHT.attack(by_hand, x, lambda keys: loss(keys, clean), x)
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
        expected = weight.detach() - ONE_STEP.learning_rate * other.grad
        torch.testing.assert_close(trained.detach(), expected, atol=1e-5, rtol=1e-4)


def _first_loss(share: float, *, mixed_precision: bool) -> float:
    adversary = replace(STRAIGHT, weight_share=share)
    config = replace(ONE_STEP, adversary=adversary, mixed_precision=mixed_precision)
    return train_metric(_metric(), _images(), config).final.loss


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_the_loss_is_that_of_the_moved_weights_whatever_the_precision(
    mixed_precision: bool,
) -> None:
    there, here = (_first_loss(one, mixed_precision=mixed_precision) for one in (SHARE, 0.0))
    assert there > 1.3 * here
    assert there == pytest.approx(_first_loss(SHARE, mixed_precision=False), rel=0.1)
