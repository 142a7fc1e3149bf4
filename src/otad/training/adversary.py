"""Adversarial training: perturbed inputs, and perturbed weights for one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from otad.checks import check_choice, check_count, require
from otad.nets.inputs import InputNet, evaluating
from otad.threat import NORMS, LpBall
from otad.training.config import check_range

Perturbation = list[tuple[Tensor, Tensor]]
"""Weights, each with what is added to it."""


@dataclass(frozen=True)
class Adversary:
    """`steps` of steepest ascent within the ball of radius `eps` in `norm` ("l2" or "linf") and the
    bounds of the net, from a random point of the ball; `step_size` is 2.5 eps / steps by default.
    The gradient of a training step is taken at weights perturbed to raise the loss too, each matrix
    by `weight_share` of its norm (adversarial weight perturbation, arXiv:2004.05884).

    - `unit`: of `eps` and `step_size`: that of the inputs, or "std" for the standard deviations by
      which the net divides each feature.
    - `warmup`: epochs in which eps grows linearly from 0, and the step size with it.
    - `weight_warmup`: epochs before the weights are perturbed."""

    eps: float
    steps: int = 7
    step_size: float | None = None
    random_start: bool = True
    weight_share: float = 0.0
    norm: str = "l2"
    unit: str = "input"
    warmup: float = 0.0
    weight_warmup: float = 0.0

    def __post_init__(self) -> None:
        check_count(self.steps, "steps")
        check_choice(self.norm, "norm", tuple(NORMS))
        check_range(self.eps, "eps", 1e-12, math.inf)
        if self.step_size is not None:
            check_range(self.step_size, "step_size", 1e-12, math.inf)
        check_range(self.weight_share, "weight_share", 0.0, 1.0)
        check_choice(self.unit, "unit", ("input", "std"))
        for name in ("warmup", "weight_warmup"):
            check_range(getattr(self, name), name, 0.0, math.inf)

    @property
    def is_constant(self) -> bool:
        """Whether it does the same at all times, as a CUDA graph does."""
        return self.warmup == self.weight_warmup == 0

    def ball(self, net: InputNet, epoch: float = math.inf) -> LpBall:
        """The ball of this net after `epoch` epochs, fractions included."""
        scale = net.std.expand(net.input_shape) if self.unit == "std" else None
        eps = self.eps if epoch >= self.warmup else self.eps * epoch / self.warmup
        return NORMS[self.norm](eps, net.bounds, scale)

    def attack(
        self,
        ball: LpBall,
        net: nn.Module,
        x: Tensor,
        loss: Callable[[Tensor], Tensor],
        start: Tensor,
    ) -> Tensor:
        """Inputs of the ball around x (B,*input_shape) whose outputs (B,...) have a large `loss`
        (B,), found from `start` (B,*input_shape) with the net in evaluation mode."""
        step_size = (self.step_size or 2.5 * self.eps / self.steps) * (ball.eps / self.eps)
        perturbed = ball.clip(start, x)
        with evaluating(net):
            for _ in range(self.steps):
                perturbed.requires_grad_()
                with torch.enable_grad():
                    total = loss(net(perturbed)).sum()
                (gradient,) = torch.autograd.grad(total, perturbed)
                step = step_size * ball.steepest(gradient)
                perturbed = ball.clip(perturbed.detach() + step, x)
        return perturbed

    def start(self, ball: LpBall, x: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the ball around x, drawn on the device of the generator; or x itself."""
        if not self.random_start:
            return x
        return x + ball.random_step(x, generator, dtype=x.dtype)


def steepest_perturbation(loss: Tensor, net: nn.Module, share: float) -> Perturbation:
    """Each trained matrix or kernel with a step along its gradient of `loss` of this share of its
    norm; biases and scales of normalization are left alone."""
    weights = [one for one in net.parameters() if one.requires_grad and one.dim() > 1]
    require(weights, "weight_share", "0 for a net that trains no matrix or kernel", share)
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    return [
        (weight, share * (weight.detach().norm() / gradient.norm().clamp_min(1e-20)) * gradient)
        for weight, gradient in zip(weights, gradients, strict=True)
    ]


@contextmanager
def perturbed_weights(perturbation: Perturbation) -> Iterator[None]:
    """Perturb the weights within the context; then restore them bit for bit."""
    before = [(weight, weight.detach().clone()) for weight, _ in perturbation]
    with torch.no_grad():
        for weight, step in perturbation:
            weight.add_(step)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in before:
                weight.copy_(original)
