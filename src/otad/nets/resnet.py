"""Residual networks of convolutions for small images, and the layers of `ResNetMetric`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_BLOCKS, check_choice, check_count, require
from otad.nets.base import Backbone, LinearHead, register
from otad.nets.inputs import Sizes, check_image_shape, draw, draw_linear, with_memory

ACTIVATIONS = {"relu": functional.relu, "silu": functional.silu}


@register("resnet")
class ResNet(Backbone):
    """A convolutional ResNet as a backbone, by default a ResNet-18 for 32 x 32 images.

    The first layer is a 3 x 3 convolution, as usual for CIFAR-10. Each stage after the first works
    at half the resolution, and the head reads the means over all pixels. All layers but the head
    are the embedding: nothing is transported, and the energy is 0.

    Parameters
    ----------
    input_shape : sequence of int
        The shape (C, H, W) of an image.
    n_outputs : int
        The number of classes, or 1 for regression.
    widths : sequence of int
        The number of channels of each stage.
    depth : int
        The number of residual blocks in a stage.
    activation : str
        "relu" or "silu".
    seed : int
        The seed of the weights.
    task, bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.ResNet((3, 8, 8), 10, widths=(4, 8), depth=1).eval()
    >>> net.dim, net(torch.rand(2, 3, 8, 8)).shape
    (8, torch.Size([2, 10]))
    """

    settings = ("widths", "depth", "activation")

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        widths: Sizes = (64, 128, 256, 512),
        depth: int = 2,
        activation: str = "relu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.widths, self.depth = check_stages(widths, depth)
        super().__init__(input_shape, n_outputs, dim=self.widths[-1], **options)
        self.activation = check_choice(activation, "activation", tuple(ACTIVATIONS))
        generator = torch.Generator().manual_seed(seed)
        self.stem, self.blocks = draw_stages(self, activation, generator)
        self.head = draw_linear(LinearHead(self.dim, n_outputs, self.task), generator)

    def embed(self, x: Tensor) -> Tensor:
        maps = self.blocks(ACTIVATIONS[self.activation](self.stem(self.normalize(x))))
        return maps.mean((2, 3))  # type: ignore[no-any-return]

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        return e, e.new_zeros(len(e))


class ResidualBlock(nn.Module):
    """Computes act(shortcut(x) + two 3 x 3 convolutions of x), with act between them too."""

    def __init__(
        self, before: int, width: int, stride: int, activation: str, generator: torch.Generator
    ) -> None:
        super().__init__()
        self._act = ACTIVATIONS[activation]
        self.first = convolution(before, width, generator, stride=stride)
        self.second = convolution(width, width, generator)
        self.shortcut: nn.Module = nn.Identity()
        if before != width or stride != 1:
            self.shortcut = convolution(before, width, generator, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        change = self.second(self._act(self.first(x)))
        return self._act(self.shortcut(x) + change)


def draw_stages(
    net: Any, activation: str, generator: torch.Generator
) -> tuple[nn.Sequential, nn.Sequential]:
    """Draw the first convolution and the blocks of a network by its shape, widths and depth."""
    channels, _, _ = check_image_shape(net.input_shape, 1)
    before = net.widths[0]
    stem, blocks = convolution(channels, before, generator), nn.Sequential()
    for stage, width in enumerate(net.widths):
        for place in range(net.depth):
            stride = 2 if stage > 0 and place == 0 else 1
            blocks.append(ResidualBlock(before, width, stride, activation, generator))
            before = width
    return stem, blocks


def convolution(
    before: int, after: int, generator: torch.Generator, *, size: int = 3, stride: int = 1
) -> nn.Sequential:
    """Return a convolution, drawn for ReLU (variance 2 / fan_in), with batch normalization."""
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False, device="meta")
    with_memory(layer)
    with torch.no_grad():
        spread = (2 / (before * size * size)) ** 0.5
        draw(layer.weight, "normal_", 0.0, spread, generator=generator)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


def check_stages(widths: Sizes, depth: int) -> tuple[tuple[int, ...], int]:
    return check_widths(widths), check_count(depth, "depth", most=MOST_BLOCKS)


def check_widths(widths: Sizes, count: int | None = None) -> tuple[int, ...]:
    expected = "at least one" if count is None else f"{count} of them"
    require(len(widths) == (count or len(widths) or 1), "widths", expected, tuple(widths))
    return tuple(check_count(width, "widths") for width in widths)
