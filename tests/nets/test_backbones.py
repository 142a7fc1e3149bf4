"""The backbone contract: energy, linear head, normalization, configs, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets import (
    Backbone,
    CNNMetric,
    FCResNet,
    LinearHead,
    LipschitzMetric,
    build,
    fc_resnet,
    lifted_net,
    plain_net,
    register,
    vision_transformer,
)
from otad.nets.base import draw_linear
from otad.nets.inputs import InputNet


def _inputs(rows: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(seed))


def _by_hand(net: FCResNet, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and energy by matrix products on the named weights, in float64."""
    state = {name: value.double() for name, value in net.state_dict().items()}
    point = (x.double().flatten(1) - state["mean"].flatten()) / state["std"].flatten()
    energy = torch.zeros(len(x), dtype=torch.float64)
    for k in range(len(net.blocks)):
        hidden = point @ state[f"blocks.{k}.0.weight"].T + state[f"blocks.{k}.0.bias"]
        moved = hidden.clamp(min=0) @ state[f"blocks.{k}.2.weight"].T + state[f"blocks.{k}.2.bias"]
        target = point + moved if net.residual else moved
        energy += ((target - point) ** 2).sum(1)
        point = target
    return point, energy


@pytest.mark.parametrize("variant", [fc_resnet, plain_net])
def test_features_and_energy_equal_the_hand_computed_sums(variant) -> None:
    net = variant((2, 3), 4, blocks=3, hidden=5, mean=0.4, std=0.3, seed=2)
    x = _inputs(7, 2, 3)
    z, energy = net.transport(net.embed(x))
    expected_z, expected_energy = _by_hand(net, x)
    torch.testing.assert_close(z.double(), expected_z, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(energy.double(), expected_energy, rtol=1e-5, atol=1e-5)
    assert z.shape == (7, 6)
    assert net(x).shape == (7, 4)


def test_the_head_is_linear_and_the_forward_pass_ends_in_it() -> None:
    net = fc_resnet((6,), 3, blocks=2)
    a, b = _inputs(4, 6, seed=3), _inputs(4, 6, seed=4)
    mixed = net.head(0.25 * a + 0.75 * b)
    torch.testing.assert_close(mixed, 0.25 * net.head(a) + 0.75 * net.head(b))
    torch.testing.assert_close(net.head(a), a @ net.head.weight.T + net.head.bias)
    torch.testing.assert_close(net(a), net.head(net.transport(net.embed(a))[0]))
    assert isinstance(net.head, nn.Linear)


def test_regression_gives_one_value_per_row() -> None:
    net = fc_resnet((6,), 1, task="regression")
    assert net(_inputs(4, 6)).shape == (4,)


def test_twins_have_the_same_parameters_and_the_paper_s_width() -> None:
    sizes = [
        {name: tuple(value.shape) for name, value in make((3, 3), 10).named_parameters()}
        for make in (fc_resnet, plain_net)
    ]
    assert sizes[0] == sizes[1]
    assert sum(p.numel() for p in fc_resnet((9,), 10).parameters()) == 5 * 2 * (81 + 9) + 100


def test_weights_come_from_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (fc_resnet((5,), 2, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(before, torch.random.get_rng_state())
    for mine, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, same)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_drawn_weights_have_the_stated_variance() -> None:
    layer = nn.Linear(400, 500, device="meta")
    draw_linear(layer, torch.Generator().manual_seed(0), gain=1.5)
    assert layer.weight.var().item() == pytest.approx(1.5**2 / 400, rel=0.02)
    assert layer.bias.abs().max().item() <= 400**-0.5


def test_the_plain_twin_keeps_the_size_of_its_signal_at_the_start() -> None:
    net = plain_net((200,), 2, blocks=5)
    e = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    assert 0.3 < float(net.transport(e)[0].detach().std()) < 3.0


@pytest.mark.parametrize("residual", [True, False])
def test_a_net_is_rebuilt_from_json_and_safetensors(residual: bool) -> None:
    net = fc_resnet(
        (2, 4), 3, blocks=2, hidden=5, residual=residual, bounds=(0.0, 1.0), mean=0.2, std=0.5
    )
    twin = build(json.loads(json.dumps(net.config())))
    twin.load_state_dict(load(save(net.state_dict())))
    x = _inputs(6, 2, 4)
    assert torch.equal(net(x), twin(x))
    assert twin.config() == net.config()
    assert (twin.input_shape, twin.bounds, twin.dim) == ((2, 4), (0.0, 1.0), 8)


def test_a_registered_class_of_the_user_s_is_built_by_name() -> None:
    @register("shift-for-test")
    class Shift(Backbone):
        def __init__(self, **options) -> None:
            super().__init__(**options)
            self.head = LinearHead(self.dim, self.n_outputs, self.task).to_empty(device="cpu")

        def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
            return e + 1, torch.full((len(e),), float(self.dim))

    net = Shift(input_shape=(3,), n_outputs=2)
    assert type(build(net.config())) is Shift
    with pytest.raises(InputError, match="'shift-for-test', which is registered"):
        register("shift-for-test")(Shift)


def test_an_unregistered_class_cannot_be_described() -> None:
    class Unnamed(FCResNet):
        pass

    with pytest.raises(InputError, match=r"got Unnamed; .*otad\.nets\.register"):
        Unnamed((3,), 2).config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_shape": ()}, "input_shape: expected at least one axis"),
        ({"input_shape": (0,)}, "input_shape: expected an integer of at least 1, got 0"),
        ({"n_outputs": 1}, "at least 2 for classification, got 1"),
        ({"n_outputs": 2, "task": "regression"}, "expected 1 for regression"),
        ({"task": "ranking"}, "task: expected one of classification, regression, got 'ranking'"),
        ({"bounds": (1.0, 0.0)}, "bounds: expected low < high"),
        ({"bounds": (0.0,)}, "bounds: expected two finite numbers"),
        ({"std": 0.0}, "std: expected positive values, got 0.0"),
        ({"mean": float("nan")}, "mean: expected finite values"),
        ({"mean": [0.0, 1.0]}, r"mean: expected a shape that broadcasts to \(3,\), got \(2,\)"),
        ({"blocks": 0}, "blocks: expected an integer of at least 1"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FCResNet(**({"input_shape": (3,), "n_outputs": 2} | options))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "expected one of .*fc_resnet.*, got 'None'"),
        ({"kind": "transformer"}, "got 'transformer'"),
        ({"kind": "fc_resnet", "depth": 3}, "expected the options of fc_resnet"),
        ({"kind": "sequential"}, "expected the options of sequential"),
    ],
)
def test_a_foreign_config_is_refused(config: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(config)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((4, 2, 2), 0.5).numpy(), "expected a torch.Tensor"),
        (torch.zeros(0, 2, 2), "at least one entry along B"),
        (torch.zeros(4, 4), r"expected 3 axes \(B,2,2\), got shape \(4, 4\)"),
        (torch.zeros(4, 2, 3), r"expected shape \(4, 2, 2\)"),
        (torch.zeros(4, 2, 2, dtype=torch.uint8), "expected dtype float32, got uint8"),
        (torch.zeros(4, 2, 2).double(), "expected dtype float32, got float64"),
        (torch.full((4, 2, 2), float("nan")), "pixels: expected finite values, got nan"),
        (torch.full((4, 2, 2), float("inf")), "pixels: expected finite values, got inf"),
        (torch.tensor([0.5, 0.5, 2.0, float("nan")]).view(1, 2, 2), r"got nan at \(0, 1, 1\)"),
        (torch.full((4, 2, 2), 1.5), r"within the declared bounds \(0.0, 1.0\), got .* to 1.5"),
        (torch.full((4, 2, 2), -0.5), "got values from -0.5"),
    ],
)
def test_bad_inputs_are_refused(x: object, message: str) -> None:
    net = fc_resnet((2, 2), 3, bounds=(0, 1))
    with pytest.raises(InputError, match=message):
        net.check_inputs(x, "pixels")


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        ("classification", torch.tensor([0, 3]), "labels from 0 to 2, got the unknown label 3"),
        ("classification", torch.tensor([0, -1]), "got the unknown label -1"),
        ("classification", torch.tensor([0.0, 1.0]), "expected dtype int64, got float32"),
        ("classification", torch.tensor([0, 1, 2]), r"expected shape \(2,\) with one target"),
        ("classification", torch.tensor([[0, 1]]), "expected 1 axes"),
        ("regression", torch.tensor([0, 1]), "expected dtype float32, got int64"),
        ("regression", torch.tensor([0.0, float("nan")]), "expected finite values, got nan"),
    ],
)
def test_bad_targets_are_refused(task: str, y: Tensor, message: str) -> None:
    net = fc_resnet((4,), 3 if task == "classification" else 1, task=task)
    with pytest.raises(InputError, match=message):
        net.check_targets(y, 2)


def test_a_double_net_takes_double_inputs() -> None:
    net = fc_resnet((4,), 2).double()
    assert net(net.check_inputs(torch.zeros(2, 4, dtype=torch.float64))).dtype == torch.float64


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize(
    "make",
    [
        lambda: fc_resnet((1, 4, 4), 3, blocks=1),
        lambda: lifted_net((1, 4, 4), 3, hidden=(5,)),
        lambda: vision_transformer((1, 4, 4), 3, patch=2, width=4, heads=2, blocks=1),
        lambda: CNNMetric((1, 4, 4), widths=(2, 2), key_dim=3),
        lambda: LipschitzMetric((1, 4, 4), widths=(4,), depth=1, key_dim=3),
    ],
)
def test_nets_have_the_default_dtype_all_over(make: Callable[[], InputNet]) -> None:
    net = make().eval()
    x = _inputs(5, 1, 4, 4).double()
    assert net(net.check_inputs(x)).dtype == torch.float64
    assert {weight.dtype for weight in net.parameters()} == {net.mean.dtype} == {torch.float64}
