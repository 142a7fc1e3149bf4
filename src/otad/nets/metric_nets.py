"""The metric networks of the paper: ResNet blocks, two convolutions, a ViT block, attention."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_BLOCKS, check_count
from otad.nets.base import Metric, register_metric
from otad.nets.inputs import Sizes, check_image_shape, linear
from otad.nets.resnet import check_stages, check_widths, convolution, draw_stages
from otad.nets.vit import Attention, Block, PatchEmbedding, check_tokens, draw_tokens


@register_metric("resnet")
class ResNetMetric(Metric):
    """A metric of residual blocks on images, by default three stages of a ResNet-18.

    Each stage after the first works at half the resolution. The features are the means over all
    pixels of the last stage.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image.
    widths : sequence of int
        The number of channels of each stage.
    depth : int
        The number of residual blocks in a stage.
    seed : int
        The seed of the weights.
    key_dim, key_norm, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> metric = otad.nets.ResNetMetric((3, 8, 8), widths=(4, 8), depth=1, key_dim=5).eval()
    >>> metric(torch.rand(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """

    settings = ("widths", "depth")

    def __init__(
        self,
        input_shape: Sizes,
        *,
        widths: Sizes = (64, 128, 256),
        depth: int = 2,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, **options)
        self.widths, self.depth = check_stages(widths, depth)
        generator = torch.Generator().manual_seed(seed)
        self.stem, self.blocks = draw_stages(self, "relu", generator)
        self.projection = _projection(self.widths[-1], self.key_dim, generator)

    def features(self, u: Tensor) -> Tensor:
        maps = self.blocks(functional.relu(self.stem(u)))
        return maps.mean((2, 3))  # type: ignore[no-any-return]


@register_metric("cnn")
class CNNMetric(Metric):
    """A metric of two convolutions with 2 x 2 max pooling, averaged over a grid of 4 x 4 cells.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image. Its sides must be multiples of 4.
    widths : (int, int)
        The number of channels of the two convolutions.
    seed : int
        The seed of the weights.
    key_dim, key_norm, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> metric = otad.nets.CNNMetric((1, 8, 8), widths=(4, 8), key_dim=5).eval()
    >>> metric(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 5])
    """

    settings = ("widths",)

    def __init__(
        self, input_shape: Sizes, *, widths: Sizes = (64, 128), seed: int = 0, **options: Any
    ) -> None:
        super().__init__(input_shape, **options)
        channels, _, _ = check_image_shape(input_shape, 4)
        self.widths = check_widths(widths, count=2)
        generator = torch.Generator().manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((channels, *self.widths)):
            layers += [convolution(before, after, generator), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.projection = _projection(16 * self.widths[1], self.key_dim, generator)

    def features(self, u: Tensor) -> Tensor:
        return self.layers(u)  # type: ignore[no-any-return]


class _TokenMetric(Metric):
    """A metric on tokens (B,T,width): embedded patches, `mix`, a LayerNorm, and their mean."""

    settings: ClassVar[Sequence[str]] = ("patch", "width", "heads")

    def __init__(
        self,
        input_shape: Sizes,
        *,
        patch: int = 4,
        width: int = 384,
        heads: int = 12,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, **options)
        channels, tokens = check_tokens(input_shape, patch, width, heads)
        self.patch, self.width, self.heads = patch, width, heads
        generator = torch.Generator().manual_seed(seed)
        self.patch_embed = PatchEmbedding(channels, width, patch, generator)
        self.pos_embed = draw_tokens(tokens, width, generator)
        self._draw_mixer(generator)
        self.norm = nn.LayerNorm(width)
        self.projection = _projection(width, self.key_dim, generator)

    @abstractmethod
    def _draw_mixer(self, generator: torch.Generator) -> None:
        """Make the layers of `mix`."""

    @abstractmethod
    def mix(self, tokens: Tensor) -> Tensor:
        """Return tokens (B,T,width) that have exchanged information."""

    def features(self, u: Tensor) -> Tensor:
        tokens = self.mix(self.patch_embed(u) + self.pos_embed)
        return self.norm(tokens).mean(1)  # type: ignore[no-any-return]


@register_metric("vit")
class ViTMetric(_TokenMetric):
    """A metric of the blocks of a vision transformer, one by default.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image. Its sides must be multiples of `patch`.
    blocks : int
        The number of blocks.
    patch : int
        The side of a patch.
    width, heads : int
        The width of a token, and the number of attention heads, which must divide it.
    seed : int
        The seed of the weights.
    key_dim, key_norm, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> metric = otad.nets.ViTMetric((1, 8, 8), width=12, heads=2, key_dim=5)
    >>> metric(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 5])
    """

    settings = ("blocks",)

    def __init__(self, input_shape: Sizes, *, blocks: int = 1, **options: Any) -> None:
        self.n_blocks = check_count(blocks, "blocks", most=MOST_BLOCKS)
        super().__init__(input_shape, **options)

    def _draw_mixer(self, generator: torch.Generator) -> None:
        self.blocks = nn.ModuleList(
            Block(self.width, self.heads, self.width, 1e-6, generator) for _ in range(self.n_blocks)
        )

    def mix(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens, _ = block(tokens)
        return tokens


@register_metric("attention")
class AttentionMetric(_TokenMetric):
    """A metric of one residual self-attention step, tokens + Attention(LayerNorm(tokens)).

    Parameters
    ----------
    input_shape, patch, width, heads, seed
        As in `ViTMetric`.
    key_dim, key_norm, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> metric = otad.nets.AttentionMetric((1, 8, 8), width=12, heads=2, key_dim=5)
    >>> metric(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 5])
    """

    def _draw_mixer(self, generator: torch.Generator) -> None:
        self.attn_norm = nn.LayerNorm(self.width)
        self.attn = Attention(self.width, self.heads, generator)

    def mix(self, tokens: Tensor) -> Tensor:
        return tokens + self.attn(self.attn_norm(tokens))  # type: ignore[no-any-return]


def _projection(features: int, key_dim: int, generator: torch.Generator) -> nn.Linear:
    """Return the last layer of a metric, without a bias, which would change no distance."""
    return linear(features, key_dim, generator, gain=1.0, bias=False)
