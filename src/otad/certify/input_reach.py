"""How far a change of the input carries a query: where neighbors are sought, and in the map.

Without a metric both are one space. With one, keys move by at most Q |delta|, Q a Lipschitz
constant of the metric, which decides who can be a neighbor; and the embedded input moves as the
embedding lets it, which decides what the map makes of given neighbors. With l = 0 the hull rule
asks for the former alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.certify.embedding import (
    Reach,
    check_constant,
    checked_unit,
    reach_of,
    same_stretch,
)
from otad.checks import check_evaluation
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import only_normalizes

KEY_ROUNDOFFS = 64.0
"""Relative error allowed for computed keys, in units of the dtype's eps: that of 16 orthogonal
layers of up to 2,048 terms is about 1."""


class Query(NamedTuple):
    """Inputs (B,*), embedded (B,d), and where neighbors are sought for them (B,m)."""

    inputs: Tensor
    embedded: Tensor
    located: Tensor


@dataclass(frozen=True, eq=False)
class Travel:
    """`sought`: the reach where neighbors are sought. `embedded`: that of the embedding, None where
    it is not known. `assumptions`: what is taken for granted of both."""

    model: OTAD
    sought: Reach
    embedded: Reach | None
    assumptions: tuple[str, ...]
    longest_unit: float = 1.0

    @torch.no_grad()
    def query(self, x: Tensor) -> Query:
        embedded = self.model.backbone.embed(x)
        located = embedded if self.model.metric is None else self.model.query_keys(x)
        return Query(x, embedded, located)

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
            sides.append((self.sought, self._key_size(query)))
        return sides

    def _key_size(self, query: Query) -> Tensor:
        """|key| / Q + |x - mean| (B,): keys may be short while what they are made of is not. Where
        x goes by r, each term grows by no more."""
        center = getattr(self.model.metric, "mean", self.model.backbone.mean)
        own = (query.inputs.double() - center.double()).flatten(1) / self.longest_unit
        size: Tensor = self.sought.size_of(query.located) + torch.linalg.vector_norm(own, dim=1)
        return size


def travel_of(
    model: OTAD,
    unit: Tensor | None,
    embedding_lipschitz: float | None,
    metric_lipschitz: float | None,
) -> Travel:
    """For changes measured as |delta / unit|; constants that are not known have to be stated."""
    stated: tuple[str, ...] = ()
    if embedding_lipschitz is not None:
        stated = (f"the embedding stretches by {embedding_lipschitz:g} at most, as stated",)
    if model.metric is None:
        if metric_lipschitz is not None:
            raise InputError(
                "metric_lipschitz: expected None, as neighbors are sought among embedded inputs, "
                f"got {metric_lipschitz!r}"
            )
        reach = reach_of(model.backbone, unit, embedding_lipschitz)
        return Travel(model, reach, reach, stated)
    embedded: Reach | None = None
    left_out: tuple[str, ...] = ()
    if (
        only_normalizes(model.backbone)
        or embedding_lipschitz is not None
        or model.strong_convexity != 0
    ):
        embedded = reach_of(model.backbone, unit, embedding_lipschitz)
    else:
        left_out = (
            "rule 'cell' is left out, as by how much the embedding of "
            f"{type(model.backbone).__name__} stretches is not known",
        )
    measured = checked_unit(unit, model.backbone)
    longest = 1.0 if measured is None else float(measured.max())
    constant, slip, words = _constant_of(model.metric, metric_lipschitz, longest)
    keys = model.bank_points
    sought = Reach(same_stretch(keys.shape[1], constant, model.backbone.std), slip)
    return Travel(model, sought, embedded, (*words, *stated, *left_out), longest)


def _constant_of(
    metric: nn.Module, stated: float | None, longest_unit: float
) -> tuple[float, float, tuple[str, ...]]:
    """Q for changes in units, the relative rounding error of keys, and what both assume."""
    name = type(metric).__name__
    words: tuple[str, ...]
    known = getattr(metric, "lipschitz", None)
    check_evaluation(metric, "model.metric")
    if known is not None and stated is not None:
        raise InputError(
            f"metric_lipschitz: expected None, as {name} knows its own constant {known:g}, "
            f"got {stated!r}"
        )
    if known is not None:
        check_constant(known, f"{name}.lipschitz")
        dtype = next((part.dtype for part in metric.parameters()), torch.float32)
        slip = KEY_ROUNDOFFS * torch.finfo(dtype).eps
        words = (
            f"neighbors are sought by keys of {name}, which moves no two of them further apart "
            f"than {known:g} times their inputs",
            f"rounding moves computed keys by {slip:.1g} of their terms at most (no TF32, no "
            "autocast)",
        )
        return known * longest_unit, slip, words
    if stated is None:
        raise InputError(
            "model: expected neighbors by l2 distance of embedded inputs, or by a metric of known "
            f"Lipschitz constant (metric_lipschitz states one), got a metric ({name}) without"
        )
    check_constant(stated, "metric_lipschitz")
    words = (
        f"neighbors are sought by keys of {name}, which moves them by {stated:g} times the change "
        "of an input at most, as stated",
    )
    return stated, 0.0, words
