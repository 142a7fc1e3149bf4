"""The lift of a backbone: its own outputs as a Lipschitz map of its embedded inputs.

An embedded input e of p numbers becomes (e, 0) in R^(p + C), and its feature becomes (e, g(e)).
Here g(e) are the outputs of the backbone divided by a number, the `stretch`; the head multiplies by
it. A bank of such pairs is a lifted bank (`otad.cip.whole_bank.lifted_bank`): every answer is a
mixture of the network's outputs for training points, and each training point keeps its own output.

If the stretch is at least the largest ratio of differences between outputs and between embedded
inputs, the pairs belong to a 1-Lipschitz map, which curvature between 0 and 2 allows in local and
in global scope. For a backbone without a transport step the outputs are linear in e, and that ratio
is at most the spectral norm of the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_positive
from otad.nets.base import Backbone, LinearHead, build, register, squared_lengths

MARGIN = 1e-3  # added to the spectral norm as a share of it, for rounding
MOST_STRETCH = 1e30  # so that float32 has room for the outputs


@register("lift")
class Lift(Backbone):
    """A backbone that writes the outputs of another one into additional coordinates.

    Embedded inputs e of the other backbone become (e, 0), and features become (e, outputs /
    stretch). Weights are shared.

    Parameters
    ----------
    inner : Backbone
        The backbone with p-dimensional embedded inputs and C outputs.
    stretch : float
        The number that outputs are divided by. If it is at least their Lipschitz constant on the
        training data, the lifted map is 1-Lipschitz.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> net = otad.nets.fc_resnet((4,), 3, blocks=1)
    >>> lift = otad.nets.Lift(net, stretch=2.0)
    >>> x = torch.rand(2, 4)
    >>> lift.dim, torch.allclose(lift(x), net(x))
    (7, True)
    """

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
    """Return the lift of a backbone without a transport step.

    Its stretch is just above the spectral norm of the head."""
    norm = float(torch.linalg.matrix_norm(inner.head.matrix.double(), 2))
    return Lift(inner, stretch=(1 + MARGIN) * norm or 1.0)
