"""What training learns, reports and refuses, and its settings."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from training.small_vision import images, small_cnn, weights_print

from otad.nets import SequentialBackbone, fc_resnet, lifted_net, plain_net, vision_transformer
from otad.training import MetricConfig, TrainConfig, recipe, train, train_metric
from otad.training.adversary import Adversary
from otad.training.supervised import EpochRecord, TrainResult

SHORT = TrainConfig(epochs=4, batch_size=32, learning_rate=0.05)


def _two_moons(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points in the unit square, labeled by a parabola."""
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 1] > 4 * (x[:, 0] - 0.5) ** 2).long()


def _net(seed: int = 0, **options):
    return fc_resnet((2,), 2, blocks=2, hidden=16, seed=seed, bounds=(0, 1), **options)


def _weights(net: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in net.parameters()])


@pytest.mark.parametrize(
    ("variant", "optimizer", "rate"),
    [(fc_resnet, "adamw", 0.01), (plain_net, "sgd", 0.05)],
)
def test_a_curved_boundary_is_learned(variant, optimizer: str, rate: float) -> None:
    net = variant((2,), 2, blocks=2, hidden=16, bounds=(0, 1))
    data = (*_two_moons(512), *_two_moons(256, seed=1))
    config = TrainConfig(epochs=20, batch_size=32, learning_rate=rate, optimizer=optimizer)
    result = train(net, data, config)
    assert result.metric == "accuracy"
    assert result.final.val_score > 0.95
    hits = net(data[2]).argmax(1) == data[3]
    assert result.final.val_score == pytest.approx(hits.double().mean().item())
    assert not net.training


AUTOCAST = [partial(torch.autocast, "cpu", torch.bfloat16, enabled=on) for on in (False, True)]
METRIC = MetricConfig(epochs=2, batch_size=16, adversary=Adversary(0.1, steps=1, weight_share=0.1))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, *AUTOCAST])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("make", "fit", "config", "data"),
    [(_net, train, SHORT, _two_moons(64)), (small_cnn, train_metric, METRIC, images(12))],
    ids=["backbone", "metric"],
)
def test_the_mode_of_the_caller_does_not_matter(make, fit, config, data, mode, mixed) -> None:
    plainly, within = make(), make()
    config = replace(config, mixed_precision=mixed)
    fit(plainly, data, config)
    with mode():
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            within.eval()(data[0])  # whose cached casts of the weights have no gradients
        fit(within, data, config)
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == modes
    assert weights_print(plainly) == weights_print(within)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_cut_out_of_others_learn_alike_and_leave_those_alone(optimizer: str) -> None:
    whole, cut = _net(), _net()
    first = cut.blocks[0][0]
    wide = torch.cat([first.weight.detach(), torch.ones(16, 3)], dim=1)
    first.weight = nn.Parameter(wide[:, :2])
    for net in (whole, cut):
        train(net, _two_moons(64), replace(SHORT, optimizer=optimizer))
    assert bool((wide[:, 2:] == 1).all())
    torch.testing.assert_close(_weights(cut), _weights(whole))


def test_regression_learns_a_linear_function() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(3))
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
    net = fc_resnet((3,), 1, task="regression", blocks=1)
    result = train(net, (x, y, x, y), replace(SHORT, epochs=15, learning_rate=0.02))
    mse = (net(x) - y).square().mean().item()
    assert (result.metric, result.final.val_score) == ("mse", pytest.approx(mse, rel=1e-5))
    assert mse < 0.02 * y.var().item()
    assert result.final.loss == pytest.approx(result.final.train_score)


def test_the_energy_weight_lowers_the_energy() -> None:
    x, y = _two_moons(256)
    energies = []
    for weight in (0.0, 0.01, 1.0):
        net = _net()
        config = TrainConfig(epochs=8, batch_size=32, energy_weight=weight)
        result = train(net, (x, y), config)
        energies.append(net.transport(net.embed(x))[1].mean().item())
        assert result.final.energy == pytest.approx(energies[-1], rel=0.2)
    assert energies[0] > 2 * energies[1] > 4 * energies[2]


def test_the_seed_decides_everything_and_the_global_generator_nothing() -> None:
    def trained(global_seed: int, seed: int = 0) -> Tensor:
        layers = fc_resnet((2,), 2, blocks=1)
        block = nn.Sequential(layers.blocks[0], nn.Dropout(0.5))
        net = SequentialBackbone(None, [block], layers.head, input_shape=(2,))
        torch.manual_seed(global_seed)
        before = torch.random.get_rng_state()
        train(net, _two_moons(64), replace(SHORT, seed=seed))
        assert torch.equal(before, torch.random.get_rng_state())
        return _weights(net)

    first = trained(5)
    assert torch.equal(first, trained(6))
    assert not torch.equal(first, trained(5, seed=1))


def test_a_split_object_is_the_same_as_its_tensors() -> None:
    x, y = _two_moons(64)
    split = SimpleNamespace(train_x=x, train_y=y, val_x=x, val_y=y)
    assert train(_net(), split, SHORT) == train(_net(), (x, y, x, y), SHORT)
    split.val_x = split.val_y = None
    without = train(_net(), split, SHORT)
    assert without == train(_net(), SimpleNamespace(train_x=x, train_y=y), SHORT)
    assert without.final.val_score is None


def test_every_epoch_is_reported_and_logged(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[EpochRecord] = []
    with caplog.at_level(logging.INFO, logger="otad"):
        config = replace(SHORT, epochs=5, log_every=2)
        result = train(_net(), _two_moons(64), config, progress=seen.append)
    assert tuple(seen) == result.history
    assert [record.epoch for record in seen] == [1, 2, 3, 4, 5]
    assert [message[:8] for message in caplog.messages] == ["epoch 2:", "epoch 4:", "epoch 5:"]
    result = train(_net(), _two_moons(64), SHORT, progress=True)  # draws a bar
    captured = capsys.readouterr()
    assert captured.out == ""
    assert result.final.text("accuracy")[:24] in captured.err
    assert f"train {result.final.train_score:.2%}" in captured.err
    assert len(repr(result)) < 100


def test_the_best_epoch_is_by_validation_score_else_by_loss() -> None:
    def best(metric: str, *scores: float | None) -> int:
        epochs = zip((1, 2, 3), (0.3, 0.1, 0.2), scores, strict=True)
        records = [EpochRecord(epoch, loss, 0.0, 0.0, score) for epoch, loss, score in epochs]
        return TrainResult(tuple(records), metric, 0).best_epoch

    assert best("accuracy", None, None, None) == 2
    assert best("accuracy", 0.7, 0.8, 0.9) == 3
    assert best("mse", 0.7, 0.8, 0.9) == 1


_X, _Y = _two_moons(8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((_X, torch.ones_like(_Y)), "train_y: .*two classes, got only the label 1"),
        ((_X, _Y + 1), "train_y: .*label 2"),
        ((_X * float("nan"), _Y), "train_x: .*nan"),
        ((_X, _Y[:5]), r"train_y: .*\(8,\) .*target.* got \(5,\)"),
        ((_X, _Y, _X - 1, _Y), "val_x: expected values within"),
        ((_X, _Y, _X, _Y - 1), "val_y: .*label -1"),
        ((_X, _Y, _X), "data: expected train_x, train_y or .* got train_x, train_y, val_x"),
        ((_X, _Y, _X, _Y, _X), "val_y, more"),
        (SimpleNamespace(train_x=_X), "data: expected Split"),
    ],
)
def test_bad_data_is_refused(data, message: str) -> None:
    net = _net()
    before = _weights(net)
    refuses(train, net, data, SHORT, match=message)
    assert torch.equal(before, _weights(net))


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (_net, {"epochs": 50, "learning_rate": 1e6}, "learning_rate: .*converges"),
        (_net, {"device": "cuda"}, "device.*'cuda'"),
        (lambda: _net().requires_grad_(False), {}, "net: expected weights to train, got none"),
        (lambda: lifted_net((2,), 2, blocks=0), {}, "net: expected weights to train, got none"),
    ],
)
def test_runs_that_cannot_learn_are_refused(
    make, changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses(train, make(), _two_moons(64), replace(SHORT, **changes), match=message)


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
    refuses(recipe, "fc", rate=0.1, match=r"changes: expected settings of TrainConfig, .* 'rate'")
    refuses(recipe, "vit", match="recipe: expected one of fc, vit_cifar10, orthogonal, got 'vit'")


BAD: dict[type, dict[str, list]] = {
    TrainConfig: {
        "epochs": [0], "batch_size": [1.5], "log_every": [True], "seed": [-1, 2**64],
        "optimizer": ["lion"], "schedule": ["linear"], "decay_on": ["some"], "device": ["abacus"],
        "learning_rate": [0.0, math.nan], "momentum": [1.0], "weight_decay": [-0.1],
        "warmup": [30], "gradient_clip": [-1], "ema": [1.0], "augment": ["wild"],
        "loss": ["neighborhood"], "energy_weight": ["much"], "label_smoothing": [1.0],
        "mixing": [1.5, np.float32(0.5)], "mixing_by": ["cut"], "target_margin": [0.0],
        "pair_smoothness": [0.0], "pair_weight": [-1.0],
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
    refuses(kind, **{name: value}, match=f"{name}: expected .*, got {re.escape(repr(value))}")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            MetricConfig,
            {"loss": "triplet", "references": "bank"},
            "references.*'triplet'.*'bank'",
        ),
        (MetricConfig, {"references": "bank", "cuda_graph": True}, "cuda_graph: .*'bank'"),
        (TrainConfig, {"cuda_graph": True}, "cuda_graph: expected False unless with whole_batches"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(kind, settings: dict, message: str) -> None:
    refuses(kind, **settings, match=message)
