"""The cell rule: while the neighbors are the same, the model is one Lipschitz map.

The multipliers maximize a concave quadratic whose only dependence on the query is linear, so for
given neighbors and potentials x' -> z' is the gradient of a function with curvature in [l, L], and
max(|l|, L)-Lipschitz. Potentials do not depend on the query, nor on the order of the neighbors,
except where a neighbor is left out (the farthest on a cycle) or a spare takes its place. So the
rule covers rows solved with the curvature asked for and all their neighbors, without spares; and
only those that stay so when every constraint is tightened by more than its rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otad.certify.bisectors import Surroundings
from otad.certify.search import least_over_bank
from otad.certify.votes import Votes
from otad.cip import BankProblem, Status
from otad.cip.local.potentials import Constraints, closure, has_positive_cycle
from otad.cip.local.products import products_of
from otad.io.mapped_rows import gathered
from otad.model.otad import OTAD, Trace

# A query as far again from its neighbors has offsets and shifted images at most twice as long, so
# products with 4 times the rounding error; both queries' errors and room for more make 8.
TIGHTER = 8.0


@dataclass(frozen=True, eq=False)
class SteadyMap:
    """What is known of the map of each row while its neighbors are the same.

    `reach` (B,): the |u| up to which this holds, 0 where the rule does not apply. `drift` (B,): how
    far rounding may move an image. `size` (B,): of the terms of an output.
    """

    reach: Tensor
    lipschitz: float
    drift: Tensor
    size: Tensor

    def spread(self, length: Tensor, votes: Votes, weights: Tensor, offsets: Tensor) -> Tensor:
        """What rounding may add to the change of an output w.z + b with |w| = `length`, made of
        outputs with lengths and offsets that sum to `weights` and `offsets`."""
        rounding = 2 * votes.roundoff * (weights * self.size + offsets)
        return length * self.drift + rounding


def steady_map(model: OTAD, trace: Trace, embedded: Tensor, votes: Votes) -> SteadyMap:
    """`embedded` (B,d) as the model computes it. The reach is capped at the distance of the
    farthest neighbor, so that rounding errors stay comparable."""
    farthest = _farthest(model, trace, embedded)
    problem = BankProblem(
        embedded,
        model.bank_inputs,
        model.bank_features,
        trace.neighbors.indices,
        model.smoothness,
        model.strong_convexity,
    )
    steady, drift = _steadiness(problem)
    steady &= (trace.solution.status == int(Status.SOLVED)) & (model.answerer.spares == 0)
    reach = torch.where(steady, farthest / votes.longest, 0.0)
    # |x_i - e'| <= 2 * farthest, and the model forms both terms of l (x_i - e') by themselves
    size = votes.sizes[trace.neighbors.indices].amax(1)
    own = torch.linalg.vector_norm(embedded, dim=1, dtype=torch.float64) + farthest
    size = size + abs(model.strong_convexity) * own
    return SteadyMap(reach, max(abs(model.strong_convexity), model.smoothness), drift, size)


def _farthest(model: OTAD, trace: Trace, embedded: Tensor) -> Tensor:
    """The distance (B,) of the farthest neighbor in the embedded space."""
    if model.metric is None:
        return trace.neighbors.distances[:, -1]
    farthest = torch.zeros(len(embedded), dtype=torch.float64, device=embedded.device)
    for column in trace.neighbors.indices.unbind(1):
        points = gathered(model.bank_inputs, column, farthest.device).to(farthest)
        farthest = torch.maximum(farthest, torch.linalg.vector_norm(points - embedded, dim=1))
    return farthest


def cell_radius(surroundings: Surroundings, neighbors: Tensor, at_most: Tensor) -> Tensor:
    """|u| (B,), no more than `at_most` (B,), within which the neighbors (B,K) stay the same set:
    the least b_ij over i outside it and j inside."""
    if not bool((at_most > 0).any()):
        return at_most
    rivals = surroundings.rivals(neighbors)
    floor = surroundings.entry_floor(rivals.squares.amax(1).sqrt())
    floor.scatter_(1, neighbors, torch.inf)

    def passing(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
        return surroundings.bisectors(rows, indices, rivals).distances.amin(2).clamp_min_(0)

    return least_over_bank(floor, at_most, passing, surroundings.rows_at_once)


def cell_rule(steady: SteadyMap, votes: Votes, outputs: Tensor, prediction: Tensor) -> Tensor:
    """|u| (B,) within which a map that is steady keeps its prediction (B,): for every class j,
    margin / (Lipschitz constant * |w_c - w_j| * Q) after what rounding may take."""
    outputs = outputs.double()
    radius = steady.reach
    for rival in range(len(votes.weight)):
        length = torch.linalg.vector_norm(votes.weight[prediction] - votes.weight[rival], dim=1)
        margin = outputs.gather(1, prediction[:, None])[:, 0] - outputs[:, rival]
        margin = margin - steady.spread(
            length,
            votes,
            votes.lengths[prediction] + votes.lengths[rival],
            votes.offsets[prediction] + votes.offsets[rival],
        )
        allowed = margin / (steady.lipschitz * length * votes.longest)
        allowed = torch.where(margin > 0, allowed, 0.0)
        radius = torch.where(prediction == rival, radius, torch.minimum(radius, allowed))
    return radius


def _steadiness(problem: BankProblem) -> tuple[Tensor, Tensor]:
    """Whether potentials exist with room for rounding (B,), and how far rounding may move the
    image (B,).

    An error of at most e in each constraint moves a potential by K e. Eq. (3) minimizes a maximum
    of functions with Hessian I / M, so an error of D in each moves its minimizer by 2 sqrt(M D).
    """
    gram = products_of(problem, None, with_offsets=problem.has_strong_convexity).gram()
    every = torch.ones_like(gram.tilt, dtype=torch.bool)
    exact = Constraints.of(gram, problem.strong_convexity, every)
    modulus = problem.smoothness - problem.strong_convexity
    tighter = replace(
        exact, rise_error=-TIGHTER * exact.rise_error, bend_error=-TIGHTER * exact.bend_error
    )
    steady = ~has_positive_cycle(closure(tighter.weights(1 / modulus))) & gram.is_finite
    error = TIGHTER * (exact.rise_error + exact.bend_error / modulus)
    potential_error = 3 * gram.count * error  # and as much again for the terms of eq. (3)
    return steady, 2 * 2 * (modulus * potential_error).sqrt()  # at the query, and where it goes
