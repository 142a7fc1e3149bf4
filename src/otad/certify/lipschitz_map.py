"""The Lipschitz rule: a global map moves no feature further than its curvature allows.

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
is (margin - a) / (slope(v) + b)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otad.certify.half_spaces import ROUNDING, TINY
from otad.certify.input_reach import InputReach
from otad.certify.rules import PRECISION, Batch, Rule
from otad.certify.votes import Head
from otad.checks import require
from otad.cip.whole_bank.map import GAP
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import potential_lines
from otad.io.mapped_rows import block_of
from otad.model.otad import OTAD

UNIT = torch.finfo(torch.float64).eps / 2
BYTES = 2**29  # of working memory
PLACES = 16  # bank points that a query uses at a time, about


class Lipschitz(Rule):
    """The global map of a model, read by its linear head. All in float64."""

    name = "lipschitz"

    @torch.no_grad()
    def __init__(self, reach: InputReach) -> None:
        super().__init__(reach)
        model, self.stretch = reach.model, reach.keys.stretch
        self.longest_stretch = float(self.stretch.max())
        potential, dtype = model.whole_bank.potential, model.backbone.head.weight.dtype
        self.head = Head(model.backbone.head)
        bank = model.bank_inputs, model.bank_features
        pairs = Pairs(*bank, potential.strong_convexity, self.head.weight.device)
        lines = potential_lines(pairs, potential)
        self.modulus, self.bend = potential.modulus, potential.strong_convexity
        self.middle = abs(potential.smoothness + potential.strong_convexity) / 2
        self.read = (self.head.weight != 0).any(0)
        dim = pairs.dim
        width = min(len(pairs), 2 * (dim + 1))
        terms = (dim + width + 32) * torch.finfo(dtype).eps / 2
        require(terms < 1, "model", f"sums of {dim} terms to keep a digit", dtype)
        self.roundoff = terms / (1 - terms)
        self.gap = GAP + 4 * (dim + width + 8) * UNIT
        self.center = pairs.center
        self.longest = float(pairs.image_squares.max().sqrt())
        self.farthest = float(pairs.squares.max().sqrt())
        self.lines = float(lines[lines.isfinite()].abs().max())
        self.inputs, self.features = (self._longest_read(part) for part in bank)

    @staticmethod
    def rows_at_once(model: OTAD) -> int:
        return max(1, BYTES // (8 * PLACES * model.bank_inputs.shape[1]))

    def assumptions(self) -> tuple[str, ...]:
        potential = self.model.whole_bank.potential
        high, low = potential.smoothness, potential.strong_convexity
        off = math.sqrt(potential.modulus * potential.violation)
        return (
            "rule 'lipschitz': a linear head reads the answer from the gradient of one potential, "
            f"whose curvature is in [{low:g}, {high:g}]",
            "the values of the potential violate the inequality of a pair of bank points by at "
            f"most {potential.violation:.3g}, so the map may miss the feature of a bank point by "
            f"{off:.3g}; the proof holds nevertheless",
            "each answer within the radius has the status 'solved': its duality gap is at most "
            f"{GAP:g} of its terms; other answers are not covered",
            PRECISION,
        )

    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        def bound(rows: Tensor, lengths: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
            length = torch.linalg.vector_norm(rows, dim=1)
            fixed, growth = self.spread(batch.embedded, length, lengths, offsets)
            return fixed, (self.slope(rows) + growth) / (1 - ROUNDING)

        radius = self.head.radius(batch.trace.outputs, batch.prediction, bound)
        return torch.where(batch.solved, radius, 0.0)

    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        length, value = self.head.lengths[0], batch.trace.outputs.double()
        fixed, growth = self.spread(batch.embedded, length, length, self.head.offsets[0])
        change = fixed + (self.slope(self.head.weight)[0] + growth) * reached
        change = torch.where(batch.solved, change, torch.inf)
        return value - change, value + change

    def slope(self, rows: Tensor) -> Tensor:
        """By how much <v, T> changes at most for each |u|, for rows v (B,d)."""
        reached = torch.linalg.vector_norm(rows * self.stretch, dim=1)
        whole = torch.linalg.vector_norm(rows, dim=1) * self.longest_stretch
        slope: Tensor = self.middle * reached + self.modulus / 2 * whole
        return (1 + ROUNDING) * slope

    def spread(
        self, embedded: Tensor, length: Tensor, weights: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What errors may add to a change of outputs (B,), and for each |u| (B,): for rows with
        |v| = `length`, made of rows of the head with lengths and offsets of these sums (B,)."""
        drift, drift_growth = self.drift(embedded.double())
        own = torch.linalg.vector_norm(embedded.double() * self.read, dim=1)
        size = self.features + abs(self.bend) * (self.inputs + own)
        fixed = length * drift + self.roundoff * (weights * size + offsets)
        grown = self.roundoff * weights * abs(self.bend) * self.longest_stretch
        growth = length * drift_growth + grown
        return (1 + ROUNDING) * 2 * fixed, (1 + ROUNDING) * growth  # here, and there

    def drift(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """How far the image found may be from T (B,), and the growth of that with |u| (B,):
        sqrt(a + b |u|) <= sqrt(a) + b |u| / (2 sqrt(a))."""
        modulus, longest = self.modulus, self.longest_stretch
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
        parts = (block_of(points, at, at + rows) for at in range(0, len(points), rows))
        read = (part.to(self.head.weight) * self.read for part in parts)
        return max(float(torch.linalg.vector_norm(part, dim=1).max()) for part in read)
