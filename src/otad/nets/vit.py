"""Vision transformers as backbones: patches are embedded, residual blocks transport them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_BLOCKS, check_count, require
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.inputs import (
    Sizes,
    check_image_shape,
    draw,
    draw_linear,
    linear,
    standard_normal,
    with_memory,
)


class TokenHead(LinearHead):
    """A linear layer on the mean of all tokens or on the first token of z (B, T*width)."""

    def __init__(self, tokens: int, width: int, n_outputs: int, task: str, pool: str) -> None:
        super().__init__(width, n_outputs, task)
        self.tokens, self.width, self.pool = tokens, width, pool

    @property
    def matrix(self) -> Tensor:
        if self.pool == "mean":
            return self.weight.repeat(1, self.tokens) / self.tokens
        return functional.pad(self.weight, (0, (self.tokens - 1) * self.width))

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.unflatten(1, (self.tokens, self.width))
        return super().forward(tokens.mean(1) if self.pool == "mean" else tokens[:, 0])


class Attention(nn.Module):
    """Dot-product self-attention with several heads on tokens (B,T,width)."""

    def __init__(self, width: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width, generator)
        self.proj = linear(width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block x + Attn(norm(x)), then x + Mlp(norm(x)), with the squared length (B,) of both."""

    def __init__(
        self, width: int, heads: int, hidden: int, norm_eps: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attn = Attention(width, heads, generator)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        layers = {"fc1": linear(width, hidden, generator), "act": nn.GELU()}
        self.mlp = nn.Sequential(OrderedDict(layers, fc2=linear(hidden, width, generator)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.attn(self.norm1(x))
        x = x + first
        second = self.mlp(self.norm2(x))
        return x + second, squared_lengths(first) + squared_lengths(second)


class PatchEmbedding(nn.Module):
    """Maps images (B,C,H,W) to tokens (B,T,width), one for each square patch."""

    def __init__(self, channels: int, width: int, patch: int, generator: torch.Generator) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, device="meta")
        with_memory(self.proj)
        bound = (channels * patch * patch) ** -0.5
        with torch.no_grad():
            for parameter in self.proj.parameters():
                draw(parameter, "uniform_", -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


@register("vit")
class VisionTransformer(Backbone):
    """A vision transformer as a backbone: embedded inputs and features are all its T tokens.

    `embed` is the linear patch embedding plus positions, so d = T * width. `transport` is the
    residual blocks; the energy counts the attention step and the MLP step of each. The head reads
    the mean of the tokens or the class token. Parameters are named as in timm, so the weights of
    timm load with `strict=False`. The defaults are the paper's for 32 x 32 images.
    `otad.nets.vision_transformer` is another name of this class.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image. Its sides must be multiples of `patch`.
    n_outputs : int
        The number of classes, or 1 for regression.
    patch : int
        The side of a patch.
    width, heads : int
        The width of a token, and the number of attention heads, which must divide it.
    blocks : int
        The number of blocks.
    hidden : int or None
        The width of the MLP in a block, by default `width`.
    class_token : bool
        Whether the head reads an additional token instead of the mean.
    final_norm : bool
        Whether a LayerNorm follows the last block.
    norm_eps : float
        The epsilon of the LayerNorms.
    seed : int
        The seed of the weights.
    task, bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.vision_transformer((1, 8, 8), 3, width=12, heads=2, blocks=1)
    >>> net.dim, net(torch.rand(2, 1, 8, 8)).shape
    (48, torch.Size([2, 3]))
    """

    settings = (
        "patch", "width", "blocks", "heads", "hidden", "class_token", "final_norm", "norm_eps",
    )  # fmt: skip
    head: TokenHead

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        patch: int = 4,
        width: int = 384,
        blocks: int = 7,
        heads: int = 12,
        hidden: int | None = None,
        class_token: bool = False,
        final_norm: bool = False,
        norm_eps: float = 1e-6,
        seed: int = 0,
        **options: Any,
    ) -> None:
        channels, tokens = check_tokens(input_shape, patch, width, heads)
        tokens += class_token
        super().__init__(input_shape, n_outputs, dim=tokens * width, **options)
        self.patch, self.width, self.heads, self.tokens = patch, width, heads, tokens
        self.hidden = width if hidden is None else check_count(hidden, "hidden")
        self.class_token, self.final_norm, self.norm_eps = class_token, final_norm, norm_eps
        generator = torch.Generator().manual_seed(seed)
        self.patch_embed = PatchEmbedding(channels, width, patch, generator)
        self.pos_embed = draw_tokens(tokens, width, generator)
        self.cls_token = draw_tokens(1, width, generator) if class_token else None
        self.blocks = nn.ModuleList(
            Block(width, heads, self.hidden, norm_eps, generator)
            for _ in range(check_count(blocks, "blocks", most=MOST_BLOCKS))
        )
        self.norm = nn.LayerNorm(width, eps=norm_eps) if final_norm else nn.Identity()
        pool = "first" if class_token else "mean"
        self.head = draw_linear(TokenHead(tokens, width, n_outputs, self.task, pool), generator)

    def embed(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(self.normalize(x))
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), tokens], dim=1)
        return (tokens + self.pos_embed).flatten(1)  # type: ignore[no-any-return]

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e.unflatten(1, (self.tokens, self.width)), e.new_zeros(e.shape[0])
        for block in self.blocks:
            x, spent = block(x)
            energy = energy + spent
        return self.norm(x).flatten(1), energy


vision_transformer = VisionTransformer


def draw_tokens(count: int, width: int, generator: torch.Generator) -> nn.Parameter:
    """Draw learned tokens (1,count,width), such as the positions of patches."""
    return nn.Parameter(0.02 * standard_normal(1, count, width, generator=generator))


def check_tokens(input_shape: Sizes, patch: int, width: int, heads: int) -> tuple[int, int]:
    """Return the channels of images and the number of patches; the heads must divide the width."""
    channels, height, across = check_image_shape(input_shape, check_count(patch, "patch"))
    shared = check_count(width, "width") % check_count(heads, "heads") == 0
    require(shared, "heads", f"a divisor of the width {width}", heads)
    return channels, (height // patch) * (across // patch)
