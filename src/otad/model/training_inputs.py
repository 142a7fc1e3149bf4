"""Checks that inputs are those from which a bank was made."""

from __future__ import annotations

import torch
from torch import Tensor

from otad.checks import check_shape, require
from otad.errors import InputError
from otad.io.mapped_rows import spread_rows
from otad.model.otad import OTAD

SAMPLE = 64  # training inputs that are embedded again
SAME = 1e-2  # the largest difference as a share of the lengths, for banks in half precision


@torch.no_grad()
def check_training_inputs(model: OTAD, train_x: object, rows: Tensor | None = None) -> Tensor:
    """Return `train_x` (N,*) if the bank was made from these inputs, in the same order.

    The inputs of `rows`, or of a sample, are embedded again and compared with the bank. Others
    raise `InputError`."""
    backbone, points = model.backbone, len(model.bank_labels)
    if not isinstance(train_x, Tensor) or train_x.dtype != backbone.mean.dtype:
        got = train_x.dtype if isinstance(train_x, Tensor) else type(train_x).__name__
        raise InputError(f"train_x: expected a tensor of dtype {backbone.mean.dtype}, got {got}")
    check_shape(train_x, "train_x", (points, *backbone.input_shape), "with a row per bank point")
    if rows is None:
        rows = spread_rows(points, SAMPLE)
    again = backbone.embed(train_x[rows.to(train_x.device)].to(backbone.mean.device))
    known = model.bank_inputs[rows.to(model.bank_inputs.device)].to(again)
    off = (again - known).norm(dim=1) > SAME * (again.norm(dim=1) + known.norm(dim=1))
    found = f"others in row {rows[int(off.int().argmax())]}"
    require(not off.any(), "train_x", "the inputs the bank was made from, in its order", found)
    return train_x


@torch.no_grad()
def copies_of_bank(model: OTAD, x: Tensor) -> int:
    """Return how many inputs equal a point of the bank, as far as neighbors are concerned."""
    return sum(int((model.distance(part) == 0).sum()) for part in x.split(1000))
