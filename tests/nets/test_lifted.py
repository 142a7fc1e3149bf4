"""Lifted nets: inputs stay where they are, answers go to coordinates that no input reaches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otad.errors import InputError
from otad.nets import lifted_net
from otad.training import TrainConfig, train


def _inputs(rows: int, *shape: int) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(1))


def test_an_input_is_embedded_with_zeros_behind_it() -> None:
    net = lifted_net((2, 3), 4, mean=0.4, std=0.3)
    x = _inputs(5, 2, 3)
    embedded = net.embed(x)
    assert (net.dim, net.lift, embedded.shape) == (10, 4, (5, 10))
    torch.testing.assert_close(embedded[:, :6], ((x - 0.4) / 0.3).flatten(1))
    assert not embedded[:, 6:].any()


def test_transport_writes_into_the_lift_alone_and_sums_its_steps() -> None:
    net = lifted_net((6,), 3, blocks=2, hidden=(7, 5))
    embedded = net.embed(_inputs(4, 6))
    features, energy = net.transport(embedded)
    first = net.blocks[0](embedded)
    second = net.blocks[1](torch.cat([embedded[:, :6], first], dim=1))
    torch.testing.assert_close(features[:, :6], embedded[:, :6], rtol=0, atol=0)
    torch.testing.assert_close(features[:, 6:], first + second)
    torch.testing.assert_close(energy, first.square().sum(1) + second.square().sum(1))
    torch.testing.assert_close(net(_inputs(4, 6)), first + second)
    assert [layer.out_features for layer in net.blocks[0][::2]] == [7, 5, 3]


def test_the_head_reads_the_lift_and_training_leaves_it_alone() -> None:
    net = lifted_net((6,), 3, hidden=(8,))
    x, y = _inputs(30, 6), torch.arange(30) % 3
    before, weights = net.head.weight.clone(), net.blocks[0][0].weight.clone()
    config = TrainConfig(epochs=2, batch_size=10, weight_decay=0.1, ema=0.5)
    train(net, (x, y), config)
    torch.testing.assert_close(net.head.weight, before, rtol=0, atol=0)
    torch.testing.assert_close(before, torch.eye(9)[6:])
    assert not net.head.bias.any()
    assert not torch.equal(net.blocks[0][0].weight, weights)


def test_without_blocks_the_answer_is_nothing() -> None:
    net = lifted_net((6,), 3, blocks=0)
    features, energy = net.transport(net.embed(_inputs(4, 6)))
    torch.testing.assert_close(features, net.embed(_inputs(4, 6)))
    assert not energy.any()


def test_regression_lifts_one_coordinate_and_takes_the_units_of_targets() -> None:
    net = lifted_net((6,), 1, task="regression")
    x = _inputs(4, 6)
    plain = net(x)
    net.head.take_units(5.0, 2.0)
    torch.testing.assert_close(net(x), 5 + 2 * plain)
    assert (net.lift, net.dim, plain.shape) == (1, 7, (4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": ()}, "hidden.*none"),
        ({"hidden": (0,)}, "hidden: expected an integer of at least 1, got 0"),
        ({"blocks": -1}, "blocks: expected an integer of at least 0, got -1"),
        ({"task": "regression"}, "n_outputs: expected 1 for regression"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lifted_net((6,), 3, **options)
