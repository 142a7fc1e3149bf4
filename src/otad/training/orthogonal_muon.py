"""Muon for networks with orthogonal matrices, which its steps keep orthogonal.

Let X be a matrix with orthonormal rows and G a mean of its gradients. The rows stay orthonormal
along the tangents D with D X^T + X D^T = 0. As in Muon (https://kellerjordan.github.io/posts/muon/)
all singular values of the tangent that is nearest to G are replaced by numbers near 1, so all
planes turn by about the same angle a. For the tangent U nearest to the result, X becomes
X - (a U + a^2/2 U U^T X) / (1 + a^2/4). Its rows are orthonormal up to terms of the third order in
the angle, or of the fourth for square matrices. Products are taken in bfloat16 on a GPU, which is
enough because their errors are multiplied by the angle too.

If the rows are not quite orthonormal, the step leads them farther away where the loss falls with
their length, and after some hundred steps to infinity. So each step also moves X a part of the way
to the nearest matrix with orthonormal rows, along -(X X^T - I) X. What is left is removed after
every epoch (`otad.nets.orthogonal.retract`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ANGLE = 40.0  # by which a step turns, in radians at the learning rate 1
MOMENTUM = 0.95
# Of an odd polynomial that maps (0, 1] close to 1 after five times, from the page above.
FACTORS = (3.4445, -4.7750, 2.0315)
TIMES = 5


class OrthogonalMuon(torch.optim.AdamW):
    """AdamW for parameter groups, beside `matrices` (...,r,n) whose rows stay orthonormal.

    The state of a matrix has the names of AdamW: "step", and "exp_avg" for its mean gradient."""

    def __init__(
        self, groups: list[dict[str, Any]], matrices: Sequence[Tensor], **options: Any
    ) -> None:
        super().__init__([{"params": list(matrices)}, *groups], **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]
        for matrix in first["params"]:
            if matrix.grad is not None:
                state = self.state[matrix]
                if not state:
                    state["step"] = torch.zeros((), device=matrix.device)
                    state["exp_avg"] = torch.zeros_like(matrix)
                state["step"] += 1
                mean = state["exp_avg"].lerp_(matrix.grad, 1 - MOMENTUM)
                slope = matrix.grad.lerp(mean, MOMENTUM)
                matrix.copy_(turned(matrix, slope, ANGLE * first["lr"]))
                matrix.grad = None  # so that AdamW leaves it alone
        return super().step(closure)


def turned(matrix: Tensor, slope: Tensor, angle: Tensor | float) -> Tensor:
    """Return X (...,r,n) with orthonormal rows after a step of an angle against the slope."""
    dtype = torch.bfloat16 if matrix.device.type == "cuda" else matrix.dtype
    start = matrix.to(dtype)
    along = tangent(start, unit_singular_values(tangent(start, slope.to(dtype))))
    step = angle / (1 + angle**2 / 4)
    pull = 2 * step / (1 + 4 * step)  # at most 1/2, which would lead to the nearest such matrix
    excess = start @ start.mT - torch.eye(start.shape[-2], dtype=dtype, device=start.device)
    bend = (step * angle / 2 * (along @ along.mT) + pull * excess) @ start
    return matrix - step * along - bend


def tangent(matrix: Tensor, change: Tensor) -> Tensor:
    """Return the change nearest to a given one that keeps the rows of X (...,r,n) orthonormal."""
    product = change @ matrix.mT
    return change - 0.5 * (product + product.mT) @ matrix


def unit_singular_values(matrix: Tensor) -> Tensor:
    """Replace all singular values of a matrix (...,r,n) but tiny ones by numbers near 1."""
    length = torch.linalg.matrix_norm(matrix, keepdim=True)
    unit: Tensor = matrix / length.clamp_min(1e-30)
    once, cubed, fifth = FACTORS
    for _ in range(TIMES):
        square = unit @ unit.mT
        unit = once * unit + (cubed * square + fifth * square @ square) @ unit
    return unit
