"""What all attacks that climb, draw or transfer have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from attacks.linear_models import Function, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from otad.attacks.base import Attack, AttackResult, margin
from otad.attacks.objectives import LOSSES, cross_entropy, dlr, loss_for
from otad.attacks.pgd import Apgd, Bpda, MetricAttack, Pgd, Transfer
from otad.attacks.random_search import RandomNoise
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
    model = Recorder(small_net(seed)).eval()
    y = model.model(x).argmax(1)
    result = maker(model.model)(model, x, y, ball, generator=generator)
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
def test_same_seed_same_result_in_every_mode_and_it_is_what_the_model_says(maker) -> None:
    net, x = small_net().double(), examples(dtype=torch.float64)
    y, attack = net(x).argmax(1), maker(net)

    def found(seed: int) -> AttackResult:
        generator = torch.Generator().manual_seed(seed)
        return attack(net, x.clone(), y.clone(), Linf(0.1), generator=generator)

    once = found(1)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            again = found(1)
            assert torch.equal(once.inputs, again.inputs)
            assert torch.equal(once.forwards, again.forwards)
    assert not torch.equal(once.inputs, found(2).inputs)
    assert once.inputs.dtype == torch.float64
    assert torch.equal(once.broken, net(once.inputs).argmax(1) != y)
    assert bool(once.broken.any())
    assert not once.inputs.requires_grad
    assert all(weights.grad is None for weights in net.parameters())


@EVERY
def test_questions_and_gradients_are_counted(maker, generator) -> None:
    model = Recorder(small_net()).eval()
    x = examples()
    y = model.model(x).argmax(1)
    y[:5] = (y[:5] + 1) % 3
    attack = maker(model.model)
    result = attack(model, x, y, L2(0.3), generator=generator)
    assert attack.needs.gradients or not result.backwards.any()
    assert 0 < result.accuracy < (len(x) - 5) / len(x)
    assert int(result.forwards.sum()) == sum(map(len, model.asked))
    assert int(result.backwards.sum()) == model.gradients
    assert result.forwards[:5].tolist() == [1] * 5


@EVERY
def test_no_gradient_no_harm(maker, generator) -> None:
    net = small_net()
    x = examples()
    x[:, 0] = x[:, 0].round()  # half a unit away from the step
    weights = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))
    constant = Function(lambda x: weights.expand(len(x), 3))  # a gradient, but not in its inputs
    for model in (Function(lambda x: torch.eye(3)[(x[:, 0] > 0.5).long()]), constant):
        result = maker(net)(model, x, model(x).argmax(1), L2(0.4), generator=generator)
        assert result.accuracy == 1
    blind = Transfer(constant, Pgd(steps=3))
    assert not blind(net, x, net(x).argmax(1), L2(0.01), generator=generator).broken.all()


@EVERY
def test_an_abstention_is_found_and_kept(maker, generator) -> None:
    def shy(x: Tensor) -> Tensor:
        far = x.flatten(1).norm(dim=1, keepdim=True) > 0.1
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3).masked_fill(far, torch.nan)

    x, y = torch.zeros(10, 6), torch.zeros(10, dtype=torch.int64)
    result = maker(small_net())(Function(shy), x, y, L2(1.0), generator=generator)
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


LOGITS = torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.0, 5.0, 4.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([0, 2])


def test_closed_forms() -> None:
    assert margin(LOGITS, Y).tolist() == [-0.5, 1.0]
    expected = torch.tensor([-0.5 / 2.0, 1.0 / 4.0], dtype=torch.float64)
    torch.testing.assert_close(dlr(LOGITS, Y), expected)
    torch.testing.assert_close(dlr(7 * LOGITS - 3, Y), expected)
    assert math.isfinite(float(dlr(torch.zeros(1, 3), torch.tensor([0]))))
    shares = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)
    torch.testing.assert_close(cross_entropy(LOGITS, Y), -shares[[0, 1], Y].log())
    values = torch.tensor([1.0, -2.0])
    assert loss_for("dlr", values)(values, torch.tensor([3.0, -2.0])).tolist() == [4.0, 0.0]


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_are_those_of_finite_differences(name, generator) -> None:
    logits = torch.randn(20, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (20,), generator=generator)
    assert torch.autograd.gradcheck(lambda logits: LOSSES[name](logits, y), logits)


def test_only_the_margin_is_never_flat() -> None:
    """A model that is very sure: the softmax has no gradient left in float32."""
    logits = torch.tensor([[200.0, 0.0, -1.0]], requires_grad=True)
    y = torch.tensor([0])
    (flat,) = torch.autograd.grad(cross_entropy(logits, y).sum(), logits)
    (steep,) = torch.autograd.grad(margin(logits, y).sum(), logits)
    assert not flat.any()
    assert steep.tolist() == [[-1.0, 1.0, 0.0]]


def test_choice_of_loss() -> None:
    assert loss_for("dlr", Y) is dlr
    with pytest.raises(InputError, match=r"loss.*hinge"):
        loss_for("hinge", Y)
    with pytest.raises(InputError, match=r"loss.*dlr.*3.*2"):
        dlr(LOGITS[:, :2], torch.tensor([0, 1]))
