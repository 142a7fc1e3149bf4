"""Small CIP-nets and the problems they are tried on."""

from __future__ import annotations

import torch
from cip.instances import converted, normal, random_problem
from torch import Tensor

from otad.cip import CipProblem, ExactCip
from otad.cip.surrogate import CipNet, CipNetConfig

B, K, DIM = 7, 4, 5
TINY = CipNetConfig(
    epochs=3, batch_size=16, learning_rate=1e-3, optimizer="adamw", weight_decay=0.01, warmup=0.5
)
TEACHER = ExactCip(on_failure="fallback")


def make_net(readout: str = "free", seed: int = 0, **options: int) -> CipNet:
    sizes = {"width": 16, "blocks": 2, "heads": 2} | options
    generator = torch.Generator().manual_seed(seed)
    return CipNet(DIM, K, readout=readout, generator=generator, **sizes)


def stirred(readout: str = "free", scale: float = 0.5) -> CipNet:
    """A net in double precision whose every parameter matters."""
    net = make_net(readout).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(scale * normal(generator, *parameter.shape))
    return net


def family(seed: int, rows: int) -> CipProblem:
    generator = torch.Generator().manual_seed(seed)
    return converted(random_problem(generator, rows, K, DIM, smoothness=3.0), torch.float32)


def mean_square(difference: Tensor) -> float:
    return float(difference.double().square().sum(1).mean())


def changed(problem: CipProblem, **parts: Tensor) -> CipProblem:
    names = ("query", "anchors", "images", "smoothness", "strong_convexity")
    return CipProblem(*(parts.get(name, getattr(problem, name)) for name in names))
