"""Explanations of a model's predictions, from its trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otad.checks import check_shape
from otad.cip import Status
from otad.data.dataset import refuse_repeats
from otad.errors import InputError
from otad.explain.explanation import Explanation, Label, Neighbor
from otad.model.otad import OTAD
from otad.nets import Backbone, only_normalizes


def explain(
    model: OTAD,
    x: Tensor,
    *,
    classes: Sequence[Any] | None = None,
    feature_names: Sequence[str] | None = None,
    train_x: Tensor | None = None,
) -> list[Explanation]:
    """One explanation for each input x (B,*input_shape), by a single trace of the batch.

    `classes` names the C classes (else they are numbers), `feature_names` the d features of a
    vector. The raw inputs of training points are computed from the bank where the backbone only
    normalizes and flattens; for another one, give the `train_x` (N,*input_shape) of the bank.
    """
    backbone = model.backbone
    labels = _class_labels(backbone, classes)
    if feature_names is not None and (len(feature_names),) != backbone.input_shape:
        raise InputError(
            f"feature_names: expected one for each input {backbone.input_shape}, "
            f"got {len(feature_names)}"
        )
    names = None if feature_names is None else tuple(map(str, feature_names))
    with torch.no_grad():
        trace = model.trace(x)
    raw = _raw_inputs(model, trace.neighbors.indices, train_x)
    solution, outputs = trace.solution, trace.outputs.double().cpu()
    answers = zip(
        trace.neighbors.indices.tolist(),
        solution.multipliers.double().tolist(),
        trace.labels.tolist(),
        trace.neighbors.distances.tolist(),
        strict=True,
    )
    found = []
    for row, answer in enumerate(answers):
        neighbors = tuple(
            Neighbor(
                index,
                None if math.isnan(weight) else weight,
                labels[label] if labels else label,
                distance,
                inputs,
            )
            for *(index, weight, label, distance), inputs in zip(*answer, raw[row], strict=True)
            if model.answerer.rests_on_neighbors or weight > 0  # others pad a narrow support
        )
        prediction, probabilities = _answer(outputs[row], labels)
        found.append(
            Explanation(
                prediction=prediction,
                probabilities=probabilities,
                neighbors=neighbors,
                status=Status(int(solution.status[row])),
                smoothness=float(solution.smoothness[row]),
                residual=float(solution.residual[row]),
                gap=None if trace.gap is None else float(trace.gap[row]),
                inputs=x[row].cpu(),
                feature_names=names,
                bounds=backbone.bounds,
            )
        )
    return found


def _class_labels(backbone: Backbone, classes: Sequence[Any] | None) -> list[Label] | None:
    """The name of each class, as plain values; None in regression."""
    if backbone.task == "regression":
        return None
    given = range(backbone.n_outputs) if classes is None else classes
    if len(given) != backbone.n_outputs:
        raise InputError(
            f"classes: expected {backbone.n_outputs} names, one for each output, got {len(given)}"
        )
    refuse_repeats(map(str, given), "classes")
    return [label.item() if isinstance(label, np.generic) else label for label in given]


def _answer(
    output: Tensor, labels: list[Label] | None
) -> tuple[Label | None, dict[Label, float] | None]:
    """Prediction and probabilities, from logits (C,) or a value; None where it abstained."""
    if not bool(output.isfinite().all()):
        return None, None
    if labels is None:
        return float(output), None
    return labels[int(output.argmax())], dict(zip(labels, output.softmax(0).tolist(), strict=True))


def _raw_inputs(model: OTAD, indices: Tensor, train_x: Tensor | None) -> Any:
    """Inputs (B,K,*input_shape) of the training points, or (B,K) times None."""
    backbone, points = model.backbone, model.bank_inputs
    if train_x is not None:
        expected = (len(points), *backbone.input_shape)
        check_shape(train_x, "train_x", expected, "one for each point of the bank")
        return train_x[indices.to(train_x.device)].cpu()
    if not only_normalizes(backbone):
        return [[None] * indices.shape[1]] * len(indices)
    embedded = points[indices.to(points.device)].to(backbone.mean)
    embedded = embedded[..., : backbone.dim - backbone.lift]
    shape = (*indices.shape, *backbone.input_shape)
    return (embedded.reshape(shape) * backbone.std + backbone.mean).cpu()
