"""What each bank point says on its own, and how far the query must move to change that.

For neighbors S the model's feature is sum_i lambda_i (z_i + l (e' - x_i)) with weights of the
simplex, so its outputs are the same mixture of the votes w_k.(z_i + l (e' - x_i)) + b_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otad.certify.embedding import Reach
from otad.errors import InputError
from otad.io.mapped_rows import block_of
from otad.model.otad import OTAD

BLOCK_BYTES = 2**27


class Votes:
    """The votes of a bank of N points for C outputs, all in float64.

    `scores` (C,N) w_k.(z_i - l x_i) + b_k, to which the query adds l w_k.e; `sizes` (N,)
    |z_i| + |l| |x_i|. `roundoff` bounds the relative error of the model's own arithmetic: image and
    output are float32 sums of K and of d terms. `reach` is that of the embedding; for l = 0, where
    the query has no part in a vote, it need not be known (None).
    """

    @torch.no_grad()
    def __init__(self, model: OTAD, reach: Reach | None) -> None:
        head = model.backbone.head
        self.weight = head.matrix.double()
        bias = self.weight.new_zeros(len(self.weight)) if head.bias is None else head.bias.double()
        self.convexity = model.strong_convexity
        if reach is None and self.convexity != 0:
            raise InputError("reach: expected that of the embedding, as l is not 0, got None")
        self.stretch = self.weight.new_zeros(()) if reach is None else reach.stretch
        self.longest = float(self.stretch.max())
        terms = self.weight.shape[1] + 4 * model.n_searched + 32
        self.roundoff = terms * torch.finfo(head.weight.dtype).eps / 2
        self.lengths = torch.linalg.vector_norm(self.weight, dim=1)
        self.offsets = bias.abs()
        self.scores, self.sizes = self._of_bank(model, bias)

    def _of_bank(self, model: OTAD, bias: Tensor) -> tuple[Tensor, Tensor]:
        inputs, features = model.bank_inputs, model.bank_features
        rows = max(1, BLOCK_BYTES // (8 * inputs.shape[1]))
        scores, sizes = [], []
        for start in range(0, len(inputs), rows):
            z = block_of(features, start, start + rows).to(self.weight)
            size = torch.linalg.vector_norm(z, dim=1)
            if self.convexity != 0:  # else the inputs are not even read
                x = block_of(inputs, start, start + rows).to(self.weight)
                size += abs(self.convexity) * torch.linalg.vector_norm(x, dim=1)
                z = z - self.convexity * x
            scores.append(torch.addmm(bias, z, self.weight.mT).mT)
            sizes.append(size)
        return torch.cat(scores, dim=1).contiguous(), torch.cat(sizes)

    def turning(self, embedded: Tensor, prediction: Tensor) -> Tensor:
        """|u| (B,N) from which bank point i may vote for another class than the prediction (B,).

        A vote for c against j, taken at the query, changes by at most |l| |stretch (w_c - w_j)| for
        each unit of u. Infinite where no move changes it, 0 where it is not for c at all.
        """
        if self.convexity == 0 and len(prediction) > 1:  # the query itself has no part in it
            classes, place = prediction.unique(return_inverse=True)
            return self._turning(embedded[: len(classes)], classes)[place]
        return self._turning(embedded, prediction)

    def _turning(self, embedded: Tensor, prediction: Tensor) -> Tensor:
        lift = self.convexity * (embedded @ self.weight.mT)
        own = self.scores[prediction] + lift.gather(1, prediction[:, None])
        sizes = self._sizes(embedded)
        turning = torch.full_like(own, torch.inf)
        for rival in range(len(self.weight)):
            lengths = self.lengths[prediction] + self.lengths[rival]
            offsets = self.offsets[prediction] + self.offsets[rival]
            margin = own - self.scores[rival] - lift[:, rival, None]
            margin -= self.roundoff * (lengths[:, None] * sizes + offsets[:, None])
            pull = self._pull(self.weight[prediction] - self.weight[rival], lengths)
            turned = torch.where(margin > 0, margin / pull[:, None], 0.0)
            turned[prediction == rival] = torch.inf
            torch.minimum(turning, turned, out=turning)
        return turning

    def range_of_values(self, embedded: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Regression: least and largest vote (B,N) of each bank point while |u| <= eps (B,)."""
        center = self.scores[0] + self.convexity * (embedded @ self.weight.mT)
        pull = self._pull(self.weight[:1], self.lengths[:1])
        slack = self.roundoff * (self.lengths[0] * self._sizes(embedded) + self.offsets[0])
        slack += (pull * eps)[:, None]
        return center - slack, center + slack

    def _pull(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """By how much votes by rows (B,d), made of rows with lengths that sum to `lengths` (B,),
        change at most for each unit of u: |l| |stretch row|, and what rounding may add."""
        moved = torch.linalg.vector_norm(rows * self.stretch, dim=1)
        pull: Tensor = abs(self.convexity) * (moved + self.roundoff * self.longest * lengths)
        return pull

    def _sizes(self, embedded: Tensor) -> Tensor:
        """Of the terms of each vote (B,N)."""
        own = abs(self.convexity) * torch.linalg.vector_norm(embedded, dim=1)
        sizes: Tensor = self.sizes + own[:, None]
        return sizes
