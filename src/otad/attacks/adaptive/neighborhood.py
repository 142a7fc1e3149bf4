"""What an attacker who knows everything reads off a bank: who stands where, and votes for what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.defense import OTAD
from otad.errors import InputError
from otad.nets import only_normalizes

SCORES_AT_ONCE = 2**26  # numbers of a block of squared distances


def knows_lines(model: OTAD) -> bool:
    """Whether a straight line of inputs is one where neighbors are sought."""
    return model.metric is None and only_normalizes(model.backbone)


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """The bank of a model as its attacker sees it.

    `points` (N,d): the bank in the space where neighbors are sought. `votes` (N,): the class each
    of them stands for on its own, in regression its value. `squares` (N,): |point|^2.
    `n_neighbors`: K.
    """

    owner: OTAD
    points: Tensor
    votes: Tensor
    squares: Tensor
    n_neighbors: int

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, like: Tensor) -> Neighborhood:
        """That of an OTAD model, or of a k-NN rule on the bank of one, on the device of `like`."""
        owner = model if isinstance(model, OTAD) else getattr(model, "model", None)
        if not isinstance(owner, OTAD):
            raise InputError(
                f"model: expected OTAD or k-NN on its bank, which an attack on neighbors needs, "
                f"got {type(model).__name__}"
            )
        points = owner.bank_points.to(like)
        if model is owner:
            outputs = torch.cat(
                [
                    owner.backbone.head(features.to(like))
                    for features in owner.bank_features.split(8192)
                ]
            )
            votes = outputs.argmax(1) if outputs.dim() == 2 else outputs
        else:
            votes = owner.bank_labels.to(like.device)
        count = getattr(model, "n_neighbors", owner.n_neighbors)
        return Neighborhood(owner, points, votes, points.square().sum(1), int(count))

    def embed(self, x: Tensor) -> Tensor:
        return self.owner.locate(x)

    def inputs(self, points: Tensor, like: Tensor) -> Tensor:
        """Points (..., d) as inputs (..., *input_shape): the reverse of `embed`."""
        backbone, metric = self.owner.backbone, self.owner.metric
        if not knows_lines(self.owner):
            raise InputError(
                "model: expected neighbors of inputs that are normalized alone, so that straight "
                f"lines to bank points are known, got {type(metric or backbone).__name__}"
            )
        shaped = points.view(*points.shape[:-1], *backbone.input_shape)
        return (shaped * backbone.std + backbone.mean).to(like)

    def squared_distances(self, embedded: Tensor) -> Tensor:
        """|embedded - point|^2 (B,N), differentiable; accurate enough to rank, not to decide."""
        product = embedded @ self.points.T
        return (embedded.square().sum(1, keepdim=True) - 2 * product + self.squares).clamp_min(0)

    def rows_at_once(self) -> int:
        """How many examples a block of squared distances should have."""
        return max(1, SCORES_AT_ONCE // len(self.points))

    def is_wrong(self, y: Tensor) -> Tensor:
        """Which bank points (B,N) vote against the right answers y (B,)."""
        return self.votes[None] != y[:, None]

    @torch.no_grad()
    def nearest(self, x: Tensor, allowed: Tensor | None, count: int) -> Tensor:
        """The `count` bank points (B,count) nearest to inputs x, of those allowed (B,N)."""
        scores = self.squared_distances(self.embed(x))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.inf)
        return scores.topk(min(count, scores.shape[1]), largest=False).indices
