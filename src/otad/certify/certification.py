"""`certify` and `certify_values`: the best that the rules of a model prove, batch by batch."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otad.certify.input_reach import input_reach
from otad.certify.rules import RULES, Batch, Rule
from otad.checks import check_count, check_shape, require
from otad.errors import InputError
from otad.model.conversion import ArrayLike, Estimator, converted, like_inputs
from otad.model.otad import OTAD
from otad.nets import LinearHead
from otad.nets.vit import TokenHead
from otad.progress import Counter, progress_bar
from otad.short_repr import counts_text, median_text

LINEAR = (LinearHead.forward, TokenHead.forward)  # what is known to be `matrix` times z
NONE = "none"
for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):  # rules register themselves
    importlib.import_module(f"{__package__}.{_module.name}")


@dataclass(frozen=True, eq=False)
class Certificate:
    """No input closer than `radius` (B,) to its example changes the model's `prediction` (B,).

    Radii are float64, in l2, in the unit asked for (see `certify`), and 0 where nothing is proved.
    Within a radius the model also answers: where it abstains, the prediction is -1, the radius 0.
    `rules`: which rule gave the radius of each row. `assumptions`: what the proof rests on."""

    radius: Tensor
    prediction: Tensor
    rules: tuple[str, ...]
    assumptions: tuple[str, ...]
    kind: str = "proved"

    def __len__(self) -> int:
        return len(self.radius)

    def __repr__(self) -> str:
        radii = f"radius {median_text(self.radius)}"
        return f"Certificate({len(self)} inputs, {radii}; by rule {counts_text(self.rules)})"

    def holds(self, y: Tensor, eps: float) -> Tensor:
        """Rows (B,) whose prediction is y and cannot change within l2 distance eps."""
        check_shape(y, "y", tuple(self.prediction.shape), "like the predictions")
        require(0 <= eps < math.inf, "eps", "a finite number of at least 0", eps)
        return (self.prediction == y.to(self.prediction.device)) & (self.radius > eps)

    def accuracy(self, y: Tensor, eps: float) -> float:
        """Certified accuracy: the share of rows that `holds`."""
        return float(self.holds(y, eps).double().mean())

    def linf_radius(self, n_mutable: int) -> Tensor:
        """Radii (B,) in l-infinity, for attacks on so many features: |delta|_2 is at most
        sqrt(n_mutable) |delta|_inf. Both are measured in the same unit."""
        return self.radius / math.sqrt(check_count(n_mutable, "n_mutable"))


@dataclass(frozen=True, eq=False)
class Interval:
    """Every input within l2 distance `eps` of its example is answered in [low, high] (B,)."""

    low: Tensor
    high: Tensor
    eps: float
    assumptions: tuple[str, ...]
    kind: str = "proved"

    def __repr__(self) -> str:
        width = f"width {median_text(self.high - self.low)}"
        return f"Interval({len(self.low)} inputs, eps {self.eps:g}, {width})"


@torch.no_grad()
def certify(
    model: OTAD | Estimator,
    x: ArrayLike,
    *,
    unit: ArrayLike | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Counter | bool | None = None,
) -> Certificate:
    """Radii within which no change of the inputs x (B,*input_shape) changes the class they get.

    - `model`, `x`: an OTAD model or a fitted estimator, and a tensor, an array, a DataFrame or a
      DataLoader.
    - `unit` (*input_shape): distances are |delta / unit| in l2; None for plain input units.
    - `embedding_lipschitz`: for a net whose embedding does more than normalize, a proved constant Q
      with |e(x + delta) - e(x)| <= Q |delta / unit|.
    - `metric_lipschitz`: the same for the keys of a metric without a `lipschitz` of its own.
    - `batch_size`: None fits the working memory. `progress`: see `otad.progress`, with
      (rows done, rows in all).

    Models of local scope have the rules "hull" and "cell", those of global scope "lipschitz". With
    a metric, "hull" needs its constant (and for l = 0 no other), "cell" that of the embedding too,
    and is left out where that is not known. A radius is infinite where no bank point can ever vote
    for another class. Refused: regression, other than linear heads, models that abstain or whose
    strong convexity is not known beforehand, embeddings and metrics of unknown constant."""
    model, x, unit = _converted(model, x, unit)
    rules = _rules(model, "classification", unit, embedding_lipschitz, metric_lipschitz)
    names = (NONE, *(rule.name for rule in rules))
    radii, predictions, chosen = [], [], []
    with progress_bar("certifying", progress) as report:
        for batch in _batches(rules, x, batch_size, report):
            radius = torch.zeros_like(batch.prediction, dtype=torch.float64)
            number = torch.zeros_like(batch.prediction)
            for place, rule in enumerate(rules, start=1):
                found = rule.radius(batch, radius)
                number = torch.where(found > radius, place, number)
                radius = torch.maximum(radius, found)
            radius = batch.to_input(torch.minimum(radius, batch.answered.clamp_min(0.0)))
            radii.append(radius)
            predictions.append(batch.prediction.masked_fill(batch.silent, -1))
            chosen.append(torch.where(radius > 0, number, 0))
    used = tuple(names[number] for number in torch.cat(chosen).tolist())
    return Certificate(torch.cat(radii), torch.cat(predictions), used, _assumptions(rules, {*used}))


@torch.no_grad()
def certify_values(
    model: OTAD | Estimator,
    x: ArrayLike,
    eps: float,
    *,
    unit: ArrayLike | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    progress: Counter | bool | None = None,
) -> Interval:
    """An interval for each input of x (B,*input_shape) with all answers within l2 distance eps.

    Local scope: the answer is a mixture of the votes of the neighbors, so it is between the least
    and the largest vote of the bank points that can be neighbors within eps; and where the
    neighbors cannot change at all, no further from the answer at x than the Lipschitz constant
    allows. Global scope: that distance, for every input; the interval is all numbers where the map
    was not solved, and where an input within eps may be too far from the bank for an answer.
    Parameters and refusals as in `certify`."""
    require(0 <= eps < math.inf, "eps", "a finite number of at least 0", eps)
    model, x, unit = _converted(model, x, unit)
    rules = _rules(model, "regression", unit, embedding_lipschitz, metric_lipschitz)
    lows, highs, used = [], [], set()
    with progress_bar("certifying", progress) as report:
        for batch in _batches(rules, x, batch_size, report):
            reached = batch.from_input(eps)
            low, high = torch.full_like(reached, -torch.inf), torch.full_like(reached, torch.inf)
            for rule in rules:
                least, largest = rule.interval(batch, reached)
                if bool(largest.isfinite().any()):
                    used.add(rule.name)
                low, high = torch.maximum(low, least), torch.minimum(high, largest)
            silent = reached > batch.answered
            lows.append(low.masked_fill(silent, -torch.inf))
            highs.append(high.masked_fill(silent, torch.inf))
    return Interval(torch.cat(lows), torch.cat(highs), float(eps), _assumptions(rules, used))


def _converted(
    model: OTAD | Estimator, x: ArrayLike, unit: ArrayLike | None
) -> tuple[OTAD, Tensor, Tensor | None]:
    given = converted(model, x)
    require(isinstance(given.module, OTAD), "model", "an OTAD model", type(model).__name__)
    return given.module, given.x, None if unit is None else like_inputs(given.module, unit, "unit")


def _rules(model: OTAD, task: str, *units_and_constants: Any) -> list[Rule]:
    """Those that apply, at least one; refuses a model that the proofs do not cover."""
    own, head = model.backbone.task, model.backbone.head
    right = "certify" if own == "classification" else "certify_values"
    require(own == task, "model", task, f"{own}; use {right}")
    is_linear = isinstance(head, LinearHead) and type(head).forward in LINEAR
    require(is_linear, "head", "a LinearHead", type(head).__name__)
    if model.answerer.refusal is not None:
        raise InputError(model.answerer.refusal)
    reach = input_reach(model, *units_and_constants)
    rules = (RULES[name] for name in model.answerer.rules)
    return [rule(reach) for rule in rules if rule.applies(reach)]


def _batches(
    rules: list[Rule], x: Tensor, batch_size: int | None, report: Counter
) -> Iterator[Batch]:
    reach = rules[0].reach
    inputs = reach.model.backbone.check_inputs(x)
    if batch_size is None:
        batch_size = min(rule.rows_at_once(reach.model) for rule in rules)
    for start in range(0, len(inputs), check_count(batch_size, "batch_size")):
        stop = min(start + batch_size, len(inputs))
        yield Batch(reach, inputs[start:stop])
        report(stop, len(inputs))


def _assumptions(rules: list[Rule], used: set[str]) -> tuple[str, ...]:
    always = [words for rule in rules for words in rule.assumptions()]
    further = [words for rule in rules if rule.name in used for words in rule.if_used]
    return (*always, *rules[0].reach.assumptions, *further)
