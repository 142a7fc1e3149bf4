"""Settings and learning rates."""

from __future__ import annotations

import pytest
import torch

from otad.errors import InputError
from otad.transport import TrainConfig


def test_the_cosine_rate_rises_through_the_warmup_and_falls_to_zero() -> None:
    config = TrainConfig(epochs=10, learning_rate=0.2, warmup=2)
    assert config.rate_at(0) == 0
    assert config.rate_at(1) == pytest.approx(0.1)
    assert config.rate_at(2) == pytest.approx(0.2)
    assert config.rate_at(6) == pytest.approx(0.1)
    assert config.rate_at(10) == pytest.approx(0.0)


def test_the_other_schedules() -> None:
    constant = TrainConfig(epochs=8, learning_rate=0.2, schedule="constant")
    assert {constant.rate_at(epoch) for epoch in (0, 3.5, 8)} == {0.2}
    steps = TrainConfig(epochs=8, learning_rate=0.2, schedule="step")
    rates = [steps.rate_at(epoch) for epoch in (0, 3.9, 4.1, 5.9, 6.1)]
    assert rates == pytest.approx([0.2, 0.2, 0.02, 0.02, 0.002])


def test_the_optimizers_get_the_settings() -> None:
    weight = [torch.nn.Parameter(torch.zeros(2))]
    sgd = TrainConfig(momentum=0.7, weight_decay=0.1).make_optimizer(weight)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.7, 0.1)
    adamw = TrainConfig(optimizer="adamw", momentum=0.8, weight_decay=0.1).make_optimizer(weight)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["betas"], adamw.defaults["weight_decay"]) == ((0.8, 0.999), 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size: expected an integer"),
        ({"log_every": True}, "log_every: expected an integer"),
        ({"seed": -1}, "seed: expected an integer of at least 0, got -1"),
        ({"optimizer": "lion"}, "optimizer: expected one of sgd, adamw, got 'lion'"),
        ({"schedule": "linear"}, "schedule: expected one of cosine, constant, step"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number of at least"),
        ({"learning_rate": float("nan")}, "learning_rate: .* got nan"),
        ({"momentum": 1.0}, "momentum: .* below 1, got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay: .* at least 0 .* got -0.1"),
        ({"energy_weight": "much"}, "energy_weight: .* got 'much'"),
        ({"epochs": 5, "warmup": 5}, "warmup: .* below 5, got 5"),
        ({"device": "abacus"}, "device: expected a device such as 'cpu', got 'abacus'"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig(**options)
