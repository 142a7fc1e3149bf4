"""What an attacker who knows everything reads off a bank: who stands where, and votes for what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.cip.bank_potential import potential_lines
from otad.cip.pairs import Pairs
from otad.defense import OTAD
from otad.errors import InputError
from otad.nets import only_normalizes

SCORES_AT_ONCE = 2**26  # numbers of a block of ranks


def knows_lines(model: OTAD) -> bool:
    """Whether a straight line of inputs is one where neighbors are sought."""
    return model.metric is None and only_normalizes(model.backbone)


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """The bank of a model as its attacker sees it: N points, of which the first in rank decide.
    Coordinates that no input reaches, those of a lift, are left off.

    The rank of point i for an embedded input e is offsets_i - 2 <sites_i, e>, up to a number that
    is the same for all i: the lowest comes first, and i is before j beyond a plane with the normal
    sites_i - sites_j. There are two such views:

    - neighbors: the rank is |e - x_i|^2, so sites are the bank points (N,d) and offsets |x_i|^2;
    - tangents (`by_tangents`), for one map of the whole bank: its potential is the smoothed maximum
      of its tangents u~_i + <z~_i, e - x_i>, and between two of them the map is half-way where
      they meet. So sites are z~_i, and offsets 2 (<z~_i, x_i> - u~_i).

    `places` (N,d): where the points are. `votes` (N,): the class each of them stands for on its
    own, in regression its value. `n_neighbors`: K.
    """

    owner: OTAD
    places: Tensor
    sites: Tensor
    offsets: Tensor
    votes: Tensor
    n_neighbors: int
    by_tangents: bool = False

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, like: Tensor) -> Neighborhood:
        """The neighbors of an OTAD model, or of a k-NN rule on the bank of one, on the device of
        `like`."""
        owner = model if isinstance(model, OTAD) else getattr(model, "model", None)
        if not isinstance(owner, OTAD):
            raise InputError(
                f"model: expected OTAD or k-NN on its bank, which an attack on neighbors needs, "
                f"got {type(model).__name__}"
            )
        points = owner.bank_points.to(like)
        points = points[:, : points.shape[1] - _lift_of(owner)]
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
        count = int(getattr(model, "n_neighbors", owner.n_neighbors))
        return Neighborhood(owner, points, points, points.square().sum(1), votes, count)

    @staticmethod
    def views(model: nn.Module, like: Tensor) -> list[Neighborhood]:
        """Every way in which points of the bank come to decide: neighbors; for one map of the whole
        bank, of the points it passes through, its tangents as well."""
        neighbors = Neighborhood.of(model, like)
        if model is not neighbors.owner or neighbors.owner.scope != "global":
            return [neighbors]
        return _views_of_one_map(neighbors)

    def embed(self, x: Tensor) -> Tensor:
        located = self.owner.locate(x)
        return located[:, : located.shape[1] - _lift_of(self.owner)]

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

    def ranks(self, embedded: Tensor) -> Tensor:
        """(B,N), 0 at the least, differentiable; accurate enough to rank, not to decide."""
        ranks = self.offsets - 2 * embedded @ self.sites.T
        if self.by_tangents:
            return ranks - ranks.detach().amin(1, keepdim=True)
        return (embedded.square().sum(1, keepdim=True) + ranks).clamp_min(0)

    def behind(self, embedded: Tensor, indices: Tensor) -> Tensor:
        """Ranks (B,n) of points (B,n) alone, up to a number that is the same for a whole row."""
        if self.by_tangents:
            products = self.sites[indices] @ embedded[:, :, None]
            return self.offsets[indices] - 2 * products[:, :, 0]
        return (self.sites[indices] - embedded[:, None]).square().sum(2)

    def rows_at_once(self) -> int:
        """How many examples a block of ranks should have."""
        return max(1, SCORES_AT_ONCE // len(self.sites))

    def is_wrong(self, y: Tensor) -> Tensor:
        """Which bank points (B,N) vote against the right answers y (B,)."""
        return self.votes[None] != y[:, None]

    @torch.no_grad()
    def nearest(self, x: Tensor, allowed: Tensor | None, count: int) -> Tensor:
        """The `count` bank points (B,count) first in rank for inputs x, of those allowed (B,N)."""
        scores = self.ranks(self.embed(x))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.inf)
        return scores.topk(min(count, scores.shape[1]), largest=False).indices


def _lift_of(model: OTAD) -> int:
    """The last coordinates, of those where neighbors are sought, that no input reaches."""
    return model.backbone.lift if model.metric is None else 0


@torch.no_grad()
def _views_of_one_map(neighbors: Neighborhood) -> list[Neighborhood]:
    """Of the points that were not left out: the others' votes are not heard."""
    owner, like = neighbors.owner, neighbors.places
    potential = owner.whole_bank.potential
    bend = potential.strong_convexity
    pairs = Pairs(owner.bank_inputs, owner.bank_features, bend, like.device)
    levels = potential_lines(pairs, potential) - pairs.image_squares / (2 * potential.modulus)
    kept = levels.isfinite().nonzero()[:, 0]
    places, votes = neighbors.places[kept], neighbors.votes[kept]
    count = min(neighbors.n_neighbors, len(kept))
    sites, offsets = [], []
    for rows in kept.split(8192):
        images = pairs.images(rows)
        offsets.append(2 * (images @ pairs.center - levels[rows]))
        sites.append(images[:, : places.shape[1]].to(like))
    tangents = torch.cat(sites), torch.cat(offsets).to(like)
    squares = places.square().sum(1)
    return [
        Neighborhood(owner, places, places, squares, votes, count),
        Neighborhood(owner, places, *tangents, votes, count, by_tangents=True),
    ]
