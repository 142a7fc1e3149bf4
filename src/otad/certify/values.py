"""`certify_values`: intervals that hold every answer of a regressor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from otad.certify.bisectors import Surroundings
from otad.certify.cell import cell_radius, steady_map
from otad.certify.certificate import Interval
from otad.certify.classes import answered, batch_rows
from otad.certify.conditions import CELL, check_certifiable
from otad.certify.embedding import Reach
from otad.certify.hull import Entrance
from otad.certify.input_reach import Query, Travel, travel_of
from otad.certify.lipschitz_map import LipschitzMap
from otad.certify.search import least_over_bank
from otad.certify.votes import Votes
from otad.errors import InputError
from otad.model.otad import OTAD, Trace

Rule = Callable[[Query, Trace, Tensor], tuple[Tensor, Tensor, Tensor]]
"""A batch, its trace and the |u| (B,) allowed -> low (B,), high (B,), and the rows (B,)
that the cell rule has a part in."""


@torch.no_grad()
def certify_values(
    model: OTAD,
    x: Tensor,
    eps: float,
    *,
    unit: Tensor | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Interval:
    """An interval for each input of x (B,*input_shape) with all answers within l2 distance eps.

    Local scope: the answer is a mixture of the votes of the neighbors, so it lies between the least
    and the largest vote of the bank points that can be neighbors within eps; and where the
    neighbors cannot change at all, no further from the answer at x than the Lipschitz constant
    allows. Global scope: that distance, for every input; the interval is all numbers where the map
    was not solved. Parameters and refusals as in `certify`.
    """
    if not 0 <= eps < math.inf:
        raise InputError(f"eps: expected a finite number of at least 0, got {eps!r}")
    assumptions = check_certifiable(model, "regression")
    inputs = model.backbone.check_inputs(x)
    travel = travel_of(model, unit, embedding_lipschitz, metric_lipschitz)
    assumptions += travel.assumptions
    is_global = model.scope == "global"
    interval = _one_map(model, travel.sought) if is_global else _neighbors(model, travel)
    lows, highs, steadied = [], [], False
    for rows in inputs.split(batch_rows(model, batch_size)):
        trace = model.trace(rows)
        answered(trace)
        query = travel.query(rows)
        low, high, same = interval(query, trace, travel.from_input(eps, query))
        steadied |= bool(same.any())
        lows.append(low)
        highs.append(high)
        if progress is not None:
            progress(sum(len(part) for part in lows), len(inputs))
    if steadied:
        assumptions += CELL
    return Interval(torch.cat(lows), torch.cat(highs), float(eps), assumptions)


def _neighbors(model: OTAD, travel: Travel) -> Rule:
    """Local scope: what hull and cell both allow."""
    votes = Votes(model, travel.embedded)
    points, stretch = model.bank_points, travel.sought.stretch

    def interval(query: Query, trace: Trace, reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = trace.outputs.double()
        surroundings = Surroundings(query.located.double(), points, stretch)
        entrance = Entrance.of(surroundings, model.n_searched)
        ranges = votes.range_of_values(query.embedded.double(), reached)
        low, high = _hull_interval(entrance, ranges, reached, trace.neighbors.distances[:, -1])
        if travel.embedded is None:
            return low, high, torch.zeros_like(reached, dtype=torch.bool)
        steady = steady_map(model, trace, query.embedded, votes)
        limit = torch.minimum(steady.reach, 1.001 * reached)  # no need to look any further
        same = cell_radius(surroundings, trace.neighbors.indices, limit) > reached
        change = steady.lipschitz * votes.lengths[0] * votes.longest * reached
        change += steady.spread(votes.lengths[0], votes, votes.lengths[0], votes.offsets[0])
        change = torch.where(same, change, torch.inf)
        return torch.maximum(low, value - change), torch.minimum(high, value + change), same

    return interval


def _one_map(model: OTAD, reach: Reach) -> Rule:
    """Global scope; the neighbors of a cell have no part in it."""
    lipschitz = LipschitzMap(model, reach)

    def interval(query: Query, trace: Trace, reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value, change = trace.outputs.double(), lipschitz.change(trace, query.embedded, reached)
        return value - change, value + change, torch.zeros_like(reached, dtype=torch.bool)

    return interval


def _hull_interval(
    entrance: Entrance, ranges: tuple[Tensor, Tensor], reached: Tensor, farthest: Tensor
) -> tuple[Tensor, Tensor]:
    """Least and largest vote (B,) of the bank points that can be neighbors while |u| <= `reached`
    (B,), from the `ranges` (B,N), twice, of their votes. Taken in the order of their votes, the
    first that can be one decides."""
    surroundings = entrance.surroundings
    excluded = surroundings.entry_floor(farthest) > reached[:, None]
    low, high = ranges

    def least(bound: Tensor) -> Tensor:
        def bound_if_reached(rows: Tensor, indices: Tensor, below: Tensor) -> Tensor:
            outside = entrance(rows, indices, reached[rows]) > reached[rows][:, None]
            return bound[rows[:, None], indices].masked_fill(outside, torch.inf)

        floor = bound.masked_fill(excluded, torch.inf)
        start = torch.full_like(reached, torch.inf)
        return least_over_bank(floor, start, bound_if_reached, surroundings.rows_at_once)

    return least(low), -least(-high)
