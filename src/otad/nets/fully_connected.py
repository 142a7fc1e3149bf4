"""Fully connected networks: the ResNet of the paper, the same layers without shortcuts, and a
lifted network, which leaves its input unchanged and writes its answer into additional coordinates.

The lifted network embeds an input x of p numbers as (x, 0) in R^(p + C) and transports it to
(x, g(x)); the head reads g. Let T be the gradient of a function with curvature between 1 - k and
1 + k. Then T - Id is k-Lipschitz, so its lifted part is a k-Lipschitz map of x. Pairs
((x_i, 0), (x_i, g_i)) have such a T if and only if |g_i - g_j| <= k |x_i - x_j| for all i and j
(`otad.cip.whole_bank.lifted_bank`). So a global map can be any Lipschitz map to R^C."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_BLOCKS, check_count, require
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.inputs import Sizes, draw_linear, linear, with_memory


@register("fc_resnet")
class FCResNet(Backbone):
    """The paper's fully connected ResNet, in which every block keeps the dimension of the input.

    A block is `R_k = Linear(d, h) - ReLU - Linear(h, d)`. A residual network computes
    `x^k = x^(k-1) + R_k(x^(k-1))`, a plain one `x^k = R_k(x^(k-1))`. The energy is
    `sum_k |x^k - x^(k-1)|^2` in both. `otad.nets.fc_resnet` is another name of this class.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input; d is the product of its sizes.
    n_outputs : int
        The number of classes, or 1 for regression.
    blocks : int
        The number of blocks.
    hidden : int or None
        The width h of the blocks, by default d.
    residual : bool
        Whether the blocks have shortcuts.
    seed : int
        The seed of the weights.
    task, bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=2, hidden=16, bounds=(0.0, 1.0))
    >>> net(torch.rand(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    >>> features, energy = net.transport(net.embed(torch.rand(3, 1, 8, 8)))
    >>> features.shape, energy.shape
    (torch.Size([3, 64]), torch.Size([3]))
    """

    settings = ("blocks", "hidden", "residual")

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        blocks: int = 5,
        hidden: int | None = None,
        residual: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, n_outputs, **options)
        self.hidden = self.dim if hidden is None else check_count(hidden, "hidden")
        self.residual = residual
        generator = torch.Generator().manual_seed(seed)
        # With shortcuts, the network starts near the identity, by PyTorch's own small gain. Without
        # shortcuts the signal must keep its size through every layer.
        gains = (3**-0.5, 3**-0.5) if residual else (2**0.5, 1.0)
        self.blocks = nn.ModuleList(
            _stack((self.dim, self.hidden, self.dim), gains, generator)
            for _ in range(check_count(blocks, "blocks", most=MOST_BLOCKS))
        )
        self.head = draw_linear(LinearHead(self.dim, n_outputs, self.task), generator)

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x)
            step, x = (moved, x + moved) if self.residual else (moved - x, moved)
            energy = energy + squared_lengths(step)
        return x, energy


fc_resnet = FCResNet


def plain_net(input_shape: Sizes, n_outputs: int, **options: Any) -> FCResNet:
    """Make the layers of `fc_resnet` without shortcuts.

    Parameters
    ----------
    input_shape, n_outputs, **options
        As in `FCResNet`.

    Returns
    -------
    FCResNet

    Examples
    --------
    >>> import otad
    >>> otad.nets.plain_net((4,), 2, blocks=1).residual
    False
    """
    return FCResNet(input_shape, n_outputs, residual=False, **options)


@register("lifted_net")
class LiftedNet(Backbone):
    """A network that keeps its input x and writes its answer g into additional coordinates.

    It begins with (x, 0) in R^(p + C), and each block computes `(x, g) -> (x, g + R_k(x, g))`. The
    energy is `sum_k |R_k|^2`. The head reads g and is not trained. The global map of such a network
    is a Lipschitz map from x to g. `otad.nets.lifted_net` is another name of this class.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input.
    n_outputs : int
        The number of classes C, or 1 for regression.
    blocks : int
        The number of blocks. Without blocks g is 0, for networks that find g in another way.
    hidden : sequence of int
        The widths of the hidden layers of a block, with ReLU between layers.
    seed : int
        The seed of the weights.
    task, bounds, mean, std
        As in `Backbone`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.lifted_net((4,), 3, hidden=(8,))
    >>> net.dim, net.lift, net(torch.rand(2, 4)).shape
    (7, 3, torch.Size([2, 3]))
    """

    settings = ("blocks", "hidden")

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        blocks: int = 1,
        hidden: Sizes = (512, 512),
        seed: int = 0,
        **options: Any,
    ) -> None:
        dim = math.prod(input_shape) + check_count(n_outputs, "n_outputs")
        super().__init__(input_shape, n_outputs, dim=dim, **options)
        self.lift = self.n_outputs
        require(len(hidden) > 0, "hidden", "the width of at least one layer", "none")
        self.hidden = tuple(check_count(width, "hidden") for width in hidden)
        generator = torch.Generator().manual_seed(seed)
        widths, gains = (self.dim, *hidden, self.lift), (*[2**0.5] * len(hidden), 3**-0.5)
        self.blocks = nn.ModuleList(
            _stack(widths, gains, generator)
            for _ in range(check_count(blocks, "blocks", least=0, most=MOST_BLOCKS))
        )
        self.head = with_memory(LinearHead(self.dim, self.n_outputs, self.task))
        self.head.requires_grad_(False)
        self.head.weight.zero_()[:, -self.lift :].fill_diagonal_(1.0)
        self.head.bias.zero_()

    def embed(self, x: Tensor) -> Tensor:
        return functional.pad(super().embed(x), (0, self.lift))

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs, lifted = e[:, : -self.lift], e[:, -self.lift :]
        energy = e.new_zeros(e.shape[0])
        for block in self.blocks:
            step = block(torch.cat([inputs, lifted], dim=1))
            lifted = lifted + step
            energy = energy + squared_lengths(step)
        return torch.cat([inputs, lifted], dim=1), energy


lifted_net = LiftedNet


def _stack(widths: Sizes, gains: Sequence[float], generator: torch.Generator) -> nn.Sequential:
    """Return Linear layers between these widths, with ReLU between the layers."""
    layers: list[nn.Module] = []
    for (before, after), gain in zip(itertools.pairwise(widths), gains, strict=True):
        layers += [linear(before, after, generator, gain=gain), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
