"""Models whose robustness is known in closed form, random nets, and one that records its inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from otad.attacks import Attack, AttackResult, LpBall

DUAL = {"l2": 2.0, "linf": 1.0}


class Linear(nn.Module):
    """Logits (or, with one output, the value) linear in inputs of any shape."""

    def __init__(self, shape: tuple[int, ...], outputs: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(outputs, np.prod(shape), generator=generator))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        outputs = (x - 0.5).flatten(1) @ self.weight.to(x).T
        return outputs[:, 0] if len(self.weight) == 1 else outputs

    @torch.no_grad()
    def radius(self, x: Tensor, dual: float) -> Tensor:
        """The distance (B,) to the nearest other answer, bounds aside; `dual` norm of weights."""
        logits = self(x)
        best = logits.argmax(1)
        gaps = logits.gather(1, best[:, None]) - logits
        slopes = torch.linalg.vector_norm(self.weight[best][:, None] - self.weight, dual, dim=2)
        return (gaps / slopes).scatter(1, best[:, None], torch.inf).amin(1)


def halving_ball(kind: type[LpBall], model: Linear, x: Tensor, **options: Any) -> LpBall:
    """A ball of half of the largest radius: some of x can be broken in it, some cannot."""
    return kind(float(model.radius(x, DUAL[kind.norm]).max()) / 2, **options)


def inner_points(count: int, shape: tuple[int, ...], seed: int = 7) -> Tensor:
    """Inputs far enough from 0 and 1 that bounds play no part."""
    drawn = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    return 0.4 + 0.2 * drawn


def random_net(inputs: int = 6, classes: int = 3, seed: int = 0) -> nn.Sequential:
    """Steep, bent decision boundaries."""
    hidden = nn.Linear(inputs, 30), nn.Tanh(), nn.Linear(30, 30), nn.ReLU()
    net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(30, classes))
    generator = torch.Generator().manual_seed(seed)
    for weights in net.parameters():
        drawn = torch.randn(weights.shape, generator=generator)
        weights.data = 3 * drawn / weights.shape[-1] ** 0.5
    return net.eval()


def run(
    attack: Attack, model: nn.Module, x: Tensor, ball: LpBall, y: Tensor | None = None, *, seed=0
) -> AttackResult:
    """Attack the answers of the model, or y (B,)."""
    if y is None:
        y = model(x).detach()
        y = y.argmax(1) if y.dim() == 2 else y
    return attack(model, x, y, ball, generator=torch.Generator().manual_seed(seed))


class Recorder(nn.Module):
    """Passes on to a model and keeps all inputs it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.asked: list[Tensor] = []
        self.gradients = 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        outputs: Tensor = self.model(x)
        if x.requires_grad:
            outputs.register_hook(self._count)
        return outputs

    def _count(self, gradient: Tensor) -> None:
        self.gradients += len(gradient)


class Function(nn.Module):
    """A function of inputs (B,*) as a model, in evaluation mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def abstains_above(level: float) -> nn.Module:
    """Right everywhere, but silent (NaN) where the mean of an input exceeds a level."""

    def logits(x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.cat([2 - mean, mean], 1).masked_fill(mean > level, torch.nan)

    return Function(logits)


def global_randomness() -> tuple[object, ...]:
    """The state of every global generator."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def assert_legal(inputs: Tensor, x: Tensor, ball: LpBall) -> None:
    """In the ball and in its bounds, by NumPy in float64, without the ball's own measure."""
    step = inputs.double().numpy() - x.double().numpy()
    if ball.mutable is not None:
        assert not step[:, ~ball.mutable.numpy()].any()
    if ball.scale is not None:
        step = step / ball.scale.double().numpy()
    order = 2 if ball.norm == "l2" else np.inf
    lengths = np.linalg.norm(step.reshape(len(step), -1), order, axis=1)
    assert (lengths <= ball.eps * (1 + 1e-14)).all()
    if ball.bounds is not None:
        low, high = np.asarray(ball.bounds).astype(inputs.numpy().dtype)
        assert low <= inputs.numpy().min()
        assert inputs.numpy().max() <= high
        ball.check_inputs(inputs)
