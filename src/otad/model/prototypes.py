"""Prototypes: labeled points that answer without a network, and that can be trained.

A point `x_i` of class `y_i` gets the answer `g_i = h_i e_(y_i)`. The height is `h_i = D_i / sqrt 2`
with the distance `D_i` to the nearest point of another class. These answers are 1-Lipschitz:

- For points of two classes, `|g_i - g_j|^2 = (D_i^2 + D_j^2) / 2 <= |x_i - x_j|^2`, because neither
  point is nearer to a point of another class than to this one.
- For points of one class, `|g_i - g_j| = |D_i - D_j| / sqrt 2 <= |x_i - x_j| / sqrt 2`, because the
  distance to a set is 1-Lipschitz.

No 1-Lipschitz map does better: at `x_i` the margin `h_i` certifies a radius of
`h_i / sqrt 2 = D_i / 2`, which is half of the way to a point of another class. The map of such a
lifted bank is a 1-Lipschitz classifier for all points, and it is differentiable in them. So the
points can be trained like the weights of a network, for wide margins of the very classifier that is
certified afterwards.

In regression the answers are the targets divided by the least Lipschitz constant of all pairs, by
which the head multiplies. Points that are equal share the mean of their targets.
"""

from __future__ import annotations

import math
import warnings
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

REFRESHED = 10  # training steps after which the nearest points of other classes are searched again


@register("prototype_net")
class PrototypeNet(LiftedNet):
    """A backbone whose weights are n labeled points, and whose answer is their 1-Lipschitz map.

    It maps (x, 0) to (x, g(x)), where g is the 1-Lipschitz map through the points and their
    answers. `transport` solves for the map exactly. So the network and a global model of smoothness
    2 on its `bank()` are the same function, up to rounding. In training, the nearest points of
    other classes are searched again every ten steps; the map is 1-Lipschitz in between as well. Use
    `prototype_net` to make one from data.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input.
    n_outputs : int
        The number of classes, or 1 for regression.
    n_points : int
        The number n of points. All points and labels are 0 at first.
    task, bounds, mean, std
        As in `otad.nets.Backbone`.

    Attributes
    ----------
    points : nn.Parameter (n, p)
        The points, in the units of embedded inputs.
    labels : Tensor (n,)
        The labels of the points, or their values in regression.

    Examples
    --------
    >>> import otad
    >>> net = otad.prototypes.PrototypeNet((4,), 3, n_points=6)
    >>> net.points.shape, net.labels.shape
    (torch.Size([6, 4]), torch.Size([6]))
    """

    labels: Tensor

    def __init__(
        self, input_shape: Sequence[int], n_outputs: int, *, n_points: int, **options: Any
    ) -> None:
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

    @property
    def prototypes(self) -> tuple[Tensor, Tensor] | None:
        return (self.points, self.labels) if self.task == "classification" else None

    def bank(self, dtype: torch.dtype = torch.float32) -> FeatureBank:
        """Return the bank of inputs (x_i, 0) and features (x_i, g_i), each (n, p + C)."""
        points, heights = self.points.detach().to(dtype, copy=True), None
        if self.task == "classification":  # the heights of the points after rounding
            exact = label_heights(points.to(torch.float32), self.labels)
            if equal := int((exact == 0).sum()):
                told = f"{equal} of {len(points)} equal a point of another class"
                warnings.warn(f"points: {told}, where all classes tie", stacklevel=2)
            heights = exact.to(dtype)
            # Rounded down: otherwise two answers could be steeper than 1, and one be left out.
            heights = torch.nextafter(heights, torch.zeros_like(heights))
        answers = self._answers(heights).to(dtype)
        pairs = functional.pad(points, (0, self.n_outputs)), torch.cat([points, answers], 1)
        return FeatureBank(*pairs, self.labels, fingerprint_of(self, note="prototypes"))

    def train(self, mode: bool = True) -> PrototypeNet:
        """Switch to training mode, or to evaluation mode, and forget cached nearest points."""
        self._rivals = None  # because fused optimizers change weights unnoticed
        super().train(mode)
        return self

    def config(self) -> dict[str, Any]:
        options = super().config()
        del options["blocks"], options["hidden"]
        return options | {"n_points": len(self.points)}

    def _answers(self, heights: Tensor | None) -> Tensor:
        """Return g_i (n,C): the heights of the labels, or values in units of the head's slope."""
        if heights is None:
            return self.labels[:, None] / self.head.weight[:, -1]
        return functional.one_hot(self.labels, self.lift) * heights[:, None]

    def _heights(self) -> Tensor:
        """Return D_i / sqrt 2 (n,), differentiable in the points."""
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


@torch.inference_mode(False)  # points made in inference mode cannot be trained
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
    """Make prototypes from data, to be trained or used as they are.

    Each prototype is the mean of an input and its nearest neighbors of the same class.

    Parameters
    ----------
    net : LiftedNet
        A network whose input shape, outputs, normalization and task the prototypes take over, such
        as `otad.nets.lifted_net(shape, n_outputs, blocks=0)`.
    x : Tensor (N, *input_shape)
        Inputs.
    y : Tensor (N,)
        Labels (int64), or values in regression.
    per_class : int or None
        The largest number of prototypes of a class, drawn at random. If None, all are used.
    neighbors : int
        Over how many inputs a mean is taken, the input itself included. In regression it must be 1.
    generator : torch.Generator or None
        The source of randomness, by default of seed 0.
    progress : callable, bool or None
        A function of (classes done, all classes), or True or False to show or hide a progress bar.

    Returns
    -------
    PrototypeNet
        The prototypes, on the device and in the dtype of `net`.

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> x, y = digits.train_x[:200], digits.train_y[:200]
    >>> frame = otad.nets.lifted_net((1, 8, 8), 10, blocks=0)
    >>> net = otad.prototypes.prototype_net(frame, x, y, per_class=3, neighbors=5)
    >>> net.points.shape, net(x[:2]).shape
    (torch.Size([30, 64]), torch.Size([2, 10]))
    """
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
        points = class_means(points, labels.to(points.device), neighbors, rows, progress)
    else:
        points = points[rows.to(points.device)]
    frame: dict[str, Any] = {"bounds": net.bounds, "mean": net.mean.cpu(), "std": net.std.cpu()}
    frame["task"] = net.task
    made = PrototypeNet(net.input_shape, net.n_outputs, n_points=len(rows), **frame).to(net.mean)
    with torch.no_grad():
        made.points.copy_(points)
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
    points: Tensor,
    labels: Tensor,
    neighbors: int,
    rows: Tensor,
    progress: Counter | bool | None = None,
) -> Tensor:
    """Return for each of the points `rows` (n,) the mean (n,p) of the `neighbors` nearest points of
    its class.

    The point itself is included. If a class has fewer points, the mean is over all of them."""
    _check(points, labels)
    check_count(neighbors, "neighbors")
    rows = rows.to(points.device)
    means, classes = points[rows], labels.unique()
    with progress_bar("placing prototypes", progress) as report:
        for done, label in enumerate(classes, 1):
            own, asked = points[labels == label], labels[rows] == label
            nearest = TorchSearch(own)(means[asked], min(neighbors, len(own))).indices
            # Sums in the order of the points: the same neighbors must give the same mean.
            shares = [own[column] / nearest.shape[1] for column in nearest.sort(1).values.unbind(1)]
            means[asked] = sum(shares[1:], shares[0])
            report(done, len(classes))
    return means


@torch.no_grad()
def label_heights(points: Tensor, labels: Tensor) -> Tensor:
    """Return h_i = D_i / sqrt 2 (N,) in float64."""
    steps = points.double() - points[nearest_rivals(points, labels)].double()
    heights: Tensor = steps.norm(dim=1) / math.sqrt(2)
    return heights


@torch.no_grad()
def nearest_rivals(points: Tensor, labels: Tensor) -> Tensor:
    """Return for each point (N,p) the nearest point of another class (N,)."""
    _check(points, labels)
    is_mixed = bool((labels != labels[0]).any())
    require(is_mixed, "labels", "two classes at least", f"only {int(labels[0])}")
    nearest, classes = torch.empty_like(labels), labels.unique()
    with progress_bar("searching the nearest points of other classes") as report:
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
