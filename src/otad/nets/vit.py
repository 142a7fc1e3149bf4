"""Vision transformers: patches and positions embed, residual blocks transport."""

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
)


class TokenHead(LinearHead):
    """A linear layer on the mean of all tokens, or on the first one: linear in z (B, T*width)."""

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
    """Dot-product self-attention of several heads on tokens (B,T,width)."""

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
    """x + Attn(norm(x)), then x + Mlp(norm(x)); also the squared length of both (B,)."""

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
    """Images (B,C,H,W) to tokens (B,T,width), one for each square patch."""

    def __init__(self, channels: int, width: int, patch: int, generator: torch.Generator) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, device="meta")
        self.proj.to_empty(device="cpu")
        bound = (channels * patch * patch) ** -0.5
        with torch.no_grad():
            for parameter in self.proj.parameters():
                draw(parameter, "uniform_", -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


@register("vit")
class VisionTransformer(Backbone):
    """A ViT whose input and feature space is that of all its tokens, d = T * width.

    `embed` is the linear patch embedding plus positions; `transport` the residual blocks, with the
    energy of both steps of each, and with `final_norm` a LayerNorm; the head reads the mean of the
    tokens or the class token. Parameters are named as in timm, so its weights load with
    `strict=False`; fresh ones are drawn from `seed`. Defaults: the paper's for 32 x 32 images."""

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
    return nn.Parameter(0.02 * standard_normal(1, count, width, generator=generator))


def check_tokens(input_shape: Sizes, patch: int, width: int, heads: int) -> tuple[int, int]:
    """Channels of the images and number of patches, for a width that the heads share."""
    channels, height, across = check_image_shape(input_shape, check_count(patch, "patch"))
    shared = check_count(width, "width") % check_count(heads, "heads") == 0
    require(shared, "heads", f"a divisor of the width {width}", heads)
    return channels, (height // patch) * (across // patch)
