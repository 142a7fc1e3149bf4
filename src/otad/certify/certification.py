"""`certify` and `certify_values`: the best bound that the rules of a model prove."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from otad.certify.certificate import Certificate, Interval
from otad.certify.input_reach import check_bounds, input_reach
from otad.certify.network import BATCH, NAME, NetworkBound
from otad.certify.rules import RULES, Batch, Rule
from otad.checks import check_count, require
from otad.errors import InputError
from otad.model.conversion import (
    ArrayLike,
    Converted,
    Estimator,
    classes_of,
    converted_inputs,
    like_inputs,
)
from otad.model.otad import OTAD
from otad.nets import Backbone, LinearHead
from otad.nets.vit import TokenHead
from otad.precision import FULL_PRODUCTS
from otad.progress import Counter, progress_bar
from otad.workers import Workers, in_batches

LINEAR = (LinearHead.forward, TokenHead.forward)  # what is known to be `matrix` times z
NONE = "none"
UNPROVED = "unproved neighbors"  # in place of a rule
APPROXIMATE = (
    "the search stops early: the certificate holds against changed inputs whose neighbors are "
    "proved, as Neighbors.proved says"
)
for _module in pkgutil.iter_modules([str(Path(__file__).parent)]):  # rules register themselves
    importlib.import_module(f"{__package__}.{_module.name}")

Arguments = ParamSpec("Arguments")
Proof = TypeVar("Proof")


def _in_full_precision(work: Callable[Arguments, Proof]) -> Callable[Arguments, Proof]:
    """Margins have to be those of float32, even if the caller uses autocast or TF32."""

    @torch.no_grad()
    @wraps(work)
    def proving(*args: Arguments.args, **options: Arguments.kwargs) -> Proof:
        cpu, cuda = (torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda"))
        with FULL_PRODUCTS, cpu, cuda:
            return work(*args, **options)

    return proving


@_in_full_precision
def certify(
    model: OTAD | Backbone | Estimator,
    x: ArrayLike,
    *,
    unit: ArrayLike | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    within_bounds: bool = False,
    batch_size: int | None = None,
    executor: Executor | Workers | int | None = None,
    progress: Counter | bool | None = None,
) -> Certificate:
    """Prove radii within which no change of an input changes its predicted class.

    They are in l2, except for a network that is Lipschitz in l-infinity: see `Certificate.norm`. A
    radius is infinite where no training point could ever vote for another class.

    Parameters
    ----------
    model : OTAD, Backbone or estimator
        A defended classifier, a fitted `OTADClassifier`, or a network with a proved Lipschitz
        bound, such as `otad.nets.OrthogonalNet` or `otad.nets.LinfDistNet`.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Inputs.
    unit : array (*input_shape), optional
        Distances are `|delta / unit|`. If None, plain input units. Other shapes are broadcast.
    embedding_lipschitz : float, optional
        For a network whose embedding does more than normalize and that does not prove a constant
        itself: a proved Q with `|e(x + delta) - e(x)| <= Q |delta / unit|`.
    metric_lipschitz : float, optional
        The same for the keys of a metric that has no `lipschitz` of its own.
    within_bounds : bool
        Whether only inputs within the bounds of the model count, such as pixels from 0 to 1. This
        is a weaker claim against a weaker attacker. Its radii are never smaller, and larger where
        the rules "hull" and "pieces" apply to inputs that are only normalized.
    batch_size : int, optional
        Rows at once. If None, as many as fit into the working memory.
    executor : Executor, int or None
        Who certifies the batches; see `otad.evaluate`. With few rows, give a smaller `batch_size`
        as well, so that there is a batch for every process.
    progress : callable, bool or None
        A function of (rows done, rows in total). True draws a progress bar, False draws none, and
        None draws one on a terminal when the work takes longer than two seconds.

    Returns
    -------
    Certificate
        A radius and a prediction for each input.

    Raises
    ------
    InputError
        For a regression model, a head that is not linear, a solver whose answers have no proof, an
        embedding or metric whose Lipschitz constant is not known, and `within_bounds` for a model
        without bounds.

    Notes
    -----
    Models of local scope have the rules "hull" and "cell". The nearest of several prototypes also
    has the rule "pieces", and so has within bounds every model of one neighbor. Models of global
    scope have the rule "lipschitz". With a metric, "hull" needs the constant of the metric. "cell"
    also needs the constant of the embedding, and is left out if it is not known. A network alone
    has the rule "network".

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16)
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> certificate = otad.certify(model, digits.test_x[:5])
    >>> certificate
    Certificate(5 inputs, radius median ...; by rule ...)
    >>> bool((certificate.radius >= 0).all())
    True
    """
    given, classes = converted_inputs(model, x), classes_of(model)
    if isinstance(given.module, Backbone):
        stated = {"embedding_lipschitz": embedding_lipschitz, "metric_lipschitz": metric_lipschitz}
        for name, value in stated.items():
            require(value is None, name, "None for a network without a defense", value)
        return _certify_network(given, unit, within_bounds, batch_size, executor, progress)
    model, x, unit = _converted(given, unit)
    constants = embedding_lipschitz, metric_lipschitz
    rules = _rules(model, "classification", unit, *constants, within_bounds)
    names = (NONE, *(rule.name for rule in rules), UNPROVED)
    inputs, rows = model.backbone.check_inputs(x), _rows_at_once(rules, batch_size)
    with progress_bar("certifying", progress) as report:
        found = in_batches(_radii, rules, inputs, rows, executor, report)
    radii, predictions, chosen = (torch.cat(column) for column in zip(*found, strict=True))
    used = tuple(names[number] for number in chosen.tolist())
    assumed = _assumptions(rules, {*used})
    about: dict[str, Any] = {"within_bounds": within_bounds, "classes": classes}
    return Certificate(radii, predictions, used, assumed, **about)


@torch.no_grad()
def _radii(rules: Sequence[Rule], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return radii, predictions and the numbers of the rules (n,) of one batch."""
    batch = Batch(rules[0].reach, x)
    radius = torch.zeros_like(batch.prediction, dtype=torch.float64)
    number = torch.zeros_like(batch.prediction)
    for place, rule in enumerate(rules, start=1):
        found = rule.radius(batch, radius)
        number = torch.where(found > radius, place, number)
        radius = torch.maximum(radius, found)
    radius = batch.to_input(torch.minimum(radius, batch.answered.clamp_min(0.0)))
    radius = radius.masked_fill(~batch.proved, 0.0)
    prediction = batch.prediction.masked_fill(batch.silent, -1)
    number = torch.where(radius > 0, number, 0)
    return radius, prediction, torch.where(batch.proved, number, len(rules) + 1)


@_in_full_precision
def certify_values(
    model: OTAD | Estimator,
    x: ArrayLike,
    eps: float,
    *,
    unit: ArrayLike | None = None,
    embedding_lipschitz: float | None = None,
    metric_lipschitz: float | None = None,
    batch_size: int | None = None,
    executor: Executor | Workers | int | None = None,
    progress: Counter | bool | None = None,
) -> Interval:
    """Prove bounds on the answers of a regressor to all inputs within l2 distance `eps`.

    In local scope the answer is a weighted mean of the votes of the neighbors. It is therefore
    between the smallest and the largest vote of the training points that can be neighbors within
    `eps`. Where the neighbors cannot change, and everywhere in global scope, the Lipschitz constant
    of the map bounds how far the answer can move.

    Parameters
    ----------
    model : OTAD or estimator
        A defended regressor, or a fitted `OTADRegressor`.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Inputs.
    eps : float
        The distance, at least 0.
    unit, embedding_lipschitz, metric_lipschitz, batch_size, executor, progress
        As in `certify`.

    Returns
    -------
    Interval
        The bounds of each input. They are infinite where a global map was not solved, and where an
        input within `eps` may be so far from the bank that the model abstains.

    Raises
    ------
    InputError
        For a classifier, and otherwise as in `certify`.

    Examples
    --------
    >>> import otad
    >>> diabetes = otad.data.load("diabetes")
    >>> net = otad.nets.fc_resnet((10,), 1, task="regression", blocks=1, hidden=16)
    >>> model = otad.defend(net, diabetes.train_x[:100], diabetes.train_y[:100])
    >>> otad.certify_values(model, diabetes.test_x[:3], eps=0.1)
    Interval(3 inputs, eps 0.1, width median ...)
    """
    require(0 <= eps < math.inf, "eps", "a finite number of at least 0", eps)
    model, x, unit = _converted(converted_inputs(model, x), unit)
    rules = _rules(model, "regression", unit, embedding_lipschitz, metric_lipschitz)
    inputs, rows = model.backbone.check_inputs(x), _rows_at_once(rules, batch_size)
    with progress_bar("certifying", progress) as report:
        found = in_batches(_bounds, (rules, eps), inputs, rows, executor, report)
    lows, highs, used = zip(*found, strict=True)
    assumptions = _assumptions(rules, {name for names in used for name in names})
    return Interval(torch.cat(lows), torch.cat(highs), float(eps), assumptions)


@torch.no_grad()
def _bounds(asked: tuple[Sequence[Rule], float], x: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    """Return the bounds (n,) of one batch, and the names of the rules that gave some."""
    rules, eps = asked
    batch, used = Batch(rules[0].reach, x), []
    reached = batch.from_input(eps)
    low, high = torch.full_like(reached, -torch.inf), torch.full_like(reached, torch.inf)
    for rule in rules:
        least, largest = rule.interval(batch, reached)
        if bool(largest.isfinite().any()):
            used.append(rule.name)
        low, high = torch.maximum(low, least), torch.minimum(high, largest)
    silent = (reached > batch.answered) | ~batch.proved
    return low.masked_fill(silent, -torch.inf), high.masked_fill(silent, torch.inf), used


def _certify_network(
    given: Converted,
    unit: ArrayLike | None,
    within_bounds: bool,
    batch_size: int | None,
    executor: Executor | Workers | int | None,
    progress: Counter | bool | None,
) -> Certificate:
    net, x, unit = _parts(given, unit)
    _check_head(net)
    bound, limits = NetworkBound(net, unit), check_bounds(net, within_bounds)
    rows = BATCH if batch_size is None else check_count(batch_size, "batch_size")
    with progress_bar("certifying", progress) as report:
        found = in_batches(NetworkBound.radius, bound, net.check_inputs(x), rows, executor, report)
    radius, prediction = (torch.cat(column) for column in zip(*found, strict=True))
    used = tuple(NAME if value > 0 else NONE for value in radius.tolist())
    threat: dict[str, Any] = {"norm": bound.norm, "within_bounds": within_bounds}
    return Certificate(radius, prediction, used, (*bound.assumptions, *limits), **threat)


def _converted(given: Converted, unit: ArrayLike | None) -> tuple[OTAD, Tensor, Tensor | None]:
    require(isinstance(given.module, OTAD), "model", "an OTAD model", type(given.module).__name__)
    return _parts(given, unit)


def _parts(given: Converted, unit: ArrayLike | None) -> tuple[Any, Tensor, Tensor | None]:
    return given.module, given.x, None if unit is None else like_inputs(given.module, unit, "unit")


def _check_head(net: Backbone) -> None:
    is_linear = isinstance(net.head, LinearHead) and type(net.head).forward in LINEAR
    require(is_linear, "head", "a LinearHead", type(net.head).__name__)
    hooks = net.head._forward_hooks or net.head._forward_pre_hooks
    require(not hooks, "head", "a LinearHead without hooks", "one with a hook")


def _rules(model: OTAD, task: str, *units_and_constants: Any) -> list[Rule]:
    """Return the rules that apply, at least one; refuse a model that the proofs do not cover."""
    own = model.backbone.task
    right = "certify" if own == "classification" else "certify_values"
    require(own == task, "model", task, f"{own}; use {right}")
    _check_head(model.backbone)
    if model.answerer.refusal is not None:
        raise InputError(model.answerer.refusal)
    reach = input_reach(model, *units_and_constants)
    rules = (RULES[name] for name in model.answerer.rules)
    return [rule(reach) for rule in rules if rule.applies(reach)]


def _rows_at_once(rules: list[Rule], batch_size: int | None) -> int:
    if batch_size is not None:
        return check_count(batch_size, "batch_size")
    return min(rule.rows_at_once(rule.model) for rule in rules)


def _assumptions(rules: list[Rule], used: set[str]) -> tuple[str, ...]:
    always = [words for rule in rules for words in rule.assumptions()]
    further = [words for rule in rules if rule.name in used for words in rule.if_used]
    model = rules[0].model
    if model.answerer.rests_on_neighbors and not model.searches_exactly:
        further.append(APPROXIMATE)
    return (*always, *rules[0].reach.assumptions, *further)
