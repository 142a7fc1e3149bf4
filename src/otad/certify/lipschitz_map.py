"""The Lipschitz rule: one map for the whole bank moves no feature further than its curvature lets.

With z~_i = z_i - l x_i and any numbers s_i, the map of a whole bank is T(e) = T~(e) + l e, with T~
the gradient of

    h~(e) = max over the simplex of  sum_i lambda_i (s_i + <z~_i, e>) - |sum_i lambda_i z~_i|^2 / 2M

the conjugate of a function that is 1/M-strongly convex. So h~ is convex and M-smooth whatever the
s_i are, T~ is cocoercive, |g|^2 <= M <g, d> for g = T~(e + d) - T~(e), which is the same as
|g - M d / 2| <= M |d| / 2, and with L = l + M

    T(e + d) - T(e) = (L + l) / 2 d + r,       |r| <= M |d| / 2.

An input moved by u carries e to e + S u, S = diag(stretch). A difference of two outputs with the
row v = w_c - w_j of the head therefore changes by at most slope(v) |u|,

    slope(v) = |L + l| / 2 |S v| + M / 2 |v| max S.

For S = s I that is max(|l|, L) |v| s. A head that reads coordinates the input does not reach (a
lift, S v = 0) is left with the second term.

The model computes T and the head with errors, at the query and again where it goes. Of a row whose
status is "solved" they are at most, with u64 and u the unit roundoffs of float64 and of the model:

- gap: at the weights found, the slopes are those of the optimum but for a gap of at most
  G = (GAP + 4 (d + W + 8) u64) scale, the second term being what computing the gap may have lost;
  the image is then within sqrt(M G) of T, because for the step D between the images of both weights
  |D|^2 / M <= gap.
- centering: the query less the bank's center is rounded, by u64 (|e| + |center|) at most, which the
  map takes M times.
- assembly and head: float sums of W and of d terms; n u / (1 - n u) times |w| size + |b| for both,
  with n = d + W + 32 and size = max |z_i| + |l| (max |x_i| + |e|), all of it in the coordinates
  with a weight in the head alone.

W bounds the points with weight: they are affinely independent, so d + 1 at most, here taken twice.
scale and size grow with the query by known slopes, so all this is a + b |u|, and what is certified
is (margin - a) / (slope(v) + b).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otad.certify.bisectors import ROUNDING
from otad.certify.embedding import Reach
from otad.certify.halfspaces import TINY
from otad.cip import Status
from otad.cip.whole_bank.map import GAP
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import potential_lines
from otad.errors import InputError
from otad.io.mapped_rows import block_of
from otad.model.otad import OTAD, Trace

UNIT = torch.finfo(torch.float64).eps / 2
BYTES = 2**29  # of working memory
PLACES = 16  # bank points a query holds at a time, about


class Spread(NamedTuple):
    """What errors may add to a change of outputs: `fixed` (B,), and `growth` (B,) for each |u|."""

    fixed: Tensor
    growth: Tensor


class LipschitzMap:
    """The one map of a model of global scope, seen through its linear head. All in float64."""

    @torch.no_grad()
    def __init__(self, model: OTAD, reach: Reach) -> None:
        potential, head = model.whole_bank.potential, model.backbone.head
        bank = model.bank_inputs, model.bank_features
        pairs = Pairs(*bank, potential.strong_convexity, head.weight.device)
        lines = potential_lines(pairs, potential)
        self.reach = reach
        self.modulus = potential.modulus
        self.bend = potential.strong_convexity
        self.middle = abs(potential.smoothness + potential.strong_convexity) / 2
        self.weight = head.matrix.double()
        bias = self.weight.new_zeros(len(self.weight)) if head.bias is None else head.bias.double()
        self.offsets = bias.abs()
        self.lengths = torch.linalg.vector_norm(self.weight, dim=1)
        self.read = (self.weight != 0).any(0)
        dim = pairs.dim
        width = min(len(pairs), 2 * (dim + 1))
        terms = (dim + width + 32) * torch.finfo(head.weight.dtype).eps / 2
        if terms >= 1:
            raise InputError(
                f"model: expected one whose sums of {dim} terms keep a digit, "
                f"got {head.weight.dtype}"
            )
        self.roundoff = terms / (1 - terms)
        self.gap = GAP + 4 * (dim + width + 8) * UNIT
        self.center = pairs.center
        self.longest = float(pairs.image_squares.max().sqrt())
        self.farthest = float(pairs.squares.max().sqrt())
        self.lines = float(lines[lines.isfinite()].abs().max())
        self.inputs, self.features = (self._longest_read(part) for part in bank)

    def slope(self, rows: Tensor) -> Tensor:
        """By how much <v, T> changes at most for each |u|, for rows v (B,d)."""
        reached = torch.linalg.vector_norm(rows * self.reach.stretch, dim=1)
        whole = torch.linalg.vector_norm(rows, dim=1) * self.reach.longest
        slope: Tensor = self.middle * reached + self.modulus / 2 * whole
        return (1 + ROUNDING) * slope

    def spread(self, embedded: Tensor, length: Tensor, weights: Tensor, offsets: Tensor) -> Spread:
        """For queries (B,d) and rows with |v| = `length` (B,), made of rows of the head with
        lengths and offsets that sum to `weights` and `offsets` (B,)."""
        embedded = embedded.double()
        longest = self.reach.longest
        drift, drift_growth = self._drift(embedded)
        own = torch.linalg.vector_norm(embedded * self.read, dim=1)
        size = self.features + abs(self.bend) * (self.inputs + own)
        fixed = length * drift + self.roundoff * (weights * size + offsets)
        grown = self.roundoff * weights * abs(self.bend) * longest
        growth = length * drift_growth + grown
        return Spread((1 + ROUNDING) * 2 * fixed, (1 + ROUNDING) * growth)  # here, and there

    def radius(self, trace: Trace, embedded: Tensor) -> Tensor:
        """|u| (B,) within which a prediction stays, 0 for rows that were not solved."""
        outputs, prediction = trace.outputs.double(), trace.outputs.argmax(1)
        radius = torch.full_like(outputs[:, 0], torch.inf)
        for rival in range(len(self.weight)):
            between = self.weight[prediction] - self.weight[rival]
            spread = self.spread(
                embedded,
                torch.linalg.vector_norm(between, dim=1),
                self.lengths[prediction] + self.lengths[rival],
                self.offsets[prediction] + self.offsets[rival],
            )
            margin = outputs.gather(1, prediction[:, None])[:, 0] - outputs[:, rival]
            margin = margin - spread.fixed
            allowed = (1 - ROUNDING) * margin / (self.slope(between) + spread.growth)
            allowed = torch.where(margin > 0, allowed, 0.0)
            radius = torch.where(prediction == rival, radius, torch.minimum(radius, allowed))
        return torch.where(solved(trace), radius, 0.0)

    def change(self, trace: Trace, embedded: Tensor, reached: Tensor) -> Tensor:
        """Regression: the most an answer changes (B,) while |u| <= `reached` (B,); infinite for
        rows that were not solved."""
        spread = self.spread(embedded, self.lengths[0], self.lengths[0], self.offsets[0])
        change = spread.fixed + (self.slope(self.weight)[0] + spread.growth) * reached
        return torch.where(solved(trace), change, torch.inf)

    def _drift(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """How far the image found may be from T (B,), and the growth of that with |u| (B,):
        sqrt(a + b |u|) <= sqrt(a) + b |u| / (2 sqrt(a))."""
        modulus, longest = self.modulus, self.reach.longest
        distance = torch.linalg.vector_norm(embedded - self.center, dim=1)
        scale = self.longest * (distance + self.farthest + self.longest / modulus) + self.lines
        by_gap = (modulus * self.gap * scale).sqrt()
        gap_growth = modulus * self.gap * self.longest * longest / (2 * by_gap).clamp_min(TINY)
        size = torch.linalg.vector_norm(embedded, dim=1) + torch.linalg.vector_norm(self.center)
        by_center = 2 * modulus * UNIT
        return by_gap + by_center * size, gap_growth + by_center * longest

    def _longest_read(self, points: Tensor) -> float:
        """The greatest length of a row (N,d) in the coordinates that the head reads."""
        rows = max(1, BYTES // (16 * points.shape[1]))
        lengths = [
            torch.linalg.vector_norm(part.to(self.weight) * self.read, dim=1).max()
            for part in (block_of(points, at, at + rows) for at in range(0, len(points), rows))
        ]
        return float(torch.stack(lengths).max())


def solved(trace: Trace) -> Tensor:
    """Rows (B,) that the map was really solved for."""
    return trace.solution.status == int(Status.SOLVED)


def rows_at_once(dim: int) -> int:
    """Queries in a batch: the points each of them holds."""
    return max(1, BYTES // (8 * PLACES * dim))
