"""What all attacks that climb, draw or transfer have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.attacks.random_search import RandomNoise
from otad.attacks.transfer import Transfer
from otad.errors import InputError
from otad.threat import L2, Linf, LpBall


def small_net(seed: int = 0, inputs: int = 6, classes: int = 3) -> nn.Sequential:
    """A random net with steep, bent decision boundaries."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 30), nn.Tanh(), nn.Linear(30, 30), nn.ReLU()
    ).append(nn.Linear(30, classes))
    for weights in net.parameters():
        weights.data = torch.randn(weights.shape, generator=generator) / weights.shape[-1] ** 0.5
        weights.data *= 3
    return net.eval()


MAKERS: dict[str, Callable[[nn.Module], Attack]] = {
    "noise": lambda net: RandomNoise(draws=8),
    "pgd": lambda net: Pgd(steps=7),
    "pgd_restarts": lambda net: Pgd(loss="dlr", steps=4, restarts=2),
    "pgd_substitute": lambda net: Pgd(steps=7, substitute=net),
    "bpda": lambda net: Bpda(net, steps=7),
    "bpda_last": lambda net: Bpda(net, steps=7, last_only=True),
    "metric": lambda net: MetricAttack(net[:3], steps=7),
    "apgd": lambda net: Apgd(steps=7),
    "apgd_restarts": lambda net: Apgd(steps=4, loss="cross_entropy", restarts=2),
    "apgd_substitute": lambda net: Apgd(steps=7, substitute=net),
    "transfer": lambda net: Transfer(net, Pgd(steps=7), starts=2),
}
EVERY = pytest.mark.parametrize("maker", list(MAKERS.values()), ids=list(MAKERS))


class Watched(nn.Module):
    """A model that notes the rows of each question, and of each gradient taken through it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.asked: list[Tensor] = []
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        if x.requires_grad:
            x.register_hook(self._count)
        outputs: Tensor = self.net(x)
        return outputs

    def _count(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


def examples(count: int = 40, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, 6, generator=generator, dtype=dtype)


@EVERY
@settings(max_examples=8)
@given(
    kind=st.sampled_from([L2, Linf]),
    eps=st.sampled_from([0.0, 0.01, 0.3, 5.0]),
    bounds=st.sampled_from([None, (0.0, 1.0)]),
    scaled=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_question_leaves_the_ball(maker, kind, eps, bounds, scaled, masked, seed) -> None:
    """Not only the result: every input the model is ever asked about is legal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 3, 2, generator=generator)
    scale = torch.rand(3, 2, generator=generator) + 0.1 if scaled else None
    mutable = torch.rand(3, 2, generator=generator) < 0.6 if masked else None
    ball = kind(eps, bounds=bounds, scale=scale, mutable=mutable)
    model = Watched(small_net(seed)).eval()
    y = model.net(x).argmax(1)
    result = maker(model.net)(model, x, y, ball, generator=generator)
    for point in [*model.asked, result.inputs]:
        step = point.double() - x.double()
        if mutable is not None:
            assert not step[:, ~mutable].any()
        if scale is not None:
            step = step / scale
        length = step.norm() if kind is L2 else step.abs().max()
        assert float(length) <= eps * (1 + 1e-12)
        if bounds is not None:
            assert bool(((point >= 0) & (point <= 1)).all())
    assert float(ball.distance(result.inputs, x)) == float(result.distance)


@EVERY
def test_same_seed_same_result(maker) -> None:
    net = small_net()
    x = examples()
    y = net(x).argmax(1)
    attack = maker(net)
    once, again, other = (
        attack(net, x, y, L2(0.2), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(once.inputs, again.inputs)
    assert torch.equal(once.forwards, again.forwards)
    assert not torch.equal(once.inputs, other.inputs)


@EVERY
def test_gradients_are_taken_where_others_take_none(maker) -> None:
    net = small_net()
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    y = net(x).argmax(1)

    attack = maker(small_net(seed=1))

    def found() -> Tensor:
        seed = torch.Generator().manual_seed(0)
        return attack(net, x.clone(), y.clone(), L2(0.3), generator=seed).inputs

    expected = found()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(found(), expected)


@EVERY
def test_questions_and_gradients_are_counted(maker, generator) -> None:
    model = Watched(small_net()).eval()
    x = examples()
    y = model.net(x).argmax(1)
    y[:5] = (y[:5] + 1) % 3
    attack = maker(model.net)
    result = attack(model, x, y, L2(0.3), generator=generator)
    assert attack.needs.gradients or not result.backwards.any()
    assert 0 < result.accuracy < (len(x) - 5) / len(x)
    assert int(result.forwards.sum()) == sum(map(len, model.asked))
    assert int(result.backwards.sum()) == model.backwards
    assert result.forwards[:5].tolist() == [1] * 5


@EVERY
def test_results_are_what_the_model_says(maker, generator) -> None:
    net = small_net().double()
    x = examples(dtype=torch.float64)
    y = net(x).argmax(1)
    result = maker(net)(net, x, y, Linf(0.1), generator=generator)
    assert result.inputs.dtype == torch.float64
    assert torch.equal(result.broken, net(result.inputs).argmax(1) != y)
    assert bool(result.broken.any())
    assert not result.inputs.requires_grad
    assert all(weights.grad is None for weights in net.parameters())


class Steps(nn.Module):
    """A model without a gradient: which side of 1/2 the first feature is on."""

    def forward(self, x: Tensor) -> Tensor:
        side = (x.flatten(1)[:, 0] > 0.5).float()
        return torch.stack([1 - side, side, torch.zeros_like(side)], 1)


class Constant(nn.Module):
    """A model whose outputs have a gradient, but none in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.weights.expand(len(x), 3)


@EVERY
def test_no_gradient_no_harm(maker, generator) -> None:
    net = small_net()
    x = examples()
    x[:, 0] = x[:, 0].round()  # half a unit away from the step
    for model in (Steps().eval(), Constant().eval()):
        result = maker(net)(model, x, model(x).argmax(1), L2(0.4), generator=generator)
        assert result.accuracy == 1
    blind = Transfer(Constant().eval(), Pgd(steps=3))
    assert not blind(net, x, net(x).argmax(1), L2(0.01), generator=generator).broken.all()


class Shy(nn.Module):
    """Abstains outside the ball of radius 0.1 around the origin."""

    def forward(self, x: Tensor) -> Tensor:
        far = x.flatten(1).norm(dim=1, keepdim=True) > 0.1
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3).masked_fill(far, torch.nan)


@EVERY
def test_an_abstention_is_found_and_kept(maker, generator) -> None:
    x = torch.zeros(10, 6)
    y = torch.zeros(10, dtype=torch.int64)
    result = maker(small_net())(Shy().eval(), x, y, L2(1.0), generator=generator)
    assert bool(result.abstained.all())
    assert bool(result.broken.all())


@EVERY
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_regression(maker, bounds, generator) -> None:
    """Every attack but the noise makes the error of a linear model nearly as large as can be."""
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0])
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 1), nn.Identity(), nn.Flatten(0)).eval()
    net[1].weight.data, net[1].bias.data = weights[None], torch.zeros(1)
    x = 0.5 + 0.2 * torch.rand(20, 6, generator=generator)
    eps = 0.1
    y = net(x).detach()
    ball: LpBall = Linf(eps, bounds=bounds)
    result = maker(net)(net, x, y, ball, generator=generator)
    largest = float(weights.abs().sum()) * eps
    torch.testing.assert_close(result.gain, (net(result.inputs) - y).abs())
    assert float(result.gain.max()) <= largest * (1 + 1e-5)
    # A few steps cross the ball; noise only meets its corners at random.
    least = 0.3 if isinstance(maker(net), RandomNoise) else 0.95
    assert float(result.gain.min()) > least * largest
    assert not result.broken.any()


@pytest.mark.parametrize("attack", [Pgd, Apgd])
def test_refused_settings(attack) -> None:
    for options, message in (
        ({"steps": 0}, "steps.*0"),
        ({"restarts": -1}, "restarts.*-1"),
        ({"restarts": 2, "random_start": False}, "restarts.*1.*2"),
        ({"loss": "hinge"}, "loss.*hinge"),
    ):
        with pytest.raises(InputError, match=message):
            attack(**options)


@pytest.mark.parametrize("attack", [Pgd(loss="dlr"), Apgd(loss="dlr")])
def test_dlr_needs_three_classes(attack, generator) -> None:
    net = small_net(classes=2)
    x = examples()
    with pytest.raises(InputError, match=r"loss.*dlr.*3.*2"):
        attack(net, x, net(x).argmax(1), L2(0.1), generator=generator)


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (lambda net: Pgd(substitute=net), "substitute"),
        (lambda net: Apgd(substitute=net), "substitute"),
        (lambda net: Bpda(net), "network"),
        (lambda net: Transfer(net), "source"),
    ],
)
def test_refused_networks(maker, name, generator) -> None:
    net = small_net(seed=2)
    x = examples()
    y = net(x).argmax(1)
    with pytest.raises(InputError, match=f"{name}.*training"):
        maker(small_net().train())(net, x, y, L2(0.1), generator=generator)
    with pytest.raises(InputError, match=f"{name}.*Module.*int"):
        maker(3)(net, x, y, L2(0.1), generator=generator)
    assert set(y.tolist()) == {0, 1, 2}
    with pytest.raises(InputError, match=r"expected (shape \(40, 3\)|labels from 0 to 1)"):
        maker(small_net(classes=2))(net, x, y, L2(0.1), generator=generator)
