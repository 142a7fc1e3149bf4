"""`certify` and `certify_values`: the best that the rules of a model prove, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from otad.certify import cell, hull, lipschitz_map  # noqa: F401  (they register their rules)
from otad.certify.certificate import Certificate, Interval
from otad.certify.input_reach import input_reach
from otad.certify.rules import RULES, Batch, Rule, Subject
from otad.checks import check_count
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import LinearHead
from otad.nets.vit import TokenHead

LINEAR = (LinearHead.forward, TokenHead.forward)  # what is known to be `matrix` times z
NONE = "none"
Progress = Callable[[int, int], None]


@torch.no_grad()
def certify(
    model: OTAD,
    x: Tensor,
    *,
    unit: Tensor | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Radii within which no change of the inputs x (B,*input_shape) changes the class they get.

    - `unit` (*input_shape): distances are |delta / unit| in l2; None for plain input units.
    - `embedding_lipschitz`: for a net whose embedding does more than normalize, a proved constant Q
      with |e(x + delta) - e(x)| <= Q |delta / unit|.
    - `metric_lipschitz`: the same for the keys of a metric that has no proved constant of its own
      (`metric.lipschitz`).
    - `batch_size`: rows in a batch; None fits the working memory.
    - `progress` is called with (rows done, rows in all) after each batch.

    Models of local scope have the rules "hull" and "cell", those of global scope "lipschitz". With
    a metric, "hull" needs its constant (and for l = 0 no other), "cell" that of the embedding too,
    and is left out where that is not known. A radius is infinite where no bank point can ever vote
    for another class. Refused, with the reason: regression, other than linear heads, models that
    abstain or whose strong convexity is not known beforehand, embeddings and metrics of unknown
    Lipschitz constant.
    """
    rules = _rules(model, "classification", unit, embedding_lipschitz, metric_lipschitz)
    names = (NONE, *(rule.name for rule in rules))
    radii, predictions, chosen = [], [], []
    for batch in _batches(rules, x, batch_size, progress):
        radius = torch.zeros_like(batch.prediction, dtype=torch.float64)
        number = torch.zeros_like(batch.prediction)
        for place, rule in enumerate(rules, start=1):
            found = rule.radius(batch, radius)
            number = torch.where(found > radius, place, number)
            radius = torch.maximum(radius, found)
        radius = rules[0].subject.reach.to_input(radius, batch.query)
        radii.append(radius)
        predictions.append(batch.prediction)
        chosen.append(torch.where(radius > 0, number, 0))
    used = tuple(names[number] for number in torch.cat(chosen).tolist())
    assumptions = _assumptions(rules, {*used})
    return Certificate(torch.cat(radii), torch.cat(predictions), used, assumptions)


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
    progress: Progress | None = None,
) -> Interval:
    """An interval for each input of x (B,*input_shape) with all answers within l2 distance eps.

    Local scope: the answer is a mixture of the votes of the neighbors, so it is between the least
    and the largest vote of the bank points that can be neighbors within eps; and where the
    neighbors cannot change at all, no further from the answer at x than the Lipschitz constant
    allows. Global scope: that distance, for every input; the interval is all numbers where the map
    was not solved. Parameters and refusals as in `certify`.
    """
    if not 0 <= eps < math.inf:
        raise InputError(f"eps: expected a finite number of at least 0, got {eps!r}")
    rules = _rules(model, "regression", unit, embedding_lipschitz, metric_lipschitz)
    lows, highs, used = [], [], set()
    for batch in _batches(rules, x, batch_size, progress):
        reached = rules[0].subject.reach.from_input(eps, batch.query)
        low, high = torch.full_like(reached, -torch.inf), torch.full_like(reached, torch.inf)
        for rule in rules:
            least, largest = rule.interval(batch, reached)
            if bool(largest.isfinite().any()):
                used.add(rule.name)
            low, high = torch.maximum(low, least), torch.minimum(high, largest)
        lows.append(low)
        highs.append(high)
    return Interval(torch.cat(lows), torch.cat(highs), float(eps), _assumptions(rules, used))


def _rules(
    model: OTAD,
    task: str,
    unit: Tensor | None,
    embedding_lipschitz: float | None,
    metric_lipschitz: float | None,
) -> list[Rule]:
    """Those that apply, at least one; refuses a model that the proofs do not cover."""
    if not isinstance(model, OTAD):
        raise InputError(f"model: expected an OTAD model, got {type(model).__name__}")
    backbone = model.backbone
    if backbone.task != task:
        right = "certify" if backbone.task == "classification" else "certify_values"
        raise InputError(f"model: expected {task}, got {backbone.task}; use {right}")
    head = backbone.head
    if not isinstance(head, LinearHead) or type(head).forward not in LINEAR:
        raise InputError(f"head: expected a LinearHead, got {type(head).__name__}")
    if model.answerer.refusal is not None:
        raise InputError(model.answerer.refusal)
    reach = input_reach(model, unit, embedding_lipschitz, metric_lipschitz)
    subject = Subject(model, reach)
    kinds = [RULES[name] for name in model.answerer.rules]
    return [kind(subject) for kind in kinds if kind.applies(reach)]


def _batches(
    rules: list[Rule], x: Tensor, batch_size: int | None, progress: Progress | None
) -> Iterator[Batch]:
    subject = rules[0].subject
    inputs = subject.model.backbone.check_inputs(x)
    if batch_size is None:
        batch_size = min(rule.rows_at_once(subject.model) for rule in rules)
    done = 0
    for rows in inputs.split(check_count(batch_size, "batch_size")):
        yield Batch(subject, rows)
        done += len(rows)
        if progress is not None:
            progress(done, len(inputs))


def _assumptions(rules: list[Rule], used: set[str]) -> tuple[str, ...]:
    base = [words for rule in rules for words in rule.assumptions()]
    further = [words for rule in rules if rule.name in used for words in rule.if_used]
    return (*base, *rules[0].subject.reach.assumptions, *further)
