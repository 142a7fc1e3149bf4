"""`certify`: for classifiers, the best of the rules that fit the scope of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otad.certify.cell import cell_radius, cell_rule, steady_map
from otad.certify.certificate import Certificate
from otad.certify.conditions import CELL, check_certifiable
from otad.certify.embedding import Reach, reach_of
from otad.certify.hull import Entrance, hull_radius, rivals_of
from otad.certify.lipschitz_map import LipschitzMap, rows_at_once
from otad.certify.surroundings import Surroundings, queries_at_once
from otad.certify.votes import Votes
from otad.checks import check_count
from otad.defense import OTAD, Trace
from otad.errors import InputError

RULES = ("none", "hull", "cell", "lipschitz")
Rule = Callable[[Tensor, Trace], tuple[Tensor, Tensor]]
"""Embedded inputs and their trace -> |u| (B,) that is certified, place in RULES (B,)."""


@torch.no_grad()
def certify(
    model: OTAD,
    x: Tensor,
    *,
    unit: Tensor | None = None,
    embedding_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Certificate:
    """Radii within which no change of the inputs x (B,*input_shape) changes the class they get.

    - `unit` (*input_shape): distances are |delta / unit| in l2; None for plain input units.
    - `embedding_lipschitz`: for a net whose embedding does more than normalize, a proved constant Q
      with |e(x + delta) - e(x)| <= Q |delta / unit|.
    - `batch_size`: rows worked on at a time; None fits the working memory.
    - `progress` is told (rows done, rows in all) after each batch.

    Models of local scope have the rules "hull" and "cell", those of global scope "lipschitz". A
    radius is infinite where no bank point can ever vote for another class. Refused, with the
    reason: regression, other than linear heads, models that abstain or whose strong convexity is
    not known beforehand, embeddings of unknown Lipschitz constant.
    """
    assumptions = check_certifiable(model, "classification")
    inputs = model.backbone.check_inputs(x)
    reach = reach_of(model.backbone, unit, embedding_lipschitz)
    best_radius = _one_map(model, reach) if model.scope == "global" else _neighbors(model, reach)
    if embedding_lipschitz is not None:
        assumptions += (f"the embedding stretches by {embedding_lipschitz:g} at most, as stated",)
    radii, predictions, rules = [], [], []
    for rows in inputs.split(batch_rows(model, batch_size)):
        trace = model.trace(rows)
        prediction = answered(trace).argmax(1)
        embedded = model.backbone.embed(rows)
        radius, rule = best_radius(embedded, trace)
        radius = reach.to_input(radius, embedded.double())
        radii.append(radius)
        predictions.append(prediction)
        rules.append(torch.where(radius > 0, rule, RULES.index("none")))
        if progress is not None:
            progress(sum(len(part) for part in radii), len(inputs))
    names = tuple(RULES[number] for number in torch.cat(rules).tolist())
    if "cell" in names:
        assumptions += CELL
    return Certificate(torch.cat(radii), torch.cat(predictions), names, assumptions)


def _neighbors(model: OTAD, reach: Reach) -> Rule:
    """Local scope: the better of hull and cell."""
    votes = Votes(model, reach)

    def best_radius(embedded: Tensor, trace: Trace) -> tuple[Tensor, Tensor]:
        neighbors, prediction = trace.neighbors, trace.outputs.argmax(1)
        surroundings = Surroundings(embedded.double(), model.bank_inputs, reach.stretch)
        entrance = Entrance.of(surroundings, model.n_sought)
        hull = hull_radius(entrance, votes, prediction, neighbors.distances[:, -1])
        steady = steady_map(model, trace, embedded, votes)
        cell = cell_rule(steady, votes, trace.outputs, prediction)
        cell = torch.where(cell > hull, cell, 0.0)  # elsewhere the cell need not be found
        cell = cell_radius(surroundings, neighbors.indices, cell)
        rule = torch.where(cell > hull, RULES.index("cell"), RULES.index("hull"))
        return torch.maximum(hull, cell), rule

    return best_radius


def _one_map(model: OTAD, reach: Reach) -> Rule:
    """Global scope."""
    lipschitz = LipschitzMap(model, reach)

    def best_radius(embedded: Tensor, trace: Trace) -> tuple[Tensor, Tensor]:
        radius = lipschitz.radius(trace, embedded)
        return radius, torch.full_like(radius, RULES.index("lipschitz"), dtype=torch.int64)

    return best_radius


def batch_rows(model: OTAD, batch_size: int | None) -> int:
    """Rows in a batch: as asked for, or as many as fit."""
    if batch_size is not None:
        return check_count(batch_size, "batch_size")
    points, dim = model.bank_inputs.shape
    if model.scope == "global":
        return rows_at_once(dim)
    return queries_at_once(points, rivals_of(model.n_sought, points), dim)


def answered(trace: Trace) -> Tensor:
    """The outputs, all of them numbers."""
    bad = ~trace.outputs.isfinite().reshape(len(trace.outputs), -1).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise InputError(f"model: expected finite outputs, got {trace.outputs[row].tolist()}")
    return trace.outputs
