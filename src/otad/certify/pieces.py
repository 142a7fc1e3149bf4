"""The rule of pieces: with one neighbor, the model gives the answer of the nearest bank point.

Each bank point is a piece -|e - x_i|^2 of a maximum of functions that are affine but for -|e|^2,
which all of them share. Bank point j answers only where no point of the predicted class is nearer:
an intersection of half-spaces, one for each such point. Its distance is

    max over weights of the own class of  (sum_i lambda_i f_i - f_j) / |sum_i lambda_i a_i - a_j|,

with f_i = (|x_j - e|^2 - |x_i - e|^2) / 2 up to a shared term and a_i = stretch x_i. One i alone
gives a bisector. The hull rule takes four of all points; here the nearest points of the predicted
class are taken, and their weights are solved for. The radius is the least distance over all j that
may vote for another class. For l = 0 it is exact up to rounding if no further point of the class
matters."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from otad.certify.bisectors import queries_at_once
from otad.certify.half_spaces import HalfSpaces
from otad.certify.hull import Entrance, Hull
from otad.certify.input_reach import InputReach
from otad.certify.rules import Batch
from otad.model.otad import OTAD

OWN = 32  # points of the predicted class


class OwnClass(Entrance):
    """Rivals are the nearest points of the predicted class, all in one group."""

    group, spare = OWN, 0

    def weights(self, spaces: HalfSpaces) -> Tensor:
        return spaces.polished(spaces.weights())


class Pieces(Hull):
    name = "pieces"
    first_block: ClassVar[int] = 2  # the nearest points usually decide, and then others are skipped

    @classmethod
    def applies(cls, reach: InputReach) -> bool:
        """For prototypes, and within bounds for every model of one neighbor. Elsewhere the hull
        rule proves nearly as much, and certificates stay those of earlier versions."""
        named = reach.model.backbone.prototypes is not None
        return reach.model.n_searched == 1 and (named or reach.corners is not None)

    @staticmethod
    def rows_at_once(model: OTAD) -> int:
        points, dim = model.bank_points.shape
        return queries_at_once(points, OWN, dim)

    def assumptions(self) -> tuple[str, ...]:
        return ()  # those of the hull rule, which always applies too

    def entrance(self, batch: Batch, turning: Tensor | None) -> OwnClass:
        own = None if turning is None else turning > 0
        return OwnClass(batch.bisectors, self.model.n_searched, batch.box, own)
