"""What each training point contributes to an answer.

With weights lambda_i that sum to 1, the feature of a query x' is

    z' = sum_i lambda_i (z_i + l (x' - x_i)):

the mean of the features of the training points, each moved to the query with slope l, which is 0 by
default and of no effect in a lifted bank. The head W z + b is linear, so the outputs are the same
mean of what the head reads from each moved feature alone, and so is a difference of two logits.
Nothing remains but rounding. (An estimate by a network that adds a term of its own has no weights.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from otad.io.mapped_rows import gathered
from otad.model.otad import OTAD
from otad.model.trace import Trace


@torch.no_grad()
def outputs_alone(model: OTAD, x: Tensor, trace: Trace) -> Tensor:
    """Return what the head makes (B,K,C) of each of the K training points alone, in float64:
    logits, or in regression one value."""
    head, indices = model.backbone.head, trace.neighbors.indices
    matrix, bias = head.matrix.double(), head.bias
    slope = _map_convexity(model, trace)
    embedded = model.backbone.embed(x).double() if bool(slope.any()) else None
    columns = []
    for column in indices.unbind(1):  # never B*K*d numbers at once
        feature = gathered(model.bank_features, column, x.device).double()
        if embedded is not None:
            point = gathered(model.bank_inputs, column, x.device).double()
            feature += slope[:, None] * (embedded - point)
        columns.append(feature @ matrix.T)
    outputs = torch.stack(columns, dim=1)
    return outputs if bias is None else outputs + bias.double()


def _map_convexity(model: OTAD, trace: Trace) -> Tensor:
    """Return the l (B,) of the map itself, which may be lower than the l that was asked for."""
    asked = torch.full_like(trace.solution.strong_convexity, model.strong_convexity)
    if trace.solution.mode != "consistent":
        return asked
    used = trace.solution.strong_convexity
    return torch.where(used.isnan(), asked, used)  # a row without a solution has none


def lead(output: Tensor, alone: Tensor) -> tuple[int, float, Tensor]:
    """The runner-up among logits (C,), how far it is below the largest, and the same difference in
    what each training point gives alone (K,C). The answer changes exactly where it becomes 0."""
    first = int(output.argmax())
    second = int(output.index_fill(0, output.argmax(), -torch.inf).argmax())
    return second, float(output[first] - output[second]), alone[:, first] - alone[:, second]


def contributions_of(model: OTAD, x: Tensor, trace: Trace) -> Tensor:
    """Return what each training point contributes (B,K) to the margin or the value of inputs
    (B, *input_shape), in float64. It is NaN where the model abstains or has no weights."""
    outputs, alone = trace.outputs.double(), outputs_alone(model, x, trace)
    if outputs.dim() == 1:
        leads = alone[..., 0].masked_fill(outputs.isnan()[:, None], torch.nan)
    else:
        leads = torch.stack([lead(*row)[2] for row in zip(outputs, alone, strict=True)])
        leads = leads.masked_fill(outputs.isnan().any(1)[:, None], torch.nan)
    return trace.solution.multipliers.double() * leads
