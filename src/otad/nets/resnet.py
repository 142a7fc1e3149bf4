"""The dimension-invariant fully connected ResNet of the paper, and its plain twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import check_count
from otad.nets.base import Backbone, LinearHead, draw_linear, register, squared_lengths


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
        task: str = "classification",
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(input_shape, n_outputs, task=task, bounds=bounds, mean=mean, std=std)
        self.hidden = self.dim if hidden is None else check_count(hidden, "hidden")
        self.residual = residual
        drawn_by = generator or torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(
            self._block(drawn_by) for _ in range(check_count(blocks, "blocks"))
        )
        self.head = draw_linear(LinearHead(self.dim, n_outputs, task), drawn_by)

    def _block(self, generator: torch.Generator) -> nn.Sequential:
        # With a shortcut, start near the identity by small steps (PyTorch's own gain); without
        # one, the signal must keep its size through every layer.
        gains = (3**-0.5, 3**-0.5) if self.residual else (2**0.5, 1.0)
        first = nn.Linear(self.dim, self.hidden, device="meta")
        second = nn.Linear(self.hidden, self.dim, device="meta")
        return nn.Sequential(
            draw_linear(first, generator, gain=gains[0]),
            nn.ReLU(),
            draw_linear(second, generator, gain=gains[1]),
        )

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x)
            step, x = (moved, x + moved) if self.residual else (moved - x, moved)
            energy = energy + squared_lengths(step)
        return x, energy

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "blocks": len(self.blocks),
            "hidden": self.hidden,
            "residual": self.residual,
        }


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
