"""The votes of single bank points, and how far the query must move to change them.

For neighbors S the model's feature is sum_i lambda_i (z_i + l (e' - x_i)) with weights of the
simplex, so its outputs are the same mixture of the votes w_k.(z_i + l (e' - x_i)) + b_k."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otad.checks import require
from otad.io.mapped_rows import block_of
from otad.model.otad import OTAD
from otad.nets import LinearHead

BLOCK_BYTES = 2**27

Bound = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Rows v (B,d), made of two rows of a head with lengths and offsets that sum to (B,), (B,) -> what
rounding may take off the margin <v, z> + b (B,), and how fast it falls at most with |u| (B,)."""


class Head:
    """A linear head in float64: `weight` (C,d), `bias`, `lengths` of its rows in the norm of an
    order, and `offsets` |bias|, each (C,)."""

    def __init__(self, head: LinearHead, order: float = 2.0) -> None:
        self.weight = head.matrix.double()
        no_bias = self.weight.new_zeros(len(self.weight))
        self.bias = no_bias if head.bias is None else head.bias.double()
        self.lengths = torch.linalg.vector_norm(self.weight, order, dim=1)
        self.offsets = self.bias.abs()

    def against(self, prediction: Tensor, rival: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for the predictions (B,) and a class the rows v (B,d) and the sums of lengths and
        offsets (B,)."""
        return (
            self.weight[prediction] - self.weight[rival],
            self.lengths[prediction] + self.lengths[rival],
            self.offsets[prediction] + self.offsets[rival],
        )

    def radius(self, outputs: Tensor, prediction: Tensor, bound: Bound) -> Tensor:
        """|u| (B,) within which no other class reaches the predicted one."""
        outputs = outputs.double()
        own = outputs.gather(1, prediction[:, None])[:, 0]
        radius = torch.full_like(own, torch.inf)
        for rival in range(len(self.weight)):
            lost, slope = bound(*self.against(prediction, rival))
            margin = own - outputs[:, rival] - lost
            allowed = torch.where(margin > 0, margin / slope, 0.0)
            radius = torch.where(prediction == rival, radius, torch.minimum(radius, allowed))
        return radius


class Votes:
    """The votes of a bank of N points for C outputs, all in float64.

    `scores` (C,N) w_k.(z_i - l x_i) + b_k, to which the query adds l w_k.e; `sizes` (N,)
    |z_i| + |l| |x_i|. `roundoff` bounds the relative error of the model's own arithmetic: image and
    output are float32 sums of K and of d terms. `stretch` is that of the embedding (see `Reach`);
    for l = 0, where a vote does not depend on the query, it need not be known (None)."""

    @torch.no_grad()
    def __init__(self, model: OTAD, stretch: Tensor | None) -> None:
        self.head = head = Head(model.backbone.head)
        self.convexity = model.strong_convexity
        known = stretch is not None or self.convexity == 0
        require(known, "stretch", "the stretch of the embedding, because l is not 0", stretch)
        self.stretch = head.weight.new_zeros(()) if stretch is None else stretch
        self.longest = float(self.stretch.max())
        terms = head.weight.shape[1] + 4 * model.n_searched + 32
        self.roundoff = terms * torch.finfo(model.backbone.head.weight.dtype).eps / 2
        inputs, features, weight = model.bank_inputs, model.bank_features, head.weight
        rows = max(1, BLOCK_BYTES // (8 * inputs.shape[1]))
        scores, sizes = [], []
        for start in range(0, len(inputs), rows):
            z = block_of(features, start, start + rows).to(weight)
            size = torch.linalg.vector_norm(z, dim=1)
            if self.convexity != 0:  # else the inputs are not even read
                x = block_of(inputs, start, start + rows).to(weight)
                size += abs(self.convexity) * torch.linalg.vector_norm(x, dim=1)
                z = z - self.convexity * x
            scores.append(torch.addmm(head.bias, z, weight.mT).mT)
            sizes.append(size)
        self.scores, self.sizes = torch.cat(scores, dim=1).contiguous(), torch.cat(sizes)

    def turning(self, embedded: Tensor, prediction: Tensor) -> Tensor:
        """|u| (B,N) from which bank point i may vote for another class than the prediction (B,).

        A vote for c against j, taken at the query, changes by at most |l| |stretch (w_c - w_j)| for
        each unit of u. Infinite where no move changes it, 0 where it is not for c at all."""
        classes, place = prediction.unique(return_inverse=True)
        if self.convexity == 0 and len(classes) < len(prediction):  # the query does not matter
            return self.turning(embedded[: len(classes)], classes)[place]
        lift = self.convexity * (embedded @ self.head.weight.mT)
        own = self.scores[prediction] + lift.gather(1, prediction[:, None])
        sizes = self._sizes(embedded)
        turning = torch.full_like(own, torch.inf)
        for rival in range(len(self.head.weight)):
            between, lengths, offsets = self.head.against(prediction, rival)
            margin = own - self.scores[rival] - lift[:, rival, None]
            margin -= self.roundoff * (lengths[:, None] * sizes + offsets[:, None])
            turned = torch.where(margin > 0, margin / self._pull(between, lengths)[:, None], 0.0)
            turned[prediction == rival] = torch.inf
            torch.minimum(turning, turned, out=turning)
        return turning

    def range_of_values(self, embedded: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Regression: least and largest vote (B,N) of each bank point while |u| <= eps (B,)."""
        head = self.head
        center = self.scores[0] + self.convexity * (embedded @ head.weight.mT)
        pull = self._pull(head.weight[:1], head.lengths[:1])
        slack = self.roundoff * (head.lengths[0] * self._sizes(embedded) + head.offsets[0])
        slack += (pull * eps)[:, None]
        return center - slack, center + slack

    def _pull(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """Return by how much votes with rows (B,d) and these sums of lengths (B,) change at most
        for each unit of u: |l| |stretch row|, and what rounding may add."""
        moved = torch.linalg.vector_norm(rows * self.stretch, dim=1)
        pull: Tensor = abs(self.convexity) * (moved + self.roundoff * self.longest * lengths)
        return pull

    def _sizes(self, embedded: Tensor) -> Tensor:
        """Return the sizes of the terms of each vote (B,N)."""
        own: Tensor = torch.linalg.vector_norm(embedded, dim=1, keepdim=True)
        return self.sizes + abs(self.convexity) * own
