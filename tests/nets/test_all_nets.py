"""What every net does, whether of the library or of the user's own modules."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from factories import refuses
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils import remove_spectral_norm, spectral_norm

from otad import nets
from otad.nets import SequentialBackbone, adapt, build
from otad.nets.inputs import InputNet

SHAPE = (3, 8, 8)
TOKENS = {"patch": 4, "width": 12, "heads": 3}
VIT = TOKENS | {"blocks": 1, "class_token": True, "final_norm": True}
NETS: dict[str, tuple[type[InputNet], dict[str, Any]]] = {
    "residual": (nets.FCResNet, {"blocks": 2, "hidden": 5}),
    "plain": (nets.FCResNet, {"blocks": 2, "hidden": 5, "residual": False}),
    "lifted": (nets.LiftedNet, {"blocks": 2, "hidden": (7,)}),
    "vit": (nets.VisionTransformer, VIT),
    "resnet": (nets.ResNet, {"widths": (4, 6), "depth": 1, "activation": "silu"}),
    "linf_dist": (nets.LinfDistNet, {"widths": (6, 5)}),
    "orthogonal": (nets.OrthogonalNet, {"width": 16, "blocks": 2}),
    "soc": (nets.SOCNet, {"widths": (4, 6), "depth": 2}),
    "metric_resnet": (nets.ResNetMetric, {"widths": (4, 6), "depth": 1}),
    "metric_cnn": (nets.CNNMetric, {"widths": (4, 6)}),
    "metric_vit": (nets.ViTMetric, TOKENS | {"blocks": 2}),
    "metric_attention": (nets.AttentionMetric, TOKENS),
    "metric_lipschitz": (nets.LipschitzMetric, {"widths": (12, 16), "depth": 1}),
}
EVERY = pytest.mark.parametrize("name", NETS)


def make(name: str, seed: int = 0) -> InputNet:
    kind, options = NETS[name]
    sizes = {"key_dim": 5} if issubclass(kind, nets.Metric) else {"n_outputs": 4}
    common = {"bounds": (0.0, 1.0), "mean": 0.2, "std": 0.5, "seed": seed}
    return kind(SHAPE, **sizes, **common, **options)


def images() -> Tensor:
    return torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(1))


@EVERY
def test_weights_come_from_the_generator_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (make(name, seed).eval()(images()) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("name", [name for name in NETS if name.startswith("metric_")])
def test_gradients_reach_every_weight_of_a_metric(name: str) -> None:
    metric = make(name)
    keys = metric(images())
    lengths = keys.norm(dim=1)
    assert torch.allclose(lengths, torch.ones(6)) is (name != "metric_lipschitz")
    (keys * torch.randn(6, 5, generator=torch.Generator().manual_seed(2))).sum().backward()
    for part, weight in metric.named_parameters():
        assert weight.grad is not None, part
        assert weight.grad.abs().max() > 0, part


@EVERY
def test_a_net_is_rebuilt_from_json_and_safetensors(name: str) -> None:
    net = make(name, seed=9)
    net(images())  # changes batch statistics
    rebuild = nets.build_metric if isinstance(net, nets.Metric) else nets.build
    twin = rebuild(json.loads(json.dumps(net.config())))
    twin.load_state_dict(load(save(net.state_dict())))
    assert torch.equal(twin.eval()(images()), net.eval()(images()))
    assert twin.config() == net.config()
    assert type(twin) is type(net)


@EVERY
def test_nets_have_the_default_dtype(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        net = make(name).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    assert net(net.check_inputs(images().double())).dtype == torch.float64
    assert {weight.dtype for weight in net.parameters()} == {net.mean.dtype} == {torch.float64}


@pytest.mark.parametrize(
    ("net", "register", "rebuild"),
    [("plain", nets.register, nets.build), ("metric_cnn", nets.register_metric, nets.build_metric)],
)
def test_registered_classes_are_built_by_name(net, register, rebuild) -> None:
    net = make(net)
    net.__class__ = own = type("Own", (type(net),), {})
    refuses(net.config, match=rf"got Own; .*otad\.nets\.{register.__name__}")
    register("for-test")(own)
    assert type(rebuild(net.config())) is own
    refuses(register("for-test"), own, match=r"kind.*'for-test'")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((4, 2, 2), 0.5).numpy(), "torch.Tensor"),
        (torch.zeros(0, 2, 2), "at least one entry along B"),
        (torch.zeros(4, 4), r"\(B,2,2\), got shape \(4, 4\)"),
        (torch.zeros(4, 2, 3), r"expected shape \(4, 2, 2\)"),
        (torch.zeros(4, 2, 2, dtype=torch.uint8), "float32, got uint8"),
        (torch.zeros(4, 2, 2).double(), "float32, got float64"),
        (torch.full((4, 2, 2), float("nan")), "finite values, got nan"),
        (torch.full((4, 2, 2), float("inf")), "finite values, got inf"),
        (torch.tensor([0.5, 0.5, 2.0, float("nan")]).view(1, 2, 2), r"nan at \(0, 1, 1\)"),
        (torch.full((4, 2, 2), 1.5), r"bounds \(0.0, 1.0\), got .* to 1.5"),
        (torch.full((4, 2, 2), -0.5), "from -0.5"),
    ],
)
def test_bad_inputs_are_refused(x: object, message: str) -> None:
    net = nets.fc_resnet((2, 2), 3, bounds=(0, 1))
    refuses(net.check_inputs, x, "pixels", match=f"pixels: .*{message}")


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


def _stack(parts: tuple) -> SequentialBackbone:
    return SequentialBackbone(*parts[:3], input_shape=parts[3])


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (build, {}, "kind.*fc_resnet.*'None'"),
        (build, {"kind": "transformer"}, "'transformer'"),
        (build, {"kind": "fc_resnet", "depth": 3}, "options of fc_resnet"),
        (build, {"kind": "sequential"}, "options of sequential"),
        (nets.build_metric, {"kind": "guess"}, "kind.*cnn.*'guess'"),
        (nets.build_metric, {"kind": "cnn"}, "options of cnn"),
        (adapt, nn.Sequential(), "input_shape: .*None for Sequential"),
        (adapt, nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), "input_shape: .*None for ReLU"),
        (_stack, (None, [nn.Linear(5, 6)], nn.Linear(6, 2), (6,)), r"blocks\[0\]: .* \(1, 6\)"),
        (_stack, (nn.Identity(), [], nn.Linear(6, 2), (2, 6)), r"embed: .*shape \(B,d\), got"),
        (_stack, (None, [], nn.Identity(), (6,)), r"head: expected an nn\.Linear.*Identity"),
        (_stack, (None, [], spectral_norm(nn.Linear(6, 2)), (6,)), "head: .*parametrization"),
        (_stack, (nn.Linear(6, 4), [], nn.Linear(5, 2), (6,)), "in_features .* 4 .* 5: .*space"),
    ],
)
def test_what_cannot_be_built_is_refused(make, given: object, message: str) -> None:
    refuses(make, given, match=message)


def test_modules_that_json_cannot_describe_are_refused() -> None:
    blocks = [_Residual(nn.Linear(6, 6))]
    net = SequentialBackbone(None, blocks, nn.Linear(6, 2), input_shape=(6,))
    refuses(net.config, match=r"got _Residual; subclass Backbone")
    layer = nn.Linear(6, 6)
    net = adapt(nn.Sequential(layer, nn.Linear(6, 2)))
    config = net.config()
    spectral_norm(layer)
    refuses(net.config, match=r"Linear with weights .*, got .*_orig")
    remove_spectral_norm(layer)
    assert net.config() == config
    config["blocks"][0]["layers"][0]["layer"] = "os.system"
    refuses(build, config, match=r"layer: .*Identity.* got 'os\.system'")


@pytest.mark.parametrize("shape", [(2**40,), (2**10, 2**10, 2**10)])
def test_huge_inputs_are_refused_before_they_use_memory(shape: tuple[int, ...]) -> None:
    refuses(nets.fc_resnet, shape, 2, match="at most 268435456 values")
    refuses(nets.ViTMetric, shape, match="at most 268435456 values")
