"""Adam for networks with orthogonal matrices, which its steps keep orthogonal.

Let X be a matrix with orthonormal rows and G its gradient. For every skew-symmetric A the rows of
X exp(A) are orthonormal too, and the gradient in A at A = 0 is the skew-symmetric X^T G - G^T X, up
to a factor that Adam ignores. A step of Adam from A = 0 is again skew-symmetric, as the moments of
A are skew-symmetric and symmetric. It is taken, X exp(A) replaces X, and A is 0 again.

The steps are small, so a few terms of the exponential are enough. What they leave out is removed
after every epoch (`otad.nets.orthogonal.retract`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TERMS = 3  # of the exponential, beside the identity


class OrthogonalAdam(torch.optim.AdamW):
    """AdamW for parameter groups, beside `matrices` (...,r,n) whose rows stay orthonormal.

    The moments of a matrix are those of A (...,n,n)."""

    def __init__(
        self, groups: list[dict[str, Any]], matrices: Sequence[Tensor], **options: Any
    ) -> None:
        self.matrices = matrices
        self.turns = [_zero_turn(one) for one in matrices]
        super().__init__([{"params": self.turns}, *groups], **options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for matrix in self.matrices:
            matrix.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        pairs = list(zip(self.matrices, self.turns, strict=True))
        for matrix, turn in pairs:
            if matrix.grad is not None:
                slope = matrix.mT @ matrix.grad
                turn.grad = slope - slope.mT
        loss = super().step(closure)
        for matrix, turn in pairs:
            matrix.copy_(turned(matrix, turn))
            turn.zero_()
        return loss


def _zero_turn(matrix: Tensor) -> Tensor:
    """Return A = 0 (...,n,n) for a matrix (...,r,n)."""
    size = matrix.shape[-1]
    return matrix.detach().new_zeros(*matrix.shape[:-2], size, size)


def turned(matrix: Tensor, turn: Tensor) -> Tensor:
    """Return X exp(A) (...,r,n) for X (...,r,n) and a small A (...,n,n)."""
    term = total = matrix
    for number in range(1, TERMS + 1):
        term = term @ turn / number
        total = total + term
    return total
