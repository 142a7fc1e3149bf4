"""Prototypes: a lifted bank whose points are learned, through the map they give.

The map of a lifted bank of labeled points (`otad.model.labeled_bank`) is a 1-Lipschitz
classifier, whatever the points are, and differentiable in them. So points can be trained like the
weights of a net: for wide margins of the very classifier that answers and is certified afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_count
from otad.cip.whole_bank.lifted_map import lifted_map
from otad.errors import InputError
from otad.io.tensor_files import fingerprint_of
from otad.model.bank import FeatureBank
from otad.model.labeled_bank import (
    bank_of_labels,
    class_means,
    label_heights,
    nearest_rivals,
)
from otad.nets.base import register, squared_lengths
from otad.nets.lifted import LiftedNet

REFRESHED = 10  # steps of training after which nearest rivals are looked for again


@register("prototype_net")
class PrototypeNet(LiftedNet):
    """(x, 0) -> (x, g(x)), with g the 1-Lipschitz map of n labeled points, which are its weights.

    `points` (n,p) are in the units of embedded inputs. `transport` solves for the map exactly, so
    the net and the model of global scope on its `bank()`, of smoothness 2, are one function, up to
    rounding. (The least smoothness is 2 unless equal points have different labels.) While it
    trains, heights follow the rivals that were nearest a few steps ago; the map is 1-Lipschitz
    whatever they are.
    """

    labels: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        n_points: int,
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
        task: str = "classification",
    ) -> None:
        """All points and labels are 0 at first: load them, or take those of `prototype_net`."""
        super().__init__(
            input_shape, n_outputs, blocks=0, task=task, bounds=bounds, mean=mean, std=std
        )
        if task != "classification":
            raise InputError(f"task: expected 'classification', got {task!r}")
        count = check_count(n_points, "n_points")
        self.register_buffer("labels", torch.zeros(count, dtype=torch.int64))
        self.points = nn.Parameter(torch.zeros(count, self.dim - self.lift))
        self._rivals: Tensor | None = None
        self._state: tuple[object, ...] = ()
        self._age = 0

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        inputs = e[:, : -self.lift]
        with torch.autocast(e.device.type, enabled=False):
            heights = self._heights()
            answers = functional.one_hot(self.labels, self.lift) * heights[:, None]
            found = lifted_map(inputs.to(self.points.dtype), self.points, answers)
        return torch.cat([inputs, found.to(e.dtype)], dim=1), squared_lengths(found)

    def bank(self) -> FeatureBank:
        """The points with their answers, in float32."""
        points = self.points.detach().to(torch.float32, copy=True)
        heights = label_heights(points, self.labels).to(points.dtype)
        # Never rounded up: two answers would be steeper than 1 then, and one of them left out.
        heights = torch.nextafter(heights, torch.zeros_like(heights))
        fingerprint = fingerprint_of(self, note="prototypes")
        return bank_of_labels(points, self.labels, heights, self.n_outputs, fingerprint)

    def train(self, mode: bool = True) -> PrototypeNet:
        self._rivals = None  # fused optimizers change weights without a trace
        super().train(mode)
        return self

    def config(self) -> dict[str, Any]:
        options = super().config()
        del options["blocks"], options["hidden"]
        return options | {"n_points": len(self.points)}

    def _heights(self) -> Tensor:
        """D_i / sqrt 2 (n,), differentiable in the points."""
        points, labels = self.points, self.labels
        trained = None if self.training else points._version
        state = (points.data_ptr(), trained, labels.data_ptr(), labels._version)
        if self._rivals is None or self._state != state or self._age >= REFRESHED:
            with torch.inference_mode(False):  # kept for calls that ask for a gradient
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
) -> PrototypeNet:
    """Prototypes for the inputs and outputs of `net`, to be trained or used as they are.

    They are inputs x (N,*input_shape) with labels y (N,), each replaced by the mean of its
    `neighbors` nearest of that class; all of them, or `per_class` of each class (all where it has
    fewer), drawn by the generator.
    """
    labels = net.check_targets(y, len(net.check_inputs(x))).cpu()
    rows = _chosen(labels, per_class, generator or torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedded = torch.cat([net.embed(some.to(net.mean.device)) for some in x.split(4096)])
    points = class_means(embedded[:, : -net.lift], labels.to(embedded.device), neighbors)
    made = PrototypeNet(
        net.input_shape,
        net.n_outputs,
        n_points=len(rows),
        bounds=net.bounds,
        mean=net.mean.cpu(),
        std=net.std.cpu(),
    ).to(net.mean)
    with torch.no_grad():
        made.points.copy_(points[rows.to(points.device)])
        made.labels.copy_(labels[rows])
    return made


def _chosen(labels: Tensor, per_class: int | None, generator: torch.Generator) -> Tensor:
    """Rows (n,), ascending."""
    if per_class is None:
        return torch.arange(len(labels))
    count = check_count(per_class, "per_class")
    members = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    drawn = [rows[torch.randperm(len(rows), generator=generator)[:count]] for rows in members]
    return torch.cat(drawn).sort().values
