"""Vision transformers: against torch's own layers, in timm's layout, and as a backbone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from otad.errors import InputError
from otad.nets.vit import TokenHead, VisionTransformer, vision_transformer

TINY = {"patch": 2, "width": 12, "blocks": 2, "heads": 3, "hidden": 20}


def images(count: int) -> Tensor:
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))


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
    net = vision_transformer((3, 4, 4), 5, mean=0.4, std=0.3, seed=2, **TINY).eval()
    x = images(6)
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
    net = vision_transformer((3, 4, 4), 5, seed=3, **TINY).eval()
    x, expected = net.embed(images(3)).unflatten(1, (4, 12)), torch.zeros(3)
    for block in net.blocks:
        half = x + block.attn(block.norm1(x))
        end = half + block.mlp(block.norm2(half))
        expected += (half - x).square().sum((1, 2)) + (end - half).square().sum((1, 2))
        x = end
    torch.testing.assert_close(net.transport(net.embed(images(3)))[1], expected)


@pytest.mark.parametrize("class_token", [False, True])
def test_the_head_is_the_matrix_it_says_it_is(class_token: bool) -> None:
    net = vision_transformer((3, 4, 4), 5, class_token=class_token, **TINY)
    z = torch.randn(7, net.dim, generator=torch.Generator().manual_seed(0))
    assert isinstance(net.head, TokenHead)
    assert net.head.matrix.shape == (5, net.dim)
    torch.testing.assert_close(net.head(z), z @ net.head.matrix.T + net.head.bias)


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
    net = vision_transformer((3, 4, 4), 5, class_token=True, final_norm=True, mean=0.5, **TINY)
    assert {name: tuple(weight.shape) for name, weight in net.named_parameters()} == expected


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ((3, 5, 4), {}, r"input_shape.* 2 .*\(3, 5, 4\)"),
        ((12,), {}, r"expected images \(C,H,W\)"),
        ((3, 4, 4), {"heads": 5}, "expected a divisor of the width 12, got 5"),
        ((3, 4, 4), {"blocks": 0}, "blocks: expected an integer of at least 1"),
    ],
)
def test_refuses_what_cannot_be_built(shape, changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        vision_transformer(shape, 5, **(TINY | changes))
