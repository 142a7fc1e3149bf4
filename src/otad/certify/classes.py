"""`certify`: the best of the rules, for classifiers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from otad.certify.cell import cell_radius, cell_rule, steady_map
from otad.certify.certificate import Certificate
from otad.certify.conditions import CELL, check_certifiable
from otad.certify.embedding import Reach, reach_of
from otad.certify.hull import Entrance, hull_radius, rivals_of
from otad.certify.surroundings import Surroundings, queries_at_once
from otad.certify.votes import Votes
from otad.checks import check_count
from otad.defense import OTAD, Trace
from otad.errors import InputError

RULES = ("none", "hull", "cell")


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

    A radius is infinite where no bank point can ever vote for another class. Refused, with the
    reason: regression, other than linear heads, models that abstain or whose strong convexity is
    not known beforehand, embeddings of unknown Lipschitz constant.
    """
    assumptions = check_certifiable(model, "classification")
    inputs = model.backbone.check_inputs(x)
    reach = reach_of(model.backbone, unit, embedding_lipschitz)
    votes = Votes(model, reach)
    if embedding_lipschitz is not None:
        assumptions += (f"the embedding stretches by {embedding_lipschitz:g} at most, as stated",)
    radii, predictions, rules = [], [], []
    for rows in inputs.split(batch_rows(model, batch_size)):
        trace = model.trace(rows)
        prediction = answered(trace).argmax(1)
        radius, rule = _best_radius(model, model.backbone.embed(rows), trace, votes, reach)
        radii.append(radius)
        predictions.append(prediction)
        rules.append(rule)
        if progress is not None:
            progress(sum(len(part) for part in radii), len(inputs))
    names = tuple(RULES[number] for number in torch.cat(rules).tolist())
    if "cell" in names:
        assumptions += CELL
    return Certificate(torch.cat(radii), torch.cat(predictions), names, assumptions)


def _best_radius(
    model: OTAD, embedded: Tensor, trace: Trace, votes: Votes, reach: Reach
) -> tuple[Tensor, Tensor]:
    """Input radius (B,) and the place in RULES (B,) of the rule that gave it."""
    neighbors, prediction = trace.neighbors, trace.outputs.argmax(1)
    surroundings = Surroundings(embedded.double(), model.bank_inputs, reach.stretch)
    entrance = Entrance.of(surroundings, model.n_sought)
    hull = hull_radius(entrance, votes, prediction, neighbors.distances[:, -1])
    steady = steady_map(model, trace, embedded, votes)
    cell = cell_rule(steady, votes, trace.outputs, prediction)
    cell = torch.where(cell > hull, cell, 0.0)  # elsewhere the cell need not be found
    cell = cell_radius(surroundings, neighbors.indices, cell)
    best = reach.to_input(torch.maximum(hull, cell), surroundings.embedded)
    rule = torch.where(cell > hull, RULES.index("cell"), RULES.index("hull"))
    return best, torch.where(best > 0, rule, RULES.index("none"))


def batch_rows(model: OTAD, batch_size: int | None) -> int:
    """Rows in a batch: as asked for, or as many as fit."""
    if batch_size is not None:
        return check_count(batch_size, "batch_size")
    points, dim = model.bank_inputs.shape
    return queries_at_once(points, rivals_of(model.n_sought, points), dim)


def answered(trace: Trace) -> Tensor:
    """The outputs, all of them numbers."""
    bad = ~trace.outputs.isfinite().reshape(len(trace.outputs), -1).all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise InputError(f"model: expected finite outputs, got {trace.outputs[row].tolist()}")
    return trace.outputs
