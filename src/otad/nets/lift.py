"""The lift of a backbone: the network's own outputs as a Lipschitz map of what it embeds.

Embedded inputs e (p numbers) become (e, 0) in R^(p + C), features (e, g(e)), with g the outputs of
the backbone divided by a number, the `stretch`, which the head multiplies back. So a bank of such
pairs is a lifted bank (`otad.cip.whole_bank.lifted_bank`): every answer is a mixture of the outputs
that the network gives to training points, and each of these keeps its own output.

Where the stretch is at least the largest |g_i - g_j| / |e_i - e_j|, the pairs are those of a
1-Lipschitz map, which curvature between 0 and 2 allows in local and in global scope. For a backbone
without a transport step g is linear in e, and that number is the spectral norm of its head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_positive
from otad.nets.base import Backbone, LinearHead, build, register, squared_lengths

MARGIN = 1e-3  # of the spectral norm, for rounding
MOST_STRETCH = 1e30  # of float32, with room for the outputs


@register("lift")
class Lift(Backbone):
    """(e, 0) -> (e, g(e)) for embedded inputs e of another backbone, whose weights are shared."""

    settings = ("stretch",)

    def __init__(self, inner: Backbone, *, stretch: float) -> None:
        check_positive(stretch, "stretch", most=MOST_STRETCH)
        size, count = inner.dim, inner.n_outputs
        shape: dict[str, Any] = {"dim": size + count, "task": inner.task, "bounds": inner.bounds}
        super().__init__(inner.input_shape, count, **shape)
        self.mean, self.std = inner.mean, inner.std
        self.inner, self.lift, self.stretch = inner, count, float(stretch)
        self.head = LinearHead(self.dim, count, self.task).to_empty(device=inner.mean.device)
        self.head.to(inner.mean.dtype).requires_grad_(False)
        self.head.weight.zero_()[:, size:].fill_diagonal_(self.stretch)
        self.head.bias.zero_()

    def embed(self, x: Tensor) -> Tensor:
        return functional.pad(self.inner.embed(x), (0, self.lift))

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs = e[:, : -self.lift]
        outputs = self.inner.head(self.inner.transport(inputs)[0])
        answers = outputs.reshape(len(e), self.lift) / self.stretch
        return torch.cat([inputs, answers], dim=1), squared_lengths(answers)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, "stretch": self.stretch, "inner": self.inner.config()}

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        return cls(build(options["inner"]), stretch=options["stretch"])


@torch.no_grad()
def feature_lift(inner: Backbone) -> Lift:
    """The lift of a backbone that has no transport step, of stretch just above the norm of its
    head."""
    norm = float(torch.linalg.matrix_norm(inner.head.matrix.double(), 2))
    return Lift(inner, stretch=(1 + MARGIN) * norm or 1.0)
