"""A net that leaves its input where it is and writes its answer into coordinates of their own.

The input x (p numbers) is embedded at (x, 0) in R^(p + C) and carried to (x, g(x)): the lifted
coordinates hold g, and the head reads those alone. Let T be the gradient of a function with
curvature between 1 - k and 1 + k. Then T - Id is k-Lipschitz, so its lifted part is a k-Lipschitz
map of x; and pairs ((x_i, 0), (x_i, g_i)) have such a T exactly where |g_i - g_j| <= k |x_i - x_j|
(`otad.cip.whole_bank.lifted_potential`). One map for a whole bank is then any Lipschitz map to R^C,
not the gradient of a convex function on the inputs; and a change of the input does not reach what
the head reads.
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
from otad.nets.base import Backbone, LinearHead, draw_linear, register, squared_lengths


@register("lifted_net")
class LiftedNet(Backbone):
    """(x, g) -> (x, g + R_k(x, g)) for m blocks R_k: R^(p+C) -> R^C, with g = 0 at first.

    R_k is fully connected with ReLU between layers of the widths `hidden`. The energy is
    sum_k |R_k|^2. `lift` is C, or 1 in regression: the last coordinates of R^d, d = p + C, where
    every embedded input is 0. The head reads g as it is: it has nothing to learn.

    Without blocks g is 0, for nets that find it in another way (`otad.model.prototypes`).
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        blocks: int = 1,
        hidden: Sequence[int] = (512, 512),
        task: str = "classification",
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        dim = math.prod(input_shape) + check_count(n_outputs, "n_outputs")
        super().__init__(
            input_shape, n_outputs, task=task, dim=dim, bounds=bounds, mean=mean, std=std
        )
        self.lift = self.n_outputs
        if len(hidden) == 0:
            raise InputError("hidden: expected the width of one layer at least, got none")
        self.hidden = tuple(check_count(width, "hidden") for width in hidden)
        drawn_by = generator or torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList(
            self._block(drawn_by) for _ in range(check_count(blocks, "blocks", least=0))
        )
        self.head = self._reader()

    def _block(self, generator: torch.Generator) -> nn.Sequential:
        widths = (self.dim, *self.hidden)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layer = nn.Linear(before, after, device="meta")
            layers += [draw_linear(layer, generator, gain=2**0.5), nn.ReLU()]
        last = nn.Linear(widths[-1], self.lift, device="meta")
        return nn.Sequential(*layers, draw_linear(last, generator))

    def _reader(self) -> LinearHead:
        head = LinearHead(self.dim, self.n_outputs, self.task)
        head.to_empty(device="cpu")
        with torch.no_grad():
            head.weight.copy_(torch.eye(self.dim)[-self.lift :])
            head.bias.zero_()
        return head.requires_grad_(False)

    def embed(self, x: Tensor) -> Tensor:
        """(B,*input_shape) -> (B,p+C): normalized, flattened, and 0 where it is lifted."""
        return functional.pad(self.normalize(x).flatten(1), (0, self.lift))

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs, answer = e[:, : -self.lift], e[:, -self.lift :]
        energy = e.new_zeros(e.shape[0])
        for block in self.blocks:
            step = block(torch.cat([inputs, answer], dim=1))
            answer = answer + step
            energy = energy + squared_lengths(step)
        return torch.cat([inputs, answer], dim=1), energy

    def config(self) -> dict[str, Any]:
        return super().config() | {"blocks": len(self.blocks), "hidden": list(self.hidden)}


def lifted_net(
    input_shape: Sequence[int], n_outputs: int, *, seed: int = 0, **options: Any
) -> LiftedNet:
    """A lifted net with weights drawn from `seed`; `options` as in `LiftedNet`."""
    generator = torch.Generator().manual_seed(seed)
    return LiftedNet(input_shape, n_outputs, generator=generator, **options)
