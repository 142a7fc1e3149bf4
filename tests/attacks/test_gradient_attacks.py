"""What all attacks that climb, draw or transfer have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from attacks.linear_models import Function, Recorder, assert_legal, random_net, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from otad.attacks import AutoAttackSuite
from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack
from otad.attacks.objectives import LOSSES, cross_entropy, dlr, loss_for
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.attacks.random_search import RandomNoise
from otad.attacks.target import margin
from otad.attacks.transfer import Transfer
from otad.errors import InputError
from otad.model.defend import defend
from otad.threat import L2, Linf

MAKERS: dict[str, Callable[[nn.Module], Attack]] = {
    "noise": lambda net: RandomNoise(draws=8),
    "pgd": lambda net: Pgd(steps=7),
    "pgd_restarts": lambda net: Pgd(loss="dlr", steps=4, restarts=2),
    "pgd_substitute": lambda net: Pgd(steps=7, substitute=net),
    "pgd_targets": lambda net: Pgd(steps=4, targets=2),
    "bpda": lambda net: Bpda(net, steps=7),
    "bpda_last": lambda net: Bpda(net, steps=7, last_only=True),
    "metric": lambda net: MetricAttack(net[:3], steps=7),
    "apgd": lambda net: Apgd(steps=7),
    "apgd_restarts": lambda net: Apgd(steps=4, loss="cross_entropy", restarts=2),
    "apgd_substitute": lambda net: Apgd(steps=7, substitute=net),
    "apgd_targets": lambda net: Apgd(steps=4, targets=2, substitute=net),
    "transfer": lambda net: Transfer(net, Pgd(steps=7), starts=2),
}
EVERY = pytest.mark.parametrize("maker", list(MAKERS.values()), ids=list(MAKERS))
EXAMPLES = torch.rand(40, 6, generator=torch.Generator().manual_seed(5))


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
def test_no_query_leaves_the_ball(maker, kind, eps, bounds, scaled, masked, seed) -> None:
    """Not only the result: every input the model is ever asked about is legal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 3, 2, generator=generator)
    scale = torch.rand(3, 2, generator=generator) + 0.1 if scaled else None
    mutable = torch.rand(3, 2, generator=generator) < 0.6 if masked else None
    ball = kind(eps, bounds=bounds, scale=scale, mutable=mutable)
    net = random_net(seed=seed)
    model = Recorder(net)
    result = run(maker(net), model, x, ball, net(x).argmax(1), seed=seed)
    for point in [*model.asked, result.inputs]:
        assert_legal(point, x, ball)
    assert float(ball.distance(result.inputs, x)) == float(result.distance)


@EVERY
def test_same_seed_same_result_in_every_mode_and_it_is_what_the_model_says(maker) -> None:
    net, x = random_net().double(), EXAMPLES.double()
    y, attack = net(x).argmax(1), maker(net)
    once = run(attack, net, x, Linf(0.1), y)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            again = run(attack, net, x.clone(), Linf(0.1), y.clone())
            assert torch.equal(once.inputs, again.inputs)
            assert torch.equal(once.forwards, again.forwards)
    assert not torch.equal(once.inputs, run(attack, net, x, Linf(0.1), y, seed=2).inputs)
    assert once.inputs.dtype == torch.float64
    assert torch.equal(once.broken, net(once.inputs).argmax(1) != y)
    assert bool(once.broken.any())
    assert not once.inputs.requires_grad
    assert all(weights.grad is None for weights in net.parameters())


@EVERY
def test_queries_and_gradients_are_counted(maker) -> None:
    net, x = random_net(), EXAMPLES
    model, attack, y = Recorder(net), maker(net), net(x).argmax(1)
    y[:5] = (y[:5] + 1) % 3
    result = run(attack, model, x, L2(0.3), y)
    assert attack.needs.gradients or not result.backwards.any()
    assert 0 < result.accuracy < (len(x) - 5) / len(x)
    assert int(result.forwards.sum()) == sum(map(len, model.asked))
    assert int(result.backwards.sum()) == model.gradients
    assert result.forwards[:5].tolist() == [1] * 5


@EVERY
def test_no_gradient_no_harm(maker) -> None:
    net, x = random_net(), EXAMPLES.clone()
    x[:, 0] = x[:, 0].round()  # half a unit away from the step
    weights = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))
    constant = Function(lambda x: weights.expand(len(x), 3))  # a gradient, but not in its inputs
    steps = Function(lambda x: torch.eye(3)[(x[:, 0] > 0.5).long()])
    served = Function(torch.inference_mode()(lambda x: steps(x)))  # as in a predictor of a service
    for model in (steps, constant, served):
        assert run(maker(net), model, x, L2(0.4)).accuracy == 1
    assert not run(Transfer(constant, Pgd(steps=3)), net, x, L2(0.01)).broken.all()


@EVERY
def test_an_abstention_is_found_and_kept(maker) -> None:
    def shy(x: Tensor) -> Tensor:
        far = x.flatten(1).norm(dim=1, keepdim=True) > 0.1
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(x), 3).masked_fill(far, torch.nan)

    result = run(maker(random_net()), Function(shy), torch.zeros(10, 6), L2(1.0))
    assert bool(result.abstained.all())
    assert bool(result.broken.all())


@EVERY
@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)])
def test_regression(maker, bounds) -> None:
    """Every attack but the noise makes the error of a linear model nearly as large as can be."""
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0, -1.0])
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 1), nn.Identity(), nn.Flatten(0)).eval()
    net[1].weight.data, net[1].bias.data = weights[None], torch.zeros(1)
    x = 0.5 + 0.2 * EXAMPLES[:20]
    result = run(maker(net), net, x, Linf(0.1, bounds=bounds))
    largest = 0.1 * float(weights.abs().sum())
    torch.testing.assert_close(result.gain, (net(result.inputs) - net(x)).abs())
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
@pytest.mark.parametrize(
    ("network", "message"),
    [
        (random_net().train(), "NAME.*training"),
        (3, "NAME.*Module.*int"),
        (random_net(classes=2), r"expected (shape \(40, 3\)|labels from 0 to 1)"),
    ],
)
def test_refused_networks(maker, name, network, message) -> None:
    net = random_net(seed=2)
    assert set(net(EXAMPLES).argmax(1).tolist()) == {0, 1, 2}
    with pytest.raises(InputError, match=message.replace("NAME", name)):
        run(maker(network), net, EXAMPLES, L2(0.1))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("maker", [*MAKERS.values(), None], ids=[*MAKERS, "autoattack"])
def test_weights_that_are_not_finite_are_refused(maker, value) -> None:
    """Those of the model by every attack, and those of an attack's own networks."""
    net, spoiled = random_net(), random_net()
    spoiled[1].weight.data[3, 2] = value
    attack = AutoAttackSuite() if maker is None else maker(spoiled)
    with pytest.raises(InputError, match=rf"model\.1\.weight.*{value} at \(3, 2\)"):
        run(attack, spoiled, EXAMPLES, L2(0.1), torch.zeros(40, dtype=torch.int64))
    if maker is not None and any(isinstance(one, nn.Module) for one in vars(attack).values()):
        with pytest.raises(InputError, match=rf"(network|substitute|source|metric)\.1\.w.*{value}"):
            run(attack, net, EXAMPLES, L2(0.1))


def test_defend_refuses_weights_that_are_not_finite() -> None:
    x, y = torch.rand(9, 2), torch.arange(9) % 2
    for place in ("net", "metric"):
        net, metric = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
        (net[1] if place == "net" else metric).bias.data[1] = math.nan  # the bank would be finite
        with pytest.raises(InputError, match=rf"{place}\..*bias.*nan at \(1,\)"):
            defend(net, x, y, n_neighbors=2, metric=metric)


def test_buffers_may_mask_but_not_be_nan() -> None:
    net = random_net()
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    assert run(Pgd(steps=2), net, EXAMPLES, L2(0.1)).accuracy <= 1
    for value in (math.nan, math.inf):
        net.mask[0] = value
        with pytest.raises(InputError, match=f"model.mask.*{value}"):
            run(Pgd(steps=2), net, EXAMPLES, L2(0.1), torch.zeros(40, dtype=torch.int64))


@pytest.mark.parametrize("name", ["pgd", "bpda", "apgd_substitute", "metric", "transfer"])
def test_a_gradient_that_is_not_finite_is_no_silent_zero(name) -> None:
    class Rooted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (0 * x[:, :1]).sqrt()  # infinite times 0

    net = Rooted(*random_net()).eval()
    attack = MetricAttack(net, steps=7) if name == "metric" else MAKERS[name](net)
    blind = name != "metric"  # which takes differences in its place
    with pytest.warns(UserWarning, match=r"NaN.*40 of 40") if blind else nullcontext():
        found = run(attack, net, EXAMPLES, L2(0.01))
    assert bool((found.blind == blind).all())


LOGITS = torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.0, 5.0, 4.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([0, 2])


def test_closed_forms_of_the_losses() -> None:
    assert margin(LOGITS, Y).tolist() == [-0.5, 1.0]
    expected = torch.tensor([-0.5 / 2.0, 1.0 / 4.0], dtype=torch.float64)
    torch.testing.assert_close(dlr(LOGITS, Y), expected)
    torch.testing.assert_close(dlr(7 * LOGITS - 3, Y), expected)
    assert math.isfinite(float(dlr(torch.zeros(1, 3), torch.tensor([0]))))
    shares = LOGITS.exp() / LOGITS.exp().sum(1, keepdim=True)
    torch.testing.assert_close(cross_entropy(LOGITS, Y), -shares[[0, 1], Y].log())
    values = torch.tensor([1.0, -2.0])
    assert loss_for("dlr", values)(values, torch.tensor([3.0, -2.0])).tolist() == [4.0, 0.0]
    assert loss_for("dlr", Y) is dlr
    with pytest.raises(InputError, match=r"loss.*hinge"):
        loss_for("hinge", Y)
    with pytest.raises(InputError, match=r"loss.*dlr.*3.*2"):
        dlr(LOGITS[:, :2], torch.tensor([0, 1]))


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_are_those_of_finite_differences(name, generator) -> None:
    logits = torch.randn(20, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (20,), generator=generator)
    assert torch.autograd.gradcheck(lambda logits: LOSSES[name](logits, y), logits)
