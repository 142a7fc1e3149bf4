"""The cell rule: while the neighbors are the same, the model is one Lipschitz map.

The multipliers maximize a concave quadratic whose only dependence on the query is linear, so for
given neighbors and potentials x' -> z' is the gradient of a function with curvature in [l, L], and
max(|l|, L)-Lipschitz. Potentials do not depend on the query, nor on the order of the neighbors,
except where a neighbor is left out (the farthest on a cycle) or a spare takes its place. So the
rule covers rows solved with the curvature asked for and all their neighbors, without spares; and
only those that stay so when every constraint is tightened by more than its rounding error."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from otad.certify.bisectors import BankBisectors, queries_at_once
from otad.certify.input_reach import InputReach
from otad.certify.rules import Batch, Rule
from otad.certify.votes import Votes
from otad.cip import BankProblem
from otad.cip.local.potentials import Constraints, closure, has_positive_cycle
from otad.cip.local.products import products_of
from otad.io.mapped_rows import gathered
from otad.model.otad import OTAD

# A query as far again from its neighbors has offsets and shifted images at most twice as long, so
# products with 4 times the rounding error; both queries' errors and room for more make 8.
TIGHTER = 8.0


class Cell(Rule):
    name = "cell"
    if_used = (
        "rule 'cell': rounding changes the potentials of the same neighbors by no more than the "
        "error bound of the solver, so that the same neighbors give the same Lipschitz map",
    )

    @classmethod
    def applies(cls, reach: InputReach) -> bool:
        return reach.embedded is not None

    @staticmethod
    def rows_at_once(model: OTAD) -> int:
        dim = model.bank_inputs.shape[1]
        return queries_at_once(len(model.bank_points), model.n_searched, dim)

    def radius(self, batch: Batch, known: Tensor) -> Tensor:
        """margin / (Lipschitz constant * |w_c - w_j| * Q), while the neighbors stay the same."""
        votes, steady = self.reach.votes, steady_map(self.model, batch, self.reach.votes)

        def bound(rows: Tensor, lengths: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
            length = torch.linalg.vector_norm(rows, dim=1)
            spread = steady.spread(length, votes, lengths, offsets)
            return spread, steady.lipschitz * length * votes.longest

        radius = votes.head.radius(batch.trace.outputs, batch.prediction, bound)
        radius = torch.minimum(steady.reach, radius)
        radius = torch.where(radius > known, radius, 0.0)  # elsewhere the cell is not searched
        return cell_radius(batch.bisectors, batch.trace.neighbors.indices, radius)

    def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
        votes, steady = self.reach.votes, steady_map(self.model, batch, self.reach.votes)
        limit = torch.minimum(steady.reach, 1.001 * reached)  # no need to search any further
        same = cell_radius(batch.bisectors, batch.trace.neighbors.indices, limit) > reached
        length, offset = votes.head.lengths[0], votes.head.offsets[0]
        change = steady.lipschitz * length * votes.longest * reached
        change += steady.spread(length, votes, length, offset)
        change = torch.where(same, change, torch.inf)
        value = batch.trace.outputs.double()
        return value - change, value + change


class SteadyMap(NamedTuple):
    """The map of each row while its neighbors are the same: up to |u| = `reach` (B,), 0 where the
    rule does not apply. Rounding moves an image by `drift` (B,); an output has terms of `size`
    (B,)."""

    reach: Tensor
    lipschitz: float
    drift: Tensor
    size: Tensor

    def spread(self, length: Tensor, votes: Votes, lengths: Tensor, offsets: Tensor) -> Tensor:
        """What rounding may add to the change of an output w.z + b, |w| = `length`, made of outputs
        with these sums of lengths and offsets."""
        return length * self.drift + 2 * votes.roundoff * (lengths * self.size + offsets)


def steady_map(model: OTAD, batch: Batch, votes: Votes) -> SteadyMap:
    """The reach is capped at the distance of the farthest neighbor in the embedded space, so that
    rounding errors stay comparable.

    An error of at most e in each constraint moves a potential by K e. Eq. (3) minimizes a maximum
    of functions with Hessian I / M, so an error of D in each moves its minimizer by 2 sqrt(M D)."""
    embedded, found = batch.embedded, batch.trace.neighbors
    farthest = found.distances[:, -1]
    if model.metric is not None:
        farthest = torch.zeros_like(farthest, dtype=torch.float64)
        for column in found.indices.unbind(1):
            points = gathered(model.bank_inputs, column, farthest.device).to(farthest)
            farthest = torch.maximum(farthest, torch.linalg.vector_norm(points - embedded, dim=1))
    low, high = model.strong_convexity, model.smoothness
    bank = model.bank_inputs, model.bank_features
    problem = BankProblem(embedded, *bank, found.indices, high, low)
    gram = products_of(problem, None, with_offsets=problem.has_strong_convexity).gram()
    every = torch.ones_like(gram.tilt, dtype=torch.bool)
    exact = Constraints.of(gram, problem.strong_convexity, every)
    modulus = problem.smoothness - problem.strong_convexity
    errors = {"rise_error": exact.rise_error, "bend_error": exact.bend_error}
    tighter = replace(exact, **{name: -TIGHTER * error for name, error in errors.items()})
    steady = ~has_positive_cycle(closure(tighter.weights(1 / modulus))) & gram.is_finite
    steady &= batch.solved & (model.answerer.spares == 0)
    error = TIGHTER * (exact.rise_error + exact.bend_error / modulus)
    potential_error = 3 * len(gram.tilt) * error  # and as much again for the terms of eq. (3)
    drift = 2 * 2 * (modulus * potential_error).sqrt()  # at the query, and where it goes
    reach = torch.where(steady, farthest / votes.longest, 0.0)
    # |x_i - e'| <= 2 * farthest, and the model forms both terms of l (x_i - e') by themselves
    own = torch.linalg.vector_norm(embedded, dim=1, dtype=torch.float64) + farthest
    size = votes.sizes[found.indices].amax(1) + abs(low) * own
    return SteadyMap(reach, max(abs(low), high), drift, size)


def cell_radius(bisectors: BankBisectors, neighbors: Tensor, at_most: Tensor) -> Tensor:
    """|u| (B,), no more than `at_most` (B,), within which the neighbors (B,K) stay the same set:
    the least b_ij over i outside it and j inside."""
    if not bool((at_most > 0).any()):
        return at_most
    rivals = bisectors.rivals(neighbors)
    floor = bisectors.entry_floor(rivals.squares.amax(1).sqrt())
    floor.scatter_(1, neighbors, torch.inf)

    def passing(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        return bisectors.against(rivals, rows, indices).distances.amin(2).clamp_min_(0)

    return bisectors.least(floor, at_most, passing)
