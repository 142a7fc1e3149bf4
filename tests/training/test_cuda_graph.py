"""Steps captured as CUDA graphs; most of it needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from training.small_vision import images, small_vit, weights_print

from otad.errors import InputError
from otad.nets.lipschitz import LipschitzMetric
from otad.nets.metric_nets import ResNetMetric
from otad.training import MetricConfig, recipe, train, train_metric
from otad.training.adversary import Adversary

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHORT = {"epochs": 4, "batch_size": 16, "warmup": 1, "ema": 0.8, "device": "cuda"}
WHOLE = recipe("vit_cifar10", energy_weight=1e-4, mixed_precision=False, **SHORT)
METRIC = MetricConfig(**SHORT)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (WHOLE, {"optimizer": "sgd"}, "only with optimizer 'adamw'.*'sgd'"),
        (WHOLE, {"whole_batches": False}, "whole_batches=False"),
        (METRIC, {"loss": "triplet"}, "a loss of neighborhood, means.*'triplet'"),
        (METRIC, {"references": "bank"}, "'bank'"),
    ],
)
def test_steps_that_cannot_be_captured_are_refused(config, changes: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"cuda_graph: expected .*{message}"):
        replace(config, cuda_graph=True, **changes)


def test_a_metric_that_solves_systems_is_refused() -> None:
    metric = LipschitzMetric((3, 8, 8), widths=(4, 8), key_dim=4)
    config = replace(METRIC, cuda_graph=True, device="cpu")
    with pytest.raises(InputError, match="cuda_graph: expected False for a LipschitzMetric"):
        train_metric(metric, images(50), config)


def same_when_captured(make: Callable, fit: Callable, config, tolerance: float) -> None:
    plain, captured = make(), make()
    expected = fit(plain, images(200), config)
    result = fit(captured, images(200), replace(config, cuda_graph=True))
    for one, two in zip(result.history, expected.history, strict=True):
        found, known = (one.loss, one.energy), (two.loss, two.energy)
        assert found == pytest.approx(known, rel=tolerance)
    for one, two in zip(captured.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


@needs_gpu
@pytest.mark.parametrize(
    "adversary", [None, Adversary(0.3, steps=3), Adversary(0.3, steps=3, weight_share=0.01)]
)
@pytest.mark.parametrize("loss", ["neighborhood", "means"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_captured_training_of_a_metric_is_the_same(adversary, loss: str, mixed: bool) -> None:
    settings = {"adversary": adversary, "loss": loss, "mixed_precision": mixed}
    config = replace(METRIC, augment="light", channels_last=True, **settings)
    make = partial(ResNetMetric, (3, 8, 8), widths=(4, 8), depth=1, key_dim=4, bounds=(0, 1))
    # Rounding changes the steps of the adversary, and these the training.
    same_when_captured(make, train_metric, config, 5e-2 if mixed or adversary else 1e-3)


@needs_gpu
@pytest.mark.parametrize(("mixed", "tolerance"), [(False, 1e-4), (True, 1e-2)])
def test_a_captured_training_is_the_same(mixed: bool, tolerance: float) -> None:
    same_when_captured(small_vit, train, replace(WHOLE, mixed_precision=mixed), tolerance)


def test_on_the_cpu_nothing_is_captured() -> None:
    config = replace(WHOLE, device="cpu")
    plain, asked = small_vit(), small_vit()
    expected = train(plain, images(50), config)
    assert train(asked, images(50), replace(config, cuda_graph=True)) == expected
    assert weights_print(asked) == weights_print(plain)


@needs_gpu
def test_a_captured_training_resumes(tmp_path: Path) -> None:
    config = replace(WHOLE, cuda_graph=True)
    whole, parted = small_vit(), small_vit()
    train(whole, images(200), config)
    first = train(parted, images(200), config, checkpoint_dir=tmp_path, max_seconds=1e-6)
    assert not first.finished
    again = small_vit()
    assert train(again, images(200), config, checkpoint_dir=tmp_path).resumed_after == 1
    for one, two in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
