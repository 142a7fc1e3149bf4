"""The user's own modules as a backbone."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import remove_spectral_norm, spectral_norm

from otad.errors import InputError
from otad.nets import SequentialBackbone, adapt, build


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.fixture
def x() -> Tensor:
    return torch.rand(5, 6, generator=torch.Generator().manual_seed(0))


def test_an_adapted_sequential_computes_the_same(x: Tensor) -> None:
    plain = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3))
    net = adapt(plain)
    assert torch.equal(net(x), plain(x))
    z, energy = net.transport(net.embed(x))
    assert torch.equal(z, plain[:-1](x))
    torch.testing.assert_close(energy, ((z - x) ** 2).sum(1))
    assert net.head.weight is plain[-1].weight
    assert (net.input_shape, net.dim, net.n_outputs) == ((6,), 6, 3)
    assert adapt(net) is net
    flat = adapt(nn.Sequential(nn.Flatten(), *plain), input_shape=(2, 3), bounds=(0, 1))
    assert torch.equal(flat(x.reshape(5, 2, 3)), plain(x))
    linear = adapt(nn.Sequential(nn.Linear(6, 2, bias=False)))  # has no transport
    z, energy = linear.transport(linear.embed(x))
    assert torch.equal(z, x)
    assert torch.equal(energy, torch.zeros(5))


def test_own_residual_blocks_have_the_paper_s_energy(x: Tensor) -> None:
    blocks = [_Residual(nn.Linear(4, 4)) for _ in range(2)]
    net = SequentialBackbone(nn.Linear(6, 4), blocks, nn.Linear(4, 3), input_shape=(6,))
    e = net.embed(x)
    first = blocks[0].inner(e)
    second = blocks[1].inner(e + first)
    expected = (first**2).sum(1) + (second**2).sum(1)
    torch.testing.assert_close(net.transport(e)[1], expected)


def test_a_stack_of_known_layers_is_rebuilt_from_json(x: Tensor) -> None:
    embed = nn.Sequential(nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.LeakyReLU(0.2))
    blocks = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.3), nn.Softplus(2.0))]
    net = SequentialBackbone(embed, blocks, nn.Linear(4, 3), input_shape=(6,), mean=0.1).eval()
    before = torch.random.get_rng_state()
    twin = build(json.loads(json.dumps(net.config()))).eval()
    assert torch.equal(before, torch.random.get_rng_state())
    twin.load_state_dict(net.state_dict())
    assert torch.equal(net(x), twin(x))
    assert str(net) == str(twin)


class _Halved(nn.Module):
    """Works in place, without an attribute that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), _Halved()])
def test_layers_that_work_in_place_leave_what_they_are_given(layer: nn.Module, x: Tensor) -> None:
    x = x - 0.5
    net = SequentialBackbone(None, [layer, layer], nn.Linear(6, 2), input_shape=(6,), mean=-0.25)
    assert torch.equal(net.mean, torch.full((6,), -0.25))  # nor did the look at the dimensions
    e = net.embed(x)
    before = e.clone()
    z, energy = net.transport(e)
    assert torch.equal(e, before)
    first = layer(before.clone())
    second = layer(first.clone())
    assert torch.equal(z, second)
    torch.testing.assert_close(energy, ((first - before) ** 2 + (second - first) ** 2).sum(1))
    e.requires_grad_()
    (slope,) = torch.autograd.grad(net.transport(e)[1].sum(), e)
    assert bool((slope != 0).any())


def test_an_embedding_that_works_in_place_leaves_inputs_and_mean(x: Tensor) -> None:
    x, embed = x - 0.5, nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())
    net = SequentialBackbone(embed, [], nn.Linear(6, 2), input_shape=(6,), mean=-0.25)
    before = x.clone()
    assert torch.equal(net.embed(x), (before + 0.25).relu())
    assert torch.equal(x, before)
    assert torch.equal(net.mean, torch.full((6,), -0.25))
    norm = nn.BatchNorm1d(6)  # the look at the dimensions leaves batch statistics too
    adapt(nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2)))
    assert norm.training
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(3, 2), "a Backbone or a non-empty nn.Sequential, got Linear"),
        (nn.Sequential(), "got Sequential; give its parts"),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), "nn.Linear as last layer, got Softmax"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), "input_shape: .*None for ReLU"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), "at least 2 for classification"),
        (nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 2)), "dimension 9 like .* got 5: .*space"),
        (nn.Sequential(spectral_norm(nn.Linear(6, 2))), "head: .* without parametrization"),
    ],
)
def test_a_net_that_cannot_be_split_is_refused(net: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        adapt(net)


@pytest.mark.parametrize(
    ("embed", "blocks", "head", "shape", "message"),
    [
        (None, [nn.Linear(5, 6)], nn.Linear(6, 2), (6,), r"blocks\[0\]: .*takes .* \(1, 6\)"),
        (nn.Identity(), [], nn.Linear(6, 2), (2, 6), r"embed: .*shape \(B,d\), got"),
        (None, [], nn.Identity(), (6,), r"head: expected an nn\.Linear .*Identity"),
        (nn.Linear(6, 4), [], nn.Linear(5, 2), (6,), "in_features .* 4 like .*, got 5: .*space"),
    ],
)
def test_modules_that_do_not_fit_are_named(embed, blocks, head, shape, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SequentialBackbone(embed, blocks, head, input_shape=shape)


def test_modules_that_json_cannot_describe_are_refused() -> None:
    blocks = [_Residual(nn.Linear(6, 6))]
    net = SequentialBackbone(None, blocks, nn.Linear(6, 2), input_shape=(6,))
    with pytest.raises(InputError, match=r"got _Residual; subclass Backbone"):
        net.config()
    layer = nn.Linear(6, 6)
    net = adapt(nn.Sequential(layer, nn.Linear(6, 2)))
    config = net.config()
    spectral_norm(layer)
    with pytest.raises(InputError, match=r"Linear with weights .*, got .*_orig"):
        net.config()
    remove_spectral_norm(layer)
    assert net.config() == config
    config["blocks"][0]["layers"][0]["layer"] = "os.system"
    with pytest.raises(InputError, match=r"layer: .*Identity.* got 'os\.system'"):
        build(config)
