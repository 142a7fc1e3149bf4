"""The dimension-invariant fully connected ResNet of the paper, and its plain twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_count
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.inputs import draw_linear, linear, seeded


@register("fc_resnet")
class FCResNet(Backbone):
    """m blocks of width d, each R_k = Linear(d,h) - ReLU - Linear(h,d), h = d unless given.

    residual:  x^k = x^(k-1) + R_k(x^(k-1)), energy sum_k |R_k(x^(k-1))|^2;
    plain:     x^k = R_k(x^(k-1)),           energy sum_k |x^k - x^(k-1)|^2.
    Both have the same parameters, so only the connections differ.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        blocks: int = 5,
        hidden: int | None = None,
        residual: bool = True,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, n_outputs, **options)
        self.hidden = self.dim if hidden is None else check_count(hidden, "hidden")
        self.residual = residual
        generator = seeded(generator)
        # With a shortcut, start near the identity by small steps (PyTorch's own gain); without
        # one, the signal must keep its size through every layer.
        first, second = (3**-0.5, 3**-0.5) if residual else (2**0.5, 1.0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                linear(self.dim, self.hidden, generator, gain=first),
                nn.ReLU(),
                linear(self.hidden, self.dim, generator, gain=second),
            )
            for _ in range(check_count(blocks, "blocks"))
        )
        self.head = draw_linear(LinearHead(self.dim, n_outputs, self.task), generator)

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x)
            step, x = (moved, x + moved) if self.residual else (moved - x, moved)
            energy = energy + squared_lengths(step)
        return x, energy

    def config(self) -> dict[str, Any]:
        own = {"blocks": len(self.blocks), "hidden": self.hidden, "residual": self.residual}
        return super().config() | own


def fc_resnet(
    input_shape: Sequence[int], n_outputs: int, *, seed: int = 0, **options: Any
) -> FCResNet:
    """Residual net with weights drawn from `seed`; `options` as in `FCResNet`."""
    generator = torch.Generator().manual_seed(seed)
    return FCResNet(input_shape, n_outputs, generator=generator, **options)


def plain_net(
    input_shape: Sequence[int], n_outputs: int, *, seed: int = 0, **options: Any
) -> FCResNet:
    """The same layers as `fc_resnet` without residual connections."""
    return fc_resnet(input_shape, n_outputs, seed=seed, residual=False, **options)
