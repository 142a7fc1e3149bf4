"""Fully connected nets and vision transformers: energy, linear head, sizes, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from factories import refuses
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets import FCResNet, LinearHead, fc_resnet, lifted_net, plain_net
from otad.nets.inputs import draw_linear
from otad.nets.vit import VisionTransformer, vision_transformer
from otad.training import TrainConfig, train

TINY = {"patch": 2, "width": 12, "blocks": 2, "heads": 3, "hidden": 20}
tiny_vit = partial(vision_transformer, **TINY)


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


@pytest.mark.parametrize(
    "net",
    [fc_resnet((6,), 3), tiny_vit((3, 4, 4), 5), tiny_vit((3, 4, 4), 5, class_token=True)],
    ids=["fc", "tokens", "class token"],
)
def test_the_head_is_the_matrix_it_says_and_the_forward_pass_ends_in_it(net) -> None:
    x, z = _inputs(7, *net.input_shape), _inputs(7, net.dim)
    assert isinstance(net.head, LinearHead)
    assert net.head.matrix.shape == (net.n_outputs, net.dim)
    torch.testing.assert_close(net.head(z), z @ net.head.matrix.T + net.head.bias)
    torch.testing.assert_close(net(x), net.head(net.transport(net.embed(x))[0]))


def test_twins_have_the_same_parameters_and_the_paper_s_width() -> None:
    residual, plain = (make((200,), 10) for make in (fc_resnet, plain_net))
    sizes = [[weight.shape for weight in net.parameters()] for net in (residual, plain)]
    assert sizes[0] == sizes[1]
    count = sum(weight.numel() for weight in residual.parameters())
    assert count == 5 * 2 * (200 * 200 + 200) + 10 * 201
    # Without shortcuts the signal keeps its size at the start.
    e = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    assert 0.3 < float(plain.transport(e)[0].detach().std()) < 3.0


def test_drawn_weights_have_the_stated_variance() -> None:
    layer = nn.Linear(400, 500, device="meta")
    draw_linear(layer, torch.Generator().manual_seed(0), gain=1.5)
    assert layer.weight.var().item() == pytest.approx(1.5**2 / 400, rel=0.02)
    assert layer.bias.abs().max().item() <= 400**-0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_shape": ()}, "input_shape.*one axis"),
        ({"input_shape": (0,)}, "input_shape.* 1, got 0"),
        ({"n_outputs": 1}, "at least 2 for classification, got 1"),
        ({"n_outputs": 2, "task": "regression"}, "expected 1 for regression"),
        ({"task": "ranking"}, "task.*'ranking'"),
        ({"bounds": (1.0, 0.0)}, "bounds: .*low < high.*1.0, 0.0"),
        ({"bounds": (0.0,)}, r"bounds.*\(0.0,\)"),
        ({"bounds": ((0.0, 1.0), (0.0, 1.0))}, "bounds: expected two finite numbers low < high"),
        ({"std": 0.0}, "std: expected positive values, got 0.0"),
        ({"mean": float("nan")}, "mean.*nan"),
        ({"mean": [0.0, 1.0]}, r"mean: .*\(3,\), got \(2,\)"),
        ({"blocks": 0}, "blocks.* 1, got 0"),
        ({"make": lifted_net, "hidden": ()}, "hidden.*none"),
        ({"make": lifted_net, "hidden": (0,)}, "hidden.* 1, got 0"),
        ({"make": lifted_net, "blocks": -1}, "blocks.* 0, got -1"),
        ({"make": lifted_net, "task": "regression"}, "n_outputs: expected 1 for regression"),
        ({"make": tiny_vit, "input_shape": (3, 5, 4)}, r"input_shape.* 2 .*\(3, 5, 4\)"),
        ({"make": tiny_vit, "input_shape": (12,)}, r"expected images \(C,H,W\)"),
        ({"make": tiny_vit, "input_shape": (3, 4, 4), "heads": 5}, "width 12, got 5"),
        ({"make": tiny_vit, "input_shape": (3, 4, 4), "blocks": 0}, "blocks.* 1, got 0"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    given = {"make": fc_resnet, "input_shape": (3,), "n_outputs": 2} | options
    refuses(given.pop("make"), **given, match=message)


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        ("classification", [0, 3], "labels from 0 to 2, got .*label 3"),
        ("classification", [0, -1], "label -1"),
        ("classification", [0.0, 1.0], "dtype int64, got float32"),
        ("classification", [0, 1, 2], r"shape \(2,\)"),
        ("classification", [[0, 1]], "1 axes"),
        ("regression", [0, 1], "dtype float32, got int64"),
        ("regression", [0.0, float("nan")], "finite values, got nan"),
    ],
)
def test_bad_targets_are_refused(task: str, y: list, message: str) -> None:
    net = fc_resnet((4,), 3 if task == "classification" else 1, task=task)
    refuses(net.check_targets, torch.tensor(y), 2, match=f"y: .*{message}")


def test_an_input_is_embedded_with_zeros_behind_it() -> None:
    net = lifted_net((2, 3), 4, blocks=0, mean=0.4, std=0.3)
    x = _inputs(5, 2, 3)
    embedded = net.embed(x)
    assert (net.dim, net.lift, embedded.shape) == (10, 4, (5, 10))
    torch.testing.assert_close(embedded[:, :6], ((x - 0.4) / 0.3).flatten(1))
    assert not embedded[:, 6:].any()
    features, energy = net.transport(embedded)  # without blocks nothing is added
    assert torch.equal(features, embedded)
    assert not energy.any()


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


def test_regression_lifts_one_coordinate_and_takes_the_units_of_targets() -> None:
    net = lifted_net((6,), 1, task="regression")
    x = _inputs(4, 6)
    plain = net(x)
    net.head.take_units(5.0, 2.0)
    torch.testing.assert_close(net(x), 5 + 2 * plain)
    assert (net.lift, net.dim, plain.shape) == (1, 7, (4,))


def twin_layer(net: VisionTransformer, block: int) -> nn.TransformerEncoderLayer:
    """torch's own pre-norm layer with the same weights."""
    layer = nn.TransformerEncoderLayer(
        net.width, net.heads, net.hidden, 0.0, "gelu", net.norm_eps, batch_first=True,
        norm_first=True,
    ).eval()  # fmt: skip
    theirs = {
        "attn.qkv.": "self_attn.in_proj_", "attn.proj.": "self_attn.out_proj.",
        "mlp.fc1.": "linear1.", "mlp.fc2.": "linear2.",
    }  # fmt: skip
    state = {}
    for name, value in net.blocks[block].state_dict().items():
        part = name.removesuffix("weight").removesuffix("bias")
        state[name.replace(part, theirs.get(part, part))] = value
    layer.load_state_dict(state)
    return layer


def test_features_equal_those_of_torch_layers() -> None:
    net = tiny_vit((3, 4, 4), 5, mean=0.4, std=0.3, seed=2).eval()
    x = _inputs(6, 3, 4, 4)
    patches = (x - 0.4) / 0.3
    patches = patches.unfold(2, 2, 2).unfold(3, 2, 2)  # (B,3,2,2,2,2)
    patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(6, 4, 12)
    state = net.state_dict()
    tokens = patches @ state["patch_embed.proj.weight"].flatten(1).T
    tokens = tokens + state["patch_embed.proj.bias"] + state["pos_embed"]
    torch.testing.assert_close(net.embed(x), tokens.flatten(1))
    expected = tokens
    for block in range(2):
        expected = twin_layer(net, block)(expected)
    z, _ = net.transport(net.embed(x))
    torch.testing.assert_close(z, expected.flatten(1), rtol=1e-4, atol=1e-5)
    means = expected.mean(1) @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(net(x), means, rtol=1e-4, atol=1e-5)


def test_the_energy_is_that_of_both_steps_of_every_block() -> None:
    net = tiny_vit((3, 4, 4), 5, seed=3).eval()
    x, expected = net.embed(_inputs(3, 3, 4, 4)).unflatten(1, (4, 12)), torch.zeros(3)
    for block in net.blocks:
        half = x + block.attn(block.norm1(x))
        end = half + block.mlp(block.norm2(half))
        expected += (half - x).square().sum((1, 2)) + (end - half).square().sum((1, 2))
        x = end
    torch.testing.assert_close(net.transport(net.embed(_inputs(3, 3, 4, 4)))[1], expected)


def test_sizes_are_those_of_the_paper_and_of_timm() -> None:
    def count(net: nn.Module) -> int:
        return sum(weight.numel() for weight in net.parameters())

    paper = vision_transformer((3, 32, 32), 10)
    assert (paper.tokens, paper.dim) == (64, 64 * 384)
    assert 6.2e6 < count(paper) < 6.4e6
    deit = {"patch": 16, "width": 384, "blocks": 12, "heads": 6, "hidden": 1536}
    options = {"class_token": True, "final_norm": True}
    # the number of parameters of timm's deit_small_patch16_224
    assert count(vision_transformer((3, 224, 224), 1000, **deit, **options)) == 22_050_664


def test_parameters_have_the_names_and_shapes_of_timm() -> None:
    width, hidden = 12, 20
    weights: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (width, 3, 2, 2), "norm": (width,), "head": (5, width),
    }  # fmt: skip
    for k in range(2):
        weights |= {
            f"blocks.{k}.norm1": (width,), f"blocks.{k}.attn.qkv": (3 * width, width),
            f"blocks.{k}.attn.proj": (width, width), f"blocks.{k}.norm2": (width,),
            f"blocks.{k}.mlp.fc1": (hidden, width), f"blocks.{k}.mlp.fc2": (width, hidden),
        }  # fmt: skip
    expected = {"cls_token": (1, 1, width), "pos_embed": (1, 5, width)}
    for name, shape in weights.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    net = tiny_vit((3, 4, 4), 5, class_token=True, final_norm=True, mean=0.5)
    assert {name: tuple(weight.shape) for name, weight in net.named_parameters()} == expected


def test_bounds_are_compared_in_the_precision_of_the_inputs() -> None:
    bounds = (0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081  # float32 rounds the first one outwards
    net = fc_resnet((2,), 2, blocks=1, bounds=bounds)
    ends = torch.tensor([bounds])
    assert ends[0, 0].item() < bounds[0]
    assert torch.equal(net.check_inputs(ends), ends)
    with pytest.raises(InputError, match="within the declared bounds"):
        net.check_inputs(torch.nextafter(ends, torch.tensor(-torch.inf)))
