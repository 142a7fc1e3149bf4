"""Projected gradient ascent: PGD (Madry et al. 2018), BPDA and the attack on the metric."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from otad.attacks.base import Attack, option, register_attack
from otad.attacks.needs import Needs
from otad.attacks.objectives import (
    Objective,
    asking,
    check_loss,
    loss_for,
    objective_of,
    substitute_gradient,
    towards,
    wrong_classes,
)
from otad.attacks.projection import ascended
from otad.attacks.stand_in import climbable
from otad.attacks.target import Survivors, Target
from otad.checks import check_count, check_positive, require
from otad.threat import LpBall

ALL_STEPS = 2.5  # the length of all steps together in units of eps: across the ball and beyond


@dataclass(frozen=True, eq=False, kw_only=True)
class Ascent(Attack):
    """Gradient ascent from random points of the ball, or from the example itself.

    The attacked model answers every iterate, the last one as well. An example that is broken is
    not attacked any further. The options are described in `Pgd`."""

    steps: int = option(100, check_count)
    restarts: int = option(1, check_count)
    random_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.restarts == 1 or self.random_start
        require(fits, "restarts", "1 without a random start", f"{self.restarts}, all the same")

    @abstractmethod
    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        """Return the function to maximize for examples x (B,*)."""

    @abstractmethod
    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        """Run one ascent for the examples `rows` (n,) from points `start` (n,*) of their balls.

        `survivors` records what it finds."""

    def objectives(self, survivors: Survivors) -> Iterator[Objective]:
        """Yield what each ascent maximizes, in turn."""
        objective = self.objective(survivors.target, survivors.x, survivors.ball)
        yield from itertools.repeat(objective, self.restarts)

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        survivors = Survivors(target, x, ball)
        for objective in self.objectives(survivors):
            # Drawn for all examples, so that the start of one never depends on the others.
            start = ball.inside(x, generator) if self.random_start else x
            rows = survivors.rows
            if len(rows):
                self.climb(survivors, objective, start[rows], rows)
        return survivors.inputs


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelAscent(Ascent):
    """Ascent on a loss of the model itself, or of a `substitute` network in its place."""

    loss: str = option("margin", check_loss)
    substitute: nn.Module | None = None
    targets: int = option(0, check_count, least=0)
    family = "white-box"
    needs = Needs(gradients=True)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        return objective_of(target, loss_for(self.loss, target.y), self.substitute)

    def objectives(self, survivors: Survivors) -> Iterator[Objective]:
        yield from super().objectives(survivors)
        rows, target = survivors.rows, survivors.target
        if self.targets and len(rows) and not target.y.is_floating_point():
            logits = target(survivors.x[rows], rows)
            others = wrong_classes(logits, target.targets(rows)).T
            if len(others) > 1:  # a single one has been tried
                for classes in others[: self.targets]:
                    aims = target.y.index_copy(0, rows, classes)
                    yield towards(target, aims, self.substitute)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProjectedAscent(Ascent):
    """Ascent by x <- project(x + step_size * eps * steepest(gradient)).

    In l2 such steps turn slowly towards the gradient and end short of the best point, even where
    the gradient is constant. So the point of the ball that is furthest along the last gradient is
    asked about as well, except with `last_only` and with steps of the gradient itself."""

    step_size: float | None = option(None, check_positive)
    last_only: bool = False
    normalize: bool = True

    def climb(self, survivors: Survivors, climbed: Objective, start: Tensor, rows: Tensor) -> None:
        moved, ball = start, survivors.ball
        length = ball.eps * (ALL_STEPS / self.steps if self.step_size is None else self.step_size)
        for _ in range(self.steps):
            outputs, _, gradient = climbed(moved, rows)
            if not self.last_only:
                alive = survivors.judge(moved, outputs, rows).nonzero()[:, 0]
                if not len(alive):
                    return
                if len(alive) < len(rows):
                    rows, moved, gradient = rows[alive], moved[alive], gradient[alive]
            if self.normalize:
                lengths = moved.new_full((len(moved),), length)
                moved = ascended(survivors.x[rows], moved, lengths, gradient, ball=ball)
            else:
                moved = survivors.project(moved + length * gradient, rows)
        alive = survivors.ask(moved, rows)
        if self.normalize and not self.last_only and bool(alive.any()):
            rows, gradient = rows[alive], gradient[alive]
            survivors.ask(ball.furthest(gradient, survivors.x[rows]), rows)


@register_attack
@dataclass(frozen=True, eq=False, kw_only=True)
class Pgd(ModelAscent, ProjectedAscent):
    """Projected gradient descent (Madry et al. 2018) on the loss of a model.

    Each step moves by `step_size * eps` along the steepest direction of the ball's norm and is
    projected into the ball. The model answers every iterate, and at the end of each restart the
    point of the ball that is furthest along the last gradient. The first wrong answer ends the
    attack of an example.

    Parameters
    ----------
    steps : int
        The number of gradient steps of each restart.
    restarts : int
        How many random points of the ball the attack starts from.
    random_start : bool
        If False, the attack starts at the example itself; then `restarts` must be 1.
    step_size : float or None
        The length of a step in units of eps, by default 2.5 / steps.
    last_only : bool
        If True, only the last iterate counts, as in many papers. This makes the attack weaker.
    normalize : bool
        If False, a step is `step_size * eps` times the gradient itself, so it is short where the
        gradient is small, and the furthest point is not tried. This makes the attack weaker too.
    loss : str
        "margin", "cross_entropy" or "dlr". In regression it is always the squared error.
    substitute : nn.Module or None
        A network whose gradient is followed in place of the model's own, such as the network
        behind a defense.
    targets : int
        How many classes have an ascent of their own after the restarts: those with the highest
        wrong logits at the example. It raises the logit of its class over the right one, whatever
        the `loss`. In regression, and with two classes, there are none.

    Examples
    --------
    The logits of this model are its inputs, and other classes are sqrt(1/2) away.

    >>> import torch
    >>> import otad
    >>> model, x, y = torch.nn.Identity().eval(), torch.eye(3), torch.arange(3)
    >>> attack, generator = otad.attacks.Pgd(steps=20), torch.Generator().manual_seed(0)
    >>> attack(model, x, y, otad.L2(0.8), generator=generator).accuracy
    0.0
    >>> attack(model, x, y, otad.L2(0.6), generator=generator).accuracy
    1.0
    """

    name = "pgd"
    version = 2


@register_attack
@dataclass(frozen=True, eq=False)
class Bpda(ProjectedAscent):
    """BPDA (Athalye et al. 2018) with PGD, as in the OTAD paper.

    The loss is taken at the answers of the attacked model, and its gradient is passed back through
    another network. The paper takes 100 steps on MNIST and 20 elsewhere, does not report their
    size, and counts the last iterate alone (`last_only=True`).

    Parameters
    ----------
    network : nn.Module
        The network to differentiate, usually the undefended one.
    loss : str
        "cross_entropy", "margin" or "dlr"; in regression always the squared error.
    steps, restarts, random_start, step_size, last_only, normalize
        As in `Pgd`.

    Examples
    --------
    A model that rounds its inputs has no useful gradient; the network before rounding has one.

    >>> import torch
    >>> import otad
    >>> class Rounded(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x.round()
    >>> model, x, y = Rounded().eval(), torch.eye(3), torch.arange(3)
    >>> attack = otad.attacks.Bpda(network=torch.nn.Identity().eval(), steps=20)
    >>> attack(model, x, y, otad.L2(1.0), generator=torch.Generator().manual_seed(0)).accuracy
    0.0
    """

    network: nn.Module = field(metadata={"known": "network"})
    loss: str = option("cross_entropy", check_loss)
    name = "bpda"
    version = 2
    family = "white-box"
    needs = Needs(network=True)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        loss = loss_for(self.loss, target.y)
        return substitute_gradient(target, loss, self.network, straight_through=True)


@register_attack
@dataclass(frozen=True, eq=False)
class MetricAttack(ProjectedAscent):
    """The OTAD paper's attack on the metric: it moves the key of an input as far as it can.

    It maximizes `|psi(x + delta) - psi(x)|^2`, where psi maps inputs to the space in which
    neighbors are searched. Where the gradient of psi does not predict how psi changes, smoothed
    differences take its place.

    Parameters
    ----------
    metric : callable
        The map psi from inputs (B, *input_shape) to keys (B, m), such as `model.query_keys`.
    steps, restarts, step_size, last_only, normalize
        As in `Pgd`. The start is always random, because the gradient is 0 at the example itself.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> x, y = torch.eye(3), torch.arange(3)
    >>> model = otad.defend(None, x, y, inputs="pixels", n_neighbors=2)
    >>> attack = otad.attacks.MetricAttack(metric=model.query_keys, steps=10)
    >>> attack(model, x, y, otad.L2(0.5), generator=torch.Generator().manual_seed(0)).accuracy
    1.0
    """

    metric: Callable[[Tensor], Tensor] = field(metadata={"known": "keys"})
    name = "metric"
    version = 3
    family = "adaptive"
    needs = Needs(network=True, bank=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "True, as the gradient is 0 at the example itself"
        require(self.random_start, "random_start", expected, False)

    def objective(self, target: Target, x: Tensor, ball: LpBall) -> Objective:
        with torch.no_grad():
            anchors = self.metric(x)
        fits = anchors.dim() >= 2 and len(anchors) == len(x)
        require(fits, "metric", f"an embedding ({len(x)}, d)", f"shape {tuple(anchors.shape)}")

        metric = climbable(self.metric, x, ball)

        def distance(inputs: Tensor, rows: Tensor, outputs: Tensor) -> Tensor:
            return (metric(inputs) - anchors[rows]).flatten(1).square().sum(1)

        return asking(target, distance)
