"""Transfer: what one model gives away about another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack, Target
from otad.attacks.pgd import Pgd
from otad.attacks.random_search import RandomNoise
from otad.attacks.transfer import Transfer
from otad.errors import InputError
from otad.threat import L2, Linf, LpBall


def linear(*weights: list[float], bias: float = 0.0) -> nn.Linear:
    layer = nn.Linear(len(weights[0]), len(weights))
    layer.weight.data = torch.tensor(weights)
    layer.bias.data = torch.tensor([0.0, bias][: len(weights)])
    return layer.eval()


def test_a_source_is_pushed_beyond_its_own_boundary(generator) -> None:
    """The source breaks at distance 0.1, the model at 0.9: a step that stops early is no use."""
    source = linear([1.0, 0.0], [-1.0, 0.0], bias=1.8)
    model = linear([1.0, 0.0], [-1.0, 0.0], bias=0.2)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert source(x).argmax(1) == 0
    for inner in (Pgd(steps=20), Apgd(steps=20)):
        found = Transfer(source, inner)(model, x, y, L2(1.0), generator=generator)
        assert found.accuracy == 0
        assert found.forwards.tolist() == [3]  # clean, the result, and the final check
        assert found.backwards.tolist() == [0]
        below = Transfer(source, inner)(model, x, y, L2(0.89), generator=generator)
        assert below.accuracy == 1


def test_a_source_that_is_wrong_itself_still_helps(generator) -> None:
    source = linear([1.0, 0.0], [-1.0, 0.0], bias=9.0)
    model = linear([1.0, 0.0], [-1.0, 0.0])
    x, y = torch.tensor([[0.5, 0.0]]), torch.tensor([0])
    assert source(x).argmax(1) == 1
    assert Transfer(source)(model, x, y, L2(0.6), generator=generator).accuracy == 0


def test_more_starts_find_more_and_ask_survivors_only(generator) -> None:
    """Noise on the source as inner attack: every start is another chance."""
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3)).eval()
    for weights in net.parameters():
        weights.data = 2 * torch.randn(weights.shape, generator=generator)
    x = torch.rand(100, 3, generator=generator)
    y = net(x).argmax(1)
    source = linear([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    source.bias.data = torch.zeros(3)

    def run(starts: int):
        attack = Transfer(source, RandomNoise(2), starts=starts)
        return attack(net, x, y, Linf(0.3), generator=torch.Generator().manual_seed(0))

    one, ten = run(1), run(10)
    assert ten.accuracy < one.accuracy < 1
    assert bool((ten.broken | ~one.broken).all())
    assert ten.forwards[~ten.broken].eq(12).all()
    assert ten.forwards[one.broken].eq(3).all()


def test_non_adaptive_regression(generator) -> None:
    """The network's error is maximized, the model's is what that happens to give."""
    network = nn.Sequential(linear([2.0, 1.0]), nn.Flatten(0)).eval()
    model = nn.Sequential(linear([0.0, 3.0]), nn.Flatten(0)).eval()
    x = torch.rand(6, 2, generator=generator)
    y = model(x).detach()
    attack = Transfer(network, Pgd(steps=50, random_start=False))
    y_network = network(x).detach() - 0.1  # so that the ascent has a side to start on
    step = 0.5 * torch.tensor([2.0, 1.0]) / 5**0.5
    found = attack(model, x, torch.minimum(y, y_network), L2(0.5), generator=generator)
    torch.testing.assert_close(found.inputs, x + step)
    adaptive = Pgd(steps=50, restarts=3)(model, x, y, L2(0.5), generator=generator)
    assert bool((adaptive.gain > 1.4).all())  # 3 eps, less what a last step misses


class Erratic(Attack):
    """Finds nothing but NaN the first time, and something the second."""

    name = "erratic"
    family = "random"

    def __init__(self) -> None:
        self.found = [torch.nan, -0.1]

    def run(self, target: Target, x: Tensor, ball: LpBall, generator: torch.Generator) -> Tensor:
        return torch.full_like(x, self.found.pop(0))


def test_an_inner_attack_that_fails_once_does_no_harm(generator) -> None:
    net = linear([1.0, 0.0], [-1.0, 0.0])
    x, y = torch.tensor([[0.5, 0.0]]), torch.tensor([0])
    found = Transfer(net, Erratic())(net, x, y, Linf(1.0), generator=generator)
    assert torch.equal(found.inputs, x)
    assert found.accuracy == 1
    found = Transfer(net, Erratic(), starts=2)(net, x, y, Linf(1.0), generator=generator)
    assert found.accuracy == 0


def test_refusals(generator) -> None:
    net = linear([1.0, 0.0], [-1.0, 0.0])
    with pytest.raises(InputError, match=r"starts.*0"):
        Transfer(net, starts=0)
    x = torch.tensor([[0.5, 0.0]])
    model = nn.Sequential(linear([1.0, 0.0]), nn.Flatten(0)).eval()
    with pytest.raises(InputError, match=r"source.*\(1,\).*\(1, 2\)"):
        Transfer(net)(model, x, model(x).detach(), L2(1.0), generator=generator)
