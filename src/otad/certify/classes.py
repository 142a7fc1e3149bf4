"""`certify`: for classifiers, the best of the rules that fit the scope of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otad.certify.bisectors import Surroundings, queries_at_once
from otad.certify.cell import cell_radius, cell_rule, steady_map
from otad.certify.certificate import Certificate
from otad.certify.conditions import CELL, check_certifiable
from otad.certify.embedding import Reach
from otad.certify.hull import Entrance, hull_radius, rivals_of
from otad.certify.input_reach import Query, Travel, travel_of
from otad.certify.lipschitz_map import LipschitzMap, rows_at_once
from otad.certify.votes import Votes
from otad.checks import check_count
from otad.errors import InputError
from otad.model.otad import OTAD, Trace

RULES = ("none", "hull", "cell", "lipschitz")
Rule = Callable[[Query, Trace], tuple[Tensor, Tensor]]
"""A batch and its trace -> |u| (B,) that is certified, place in RULES (B,)."""


@torch.no_grad()
def certify(
    model: OTAD,
    x: Tensor,
    *,
    unit: Tensor | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Radii within which no change of the inputs x (B,*input_shape) changes the class they get.

    - `unit` (*input_shape): distances are |delta / unit| in l2; None for plain input units.
    - `embedding_lipschitz`: for a net whose embedding does more than normalize, a proved constant Q
      with |e(x + delta) - e(x)| <= Q |delta / unit|.
    - `metric_lipschitz`: the same for the keys of a metric that has no proved constant of its own
      (`metric.lipschitz`).
    - `batch_size`: rows worked on at a time; None fits the working memory.
    - `progress` is told (rows done, rows in all) after each batch.

    Models of local scope have the rules "hull" and "cell", those of global scope "lipschitz". With
    a metric, "hull" needs its constant (and for l = 0 no other), "cell" that of the embedding too,
    and is left out where that is not known. A radius is infinite where no bank point can ever vote
    for another class. Refused, with the reason: regression, other than linear heads, models that
    abstain or whose strong convexity is not known beforehand, embeddings and metrics of unknown
    Lipschitz constant.
    """
    assumptions = check_certifiable(model, "classification")
    inputs = model.backbone.check_inputs(x)
    travel = travel_of(model, unit, embedding_lipschitz, metric_lipschitz)
    assumptions += travel.assumptions
    is_global = model.scope == "global"
    best_radius = _one_map(model, travel.sought) if is_global else _neighbors(model, travel)
    radii, predictions, rules = [], [], []
    for rows in inputs.split(batch_rows(model, batch_size)):
        trace = model.trace(rows)
        prediction = answered(trace).argmax(1)
        query = travel.query(rows)
        radius, rule = best_radius(query, trace)
        radius = travel.to_input(radius, query)
        radii.append(radius)
        predictions.append(prediction)
        rules.append(torch.where(radius > 0, rule, RULES.index("none")))
        if progress is not None:
            progress(sum(len(part) for part in radii), len(inputs))
    names = tuple(RULES[number] for number in torch.cat(rules).tolist())
    if "cell" in names:
        assumptions += CELL
    return Certificate(torch.cat(radii), torch.cat(predictions), names, assumptions)


def _neighbors(model: OTAD, travel: Travel) -> Rule:
    """Local scope: the better of hull and cell."""
    votes = Votes(model, travel.embedded)
    points, stretch = model.bank_points, travel.sought.stretch

    def best_radius(query: Query, trace: Trace) -> tuple[Tensor, Tensor]:
        neighbors, prediction = trace.neighbors, trace.outputs.argmax(1)
        surroundings = Surroundings(query.located.double(), points, stretch)
        entrance = Entrance.of(surroundings, model.n_searched)
        turning = votes.turning(query.embedded.double(), prediction)
        hull = hull_radius(entrance, turning, neighbors.distances[:, -1])
        if travel.embedded is None:
            return hull, torch.full_like(hull, RULES.index("hull"), dtype=torch.int64)
        steady = steady_map(model, trace, query.embedded, votes)
        cell = cell_rule(steady, votes, trace.outputs, prediction)
        cell = torch.where(cell > hull, cell, 0.0)  # elsewhere the cell need not be found
        cell = cell_radius(surroundings, neighbors.indices, cell)
        rule = torch.where(cell > hull, RULES.index("cell"), RULES.index("hull"))
        return torch.maximum(hull, cell), rule

    return best_radius


def _one_map(model: OTAD, reach: Reach) -> Rule:
    """Global scope."""
    lipschitz = LipschitzMap(model, reach)

    def best_radius(query: Query, trace: Trace) -> tuple[Tensor, Tensor]:
        radius = lipschitz.radius(trace, query.embedded)
        return radius, torch.full_like(radius, RULES.index("lipschitz"), dtype=torch.int64)

    return best_radius


def batch_rows(model: OTAD, batch_size: int | None) -> int:
    """Rows in a batch: as asked for, or as many as fit."""
    if batch_size is not None:
        return check_count(batch_size, "batch_size")
    if model.scope == "global":
        return rows_at_once(model.bank_inputs.shape[1])
    points, dim = model.bank_points.shape
    rows = queries_at_once(points, rivals_of(model.n_searched, points), dim)
    if model.metric is None:
        return rows
    return min(rows, queries_at_once(points, model.n_searched, model.bank_inputs.shape[1]))


def answered(trace: Trace) -> Tensor:
    """The outputs, all of them numbers."""
    bad = ~trace.outputs.isfinite().reshape(len(trace.outputs), -1).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise InputError(f"model: expected finite outputs, got {trace.outputs[row].tolist()}")
    return trace.outputs
