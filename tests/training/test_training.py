"""What training learns, reports and refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from training.small_vision import CALLER_MODES

from otad.errors import InputError
from otad.nets import SequentialBackbone, fc_resnet, lifted_net, plain_net
from otad.training import EpochRecord, TrainConfig, TrainResult, train

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
    [(fc_resnet, "sgd", 0.1), (fc_resnet, "adamw", 0.01), (plain_net, "sgd", 0.05)],
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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@CALLER_MODES
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_the_mode_of_the_caller_does_not_matter(mode: Callable, mixed_precision: bool) -> None:
    plainly, within = _net(), _net()
    config = replace(SHORT, mixed_precision=mixed_precision)
    train(plainly, _two_moons(64), config)
    with mode():
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            within(_two_moons(64)[0])  # whose cached casts of the weights have no gradients
        train(within, _two_moons(64), config)
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == modes
    assert torch.equal(_weights(plainly), _weights(within))


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
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(400, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
    net = fc_resnet((3,), 1, task="regression", blocks=1)
    config = TrainConfig(epochs=40, batch_size=50, learning_rate=0.02, weight_decay=0.0)
    result = train(net, (x[:300], y[:300], x[300:], y[300:]), config)
    assert result.metric == "mse"
    assert result.final.val_score < 1e-3 * y.var().item()
    mse = (net(x[300:]) - y[300:]).square().mean().item()
    assert result.final.val_score == pytest.approx(mse, rel=1e-5)
    assert result.final.loss == pytest.approx(result.final.train_score)


def test_the_energy_weight_lowers_the_energy() -> None:
    x, y = _two_moons(512)
    energies = []
    for weight in (0.0, 0.01, 1.0):
        net = _net()
        config = TrainConfig(epochs=8, batch_size=32, energy_weight=weight)
        result = train(net, (x, y), config)
        energies.append(net.transport(net.embed(x))[1].mean().item())
        assert result.final.energy == pytest.approx(energies[-1], rel=0.2)
    assert energies[0] > 2 * energies[1] > 4 * energies[2]


def test_one_full_batch_step_is_the_gradient_of_the_paper_s_objective() -> None:
    x, y = _two_moons(20)
    net, reference = _net(), _net()
    config = TrainConfig(
        epochs=1, batch_size=20, learning_rate=0.1, weight_decay=0.02, momentum=0.0,
        schedule="constant", energy_weight=0.3,
    )  # fmt: skip
    record = train(net, (x, y), config).final
    z, energy = reference.transport(reference.embed(x))
    loss = nn.functional.cross_entropy(reference.head(z), y, reduction="sum") / 20
    (loss + 0.3 * energy.sum() / 20).backward()
    for trained, start in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, start - 0.1 * (start.grad + 0.02 * start))
    assert record.loss == pytest.approx(loss.item(), rel=1e-5)
    assert record.energy == pytest.approx(energy.mean().item(), rel=1e-5)


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
    by_tuple = train(_net(), (x, y, x, y), SHORT)
    split = SimpleNamespace(train_x=x, train_y=y, val_x=x, val_y=y)
    assert train(_net(), split, SHORT) == by_tuple
    without = train(_net(), SimpleNamespace(train_x=x, train_y=y, val_x=None, val_y=None), SHORT)
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
    assert str(result.final)[:12] in captured.err


def test_the_best_epoch_is_by_validation_score_else_by_loss() -> None:
    def result(metric: str, *scores: float | None) -> TrainResult:
        losses = (0.3, 0.1, 0.2)
        records = (
            EpochRecord(n, loss, 0.0, 0.0, score, 0.0)
            for n, (loss, score) in enumerate(zip(losses, scores, strict=True), start=1)
        )
        return TrainResult(tuple(records), metric, 0)

    assert result("accuracy", None, None, None).best_epoch == 2
    assert result("accuracy", 0.7, 0.8, 0.9).best_epoch == 3
    assert result("mse", 0.7, 0.8, 0.9).best_epoch == 1


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
        (SimpleNamespace(train_x=_X), "got train_x"),
        (SimpleNamespace(), "got SimpleNamespace"),
    ],
)
def test_bad_data_is_refused(data, message: str) -> None:
    net = _net()
    before = _weights(net)
    with pytest.raises(InputError, match=message):
        train(net, data, SHORT)
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
    with pytest.raises(InputError, match=message):
        train(make(), _two_moons(64), replace(SHORT, **changes))
