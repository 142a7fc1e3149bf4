"""Defenses that deceive attacks, planted in a network, a metric and an embedding: each is flagged,
and those that hide a gradient from attacks on the neighbors do not stop them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks.bank_models import Bent, keyed_model, tiles
from attacks.linear_models import run
from evaluate.small import context_of
from torch import Tensor, nn

from otad.attacks import L2, Attack, Linf, MetricAttack
from otad.attacks.adaptive import Keys, SoftKnn
from otad.attacks.stand_in import climbable
from otad.evaluate import flags
from otad.evaluate.records import FAIL, PASS
from otad.model.defend import defend
from otad.nets import Backbone, FCResNet, fc_resnet

BALL = L2(0.4, (0.0, 1.0))
QUICK = Keys(losses=("rank",), steps=10, targets=1, temperatures=(0.1,), restarts=1, polish=0)
SOFT = SoftKnn(temperatures=(0.1,), targets=1, steps=10, polish=0)
HIDDEN, RANDOM, BATCH = flags.hidden_gradient, flags.randomness, flags.batch_independence
CHECKS = (flags.gradient_share, HIDDEN, BATCH, RANDOM)

Map = Callable[[Tensor], Tensor]
Change = Callable[[Map, Tensor, int], Tensor]
"""A function, its inputs, and how often it was called before -> something in its place."""


def rounded(x: Tensor) -> Tensor:
    return (15 * x).round() / 15


def straight(x: Tensor) -> Tensor:
    return x + (rounded(x) - x).detach()


def replaced(f: Map, x: Tensor, count: int) -> Tensor:
    wrong = (x.flatten(1) * torch.tensor([1.0, -1.0]).repeat(8)).sum(1, keepdim=True)
    return f(x).detach() + wrong - wrong.detach()


DEFENSES: dict[str, tuple[Change, flags.Check]] = {
    "rounding": (lambda f, x, _: f(rounded(x)), HIDDEN),
    "rounding that leaks": (lambda f, x, _: f(rounded(x) + 1e-3 * x), HIDDEN),
    "saturation": (lambda f, x, _: (1e3 * f(x)).tanh(), HIDDEN),
    "shattered gradient": (lambda f, x, _: f(x + 2e-3 * (1e4 * x).sin()), HIDDEN),
    "constant gradient": (replaced, HIDDEN),
    "gradient that is NaN": (lambda f, x, _: f(x + (0 * x).sqrt()), HIDDEN),
    "randomness": (lambda f, x, _: f(x) + 0.1 * torch.randn(len(x), 1), RANDOM),
    "state over calls": (lambda f, x, count: f(x) * (1 + 0.1 * (count % 3)), RANDOM),
    "batch trick": (lambda f, x, _: f(x + (x - x.mean(0)) / 2), BATCH),
    "preprocessor without a gradient": (
        lambda f, x, _: f(torch.from_numpy(x.detach().numpy())),
        HIDDEN,
    ),
}
HIDING = [name for name, (_, check) in DEFENSES.items() if check is HIDDEN]


class Defended(nn.Module):
    def __init__(self, inner: Map, change: Change | None) -> None:
        super().__init__()
        self.inner, self.change, self.count = inner, change, 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.inner(x) if self.change is None else self.change(self.inner, x, self.count)


def network(change: Change | None) -> nn.Module:
    weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)) / 4
    brightness = torch.tensor([[0.5, 0.0, -0.5]]) * 4 / 16
    return Defended(lambda x: (x - 0.5).flatten(1) @ (weight - 2 * brightness), change)


class Embedded(FCResNet):
    """Embeds inputs by another function."""

    other: Map

    def embed(self, x: Tensor) -> Tensor:
        return self.other(x)


def model_of(place: str, change: Change | None) -> nn.Module:
    if place == "network":
        return network(change)
    if place == "metric":
        return keyed_model(metric=Defended(Bent(), change))[0]
    x, y = tiles(90, seed=0)
    net: Any = fc_resnet(tuple(x.shape[1:]), 3, blocks=1, bounds=(0.0, 1.0))
    net.__class__ = Embedded
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
        embedding = Defended(lambda x: (2 * (x - 0.5)).flatten(1).tanh(), change)
        object.__setattr__(net, "other", embedding)
        keys = Defended.forward(embedding, x)
        design = torch.cat([keys, torch.ones(len(x), 1)], 1)
        fitted = torch.linalg.lstsq(design, 4 * torch.eye(3)[y], driver="gelsd").solution
        net.head.weight.copy_(fitted[:-1].T)
        net.head.bias.copy_(fitted[-1])
    assert isinstance(net, Backbone)
    return defend(net, x, y, n_neighbors=5)


def examples(model: nn.Module) -> tuple[Tensor, Tensor]:
    x, y = tiles(36, 1)
    if isinstance(model, Defended):
        return x, model.inner(x).argmax(1)
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return x[right], y[right]


@pytest.mark.parametrize("place", ["network", "metric", "embedding"])
@pytest.mark.parametrize("name", DEFENSES)
def test_every_planted_defense_is_flagged(name: str, place: str) -> None:
    change, check = DEFENSES[name]
    model = model_of(place, change)
    assert check(context_of(model, *examples(model), BALL)).verdict == FAIL


@pytest.mark.parametrize("place", ["network", "metric", "embedding"])
@pytest.mark.parametrize("ball", [BALL, L2(3.0, (0.0, 1.0)), Linf(0.1)], ids=["l2", "far", "linf"])
def test_a_model_that_hides_nothing_raises_no_flag(place: str, ball: Any) -> None:
    model = model_of(place, None)
    context = context_of(model, *examples(model), ball)
    for check in CHECKS:
        assert check(context).verdict == PASS, check(context)


@functools.cache
def attacked(attack: Attack, place: str, name: str | None = None) -> float:
    model = model_of(place, None if name is None else DEFENSES[name][0])
    x, y = examples(model)
    return run(attack, model, x, BALL, y).accuracy


@pytest.mark.filterwarnings("ignore:.*gradients or steps were NaN")  # those of the answers are
@pytest.mark.parametrize("place", ["metric", "embedding"])
@pytest.mark.parametrize("name", HIDING)
def test_hidden_gradients_do_not_stop_attacks_on_the_neighbors(name: str, place: str) -> None:
    for attack in (QUICK, SOFT):
        assert attacked(attack, place, name) <= attacked(attack, place) + 0.2


def test_a_given_stand_in_is_climbed_straight_through() -> None:
    bent, x = Bent(), tiles(6, 2)[0]
    hidden = keyed_model(metric=Defended(bent, DEFENSES["rounding"][0]))[0]
    keys = climbable(hidden.query_keys, x, BALL, lambda at: bent(straight(at)))
    assert torch.equal(keys(x), hidden.query_keys(x))
    gradients = []
    for function in (keys, lambda at: bent(straight(at))):
        at = x.clone().requires_grad_()
        gradients += torch.autograd.grad(function(at).square().sum(), at)
    torch.testing.assert_close(*gradients)
    x, y = examples(hidden)
    given = Keys(**vars(QUICK) | {"stand_in": lambda at: bent(straight(at))})
    assert run(given, hidden, x, BALL, y).accuracy < 0.7


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_smoothed_differences_are_the_gradient_of_a_linear_map(kind: Any, size: float) -> None:
    """On average over many draws, at the bounds of the inputs and for features in other units."""
    weight, mutable = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(6)
    mutable[2] = 0
    scale = torch.tensor([1.0, 2, 1, 1, 0.1, 1])
    ball = kind(0.3 * size, (0.0, size), scale=scale, mutable=mutable.bool())
    hidden = climbable(lambda at: at.detach() @ weight, torch.full((8, 6), 0.5 * size), ball)
    at = torch.full((400, 6), 0.5 * size)
    at[:, 0], at[:, 1] = 0.0, size
    at.requires_grad_()
    (found,) = torch.autograd.grad(hidden(at).sum(), at)
    torch.testing.assert_close(found.mean(0), weight.sum(1) * mutable, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("attack", [QUICK, SOFT, MetricAttack(Bent(), steps=5)])
def test_the_check_of_an_honest_metric_changes_no_bit(attack: Any, monkeypatch: Any) -> None:
    model = model_of("metric", None)
    x, y = examples(model)
    found = run(attack, model, x, BALL, y)
    for module in ("adaptive.ascent", "pgd"):
        monkeypatch.setattr(f"otad.attacks.{module}.climbable", lambda keys, *_: keys)
    assert torch.equal(found.inputs, run(attack, model, x, BALL, y).inputs)
