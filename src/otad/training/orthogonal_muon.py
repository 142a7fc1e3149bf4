"""Muon for networks with orthogonal matrices, which its steps keep orthogonal.

Let X be a matrix with orthonormal rows and G a mean of its gradients. The part of G along which the
rows stay orthonormal is D = G - X G^T X, up to a factor. As in Muon
(https://kellerjordan.github.io/posts/muon/), all singular values of D are replaced by numbers near
1. For the result U and an angle a, (X - a U) / sqrt(1 + a^2) replaces X, so all planes turn by
about the same angle. Then a step of Newton and Schulz towards the polar factor makes the rows
nearly orthonormal again. What it leaves is of the second order in the angle, or of the fourth for
square matrices, and is removed after every epoch (`otad.nets.orthogonal.retract`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from otad.nets.orthogonal import polar_step

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
    along = unit_singular_values(slope - matrix @ slope.mT @ matrix)
    return polar_step((matrix - angle * along) / (1 + angle**2) ** 0.5)


def unit_singular_values(matrix: Tensor) -> Tensor:
    """Replace all singular values of a matrix (...,r,n) but tiny ones by numbers near 1."""
    on_gpu = matrix.device.type == "cuda"
    length = torch.linalg.matrix_norm(matrix, keepdim=True)
    unit: Tensor = (matrix / length.clamp_min(1e-30)).to(torch.bfloat16 if on_gpu else matrix.dtype)
    once, cubed, fifth = FACTORS
    for _ in range(TIMES):
        square = unit @ unit.mT
        unit = once * unit + (cubed * square + fifth * square @ square) @ unit
    return unit.to(matrix)
