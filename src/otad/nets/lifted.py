"""A net that leaves its input unchanged and writes its answer into additional coordinates.

The input x (p numbers) is embedded as (x, 0) in R^(p + C) and transported to (x, g(x)); the head
reads g. Let T be the gradient of a function with curvature between 1 - k and 1 + k. Then T - Id is
k-Lipschitz, so its lifted part is a k-Lipschitz map of x; and pairs ((x_i, 0), (x_i, g_i)) have
such a T exactly where |g_i - g_j| <= k |x_i - x_j| (`otad.cip.whole_bank.lifted_potential`). A
global map is then any Lipschitz map to R^C, not the gradient of a convex function on the inputs,
and a change of the input does not change what the head reads directly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_count
from otad.errors import InputError
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.inputs import linear, seeded


@register("lifted_net")
class LiftedNet(Backbone):
    """(x, g) -> (x, g + R_k(x, g)) for m blocks R_k: R^(p+C) -> R^C, with g = 0 at first.

    R_k is fully connected with ReLU between layers of the widths `hidden`; the energy is
    sum_k |R_k|^2. `lift` is C, or 1 in regression: the last coordinates of R^d, d = p + C. The head
    reads g and is not trained. Without blocks g is 0, for nets that find it in another way
    (`otad.model.prototypes`).
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        blocks: int = 1,
        hidden: Sequence[int] = (512, 512),
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        dim = math.prod(input_shape) + check_count(n_outputs, "n_outputs")
        super().__init__(input_shape, n_outputs, dim=dim, **options)
        self.lift = self.n_outputs
        if len(hidden) == 0:
            raise InputError("hidden: expected the width of at least one layer, got none")
        self.hidden = tuple(check_count(width, "hidden") for width in hidden)
        generator = seeded(generator)
        self.blocks = nn.ModuleList(
            self._block(generator) for _ in range(check_count(blocks, "blocks", least=0))
        )
        self.head = LinearHead(self.dim, self.n_outputs, self.task).to_empty(device="cpu")
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(self.dim)[-self.lift :])
            self.head.bias.zero_()
        self.head.requires_grad_(False)

    def _block(self, generator: torch.Generator) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((self.dim, *self.hidden)):
            layers += [linear(before, after, generator, gain=2**0.5), nn.ReLU()]
        return nn.Sequential(*layers, linear(self.hidden[-1], self.lift, generator))

    def embed(self, x: Tensor) -> Tensor:
        """(B,*input_shape) -> (B,p+C): normalized, flattened, and padded with zeros."""
        return functional.pad(self.normalize(x).flatten(1), (0, self.lift))

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs, lifted = e[:, : -self.lift], e[:, -self.lift :]
        energy = e.new_zeros(e.shape[0])
        for block in self.blocks:
            step = block(torch.cat([inputs, lifted], dim=1))
            lifted = lifted + step
            energy = energy + squared_lengths(step)
        return torch.cat([inputs, lifted], dim=1), energy

    def config(self) -> dict[str, Any]:
        return super().config() | {"blocks": len(self.blocks), "hidden": list(self.hidden)}


def lifted_net(
    input_shape: Sequence[int], n_outputs: int, *, seed: int = 0, **options: Any
) -> LiftedNet:
    """A lifted net with weights drawn from `seed`; `options` as in `LiftedNet`."""
    generator = torch.Generator().manual_seed(seed)
    return LiftedNet(input_shape, n_outputs, generator=generator, **options)
