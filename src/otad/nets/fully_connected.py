"""Fully connected nets: the dimension-invariant ResNet of the paper, its plain twin, and a net that
leaves its input unchanged and writes its answer into additional coordinates.

For the last one the input x (p numbers) is embedded as (x, 0) in R^(p + C) and transported to
(x, g(x)); the head reads g. Let T be the gradient of a function with curvature between 1 - k and
1 + k. Then T - Id is k-Lipschitz, so its lifted part is a k-Lipschitz map of x; and pairs
((x_i, 0), (x_i, g_i)) have such a T exactly where |g_i - g_j| <= k |x_i - x_j|
(`otad.cip.whole_bank.lifted_bank`). A global map is then any Lipschitz map to R^C."""

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
from otad.nets.inputs import Sizes, draw_linear, linear


@register("fc_resnet")
class FCResNet(Backbone):
    """m blocks of width d, each R_k = Linear(d,h) - ReLU - Linear(h,d), h = d unless given, with
    weights drawn from `seed`; residual nets and plain ones have the same parameters.

    residual:  x^k = x^(k-1) + R_k(x^(k-1)), energy sum_k |R_k(x^(k-1))|^2;
    plain:     x^k = R_k(x^(k-1)),           energy sum_k |x^k - x^(k-1)|^2."""

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
        # With a shortcut, start near the identity by small steps (PyTorch's own gain); without
        # one, the signal must keep its size through every layer.
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
    """The same layers as `fc_resnet` without residual connections."""
    return FCResNet(input_shape, n_outputs, residual=False, **options)


@register("lifted_net")
class LiftedNet(Backbone):
    """(x, g) -> (x, g + R_k(x, g)) for m blocks R_k: R^(p+C) -> R^C, with g = 0 at first.

    R_k is fully connected with ReLU between layers of the widths `hidden` and drawn from `seed`;
    the energy is sum_k |R_k|^2. `lift` is C, or 1 in regression. The head reads g and is not
    trained. Without blocks g is 0, for nets that find it otherwise (`otad.model.prototypes`)."""

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
        self.head = LinearHead(self.dim, self.n_outputs, self.task).to_empty(device="cpu")
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
    """Linear layers between these widths, with ReLU between the layers."""
    layers: list[nn.Module] = []
    for (before, after), gain in zip(itertools.pairwise(widths), gains, strict=True):
        layers += [linear(before, after, generator, gain=gain), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
