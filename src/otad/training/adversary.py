"""The inner maximization of adversarial training: ascent on a loss of keys within an l2 ball."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otad.checks import check_count
from otad.nets.metric import Metric
from otad.nets.probe import evaluating
from otad.training.recipe import check_range


@dataclass(frozen=True)
class Adversary:
    """`steps` of normalized gradient ascent within |delta| <= eps and the declared bounds, from a
    random point of the ball; `step_size` is 2.5 eps / steps unless given.

    `weight_share`: the gradient of a training step is then taken at weights that are moved to the
    same end, each matrix by this share of its length; 0 for none.
    """

    eps: float
    steps: int = 7
    step_size: float | None = None
    random_start: bool = True
    weight_share: float = 0.0

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        for name in ("eps", "step_size"):
            value = getattr(self, name)
            if value is not None:
                check_range(value, name, 1e-12, math.inf)
        check_range(self.weight_share, "weight_share", 0.0, 1.0)

    def attack(
        self, metric: Metric, x: Tensor, loss: Callable[[Tensor], Tensor], start: Tensor
    ) -> Tensor:
        """Inputs near x (B,*input_shape) whose keys (B,m) have a large `loss` (B,), sought from a
        `start` (B,*input_shape), such as `self.start` draws.

        The metric answers in evaluation mode, so that its statistics do not move.
        """
        stride = self.step_size or 2.5 * self.eps / self.steps
        moved = self._project(metric, start, x)
        with evaluating(metric):
            for _ in range(self.steps):
                moved.requires_grad_()
                with torch.enable_grad():
                    total = loss(metric(moved).float()).sum()
                (gradient,) = torch.autograd.grad(total, moved)
                step = stride * gradient / _lengths(gradient).clamp_min(1e-20)
                moved = self._project(metric, moved.detach() + step, x)
        return moved

    def start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the ball about x, drawn where the generator lives; or x itself."""
        if not self.random_start:
            return x
        at = generator.device
        direction = torch.randn(x.shape, generator=generator, device=at, dtype=x.dtype)
        share = torch.rand(len(x), generator=generator, device=at, dtype=x.dtype)
        reach = self.eps * share ** (1 / x[0].numel())
        scale = reach.view(-1, *[1] * (x.dim() - 1)) / _lengths(direction).clamp_min(1e-20)
        return x + (scale * direction).to(x.device)

    def _project(self, metric: Metric, moved: Tensor, x: Tensor) -> Tensor:
        delta = moved - x
        moved = x + delta * (self.eps / _lengths(delta).clamp_min(self.eps))
        return moved if metric.bounds is None else moved.clamp(*metric.bounds)


def _lengths(rows: Tensor) -> Tensor:
    """l2 norm of each row, with axes to divide by."""
    axes = tuple(range(1, rows.dim()))
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=axes, keepdim=True)
    return lengths
