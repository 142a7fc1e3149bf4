"""`explain`: explanations from the trace of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import require
from otad.cip import Status
from otad.data.dataset import refuse_repeats
from otad.errors import InputError
from otad.explain.contributions import lead, outputs_alone
from otad.explain.explanation import Explanation
from otad.explain.neighbor import Label, Neighbor, finite
from otad.io.mapped_rows import gathered
from otad.model.conversion import ArrayLike, Estimator, classes_of, converted_inputs, like_inputs
from otad.model.otad import OTAD
from otad.model.training_inputs import check_training_inputs
from otad.nets import Backbone, only_normalizes
from otad.nets.adapt import denormalized

Prediction = tuple[Label | None, dict[Label, float] | None]  # with the probabilities of all classes


def explain(
    model: OTAD | Estimator,
    x: ArrayLike,
    *,
    classes: Sequence[Any] | None = None,
    feature_names: Sequence[str] | None = None,
    train_x: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    train_names: Sequence[str] | None = None,
) -> list[Explanation]:
    """Explain the predictions of a model by the training points they rest on.

    Parameters
    ----------
    model : OTAD or estimator
        A defended model, or a fitted estimator, which also gives the names of classes and features.
    x : Tensor, array, DataFrame or DataLoader (n, *input_shape)
        Inputs.
    classes : sequence, optional
        The names of the C classes. If None, those of the model or the estimator, or numbers.
    feature_names : sequence of str, optional
        The names of the d features of a vector. If None, those of the model.
    train_x : Tensor or array (N, *input_shape), optional
        The training inputs of the bank. They are needed to show training points only if the network
        does more than normalize and flatten its inputs.
    names, train_names : sequence of str, optional
        Names of the inputs (n) and of the training points (N), such as files or lines. If
        `train_names` is None, the names that the model was saved with.

    Returns
    -------
    list of Explanation
        One for each input.

    Examples
    --------
    >>> import otad
    >>> digits = otad.data.load("digits")
    >>> net = otad.nets.fc_resnet((1, 8, 8), 10, blocks=1, hidden=16, bounds=(0.0, 1.0))
    >>> model = otad.defend(net, digits.train_x[:200], digits.train_y[:200])
    >>> found = otad.explain(model, digits.test_x[:2], classes=digits.classes)
    >>> len(found), len(found[0].neighbors)
    (2, 10)
    >>> print(found[0])
    prediction: ... (probability ...%)
    solved with smoothness ...
    ...
    """
    classes = classes_of(model) or None if classes is None else classes
    model, x, _ = converted_inputs(model, x)
    if not isinstance(model, OTAD):
        raise InputError(f"model: expected an OTAD model, got {type(model).__name__}")
    if feature_names is None:
        feature_names = model.notes.get("feature_names")
    backbone, labels = model.backbone, _class_labels(model.backbone, classes)
    columns = None if feature_names is None else tuple(map(str, feature_names))
    fits = columns is None or (len(columns),) == backbone.input_shape
    require(fits, "feature_names", f"one for each input {backbone.input_shape}", len(columns or ()))
    with torch.no_grad():
        trace = model.trace(x)
    asked = _names(names, "names", len(x))
    known = names_of_points(model)
    if train_names is not None:
        known = _names(train_names, "train_names", len(model.bank_labels))
    inputs = None if train_x is None else like_inputs(model, train_x, "train_x")
    raw = _raw_inputs(model, trace.neighbors.indices, inputs)
    solution, outputs = trace.solution, trace.outputs.double().cpu()
    weights, neighbors = solution.multipliers.double(), trace.neighbors
    alone = outputs_alone(model, x, trace).cpu()
    space = "embedded inputs"
    if only_normalizes(backbone):
        space = "normalized inputs, (x - mean) / std of each feature"
    space = space if model.metric is None else "keys of the metric"
    parts = neighbors.indices, weights, trace.labels, neighbors.distances
    found = []
    for row, answer in enumerate(zip(*(part.tolist() for part in parts), raw, strict=True)):
        second, margin, leads = (None, None, alone[row, :, 0])
        unknown = not bool(outputs[row].isfinite().all())  # it abstained
        if labels and not unknown:
            second, margin, leads = lead(outputs[row], alone[row])
        points = [
            Neighbor(
                index,
                finite(weight),
                labels[label] if labels else label,
                distance,
                inputs,
                None if unknown or math.isnan(weight) else value,
                None if known is None else known[index],
            )
            for index, weight, label, distance, inputs, value in zip(
                *answer, leads.tolist(), strict=True
            )
            if model.answerer.rests_on_neighbors or weight > 0  # others pad a narrow support
        ]
        found.append(
            Explanation(
                *_prediction(outputs[row], labels),
                neighbors=tuple(points),
                status=Status(int(solution.status[row])),
                smoothness=float(solution.smoothness[row]),
                residual=float(solution.residual[row]),
                gap=None if trace.gap is None else float(trace.gap[row]),
                inputs=x[row].cpu(),
                feature_names=columns,
                bounds=backbone.bounds,
                runner_up=labels[second] if labels and second is not None else None,
                margin=margin,
                std=backbone.std.cpu(),
                name=None if asked is None else asked[row],
                space=space,
            )
        )
    return found


def _names(given: Sequence[Any] | None, what: str, count: int) -> list[str] | None:
    if given is None:
        return None
    require(len(given) == count, what, f"{count} names", len(given))
    return list(map(str, given))


def names_of_points(model: OTAD) -> list[str] | None:
    """Return the names of the bank points that the model was saved with, unless it has none or its
    bank was replaced by another one."""
    noted = model.notes.get("train_names")
    if not isinstance(noted, list) or len(noted) != len(model.bank_labels):
        return None
    return list(map(str, noted))


def _class_labels(backbone: Backbone, classes: Sequence[Any] | None) -> list[Label] | None:
    """Return the name of each class as plain values; None in regression."""
    if backbone.task == "regression":
        return None
    count = backbone.n_outputs
    given = range(count) if classes is None else classes
    require(len(given) == count, "classes", f"{count} names, one for each output", len(given))
    refuse_repeats(map(str, given), "classes")
    return [label.item() if isinstance(label, np.generic) else label for label in given]


def _prediction(output: Tensor, labels: list[Label] | None) -> Prediction:
    """Return the label or the value of logits (C,) or of one value, with probabilities; None where
    the model abstained."""
    if not bool(output.isfinite().all()):
        return None, None
    if labels is None:
        return float(output), None
    return labels[int(output.argmax())], dict(zip(labels, output.softmax(0).tolist(), strict=True))


def _raw_inputs(model: OTAD, indices: Tensor, train_x: Tensor | None) -> Any:
    """Inputs (B,K,*input_shape) of the training points, or (B,K) times None."""
    backbone = model.backbone
    if train_x is not None:
        check_training_inputs(model, train_x, indices.unique())
        return train_x[indices.to(train_x.device)].cpu()
    if not only_normalizes(backbone):
        return [[None] * indices.shape[1]] * len(indices)
    embedded = gathered(model.bank_inputs, indices).to(backbone.mean)
    return denormalized(backbone, embedded).cpu()
