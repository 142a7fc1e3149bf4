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
from otad.processes import ALONE, Processes
from otad.threat import NORMS, LpBall
from otad.training.config import check_range

Perturbation = list[tuple[Tensor, Tensor]]
"""Pairs of a weight and the step that is added to it."""


@dataclass(frozen=True)
class Adversary:
    """The attacker of adversarial training, who perturbs inputs and weights to raise the loss.

    Inputs are perturbed by steepest ascent within a ball and the bounds of the network.

    Parameters
    ----------
    eps : float
        The radius of the ball.
    steps : int
        The number of steps.
    step_size : float or None
        The length of a step, by default 2.5 eps / steps.
    random_start : bool
        Whether the ascent starts from a random point of the ball instead of the input itself.
    weight_share : float
        Each weight matrix is perturbed by this share of its norm before the gradient of a training
        step is taken (adversarial weight perturbation, arXiv:2004.05884).
    norm : str
        "l2" or "linf".
    unit : str
        The unit of `eps` and `step_size`: "input" for the unit of inputs, "std" for the standard
        deviations by which the network divides each feature.
    warmup : float
        The number of epochs in which eps and the step size grow linearly from 0.
    weight_warmup : float
        The number of epochs before weights are perturbed.

    Examples
    --------
    >>> import otad
    >>> from otad.training import Adversary, TrainConfig
    >>> adversary = Adversary(eps=0.5, steps=5)
    >>> adversary.ball(otad.nets.fc_resnet((4,), 2, bounds=(0.0, 1.0))).describe()
    'l2, eps = 0.5, inputs in (0.0, 1.0)'
    >>> TrainConfig(adversary=adversary, loss="trades").beta
    6.0
    """

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
        """Whether it is the same in all epochs, as a CUDA graph requires."""
        return self.warmup == self.weight_warmup == 0

    def ball(self, net: InputNet, epoch: float = math.inf) -> LpBall:
        """Return the ball for a network after `epoch` epochs, which may be a fraction."""
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
        forward: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return inputs of the ball around x (B, *input_shape) whose outputs have a large loss.

        The ascent begins at `start` (B, *input_shape). The network is in evaluation mode, and
        `loss` maps its outputs (B, ...) to losses (B,). `forward` is the network itself or its
        compiled code."""
        step_size = (self.step_size or 2.5 * self.eps / self.steps) * (ball.eps / self.eps)
        perturbed, forward = ball.clip(start, x), forward or net
        with evaluating(net):
            for _ in range(self.steps):
                perturbed.requires_grad_()
                with torch.enable_grad():
                    total = loss(forward(perturbed)).sum()
                (gradient,) = torch.autograd.grad(total, perturbed)
                step = step_size * ball.steepest(gradient)
                perturbed = ball.clip(perturbed.detach() + step, x)
        return perturbed

    def start(self, ball: LpBall, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return random points of the ball around x, drawn on the generator's device, or x."""
        if not self.random_start:
            return x
        return x + ball.random_step(x, generator, dtype=x.dtype)


def steepest_perturbation(
    loss: Tensor, net: nn.Module, share: float, processes: Processes = ALONE
) -> Perturbation:
    """Return a step along the gradient of `loss` for each trained matrix or kernel.

    Its length is this share of the norm of the weight. Biases and scales of normalization are not
    perturbed. The gradient is the mean over all processes."""
    weights = [one for one in net.parameters() if one.requires_grad and one.dim() > 1]
    require(weights, "weight_share", "0 for a net that trains no matrix or kernel", share)
    gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
    processes.average(gradients)
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
