"""What an attacker reads from a bank: where its points are, and which class each votes for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack, option
from otad.attacks.needs import Knowledge
from otad.attacks.stand_in import Map
from otad.attacks.target import Survivors, Target
from otad.baselines import Knn, Purified
from otad.checks import check_count, check_shape, require
from otad.cip.whole_bank.pairs import Pairs, middle_of
from otad.cip.whole_bank.potential import BankPotential, potential_lines
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.model.training_inputs import check_training_inputs
from otad.nets import only_normalizes
from otad.nets.adapt import denormalized
from otad.threat import LpBall

SCORES_AT_ONCE = 2**26  # numbers in a block of ranks
FEATURES_AT_ONCE = 2**25  # numbers in a block of features
CLOSEST = 1e-3  # least scale as a share of the mean rank, for K neighbors equal to the input
OFF_ORIGIN = 0.95  # |middle| / median |point| above which distances are lost to rounding


def defended_of(model: nn.Module) -> OTAD | None:
    """Return the OTAD model that is `model` or shares its bank with it; None for other models."""
    inner = model.model if isinstance(model, Knn) else model
    return inner if isinstance(inner, OTAD) else None


def knowledge_of(model: nn.Module, train_x: Tensor | None = None) -> Knowledge:
    """Return what an attacker knows about a model.

    `train_x` (N,*) are the inputs that its bank was made from, if they are known. The answers of a
    model without a bank do not depend on them."""
    defended = defended_of(model)
    if defended is None:
        return Knowledge(model.straightened() if isinstance(model, Purified) else None)
    if train_x is not None:
        check_training_inputs(defended, train_x)
    keys = defended.backbone.embed if defended.metric is None else defended.metric
    affine = defended.metric is None and only_normalizes(defended.backbone)
    known = knows_inputs(defended, train_x)
    return Knowledge(defended.backbone, keys, affine, known, train_x)


def knows_inputs(model: OTAD, train_x: Tensor | None) -> bool:
    """Return whether the training inputs are given or can be computed from the bank."""
    return train_x is not None or only_normalizes(model.backbone)


# Cached, because a bank of images has gigabytes of features and every batch asks for the outputs.
_HEAD_OUTPUTS: WeakKeyDictionary[OTAD, tuple[tuple[object, ...], Tensor]] = WeakKeyDictionary()


@torch.no_grad()
def head_outputs(owner: OTAD, like: Tensor) -> Tensor:
    """Return the outputs of the head for the feature of each bank point: (N,C) or (N,)."""
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
    """The bank of a model as its attacker sees it: N points, of which the lowest ranks decide.

    The rank of point i for an embedded input e (or for its key, if there is a metric) is
    offsets_i - 2 <sites_i, e>, up to a number that is the same for all i. So point i ranks before
    point j on one side of a plane with the normal sites_i - sites_j. The coordinates of a lift,
    which no input reaches, are left out. Embedded inputs are taken relative to `center` (d,), which
    is 0 unless the bank is far from the origin. There are two views:

    - neighbors: the rank is |e - x_i|^2, so sites are the bank points (N,d) and offsets |x_i|^2;
    - tangents (`by_tangents`), for a global map: its potential is the smoothed maximum of its
      tangents u~_i + <z~_i, e - x_i>, and the map changes from one to the other where they meet. So
      sites are z~_i, and offsets are 2 (<z~_i, x_i> - u~_i).

    `votes` (N,) holds the class that each point alone votes for, or its value in regression;
    `outputs` (N,C) or (N,) are the outputs it alone would give. Points are sorted by their class,
    and `members` (N,) says which points of the bank they are. `train_x` holds the training inputs
    of the whole bank, if the attacker was given them. `keys` is `owner.query_keys` with a gradient
    that an attack can follow, see `climbable`."""

    owner: OTAD
    sites: Tensor
    offsets: Tensor
    votes: Tensor
    outputs: Tensor
    n_neighbors: int
    center: Tensor
    members: Tensor
    train_x: Tensor | None = None
    by_tangents: bool = False
    keys: Map | None = None

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, like: Tensor, train_x: Tensor | None = None) -> Neighborhood:
        """Return the view of neighbors of an OTAD model, or of k-NN on its bank.

        Tensors are on the device of `like`."""
        owner, got = defended_of(model), type(model).__name__
        if owner is None:
            raise InputError(f"model: expected OTAD or k-NN on its bank, got {got}")
        points = owner.bank_points.to(like)
        if owner.metric is None:  # without the coordinates of a lift, which no input reaches
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
        if outputs.dim() == 2:
            members = votes.argsort(stable=True)
            points, votes, outputs = points[members], votes[members], outputs[members]
        else:
            members = torch.arange(len(votes), device=votes.device)
        taken = points, points.square().sum(1), votes, outputs
        return Neighborhood(owner, *taken, count, center, members, train_x=train_x)

    @staticmethod
    def views(model: nn.Module, like: Tensor, train_x: Tensor | None = None) -> list[Neighborhood]:
        """Return the view of neighbors, and for a global map the view of tangents as well."""
        neighbors = Neighborhood.of(model, like, train_x)
        potential = model.answerer.potential if isinstance(model, OTAD) else None
        return [neighbors] if potential is None else neighbors._of_map(potential)

    @torch.no_grad()
    def _of_map(self, potential: BankPotential) -> list[Neighborhood]:
        """Return both views of the points that the map passes through, without those left out."""
        owner, like = self.owner, self.sites
        bank = owner.bank_inputs, owner.bank_features
        pairs = Pairs(*bank, potential.strong_convexity, like.device)
        levels = potential_lines(pairs, potential) - pairs.image_squares / (2 * potential.modulus)
        kept = levels.isfinite()[self.members]
        names = ("sites", "offsets", "votes", "outputs", "members")
        taken = {name: getattr(self, name)[kept] for name in names}
        members = taken["members"]
        common = replace(self, n_neighbors=min(self.n_neighbors, len(members)), **taken)
        width = common.sites.shape[1]
        shift = pairs.center.clone()
        shift[:width] -= self.center
        sites, offsets = torch.empty_like(common.sites), torch.empty_like(common.offsets)
        for part in torch.arange(len(members), device=members.device).split(8192):
            images = pairs.images(members[part])
            offsets[part] = (2 * (images @ shift - levels[members[part]])).to(like)
            sites[part] = images[:, :width].to(like)
        return [common, replace(common, sites=sites, offsets=offsets, by_tangents=True)]

    @cached_property
    def is_plain(self) -> bool:
        """Whether neighbors are those of inputs that are only normalized."""
        return self.owner.metric is None and only_normalizes(self.owner.backbone)

    def embed(self, x: Tensor) -> Tensor:
        if self.keys is None and self.is_plain:
            keys = self.owner.backbone.embed(x)  # without checks, which read from a GPU
        else:
            keys = (self.keys or self.owner.query_keys)(x)
        return keys[:, : self.sites.shape[1]] - self.center

    def inputs(self, points: Tensor, like: Tensor) -> Tensor:
        """Return points (..., d) as inputs (..., *input_shape), the inverse of `embed`."""
        metric, backbone = self.owner.metric, self.owner.backbone
        expected = "neighbors of inputs that are only normalized"
        require(self.is_plain, "model", expected, type(metric or backbone).__name__)
        return denormalized(backbone, points + self.center).to(like)

    def training_inputs(self, indices: Tensor, like: Tensor) -> Tensor:
        """Return the inputs (B,*input_shape) that bank points (B,) were made from."""
        owner, rows = self.owner, self.members[indices]
        if self.train_x is not None:
            return self.train_x[rows.to(self.train_x.device)].to(like)
        expected = f"the training inputs, which {type(owner.backbone).__name__} hides"
        require(knows_inputs(owner, None), "train_x", expected, None)
        points = owner.bank_inputs[rows.to(owner.bank_inputs.device)].to(like)
        return denormalized(owner.backbone, points).to(like)

    def ranks(self, embedded: Tensor) -> Tensor:
        """Return the ranks (B,N), at least 0 and differentiable, up to rounding errors."""
        ranks = self.offsets - 2 * embedded @ self.sites.T
        if self.by_tangents:
            return ranks - ranks.detach().amin(1, keepdim=True)
        return (embedded.square().sum(1, keepdim=True) + ranks).clamp_min(0)

    def ranks_of(self, embedded: Tensor, indices: Tensor) -> Tensor:
        """Return the ranks (B,n) of points (B,n), up to a number that is the same for a row."""
        if self.by_tangents:
            products = self.sites[indices] @ embedded[:, :, None]
            return self.offsets[indices] - 2 * products[:, :, 0]
        return (self.sites[indices] - embedded[:, None]).square().sum(2)

    def width(self, ranks: Tensor, share: float) -> Tensor:
        """Return a positive scale (B,1) for ranks (B,N): a share of the K-th smallest rank."""
        reach = ranks.topk(self.n_neighbors, largest=False).values[:, -1:]
        width = share * torch.maximum(reach, CLOSEST * ranks.mean(1, keepdim=True))
        return width.clamp_min(torch.finfo(ranks.dtype).tiny)

    def is_wrong(self, y: Tensor) -> Tensor:
        """Return which bank points (B,N) vote against the right answers y (B,)."""
        return self.votes[None] != y[:, None]

    def nearest_classes(self, ranks: Tensor, y: Tensor) -> Tensor:
        """Return the classes other than y (B,), in the order of their least ranks (B,N): (B,C-1).

        The nearest one is in place of those for which no point votes."""
        parts = ranks.split(self.class_sizes[0], dim=1)
        least = [
            part.amin(1) if part.shape[1] else part.new_full(y.shape, torch.inf) for part in parts
        ]
        found = torch.stack(least, 1).scatter_(1, y[:, None], torch.inf).sort(1)
        classes = torch.where(found.values.isfinite(), found.indices, found.indices[:, :1])
        return classes[:, :-1]

    def lowest_of_class(self, ranks: Tensor, count: int, classes: Tensor) -> Tensor:
        """Return the bank points (B,count) of least rank (B,N) that vote for the classes (B,).

        The first is in place of those that a class does not have. There are no more columns than
        points of the largest class."""
        most = max(self.class_sizes[0])
        places, filled = self.points_of(classes, most)
        own = ranks.gather(1, places).masked_fill(filled, torch.inf)
        best = own.topk(min(count, most), largest=False)
        chosen = places.gather(1, best.indices)
        return torch.where(best.values.isfinite(), chosen, chosen[:, :1])

    def points_of(self, classes: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the points (n,most) that vote for each of the classes (n,), and which of them do
        not, but fill up a class with fewer points (n,most)."""
        sizes, steps = self.class_sizes[1], torch.arange(most, device=classes.device)
        places = (sizes.cumsum(0) - sizes)[classes, None] + steps
        return places.clamp_max(len(self.sites) - 1), steps >= sizes[classes, None]

    @cached_property
    def class_sizes(self) -> tuple[list[int], Tensor]:
        """How many points vote for each class, as a list and as a tensor (C,)."""
        sizes = self.votes.bincount(minlength=self.outputs.shape[1])
        return sizes.tolist(), sizes

    @torch.no_grad()
    def ranks_at(self, x: Tensor) -> Tensor:
        """Return the ranks (B,N) of all bank points for inputs x (B,*), without a gradient."""
        return self.ranks(self.embed(x))


def lowest(ranks: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
    """Return the bank points (B,count) of least rank (B,N) among those allowed (B,N), or all."""
    if allowed is not None:
        ranks = ranks.masked_fill(~allowed, torch.inf)
    return ranks.topk(min(count, ranks.shape[1]), largest=False).indices


class Block:
    """Some examples x (n,*), their numbers `rows`, right answers y (n,) and a view of the bank."""

    def __init__(self, survivors: Survivors, bank: Neighborhood, rows: Tensor) -> None:
        self.survivors, self.bank, self.rows = survivors, bank, rows
        self.target = survivors.target
        self.x, self.y = survivors.x[rows], self.target.targets(rows)
        self.is_regression = self.y.is_floating_point()

    def aims(self, most: int) -> range:
        """Return the places of up to `most` wrong classes; in regression of both directions."""
        return range(2 if self.is_regression else min(most, self.bank.outputs.shape[1] - 1))

    def remaining(self) -> Block:
        """Return the block of the examples that are still worth attacking."""
        return Block(self.survivors, self.bank, self.survivors.among(self.rows))

    def offer(self, moved: Tensor) -> None:
        self.survivors.offer(moved, self.rows)

    def try_point(self, embedded: Tensor) -> Tensor:
        """Offer embedded points (n,d), projected into the ball, and return them as inputs."""
        moved = self.survivors.project(self.bank.inputs(embedded, self.x), self.rows)
        self.offer(moved)
        return moved


def blocks_of(survivors: Survivors, train_x: Tensor | None = None) -> Iterator[Block]:
    """Yield all examples in blocks that fit in memory, for each view of the bank."""
    x = survivors.x
    for bank in Neighborhood.views(survivors.target.model, x, train_x):
        size = max(1, SCORES_AT_ONCE // len(bank.sites))
        for rows in torch.arange(len(x), device=x.device).split(size):
            yield Block(survivors, bank, rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class BankAttack(Attack):
    """A search near bank points, followed by `polish` steps of APGD from the best inputs.

    APGD follows the model's own gradient, which weighs wrong neighbors as the model does. k-NN has
    no gradient, so APGD is skipped there."""

    polish: int = option(50, check_count, least=0)
    family = "adaptive"

    @abstractmethod
    def search(self, survivors: Survivors, generator: torch.Generator) -> None:
        """Search for inputs and offer them to `survivors`."""

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors, again = Survivors(target, x, ball), Survivors(target, x, ball)
        self.search(survivors, generator)
        if self.polish == 0 or not isinstance(target.model, OTAD):
            return survivors.inputs
        climber = Apgd(steps=self.polish)
        climber.climb(again, climber.objective(target, x, ball), survivors.inputs, again.rows)
        return again.inputs
