"""Attacks through purifiers: the identity in place of a missing gradient (BPDA), and means over the
draws of a randomized model (EOT)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import otad
from otad.attacks import Pgd, RandomNoise
from otad.attacks.objectives import cross_entropy
from otad.attacks.target import DRAWS, Target, answers, seeded
from otad.baselines import MedianFilter, Purified, Purifier
from otad.evaluate import make_attack
from otad.evaluate.flags import CHECKS, FlagContext
from otad.evaluate.undefended import network_of
from otad.nets import fc_resnet

CHANNELS = (1, 1, 4)


class Rounded(Purifier):
    """Rounds to halves: the derivative is 0 almost everywhere."""

    differentiable = False

    def purify(self, x: Tensor) -> Tensor:
        return (2 * x).round() / 2


class Noisy(nn.Module):
    """A linear model of inputs times random numbers with mean 1, and plus noise."""

    randomized = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.5 * torch.randn_like(x)
        return self.layer(scale * x + 0.1 * torch.randn_like(x))


def test_missing_gradient_is_that_of_the_network_at_the_purified_image(
    generator: torch.Generator,
) -> None:
    net = fc_resnet(CHANNELS, 3, blocks=1, hidden=4).double()
    model = Purified(net, Rounded(CHANNELS).double())
    x, y = torch.rand(5, *CHANNELS, generator=generator).double(), torch.arange(5) % 3
    outputs, _, gradient = Target(model, y).evaluate(x, cross_entropy)
    pure, step = model.purifier(x), 1e-6
    assert torch.equal(outputs, net(pure))
    for place in range(4):
        change = torch.zeros(CHANNELS).double()
        change[0, 0, place] = step
        rise = cross_entropy(net(pure + change), y) - cross_entropy(net(pure - change), y)
        assert torch.allclose(gradient[:, 0, 0, place], rise / (2 * step), atol=1e-6)
    attack = make_attack("bpda", model)
    assert attack.network.straight_through  # type: ignore[attr-defined]


def test_gradient_of_a_randomized_model_is_that_of_the_mean_loss(
    generator: torch.Generator,
) -> None:
    """Against finite differences of the mean over the same draws."""
    model, y = Noisy().double(), torch.tensor([0, 1])
    x, step = torch.rand(2, 4, generator=generator).double(), 1e-6

    def mean_loss(at: Tensor) -> Tensor:
        torch.manual_seed(5)
        return torch.stack([cross_entropy(model(at), y) for _ in range(DRAWS)]).mean(0)

    torch.manual_seed(5)
    target = Target(model, y)
    outputs, value, gradient = target.evaluate(x, cross_entropy)
    torch.manual_seed(5)
    assert torch.allclose(outputs, answers(model, x))
    assert torch.allclose(value, mean_loss(x))
    for place in range(4):
        change = step * torch.eye(4)[place].double()
        slope = (mean_loss(x + change) - mean_loss(x - change)) / (2 * step)
        assert torch.allclose(gradient[:, place], slope, atol=1e-6)
    assert target.forwards.tolist() == target.backwards.tolist() == [DRAWS, DRAWS]


def test_draws_follow_from_the_seed_of_an_attack_and_leave_torch_alone(
    generator: torch.Generator,
) -> None:
    model, x, y = Noisy(), torch.rand(6, 4, generator=generator), torch.arange(6) % 3
    state, results = torch.get_rng_state(), []
    for _ in range(2):
        seed = torch.Generator().manual_seed(1)
        results.append(Pgd(steps=5)(model, x, y, otad.L2(0.5), generator=seed))
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(3)
        state = torch.get_rng_state()
    assert torch.equal(results[0].inputs, results[1].inputs)
    deterministic, seed = nn.Linear(4, 3).eval(), torch.Generator().manual_seed(1)
    before = seed.get_state()
    with seeded(deterministic, seed):
        pass
    assert torch.equal(seed.get_state(), before)


class Coin(nn.Module):
    """Class 1 where x_0 > 0, but every fifth draw is wrong."""

    randomized = True

    def forward(self, x: Tensor) -> Tensor:
        wrong = torch.rand(len(x)) < 1 / 5
        score = torch.where(wrong, -1.0, 1.0) * x[:, 0]
        return torch.stack([-score, score], 1)


def test_single_draws_do_not_break_a_randomized_model() -> None:
    """The mean of ten draws is wrong only if at least five of them are: in 3.3 % of all cases."""
    x, y = torch.full((300, 1), 10.0), torch.ones(300, dtype=torch.int64)
    options = {"generator": torch.Generator().manual_seed(0)}
    found = RandomNoise(draws=3)(Coin().eval(), x, y, otad.L2(0.1), **options)
    assert found.accuracy > 0.87  # asked twice: before and after the attack


def test_flags_say_what_a_declared_randomness_and_gradient_mean(generator: torch.Generator) -> None:
    x = torch.rand(20, *CHANNELS, generator=generator)
    net = fc_resnet(CHANNELS, 3, blocks=1, hidden=4)
    models = {"noisy": nn.Sequential(nn.Flatten(), Noisy()).eval(), "bpda": None}
    models["noisy"].randomized = True  # type: ignore[union-attr, assignment]
    models["bpda"] = Purified(net, MedianFilter(CHANNELS, size=1), straight_through=True)
    found = {}
    for name, model in models.items():
        assert model is not None
        y = answers(model, x).argmax(1)
        context = FlagContext(model, x, y, otad.L2(0.1), torch.ones(20, dtype=torch.bool))
        names = {"finite_differences", "batch_independence", "randomness", "repeated_answers"}
        fitting = [one for one, applies in CHECKS.items() if applies(model)]
        chosen = [one for one in fitting if one.__name__ in names]
        found[name] = {one.__name__: one(context) for one in chosen}
    assert {name: flag.verdict for name, flag in found["bpda"].items()} == {
        "finite_differences": "NOT RUN", "batch_independence": "PASS", "randomness": "PASS",
    }  # fmt: skip
    assert "BPDA" in found["bpda"]["finite_differences"].found
    assert "randomness" not in found["noisy"]
    assert found["noisy"]["batch_independence"].verdict == "NOT RUN"
    assert found["noisy"]["finite_differences"].verdict == "PASS"
    assert "are the same in a single draw" in found["noisy"]["repeated_answers"].found


def test_evaluation_of_purified_and_randomized_models(generator: torch.Generator) -> None:
    x = torch.rand(12, *CHANNELS, generator=generator)
    net = fc_resnet(CHANNELS, 3, blocks=1, hidden=4, bounds=(0.0, 1.0))
    noisy = nn.Sequential(nn.Flatten(), Noisy()).eval()
    noisy.randomized = True  # type: ignore[assignment]
    for model in (Purified(net, MedianFilter(CHANNELS, size=1, bounds=(0.0, 1.0))), noisy):
        y = answers(model, x).argmax(1)
        attacks = [Pgd(steps=2), RandomNoise(draws=2)]
        options = {"attacks": attacks, "flags": False, "batch_size": 5, "undefended": False}
        first, second = (otad.evaluate(model, x, y, otad.L2(0.3), **options) for _ in range(2))
        assert first.distances() == second.distances()
        assert first.clean["model"].value == pytest.approx(100 * len(first.clean_right) / 12)
        assert network_of(model)[0] is (net if isinstance(model, Purified) else None)
