"""What an attacker who knows everything reads off a bank: where its points are, how they vote."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from otad.attacks.base import Attack, Survivors, Target, option
from otad.attacks.needs import Knowledge
from otad.attacks.pgd import Apgd
from otad.attacks.stand_in import Map
from otad.baselines import Knn
from otad.checks import check_count, check_shape, require
from otad.cip.whole_bank.pairs import Pairs, middle_of
from otad.cip.whole_bank.potential import BankPotential, potential_lines
from otad.errors import InputError
from otad.model.otad import OTAD, check_training_inputs
from otad.nets import only_normalizes
from otad.threat import LpBall

SCORES_AT_ONCE = 2**26  # numbers of a block of ranks
FEATURES_AT_ONCE = 2**25  # numbers of a block of features
CLOSEST = 1e-3  # of the mean rank over the bank: K copies of an input leave no scale
OFF_ORIGIN = 0.95  # |middle| / median |point| above which distances drown in the squares of lengths


def defended_of(model: nn.Module) -> OTAD | None:
    """The OTAD model that is, or shares its bank with, `model`; None for other models."""
    inner = model.model if isinstance(model, Knn) else model
    return inner if isinstance(inner, OTAD) else None


def knowledge_of(model: nn.Module, train_x: Tensor | None = None) -> Knowledge:
    """What an attacker knows about a model. `train_x` (N,*): the inputs its bank was made from."""
    defended = defended_of(model)
    if defended is None:
        require(train_x is None, "train_x", "None, as the model has no bank", "inputs")
        return Knowledge()
    if train_x is not None:
        check_training_inputs(defended, train_x)
    keys = defended.backbone.embed if defended.metric is None else defended.metric
    affine = defended.metric is None and only_normalizes(defended.backbone)
    known = knows_inputs(defended, train_x)
    return Knowledge(defended.backbone, keys, affine, known, train_x)


def knows_inputs(model: OTAD, train_x: Tensor | None) -> bool:
    """Whether the training inputs are given, or only normalized in the bank."""
    return train_x is not None or only_normalizes(model.backbone)


# A bank of images has gigabytes of features, and every batch of every attack asks for this.
_HEAD_OUTPUTS: WeakKeyDictionary[OTAD, tuple[tuple[object, ...], Tensor]] = WeakKeyDictionary()


@torch.no_grad()
def head_outputs(owner: OTAD, like: Tensor) -> Tensor:
    """What the head reads from the feature of each bank point: (N,C), in regression (N,)."""
    features, head = owner.bank_features, owner.backbone.head
    tensors = [features, *head.parameters()]
    state = (like.device, like.dtype, *((one.data_ptr(), one._version) for one in tensors))
    cached = _HEAD_OUTPUTS.get(owner)
    if cached is None or cached[0] != state:
        rows = max(1, FEATURES_AT_ONCE // features.shape[1])
        cached = state, torch.cat([head(part.to(like)) for part in features.split(rows)])
        _HEAD_OUTPUTS[owner] = cached
    return cached[1]


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """The bank of a model as its attacker sees it: N points, of which the first in rank decide.

    The rank of point i for an embedded input e (with a metric: its key) is, up to a number that is
    the same for all i, offsets_i - 2 <sites_i, e>: i is before j beyond a plane with the normal
    sites_i - sites_j. Coordinates of a lift, which no input reaches, are left off. Embedded inputs
    are taken about `center` (d,), 0 unless the bank is far off the origin. There are two views:

    - neighbors: the rank is |e - x_i|^2, so sites are the bank points (N,d) and offsets |x_i|^2;
    - tangents (`by_tangents`), for a global map: its potential is the smoothed maximum of its
      tangents u~_i + <z~_i, e - x_i>, and between two of them the map is half-way where they meet.
      So sites are z~_i, and offsets 2 (<z~_i, x_i> - u~_i).

    `votes` (N,): the class each point votes for on its own, in regression its value; `outputs`
    (N,C) or (N,): those it would give. `members` (N,): which points of the bank these are, None for
    all. `train_x`: the training inputs of the whole bank, where the attacker was given them.
    `keys`: `owner.query_keys` with a gradient to climb, see `climbable`."""

    owner: OTAD
    sites: Tensor
    offsets: Tensor
    votes: Tensor
    outputs: Tensor
    n_neighbors: int
    center: Tensor
    members: Tensor | None = None
    train_x: Tensor | None = None
    by_tangents: bool = False
    keys: Map | None = None

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, like: Tensor, train_x: Tensor | None = None) -> Neighborhood:
        """The neighbors of an OTAD model, or of k-NN on the bank of one, on the device of `like`"""
        owner, got = defended_of(model), type(model).__name__
        if owner is None:
            raise InputError(f"model: expected OTAD or k-NN on its bank, got {got}")
        points = owner.bank_points.to(like)
        if owner.metric is None:  # the last coordinates of a lifted bank, which no input reaches
            points = points[:, : points.shape[1] - owner.backbone.lift]
        if train_x is not None:
            shape = (len(points), *owner.backbone.input_shape)
            check_shape(train_x, "train_x", shape, "with a row per bank point")
        if model is owner:
            outputs = head_outputs(owner, like)
        else:  # k-NN: 1 for the label of each point, in regression its value
            labels = owner.bank_labels.to(like.device)
            classes = None if labels.is_floating_point() else owner.backbone.n_outputs
            outputs = (labels if classes is None else one_hot(labels, classes)).to(like)
        votes = outputs.argmax(1) if outputs.dim() == 2 else outputs
        count = int(getattr(model, "n_neighbors", owner.n_neighbors))
        center = middle_of(points)
        if bool(center.norm() > OFF_ORIGIN * points.norm(dim=1).median()):
            points = points - center
        else:
            center = torch.zeros_like(center)
        squares = points.square().sum(1)
        return Neighborhood(owner, points, squares, votes, outputs, count, center, train_x=train_x)

    @staticmethod
    def views(model: nn.Module, like: Tensor, train_x: Tensor | None = None) -> list[Neighborhood]:
        """Every way in which points decide: as neighbors; for a global map, by tangents too."""
        neighbors = Neighborhood.of(model, like, train_x)
        potential = model.answerer.potential if isinstance(model, OTAD) else None
        return [neighbors] if potential is None else neighbors._of_map(potential)

    @torch.no_grad()
    def _of_map(self, potential: BankPotential) -> list[Neighborhood]:
        """Both views of the points that the map passes through: those left out have no vote."""
        owner, like = self.owner, self.sites
        bank = owner.bank_inputs, owner.bank_features
        pairs = Pairs(*bank, potential.strong_convexity, like.device)
        levels = potential_lines(pairs, potential) - pairs.image_squares / (2 * potential.modulus)
        members = levels.isfinite().nonzero()[:, 0]
        names = ("sites", "offsets", "votes", "outputs")
        taken = {name: getattr(self, name)[members] for name in names}
        count = min(self.n_neighbors, len(members))
        common = replace(self, members=members, n_neighbors=count, **taken)
        width = common.sites.shape[1]
        shift = pairs.center.clone()
        shift[:width] -= self.center
        sites, offsets = torch.empty_like(common.sites), torch.empty_like(common.offsets)
        for part in torch.arange(len(members), device=members.device).split(8192):
            images = pairs.images(members[part])
            offsets[part] = (2 * (images @ shift - levels[members[part]])).to(like)
            sites[part] = images[:, :width].to(like)
        return [common, replace(common, sites=sites, offsets=offsets, by_tangents=True)]

    def embed(self, x: Tensor) -> Tensor:
        keys = (self.keys or self.owner.query_keys)(x)
        return keys[:, : self.sites.shape[1]] - self.center

    def inputs(self, points: Tensor, like: Tensor) -> Tensor:
        """Points (..., d) as inputs (..., *input_shape): the reverse of `embed`."""
        metric, backbone = self.owner.metric, self.owner.backbone
        fits = metric is None and only_normalizes(backbone)
        expected = "neighbors of inputs that are only normalized"
        require(fits, "model", expected, type(metric or backbone).__name__)
        return self._denormalized(points + self.center, like)

    def training_inputs(self, indices: Tensor, like: Tensor) -> Tensor:
        """The inputs (B,*input_shape) that points (B,) were made from."""
        owner, rows = self.owner, indices if self.members is None else self.members[indices]
        if self.train_x is not None:
            return self.train_x[rows.to(self.train_x.device)].to(like)
        expected = f"the training inputs, which {type(owner.backbone).__name__} hides"
        require(knows_inputs(owner, None), "train_x", expected, None)
        points = owner.bank_inputs[rows.to(owner.bank_inputs.device)].to(like)
        return self._denormalized(points[:, : points.shape[1] - owner.backbone.lift], like)

    def _denormalized(self, points: Tensor, like: Tensor) -> Tensor:
        backbone = self.owner.backbone
        shaped = points.view(*points.shape[:-1], *backbone.input_shape)
        return (shaped * backbone.std + backbone.mean).to(like)

    def ranks(self, embedded: Tensor) -> Tensor:
        """(B,N), 0 at the least, differentiable; accurate enough to rank, not to decide."""
        ranks = self.offsets - 2 * embedded @ self.sites.T
        if self.by_tangents:
            return ranks - ranks.detach().amin(1, keepdim=True)
        return (embedded.square().sum(1, keepdim=True) + ranks).clamp_min(0)

    def ranks_of(self, embedded: Tensor, indices: Tensor) -> Tensor:
        """Ranks (B,n) of points (B,n) alone, up to a number that is the same for a whole row."""
        if self.by_tangents:
            products = self.sites[indices] @ embedded[:, :, None]
            return self.offsets[indices] - 2 * products[:, :, 0]
        return (self.sites[indices] - embedded[:, None]).square().sum(2)

    def width(self, ranks: Tensor, share: float) -> Tensor:
        """A scale (B,1) above 0 for ranks (B,N): a share of the K-th of them."""
        reach = ranks.topk(self.n_neighbors, largest=False).values[:, -1:]
        width = share * torch.maximum(reach, CLOSEST * ranks.mean(1, keepdim=True))
        return width.clamp_min(torch.finfo(ranks.dtype).tiny)

    def is_wrong(self, y: Tensor) -> Tensor:
        """Which bank points (B,N) vote against the right answers y (B,)."""
        return self.votes[None] != y[:, None]

    def nearest_classes(self, ranks: Tensor, y: Tensor) -> Tensor:
        """Classes (B,C) by the rank (B,N) of the first point that votes for each of them, those
        without any and the right ones y (B,) last."""
        first = ranks.new_full((len(y), self.outputs.shape[1]), torch.inf)
        first.scatter_reduce_(1, self.votes.expand(len(y), -1), ranks, "amin")
        return first.scatter_(1, y[:, None], torch.inf).argsort(1)

    @torch.no_grad()
    def nearest(self, x: Tensor, allowed: Tensor | None, count: int) -> Tensor:
        """The `count` bank points (B,count) first in rank for inputs x, of those allowed (B,N)."""
        scores = self.ranks(self.embed(x))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.inf)
        return scores.topk(min(count, scores.shape[1]), largest=False).indices


class Block:
    """The examples x (n,*) numbered `rows`, their right answers y (n,), and a view of the bank."""

    def __init__(self, survivors: Survivors, bank: Neighborhood, rows: Tensor) -> None:
        self.survivors, self.bank, self.rows = survivors, bank, rows
        self.target = survivors.target
        self.x, self.y = survivors.x[rows], self.target.targets(rows)
        self.is_regression = self.y.is_floating_point()

    def remaining(self) -> Block:
        return Block(self.survivors, self.bank, self.survivors.among(self.rows))

    def offer(self, moved: Tensor) -> None:
        self.survivors.offer(moved, self.rows)

    def try_point(self, embedded: Tensor) -> Tensor:
        """Offer embedded points (n,d) as inputs of the ball, which are returned."""
        moved = self.survivors.project(self.bank.inputs(embedded, self.x), self.rows)
        self.offer(moved)
        return moved


def blocks_of(survivors: Survivors, train_x: Tensor | None = None) -> Iterator[Block]:
    """For each view of the bank, all examples in blocks that fit in memory."""
    x = survivors.x
    for bank in Neighborhood.views(survivors.target.model, x, train_x):
        size = max(1, SCORES_AT_ONCE // len(bank.sites))
        for rows in torch.arange(len(x), device=x.device).split(size):
            yield Block(survivors, bank, rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class BankAttack(Attack):
    """Searches near bank points. Then `polish` steps of APGD with the model's own gradient continue
    from the best inputs: it weighs wrong neighbors as the model does. k-NN has no gradient."""

    polish: int = option(50, check_count, least=0)
    family = "adaptive"

    @abstractmethod
    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        """Offer inputs to `survivors`."""

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, again = Survivors(target, x, ball), Survivors(target, x, ball)
        self.search(survivors, generator)
        if self.polish == 0 or not isinstance(target.model, OTAD):
            return survivors.inputs
        climber = Apgd(steps=self.polish)
        climber.climb(again, climber.objective(target, x, ball), survivors.inputs, again.rows)
        return again.inputs
