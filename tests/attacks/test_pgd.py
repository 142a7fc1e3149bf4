"""Projected gradient ascent where the right answer is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attacks.linear_models import Function
from torch import Tensor, nn

from otad.attacks.base import Attack, Target
from otad.attacks.objectives import cross_entropy, loss_for, substitute_gradient
from otad.attacks.pgd import Apgd, Bpda, MetricAttack, Pgd, Transfer
from otad.attacks.random_search import RandomNoise
from otad.errors import InputError
from otad.threat import L2, Linf, LpBall

SCALE = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.1])
MUTABLE = torch.tensor([True, True, True, False, True])
BALLS = [
    L2(1.0),
    Linf(1.0),
    L2(1.0, scale=SCALE, mutable=MUTABLE),
    Linf(1.0, scale=SCALE, mutable=MUTABLE),
]


SIDES = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])  # two classes by the sign of the first feature


def linear(weights: Tensor, bias: float = 0.0) -> nn.Linear:
    """Logits or values `weights` @ x, with a bias for the last of them."""
    layer = nn.Linear(weights.shape[1], weights.shape[0])
    layer.weight.data = weights.clone()
    layer.bias.data = torch.zeros(len(weights)).to(weights)
    layer.bias.data[-1] = bias
    return layer.eval()


def dual_norm(gradient: Tensor, ball: L2 | Linf) -> Tensor:
    """How fast a linear function can grow within the ball, per unit of eps."""
    if ball.scale is not None:
        gradient = (gradient * ball.scale)[ball.mutable]
    return gradient.norm() if isinstance(ball, L2) else gradient.abs().sum()


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.describe())
@pytest.mark.parametrize(
    ("attack", "above"),
    [
        (Pgd(steps=20, random_start=False), 1 + 1e-5),
        (Pgd(steps=20, random_start=False, loss="cross_entropy"), 1 + 1e-5),
        (Pgd(steps=100), 1.05),
        (Apgd(steps=20, random_start=False), 1 + 1e-5),
        (Apgd(steps=100, loss="cross_entropy"), 1 + 1e-3),
    ],
)
def test_distance_to_the_boundary_of_a_linear_classifier(ball, attack, above, generator) -> None:
    """Two classes: the margin over the dual norm. Just above it all break, below it none."""
    weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    model = linear(weights)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    logits = model(x)
    y = logits.argmax(1)
    distances = (logits.amax(1) - logits.amin(1)) / dual_norm(weights[0] - weights[1], ball)
    x = x / distances.detach()[:, None]  # without a bias, that puts all at distance 1
    above_all = attack(model, x, y, ball.with_eps(above), generator=generator)
    assert above_all.broken.all()
    below_all = attack(model, x, y, ball.with_eps(1 - 1e-9), generator=generator)
    assert not below_all.broken.any()


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.describe())
def test_error_of_a_linear_regression_grows_by_the_dual_norm(ball, generator) -> None:
    """|f - y| at the example, plus eps times the dual norm of the weights."""
    weights = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    model = nn.Sequential(linear(weights), nn.Flatten(0)).eval()
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    error = torch.randn(8, generator=generator, dtype=torch.float64)
    ball = ball.with_eps(0.3)
    for attack in (Pgd(steps=5, random_start=False), Apgd(steps=5, random_start=False)):
        found = attack(model, x, model(x).detach() + error, ball, generator=generator)
        expected = error.abs() + 0.3 * dual_norm(weights[0], ball)
        torch.testing.assert_close(found.gain, expected, rtol=1e-5, atol=0)


def test_one_step_goes_where_the_loss_grows_most(generator) -> None:
    """From the example, a step of 2.5 eps along a known gradient, put back on the ball."""
    weights = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    x = torch.tensor([[2.0, 0.5]])  # class 0 by 4
    once = Pgd(steps=1, random_start=False)
    found = once(linear(weights), x, torch.tensor([0]), L2(0.5), generator=generator)
    torch.testing.assert_close(found.inputs, x + torch.tensor([[-0.3, 0.4]]))
    found = once(linear(weights), x, torch.tensor([0]), Linf(0.5), generator=generator)
    torch.testing.assert_close(found.inputs, x + torch.tensor([[-0.5, 0.5]]))
    short = Pgd(steps=2, step_size=0.1, random_start=False)
    found = short(linear(weights), x, torch.tensor([0]), Linf(0.5), generator=generator)
    torch.testing.assert_close(found.inputs, x + torch.tensor([[-0.1, 0.1]]))


@pytest.mark.parametrize("attack", [Pgd(steps=6, restarts=3), Apgd(steps=6, restarts=3)])
def test_what_an_example_costs(attack, generator) -> None:
    """One that cannot be broken: steps + 1 answers and steps gradients for each restart, and the
    first and the last answer. One that breaks at once: one answer in between."""
    x = torch.tensor([[100.0, 0.0], [1e-6, 1e4]])
    found = attack(linear(SIDES), x, torch.tensor([0, 0]), Linf(1.0), generator=generator)
    assert found.broken.tolist() == [False, True]
    assert int(found.forwards[0]) == 1 + 3 * 7 + 1
    assert int(found.backwards[0]) == 3 * 6
    assert int(found.forwards[1]) <= 1 + 2 + 1
    assert int(found.backwards[1]) <= 2


def shattered(net: Callable[[Tensor], Tensor]) -> nn.Module:
    """The same answers as a net, and no gradient."""
    return Function(lambda x: net(x).detach())


def bent_net(generator: torch.Generator) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3)).eval()
    for weights in net.parameters():
        weights.data = 2 * torch.randn(weights.shape, generator=generator)
    net[2].bias.data.zero_()
    return net


@pytest.mark.parametrize(
    ("exact", "replaced"),
    [
        (Pgd(steps=10, restarts=2), lambda net: Pgd(steps=10, restarts=2, substitute=net)),
        (Apgd(steps=10, restarts=2), lambda net: Apgd(steps=10, restarts=2, substitute=net)),
        (Pgd(steps=10, loss="cross_entropy"), lambda net: Bpda(net, steps=10)),
    ],
)
def test_a_perfect_substitute_gives_the_exact_attack(exact, replaced, generator) -> None:
    """Behind shattered gradients, by the net's own backward pass: the same to the bit."""
    net = bent_net(generator)
    x = torch.randn(60, 4, generator=generator)
    y = net(x).argmax(1)

    def run(attack: Attack, model: nn.Module):
        return attack(model, x, y, L2(0.3), generator=torch.Generator().manual_seed(3))

    expected = run(exact, net)
    found = run(replaced(net), shattered(net))
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.forwards, expected.forwards)
    assert not found.backwards.any()
    assert found.accuracy < run(exact, shattered(net)).accuracy


@pytest.mark.parametrize("regression", [False, True])
def test_bpda_is_the_networks_jacobian_at_the_defended_answer(regression, generator) -> None:
    """J_network(x)^T dloss/doutputs, the loss being taken at the outputs of the defended model."""
    network, other = (bent_net(generator).double() for _ in range(2))
    defended = shattered(other)
    x = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    if regression:
        for net in (network, other):
            net.append(nn.Linear(3, 1).double()).append(nn.Flatten(0)).eval()
        y = torch.rand(5, generator=generator, dtype=torch.float64)
        loss = loss_for("margin", y)
    else:
        y, loss = torch.tensor([0, 1, 2, 0, 1]), cross_entropy
    rows = torch.tensor([3, 1, 4])
    answer = substitute_gradient(Target(defended, y), loss, network, straight_through=True)(
        x[rows], rows
    )
    assert torch.equal(answer.outputs, defended(x[rows]))
    torch.testing.assert_close(answer.value, loss(defended(x[rows]), y[rows]))
    for place, row in enumerate(rows.tolist()):
        outputs = defended(x[[row]]).requires_grad_()
        (pull,) = torch.autograd.grad(loss(outputs, y[[row]]).sum(), outputs)
        jacobian = torch.autograd.functional.jacobian(lambda point: network(point[None])[0], x[row])
        torch.testing.assert_close(
            answer.gradient[place], torch.tensordot(pull[0], jacobian, pull[0].dim())
        )


def test_last_only_forgets_what_it_met_on_the_way(generator) -> None:
    """The paper's protocol misses it, ours does not."""
    # Wrong only where the first feature is between 0.45 and 0.55.
    gate = Function(lambda x: torch.eye(2)[((x[:, 0] - 0.5).abs() < 0.05).long()])
    network = linear(-SIDES)
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    options = {"steps": 10, "step_size": 0.1, "random_start": False}
    ours = Bpda(network, **options)(gate, x, y, L2(1.0), generator=generator)
    assert ours.accuracy == 0
    torch.testing.assert_close(ours.inputs[:, 0], torch.full((3,), 0.5))
    paper = Bpda(network, last_only=True, **options)
    missed = paper(gate, x, y, L2(1.0), generator=generator)
    assert missed.accuracy == 1
    assert missed.forwards.tolist() == [1 + 11 + 1] * 3
    near = paper(gate, x, y, L2(0.5), generator=generator)  # ends at 0.5
    assert near.accuracy == 0


def test_metric_attack_finds_the_top_singular_direction(generator) -> None:
    """Around 0, the embedding x -> A x is moved by at most eps times the norm of A."""
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    matrix = torch.tensor([3.0, 1.0, 0.5, 0.0], dtype=torch.float64)[:, None] * rotation
    x = torch.zeros(5, 4, dtype=torch.float64)
    attack = MetricAttack(lambda x: x @ matrix.T, steps=100)
    model = shattered(lambda x: (x @ matrix.T).norm(dim=1))
    found = attack(model, x, torch.zeros(5, dtype=torch.float64), L2(0.7), generator=generator)
    largest = 0.7 * 3
    assert bool((found.gain <= largest * (1 + 1e-9)).all())
    assert bool((found.gain > 0.99 * largest).all())


def test_metric_attack_moves_neighbors_that_no_gradient_sees(generator) -> None:
    """A nearest-neighbor vote is flat almost everywhere; its embedding is not."""
    points = torch.rand(60, 4, generator=generator)
    labels = torch.randint(3, (60,), generator=generator)
    embed = bent_net(generator)[:2]
    model = Function(lambda x: torch.eye(3)[labels[torch.cdist(embed(x), embed(points)).argmin(1)]])
    y = model(points).argmax(1)
    blind = Pgd(steps=20)(model, points, y, L2(0.15), generator=generator)
    seeing = MetricAttack(embed, steps=20)(model, points, y, L2(0.15), generator=generator)
    assert seeing.accuracy < blind.accuracy - 0.1


def test_a_source_is_pushed_beyond_its_own_boundary(generator) -> None:
    """The source breaks at distance 0.1, the model at 0.9: a step that stops early is no use."""
    source = linear(SIDES, bias=1.8)
    model = linear(SIDES, bias=0.2)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    assert source(x).argmax(1) == 0
    for inner in (Pgd(steps=20), Apgd(steps=20)):
        found = Transfer(source, inner)(model, x, y, L2(1.0), generator=generator)
        assert found.accuracy == 0
        assert found.forwards.tolist() == [3]  # clean, the result, and the final check
        assert found.backwards.tolist() == [0]
        below = Transfer(source, inner)(model, x, y, L2(0.89), generator=generator)
        assert below.accuracy == 1
    wrong_itself, x = linear(SIDES, bias=9.0), torch.tensor([[0.5, 0.0]])
    assert wrong_itself(x).argmax(1) == 1
    helped = Transfer(wrong_itself)(linear(SIDES), x, y, L2(0.6), generator=generator)
    assert helped.accuracy == 0


def test_more_starts_find_more_and_ask_survivors_only(generator) -> None:
    """Noise on the source as inner attack: every start is another chance."""
    net = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 3)).eval()
    for weights in net.parameters():
        weights.data = 2 * torch.randn(weights.shape, generator=generator)
    x = torch.rand(100, 3, generator=generator)
    y = net(x).argmax(1)
    source = linear(torch.eye(3))

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
    network = nn.Sequential(linear(torch.tensor([[2.0, 1.0]])), nn.Flatten(0)).eval()
    model = nn.Sequential(linear(torch.tensor([[0.0, 3.0]])), nn.Flatten(0)).eval()
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
    net = linear(SIDES)
    x, y = torch.tensor([[0.5, 0.0]]), torch.tensor([0])
    found = Transfer(net, Erratic())(net, x, y, Linf(1.0), generator=generator)
    assert torch.equal(found.inputs, x)
    assert found.accuracy == 1
    found = Transfer(net, Erratic(), starts=2)(net, x, y, Linf(1.0), generator=generator)
    assert found.accuracy == 0


def test_embeddings_and_sources_of_the_wrong_shape_are_refused(generator) -> None:
    net, x = bent_net(generator), torch.rand(3, 4, generator=generator)
    with pytest.raises(InputError, match=r"metric.*\(3, d\).*\(3,\)"):
        MetricAttack(lambda x: x.sum(1))(net, x, net(x).argmax(1), L2(0.1), generator=generator)
    values = nn.Sequential(net, nn.Linear(3, 1), nn.Flatten(0)).eval()
    with pytest.raises(InputError, match=r"source.*\(3,\).*\(3, 3\)"):
        Transfer(net)(values, x, values(x).detach(), L2(1.0), generator=generator)
