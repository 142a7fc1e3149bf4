"""Prototypes: labeled points that answer without a net, and that can be trained.

A point x_i of class y_i gets the answer g_i = h_i e_(y_i) with the height h_i = D_i / sqrt 2, where
D_i is the distance to the nearest point of another class. These answers are 1-Lipschitz:

- points of two classes: |g_i - g_j|^2 = (D_i^2 + D_j^2) / 2 <= |x_i - x_j|^2, since neither is
  nearer to a point of another class than to this one;
- points of one class: |g_i - g_j| = |D_i - D_j| / sqrt 2 <= |x_i - x_j| / sqrt 2, since a distance
  to a set is 1-Lipschitz.

No 1-Lipschitz map does better: at x_i the margin h_i certifies a radius of h_i / sqrt 2 = D_i / 2,
half of the way to a point of another class. And the map of such a lifted bank is a 1-Lipschitz
classifier whatever the points are, and differentiable in them. So the points can be trained like
the weights of a net, for wide margins of the very classifier that is certified afterwards.

In regression the answers are the targets themselves, divided by the least Lipschitz constant of
all pairs, which the head multiplies back; points that are equal share the mean of their targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.arguments import guard
from otad.checks import check_count, check_shape, check_tensor, require
from otad.cip.whole_bank.lifted_bank import least_lipschitz, lifted_map
from otad.io.tensor_files import fingerprint_of
from otad.model.bank import FeatureBank
from otad.nets.base import register, squared_lengths
from otad.nets.fully_connected import LiftedNet
from otad.progress import Counter, progress_bar
from otad.search.neighbors import TorchSearch

__all__ = ["PrototypeNet", "prototype_net"]

REFRESHED = 10  # steps of training after which nearest rivals are searched again


@register("prototype_net")
class PrototypeNet(LiftedNet):
    """(x, 0) -> (x, g(x)), with g the 1-Lipschitz map of n labeled points, which are its weights.

    `points` (n,p) are in the units of embedded inputs. `transport` solves for the map exactly, so
    the net and the model of global scope on its `bank()`, of smoothness 2, are one function, up to
    rounding. In training, heights follow the rivals that were nearest a few steps ago; the map is
    1-Lipschitz whatever they are.
    """

    labels: Tensor

    def __init__(
        self, input_shape: Sequence[int], n_outputs: int, *, n_points: int, **options: Any
    ) -> None:
        """All points and labels are 0 at first."""
        super().__init__(input_shape, n_outputs, blocks=0, **options)
        count = check_count(n_points, "n_points")
        dtype = torch.int64 if self.task == "classification" else self.mean.dtype
        # Registered before they use memory, see `nets.inputs.restored`.
        self.register_buffer("labels", torch.zeros((), dtype=dtype).expand(count))
        self.points = nn.Parameter(torch.zeros(()).expand(count, self.dim - self.lift))
        self.labels, points = self.labels.clone(), self.points.detach().clone()
        self.points = nn.Parameter(points)
        self._rivals: Tensor | None = None
        self._state: tuple[object, ...] = ()
        self._age = 0

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs = e[:, : -self.lift]
        with torch.autocast(e.device.type, enabled=False):
            heights = self._heights() if self.task == "classification" else None
            answers = self._answers(heights).to(self.points.dtype)
            found = lifted_map(inputs.to(self.points.dtype), self.points, answers)
        return torch.cat([inputs, found.to(e.dtype)], dim=1), squared_lengths(found)

    def bank(self, dtype: torch.dtype = torch.float32) -> FeatureBank:
        """Inputs (x_i, 0) and features (x_i, g_i), (n,p+C)."""
        points, heights = self.points.detach().to(dtype, copy=True), None
        if self.task == "classification":  # of the points as they are rounded
            exact = label_heights(points.to(torch.float32), self.labels)
            heights = exact.to(dtype)
            # Never rounded up: two answers would be steeper than 1, and one of them left out.
            heights = torch.nextafter(heights, torch.zeros_like(heights))
        answers = self._answers(heights).to(dtype)
        pairs = functional.pad(points, (0, self.n_outputs)), torch.cat([points, answers], 1)
        return FeatureBank(*pairs, self.labels, fingerprint_of(self, note="prototypes"))

    def train(self, mode: bool = True) -> PrototypeNet:
        self._rivals = None  # fused optimizers change weights without a trace
        super().train(mode)
        return self

    def config(self) -> dict[str, Any]:
        options = super().config()
        del options["blocks"], options["hidden"]
        return options | {"n_points": len(self.points)}

    def _answers(self, heights: Tensor | None) -> Tensor:
        """g_i (n,C): the heights of the labels, or values in units of the head's slope."""
        if heights is None:
            return self.labels[:, None] / self.head.weight[:, -1]
        return functional.one_hot(self.labels, self.lift) * heights[:, None]

    def _heights(self) -> Tensor:
        """D_i / sqrt 2 (n,), differentiable in the points."""
        points, labels = self.points, self.labels
        trained = None if self.training else points._version
        state = (points.data_ptr(), trained, labels.data_ptr(), labels._version)
        if self._rivals is None or self._state != state or self._age >= REFRESHED:
            with torch.inference_mode(False):  # cached for calls that ask for a gradient
                self._rivals, self._state = nearest_rivals(points.detach(), labels), state
            self._age = 0
        self._age += self.training
        apart: Tensor = torch.linalg.vector_norm(points - points[self._rivals], dim=1)
        return apart / math.sqrt(2)


@torch.inference_mode(False)  # points made in that mode could not be trained
def prototype_net(
    net: LiftedNet,
    x: Tensor,
    y: Tensor,
    *,
    per_class: int | None = None,
    neighbors: int = 20,
    generator: torch.Generator | None = None,
    progress: Counter | bool | None = None,
) -> PrototypeNet:
    """Prototypes for the inputs and outputs of `net`, to be trained or used as they are: inputs x
    (N,*input_shape) with labels y (N,), each replaced by the mean of its `neighbors` nearest of
    that class; all, or at most `per_class` of each class, drawn by the generator. In regression y
    are values, and all points are used as they are. `progress`: see `otad.progress`, with (classes
    done, all classes)."""
    if net.task == "regression":
        kept = per_class is None and neighbors == 1
        got = f"per_class {per_class} and neighbors {neighbors}"
        require(kept, "neighbors", "1 in regression, with all points", got)
    labels = net.check_targets(y, len(net.check_inputs(x))).cpu()
    rows = torch.arange(len(labels))
    if per_class is not None:
        count = check_count(per_class, "per_class")
        generator = generator or torch.Generator().manual_seed(0)
        members = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
        drawn = [some[torch.randperm(len(some), generator=generator)[:count]] for some in members]
        rows = torch.cat(drawn).sort().values
    with torch.no_grad():
        embedded = torch.cat([net.embed(some.to(net.mean.device)) for some in x.split(4096)])
    points = embedded[:, : -net.lift]
    if neighbors != 1:
        with progress_bar("placing prototypes", progress) as report:
            points = class_means(points, labels.to(points.device), neighbors, report)
    frame: dict[str, Any] = {"bounds": net.bounds, "mean": net.mean.cpu(), "std": net.std.cpu()}
    frame["task"] = net.task
    made = PrototypeNet(net.input_shape, net.n_outputs, n_points=len(rows), **frame).to(net.mean)
    with torch.no_grad():
        made.points.copy_(points[rows.to(points.device)])
        made.labels.copy_(labels[rows])
        if net.task == "regression":  # equal points share the mean of their values
            _, place = points.unique(dim=0, return_inverse=True)
            sums = made.labels.new_zeros(len(points)).index_add(0, place, made.labels)
            made.labels.copy_((sums / place.bincount(minlength=len(points)).clamp_min(1))[place])
            slope = least_lipschitz(made.points, made.labels[:, None])
            made.head.weight[:, -1] = slope or 1.0
    return made


@torch.no_grad()
def class_means(
    points: Tensor, labels: Tensor, neighbors: int, report: Counter | None = None
) -> Tensor:
    """(N,p): for each point the mean of the `neighbors` points of its class nearest to it, itself
    included; of all of them where a class has fewer."""
    _check(points, labels)
    if check_count(neighbors, "neighbors") == 1:
        return points
    means, classes = torch.empty_like(points), labels.unique()
    for done, label in enumerate(classes, 1):
        own = points[labels == label]
        nearest = TorchSearch(own)(own, min(neighbors, len(own))).indices
        shares = [own[column] / nearest.shape[1] for column in nearest.unbind(1)]
        means[labels == label] = torch.stack(shares).sum(0)
        if report is not None:
            report(done, len(classes))
    return means


@torch.no_grad()
def label_heights(points: Tensor, labels: Tensor) -> Tensor:
    """h_i = D_i / sqrt 2 (N,) in float64."""
    steps = points.double() - points[nearest_rivals(points, labels)].double()
    heights: Tensor = steps.norm(dim=1) / math.sqrt(2)
    return heights


@torch.no_grad()
def nearest_rivals(points: Tensor, labels: Tensor) -> Tensor:
    """For each point (N,p) the nearest one of another class (N,)."""
    _check(points, labels)
    is_mixed = bool((labels != labels[0]).any())
    require(is_mixed, "labels", "two classes at least", f"only {int(labels[0])}")
    nearest, classes = torch.empty_like(labels), labels.unique()
    with progress_bar("searching rivals") as report:
        for done, label in enumerate(classes, 1):
            own = labels == label
            others = (~own).nonzero()[:, 0]
            nearest[own] = others[TorchSearch(points[others])(points[own], 1).indices[:, 0]]
            report(done, len(classes))
    return nearest


def _check(points: Tensor, labels: Tensor) -> None:
    check_tensor(points, "points", "N,p")
    check_tensor(labels, "labels", "N", dtypes=(torch.int64,))
    check_shape(labels, "labels", (len(points),), "with one label per point")


guard(globals(), __all__)
