"""Projected gradient ascent where the right answer is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from otad.attacks.apgd import Apgd
from otad.attacks.base import Attack, Target
from otad.attacks.objectives import cross_entropy, squared_error, substitute_gradient
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.errors import InputError
from otad.threat import L2, Linf

SCALE = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.1])
MUTABLE = torch.tensor([True, True, True, False, True])
BALLS = [
    L2(1.0),
    Linf(1.0),
    L2(1.0, scale=SCALE, mutable=MUTABLE),
    Linf(1.0, scale=SCALE, mutable=MUTABLE),
]


def linear(weights: Tensor) -> nn.Linear:
    """Logits or values `weights` @ x."""
    layer = nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    layer.weight.data = weights.clone()
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
    weights = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    x = torch.tensor([[100.0, 0.0], [1e-6, 1e4]])
    found = attack(linear(weights), x, torch.tensor([0, 0]), Linf(1.0), generator=generator)
    assert found.broken.tolist() == [False, True]
    assert int(found.forwards[0]) == 1 + 3 * 7 + 1
    assert int(found.backwards[0]) == 3 * 6
    assert int(found.forwards[1]) <= 1 + 2 + 1
    assert int(found.backwards[1]) <= 2


class Shattered(nn.Module):
    """The same answers as a net, and no gradient."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x).detach()
        return outputs


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
    found = run(replaced(net), Shattered(net).eval())
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.forwards, expected.forwards)
    assert not found.backwards.any()
    assert found.accuracy < run(exact, Shattered(net).eval()).accuracy


@pytest.mark.parametrize("regression", [False, True])
def test_bpda_is_the_networks_jacobian_at_the_defended_answer(regression, generator) -> None:
    """J_network(x)^T dloss/doutputs, the loss being taken at the outputs of the defended model."""
    network = bent_net(generator).double()
    defended = Shattered(bent_net(generator).double())
    x = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    if regression:
        network.append(nn.Linear(3, 1).double()).append(nn.Flatten(0)).eval()
        defended.net.append(nn.Linear(3, 1).double()).append(nn.Flatten(0))
        y, loss = torch.rand(5, generator=generator, dtype=torch.float64), squared_error
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


class Gate(nn.Module):
    """Wrong only where the first feature is between 0.45 and 0.55."""

    def forward(self, x: Tensor) -> Tensor:
        wrong = ((x[:, 0] - 0.5).abs() < 0.05).to(x)
        return torch.stack([1 - wrong, wrong], 1)


def test_last_only_forgets_what_it_met_on_the_way(generator) -> None:
    """The paper's protocol misses it, ours does not."""
    network = linear(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    x, y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    options = {"steps": 10, "step_size": 0.1, "random_start": False}
    ours = Bpda(network, **options)(Gate().eval(), x, y, L2(1.0), generator=generator)
    assert ours.accuracy == 0
    torch.testing.assert_close(ours.inputs[:, 0], torch.full((3,), 0.5))
    paper = Bpda(network, last_only=True, **options)
    missed = paper(Gate().eval(), x, y, L2(1.0), generator=generator)
    assert missed.accuracy == 1
    assert missed.forwards.tolist() == [1 + 11 + 1] * 3
    near = paper(Gate().eval(), x, y, L2(0.5), generator=generator)  # ends at 0.5
    assert near.accuracy == 0


class Length(nn.Module):
    """A regressor: how long the image of x under a matrix is."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix.T).norm(dim=1)


def test_metric_attack_finds_the_top_singular_direction(generator) -> None:
    """Around 0, the embedding x -> A x is moved by at most eps times the norm of A."""
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    matrix = torch.tensor([3.0, 1.0, 0.5, 0.0], dtype=torch.float64)[:, None] * rotation
    x = torch.zeros(5, 4, dtype=torch.float64)
    attack = MetricAttack(lambda x: x @ matrix.T, steps=100)
    model = Shattered(Length(matrix)).eval()
    found = attack(model, x, torch.zeros(5, dtype=torch.float64), L2(0.7), generator=generator)
    largest = 0.7 * 3
    assert bool((found.gain <= largest * (1 + 1e-9)).all())
    assert bool((found.gain > 0.99 * largest).all())


class Nearest(nn.Module):
    """The class of the nearest of a few points, in an embedding."""

    def __init__(self, embed: nn.Module, points: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.embed, self.points, self.labels = embed, points, labels

    def forward(self, x: Tensor) -> Tensor:
        gaps = torch.cdist(self.embed(x), self.embed(self.points))
        return nn.functional.one_hot(self.labels[gaps.argmin(1)], 3).to(x)


def test_metric_attack_moves_neighbors_that_no_gradient_sees(generator) -> None:
    """A nearest-neighbor vote is flat almost everywhere; its embedding is not."""
    points = torch.rand(60, 4, generator=generator)
    labels = torch.randint(3, (60,), generator=generator)
    model = Nearest(bent_net(generator)[:2], points, labels).eval()
    y = model(points).argmax(1)
    blind = Pgd(steps=20)(model, points, y, L2(0.15), generator=generator)
    seeing = MetricAttack(model.embed, steps=20)(model, points, y, L2(0.15), generator=generator)
    assert seeing.accuracy < blind.accuracy - 0.1


def test_refusals(generator) -> None:
    for step_size in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="step_size"):
            Pgd(step_size=step_size)
    with pytest.raises(InputError, match=r"random_start.*False"):
        MetricAttack(nn.Identity(), random_start=False)
    with pytest.raises(InputError, match=r"loss.*squared_error"):
        Bpda(nn.Identity(), loss="squared_error")
    net = bent_net(generator)
    x = torch.rand(3, 4, generator=generator)
    flat = MetricAttack(lambda x: x.sum(1))
    with pytest.raises(InputError, match=r"metric.*\(3, d\).*\(3,\)"):
        flat(net, x, net(x).argmax(1), L2(0.1), generator=generator)
