"""How far a change of the input moves the query: as a key among neighbors, and embedded.

Without a metric both are the same space. With one, keys move by at most Q |delta|, Q a Lipschitz
constant of the metric, which decides which bank points can be neighbors; and the embedded input
moves as the embedding allows, which decides the answer for given neighbors. With l = 0 the hull
rule depends on the keys alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_evaluation, check_finite, check_shape
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import Backbone, only_normalizes

KEY_ROUNDOFFS = 64.0
"""Relative error allowed for computed keys, in units of the dtype's eps: that of 16 orthogonal
layers of up to 2,048 terms is about 1."""


@dataclass(frozen=True, eq=False)
class Reach:
    """An input x + delta with |delta / unit| <= r is mapped to e(x) + stretch * u with |u| <= r.

    `stretch` (d,) float64. For normalized and flattened inputs it is unit / std, and the points
    reached are exactly that ellipsoid; it is 0 at coordinates that no input reaches, which are then
    0 themselves. Otherwise it is a Lipschitz constant, the same for all d coordinates. All rules
    work with u: their radii are radii of the input.

    `slip` is the relative rounding error of e as the model computes it, so that in truth
    |u| <= r + 2 slip (size + r), where size is |e(x) / stretch|.
    """

    stretch: Tensor
    slip: float

    @property
    def longest(self) -> float:
        """Q: no query moves further than Q r."""
        return float(self.stretch.max())

    def to_input(self, radius: Tensor, size: Tensor) -> Tensor:
        """The largest r (B,) for which |u| stays within `radius` (B,); 0 where there is none."""
        return ((radius - 2 * self.slip * size) / (1 + 2 * self.slip)).clamp_min(0.0)

    def from_input(self, eps: float, size: Tensor) -> Tensor:
        """The largest |u| (B,) for inputs within eps."""
        return eps * (1 + 2 * self.slip) + 2 * self.slip * size

    def size_of(self, points: Tensor) -> Tensor:
        """|e(x) / stretch| (B,)."""
        reached = self.stretch > 0
        size: Tensor = torch.linalg.vector_norm(
            points.double()[:, reached] / self.stretch[reached], dim=1
        )
        return size


class Query(NamedTuple):
    """Inputs (B,*), embedded (B,d), and their keys (B,m) among the neighbors."""

    inputs: Tensor
    embedded: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class InputReach:
    """`keys`: the reach of keys. `embedded`: that of the embedding, None where it is not known.
    `assumptions`: what is taken for granted about both."""

    model: OTAD
    keys: Reach
    embedded: Reach | None
    assumptions: tuple[str, ...]
    longest_unit: float = 1.0

    @torch.no_grad()
    def query(self, x: Tensor) -> Query:
        embedded = self.model.backbone.embed(x)
        return Query(
            x, embedded, embedded if self.model.metric is None else self.model.query_keys(x)
        )

    def to_input(self, radius: Tensor, query: Query) -> Tensor:
        """The largest r (B,) for which |u| stays within `radius` (B,) in both spaces."""
        sides = [reach.to_input(radius, size) for reach, size in self._sides(query)]
        return torch.stack(sides).amin(0)

    def from_input(self, eps: float, query: Query) -> Tensor:
        """The largest |u| (B,) of both spaces for inputs within eps."""
        sides = [reach.from_input(eps, size) for reach, size in self._sides(query)]
        return torch.stack(sides).amax(0)

    def _sides(self, query: Query) -> list[tuple[Reach, Tensor]]:
        sides = []
        if self.embedded is not None:
            sides.append((self.embedded, self.embedded.size_of(query.embedded)))
        if self.model.metric is not None:
            sides.append((self.keys, self._key_size(query)))
        return sides

    def _key_size(self, query: Query) -> Tensor:
        """|key| / Q + |x - mean| (B,): keys may be short while the terms they are made of are not.
        Where x moves by r, each of both grows by no more."""
        center = getattr(self.model.metric, "mean", self.model.backbone.mean)
        own = (query.inputs.double() - center.double()).flatten(1) / self.longest_unit
        size: Tensor = self.keys.size_of(query.keys) + torch.linalg.vector_norm(own, dim=1)
        return size


def input_reach(
    model: OTAD,
    unit: Tensor | None,
    embedding_lipschitz: float | None,
    metric_lipschitz: float | None,
) -> InputReach:
    """For changes measured as |delta / unit|; constants that are not known have to be given."""
    given: tuple[str, ...] = ()
    if embedding_lipschitz is not None:
        given = (f"the embedding stretches by {embedding_lipschitz:g} at most, as stated",)
    backbone, metric = model.backbone, model.metric
    if metric is None:
        if metric_lipschitz is not None:
            raise InputError(
                "metric_lipschitz: expected None, as neighbors are searched among embedded inputs, "
                f"got {metric_lipschitz!r}"
            )
        reach = reach_of(backbone, unit, embedding_lipschitz)
        return InputReach(model, reach, reach, given)
    embedded = None
    is_given = embedding_lipschitz is not None
    if only_normalizes(backbone) or is_given or model.strong_convexity != 0:
        embedded = reach_of(backbone, unit, embedding_lipschitz)
    else:
        given = (
            "rule 'cell' is left out, as the Lipschitz constant of the embedding of "
            f"{type(backbone).__name__} is not known",
        )
    measured = checked_unit(unit, backbone)
    longest = 1.0 if measured is None else float(measured.max())
    constant, slip, assumed = _metric_constant(metric, metric_lipschitz, longest)
    stretch = torch.full((model.bank_points.shape[1],), constant, dtype=torch.float64)
    keys = Reach(stretch.to(backbone.std.device), slip)
    return InputReach(model, keys, embedded, (*assumed, *given), longest)


def reach_of(backbone: Backbone, unit: Tensor | None, embedding_lipschitz: float | None) -> Reach:
    """The reach of a backbone's embedding, for changes measured as |delta / unit|.

    An embedding that does more than normalize and flatten needs `embedding_lipschitz`, a constant Q
    with |e(x + delta) - e(x)| <= Q |delta / unit| for the embedding as it is computed.
    """
    measured = checked_unit(unit, backbone)
    if not only_normalizes(backbone):
        if embedding_lipschitz is None:
            raise InputError(
                f"embedding_lipschitz: expected a number, as {type(backbone).__name__} has an "
                "embedding of its own, got None"
            )
        _check_constant(embedding_lipschitz, "embedding_lipschitz")
        check_evaluation(backbone, "model.backbone")
        constant = torch.full((backbone.dim,), embedding_lipschitz, dtype=torch.float64)
        return Reach(constant.to(backbone.std.device), 0.0)
    if embedding_lipschitz is not None:
        raise InputError(
            "embedding_lipschitz: expected None, as this embedding only normalizes and is known "
            f"exactly, got {embedding_lipschitz!r}"
        )
    std = backbone.std.double()
    stretch = (1 / std if measured is None else measured / std).flatten()
    stretch = functional.pad(stretch, (0, backbone.lift))
    return Reach(stretch, 2 * torch.finfo(backbone.std.dtype).eps)


def _metric_constant(
    metric: nn.Module, stated: float | None, longest_unit: float
) -> tuple[float, float, tuple[str, ...]]:
    """Q for changes in units, the relative rounding error of keys, and what both assume."""
    name, known = type(metric).__name__, getattr(metric, "lipschitz", None)
    check_evaluation(metric, "model.metric")
    if known is not None and stated is not None:
        raise InputError(
            f"metric_lipschitz: expected None, as {name} has its own constant {known:g}, "
            f"got {stated!r}"
        )
    searched = f"neighbors are searched by keys of {name}, which moves"
    if known is not None:
        _check_constant(known, f"{name}.lipschitz")
        dtype = next((part.dtype for part in metric.parameters()), torch.float32)
        slip = KEY_ROUNDOFFS * torch.finfo(dtype).eps
        assumed = (
            f"{searched} no two of them further apart than {known:g} times their inputs",
            f"rounding moves computed keys by {slip:.1g} of their terms at most (no TF32, no "
            "autocast)",
        )
        return known * longest_unit, slip, assumed
    if stated is None:
        raise InputError(
            "model: expected neighbors by l2 distance of embedded inputs, or by a metric of known "
            f"Lipschitz constant (metric_lipschitz states one), got a metric ({name}) without"
        )
    _check_constant(stated, "metric_lipschitz")
    moves = f"them by {stated:g} times the change of an input at most, as stated"
    return stated, 0.0, (f"{searched} {moves}",)


def _check_constant(constant: float, name: str) -> None:
    if not 0 < constant < math.inf:
        raise InputError(f"{name}: expected a positive finite number, got {constant!r}")


def checked_unit(unit: object, backbone: Backbone) -> Tensor | None:
    if unit is None:
        return None
    if not isinstance(unit, Tensor):
        raise InputError(f"unit: expected a torch.Tensor or None, got {type(unit).__name__}")
    check_shape(unit, "unit", backbone.input_shape, "like one input")
    measured = unit.detach().to(backbone.std.device, torch.float64)
    check_finite(measured, "unit")
    if not bool((measured > 0).all()):
        raise InputError(f"unit: expected positive values, got {measured.min().item()}")
    return measured
