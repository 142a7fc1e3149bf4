"""What every net does: draw from its generator, come back from JSON, check its inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from otad import nets
from otad.errors import InputError
from otad.nets.inputs import InputNet

SHAPE = (3, 8, 8)
TOKENS = {"patch": 4, "width": 12, "heads": 3}
VIT = TOKENS | {"blocks": 1, "class_token": True, "final_norm": True}
NETS: dict[str, tuple[type[InputNet], dict[str, Any]]] = {
    "residual": (nets.FCResNet, {"blocks": 2, "hidden": 5}),
    "plain": (nets.FCResNet, {"blocks": 2, "hidden": 5, "residual": False}),
    "lifted": (nets.LiftedNet, {"blocks": 2, "hidden": (7,)}),
    "vit": (nets.VisionTransformer, VIT),
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


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@EVERY
def test_nets_have_the_default_dtype(name: str) -> None:
    net = make(name).eval()
    assert net(net.check_inputs(images().double())).dtype == torch.float64
    assert {weight.dtype for weight in net.parameters()} == {net.mean.dtype} == {torch.float64}


def test_registered_classes_are_built_by_name() -> None:
    class Shift(nets.Backbone):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.head = nets.LinearHead(self.dim, self.n_outputs, self.task).to_empty(device="cpu")

        def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
            return e + 1, torch.full((len(e),), float(self.dim))

    class Half(nets.Metric):
        projection = torch.nn.Identity()

        def features(self, u: Tensor) -> Tensor:
            return u / 2

    half = Half((3,), key_norm="free", key_dim=3)
    for net, decorator, rebuild in (
        (Shift(input_shape=(3,), n_outputs=2), nets.register, nets.build),
        (half, nets.register_metric, nets.build_metric),
    ):
        name = type(net).__name__
        with pytest.raises(InputError, match=rf"got {name}; .*otad\.nets\.{decorator.__name__}"):
            net.config()
        decorator("for-test")(type(net))
        assert type(rebuild(net.config())) is type(net)
        with pytest.raises(InputError, match=r"kind.*'for-test'"):
            decorator("for-test")(type(net))
    assert torch.equal(half(torch.ones(1, 3)), torch.full((1, 3), 0.5))
    assert half.lipschitz is None


@pytest.mark.parametrize(
    ("rebuild", "config", "message"),
    [
        (nets.build, {}, "kind.*fc_resnet.*'None'"),
        (nets.build, {"kind": "transformer"}, "'transformer'"),
        (nets.build, {"kind": "fc_resnet", "depth": 3}, "options of fc_resnet"),
        (nets.build, {"kind": "sequential"}, "options of sequential"),
        (nets.build_metric, {"kind": "guess"}, "kind.*cnn.*'guess'"),
        (nets.build_metric, {"kind": "cnn"}, "options of cnn"),
    ],
)
def test_an_unknown_config_is_refused(rebuild, config: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rebuild(config)


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
    with pytest.raises(InputError, match=f"pixels: .*{message}"):
        net.check_inputs(x, "pixels")
