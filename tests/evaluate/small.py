"""Small models and attacks whose robustness is known in closed form."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attacks.bank_models import first_feature_net
from torch import Tensor, nn

from otad.attacks import L2, Attack, LpBall
from otad.attacks.target import Target
from otad.evaluate import Evaluation, evaluate
from otad.evaluate.flags import CHECKS, FlagContext
from otad.evaluate.protocol import run_attacks
from otad.io.codec import to_plain
from otad.model.defend import defend
from otad.model.otad import OTAD

# All but those that repeat attacks with more steps, restarts and eps.
QUICK_CHECKS = {one: fits for one, fits in CHECKS.items() if one.__name__ != "never_weaker"}
BATCHES_LEFT: list[int] = []  # their number, if there is a limit


class Plane(nn.Module):
    """Logits (-s, s) with s = x_0: class 1 where x_0 > 0. The distance of x to the plane is |x_0|,
    and along a unit direction d it is |x_0| / |d_0|."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        score = x @ self.weight
        return torch.stack([-score, score], 1)


class Slope(nn.Module):
    """The value 2 x_0: an error grows by 2 for each unit along the first axis."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x[:, 0]


@dataclass(frozen=True)
class Walk(Attack):
    """Goes eps far along `direction`, towards the other class; draws a number to be random."""

    direction: tuple[float, ...] = (1.0, 0.0, 0.0)
    name, family = "walk", "white-box"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        torch.rand((), generator=generator)
        step = torch.tensor(self.direction)
        step = step / step.norm()
        sign = torch.ones(len(x)) if target.y.is_floating_point() else 1.0 - 2.0 * target.y
        return x + ball.eps * sign[:, None] * step.to(x)


@dataclass(frozen=True)
class Slant(Walk):
    """The same, along a diagonal by default: each distance is longer by the square root of 2."""

    direction: tuple[float, ...] = (1.0, 1.0, 0.0)
    name = "slant"


@dataclass(frozen=True)
class Blind(Walk):
    """The same, by an attacker who is said to know nothing."""

    name, family = "blind", "black-box"


@dataclass(frozen=True)
class Wander(Attack):
    """A random step, so that the seed matters; stops for good when no `BATCHES_LEFT`."""

    name, family = "wander", "random"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        if BATCHES_LEFT:
            if BATCHES_LEFT == [0]:
                raise KeyboardInterrupt
            BATCHES_LEFT[0] -= 1
        return ball.surface(x, generator)


def plane_data(count: int = 40) -> tuple[Tensor, Tensor]:
    """Points at distances up to 1 from the plane; every eighth has the wrong label."""
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(count, 3, generator=generator) * 2 - 1
    y = (x[:, 0] > 0).long()
    y[::8] = 1 - y[::8]
    return x, y


def run_plane(**options: Any) -> Evaluation:
    x, y = plane_data()
    settings = {"attacks": [Slant(), Walk()], "eps": (0.2, 0.4, 0.6), "batch_size": 7}
    return evaluate(Plane().eval(), x, y, L2(0.4), **{"flags": False} | settings | options)


def two_sides(
    *, task: str = "classification", points: int = 200, examples: int = 30, **options: Any
) -> tuple[OTAD, Tensor, Tensor]:
    """OTAD on points of a square, K = 3, and test examples of it. The features are the inputs: in
    global scope the map is nearly the identity, and no gradient is zero."""
    x = torch.rand(points + examples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    y = (x[:, 0] > 0).long() if task == "classification" else x[:, 0].clone()
    net = first_feature_net(task, bounds=(-1.0, 1.0))
    options = {"n_neighbors": 3, "smoothness": 1.5} | options
    return defend(net, x[:points], y[:points], **options), x[points:], y[points:]


def timeless(record: Evaluation) -> Any:
    """A record without what differs from run to run by its nature."""
    alone = None if record.undefended is None else timeless(record.undefended)
    plain = to_plain(record) | {"environment": None, "undefended": alone}
    for part in (plain, plain["certificate"] or {}, *plain["attacks"]):
        part.pop("seconds", None)
    return plain


def context_of(model: nn.Module, x: Tensor, y: Tensor, ball: LpBall, **more: Any) -> FlagContext:
    """What a check gets, without an evaluation around it."""
    return FlagContext(model, x, y, ball, run_attacks(model, x, y, ball, []).right, **more)


def verdicts(record: Evaluation) -> dict[str, str]:
    return {flag.name: flag.verdict for flag in record.flags}


@dataclass(frozen=True)
class Deadly(Wander):
    """A random step; kills its process unless the file `mark` is there, and makes that file first
    if it may be `spared` the next time."""

    mark: str = ""
    spared: bool = True
    name = "deadly"

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        if not Path(self.mark).exists():
            if self.spared:
                Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(target, x, ball, generator)
