"""Settings and learning rates."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from otad.errors import InputError
from otad.nets import vision_transformer
from otad.training import MetricConfig, TrainConfig, recipe


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"epochs": 10, "warmup": 2}, {0: 0.0, 1: 0.1, 2: 0.2, 6: 0.1, 10: 0.0}),
        ({"epochs": 8, "schedule": "constant"}, {0: 0.2, 3.5: 0.2, 8: 0.2}),
        ({"epochs": 8, "schedule": "step"}, {0: 0.2, 3.9: 0.2, 4.1: 0.02, 5.9: 0.02, 6.1: 0.002}),
    ],
)
def test_the_rate_follows_the_schedule(options: dict, rates: dict[float, float]) -> None:
    config = TrainConfig(learning_rate=0.2, **options)
    assert {epoch: config.rate_at(epoch) for epoch in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.7, "weight_decay": 0.1, "lr": 0.2}),
        ("adamw", torch.optim.AdamW, {"betas": (0.7, 0.999), "weight_decay": 0.1, "lr": 0.2}),
    ],
)
def test_the_optimizers_get_the_settings(name: str, kind: type, settings: dict) -> None:
    config = TrainConfig(optimizer=name, momentum=0.7, weight_decay=0.1, learning_rate=0.2)
    made = config.make_optimizer(torch.nn.Linear(2, 2))
    assert isinstance(made, kind)
    assert made.defaults | settings == made.defaults


def test_matrices_alone_are_decayed() -> None:
    net = vision_transformer((3, 8, 8), 3, width=8, blocks=1, heads=2, class_token=True)
    config = TrainConfig(decay_on="matrices", weight_decay=0.3)
    decayed, undecayed = config.make_optimizer(net).param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    layers = ("patch_embed.proj", "head", *(f"blocks.0.{name}" for name in block))
    assert {names.pop(id(weight)) for weight in decayed["params"]} == {
        f"{name}.weight" for name in layers
    }
    assert {id(parameter) for parameter in undecayed["params"]} == set(names)
    assert {"pos_embed", "cls_token", "blocks.0.norm1.weight"} < set(names.values())


def test_recipes_can_be_changed_but_only_by_settings_that_exist() -> None:
    config = recipe("vit_cifar10", energy_weight=1e-5, epochs=20)
    assert (config.energy_weight, config.epochs, config.optimizer) == (1e-5, 20, "adamw")
    assert recipe("fc") == TrainConfig(energy_weight=0.01)
    with pytest.raises(InputError, match=r"changes: expected settings of TrainConfig, .* 'rate'"):
        recipe("fc", rate=0.1)
    with pytest.raises(InputError, match="recipe: expected one of fc, vit_cifar10, got 'vit'"):
        recipe("vit")


BAD: dict[type, dict[str, list]] = {
    TrainConfig: {
        "epochs": [0], "batch_size": [1.5], "log_every": [True], "seed": [-1, 2**64],
        "optimizer": ["lion"], "schedule": ["linear"], "decay_on": ["some"], "device": ["abacus"],
        "learning_rate": [0.0, math.nan], "momentum": [1.0], "weight_decay": [-0.1],
        "warmup": [30], "gradient_clip": [-1], "ema": [1.0], "augment": ["wild"],
        "loss": ["neighborhood"], "energy_weight": ["much"], "label_smoothing": [1.0],
        "mixing": [1.5, np.float32(0.5)], "target_margin": [0.0], "pair_smoothness": [0.0],
        "pair_weight": [-1.0],
    },
    MetricConfig: {
        "loss": ["angular"], "references": ["queue"], "temperature": [0.0, np.float32(0.1)],
        "margin": [-1.0, np.float32(0.1)], "batch_size": [1], "n_neighbors": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind in BAD for name, bad in BAD[kind].items() for value in bad],
)
def test_bad_settings_are_refused(kind: type, name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name}: expected .*, got {re.escape(repr(value))}"):
        kind(**{name: value})


def test_losses_of_all_pairs_need_references_in_the_batch() -> None:
    with pytest.raises(InputError, match=r"references: expected 'batch' .*'triplet' with 'bank'"):
        MetricConfig(loss="triplet", references="bank")
