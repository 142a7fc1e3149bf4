"""Projected gradient ascent where the right answer is known, and Auto-PGD against a plain
transcription of its pseudo-code and the authors' own program."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attacks.linear_models import Function, Recorder, random_net, run
from attacks.test_base import Scripted
from torch import Tensor, nn

from otad.attacks.apgd import Apgd, checkpoints
from otad.attacks.objectives import cross_entropy, loss_for, substitute_gradient
from otad.attacks.pgd import Bpda, MetricAttack, Pgd
from otad.attacks.random_search import RandomNoise
from otad.attacks.target import Target
from otad.attacks.transfer import Transfer
from otad.errors import InputError
from otad.threat import L2, Linf

SCALE = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.1])
MUTABLE = torch.tensor([True, True, True, False, True])
LIMITS = {"scale": SCALE, "mutable": MUTABLE}
BALLS = pytest.mark.parametrize(
    "ball",
    [L2(1.0), Linf(1.0), L2(1.0, **LIMITS), Linf(1.0, **LIMITS)],
    ids=lambda ball: ball.describe(),
)
SIDES = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])  # two classes by the sign of the first feature


def linear(weights: Tensor, bias: float = 0.0) -> nn.Module:
    """Logits, or with one row of weights a value, with a bias for the last of them."""
    layer = nn.Linear(weights.shape[1], weights.shape[0])
    layer.weight.data = weights.clone()
    layer.bias.data = torch.zeros(len(weights)).to(weights)
    layer.bias.data[-1] = bias
    return (nn.Sequential(layer, nn.Flatten(0)) if len(weights) == 1 else layer).eval()


def dual_norm(gradient: Tensor, ball: L2 | Linf) -> Tensor:
    """How fast a linear function can grow within the ball, per unit of eps."""
    if ball.scale is not None:
        gradient = (gradient * ball.scale)[ball.mutable]
    return gradient.norm() if isinstance(ball, L2) else gradient.abs().sum()


@BALLS
@pytest.mark.parametrize(
    ("attack", "above"),
    [
        (Pgd(steps=20, random_start=False), 1 + 1e-5),
        (Pgd(steps=20, random_start=False, loss="cross_entropy"), 1 + 1e-5),
        (Pgd(steps=20), 1 + 1e-5),
        (Pgd(steps=3), 1 + 1e-5),
        (Apgd(steps=20, random_start=False), 1 + 1e-5),
        (Apgd(steps=60, loss="cross_entropy"), 1 + 1e-3),
    ],
)
def test_distance_to_the_boundary_of_a_linear_classifier(ball, attack, above, generator) -> None:
    """Two classes: the margin over the dual norm. Just above it all break, below it none."""
    weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    model = linear(weights)
    x = torch.randn(30, 5, generator=generator, dtype=torch.float64)
    logits = model(x).detach()
    distances = (logits.amax(1) - logits.amin(1)) / dual_norm(weights[0] - weights[1], ball)
    x = x / distances[:, None]  # without a bias, that puts all at distance 1
    assert run(attack, model, x, ball.with_eps(above)).broken.all()
    assert not run(attack, model, x, ball.with_eps(1 - 1e-9)).broken.any()


@BALLS
@pytest.mark.parametrize("kind", [Pgd, Apgd])
def test_error_of_a_linear_regression_grows_by_the_dual_norm(ball, kind, generator) -> None:
    """|f - y| at the example, plus eps times the dual norm of the weights."""
    weights = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    model, ball = linear(weights), ball.with_eps(0.3)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    error = torch.randn(8, generator=generator, dtype=torch.float64)
    found = run(kind(steps=5, random_start=False), model, x, ball, model(x).detach() + error)
    expected = error.abs() + 0.3 * dual_norm(weights[0], ball)
    torch.testing.assert_close(found.gain, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("options", "ball", "step"),
    [
        ({"steps": 1}, L2(0.5), [-0.3, 0.4]),
        ({"steps": 1}, Linf(0.5), [-0.5, 0.5]),
        ({"steps": 2, "step_size": 0.1, "last_only": True}, Linf(0.5), [-0.1, 0.1]),
        ({"steps": 2, "step_size": 0.1}, Linf(0.5), [-0.5, 0.5]),  # the furthest point
    ],
)
def test_steps_go_where_the_loss_grows_most(options, ball, step) -> None:
    """From the example along a known gradient: a step of 2.5 eps is put back on the ball."""
    model = linear(torch.tensor([[3.0, -4.0], [0.0, 0.0]]))
    x = torch.tensor([[2.0, 0.5]])  # class 0 by 4
    found = run(Pgd(random_start=False, **options), model, x, ball)
    torch.testing.assert_close(found.inputs, x + torch.tensor([step]))


@pytest.mark.parametrize(
    ("attack", "answers"),
    [
        (Pgd(steps=6, restarts=3), 8),
        (Pgd(steps=6, restarts=3, last_only=True), 7),
        (Pgd(steps=6, restarts=3, normalize=False), 7),
        (Apgd(steps=6, restarts=3), 7),
    ],
)
def test_what_an_example_costs(attack, answers) -> None:
    """One that cannot be broken: for each restart an answer and a gradient for each step, and an
    answer for the last iterate and for the furthest point, which only PGD tries; and the first and
    the last answer. One that breaks at once: one answer in between."""
    x = torch.tensor([[100.0, 0.0], [1e-6, 1e4]])
    found = run(attack, linear(SIDES), x, Linf(1.0))
    assert found.broken.tolist() == [False, True]
    assert int(found.forwards[0]) == 1 + 3 * answers + 1
    assert int(found.backwards[0]) == 3 * 6
    if not getattr(attack, "last_only", False):
        assert int(found.forwards[1]) <= 1 + 2 + 1
        assert int(found.backwards[1]) <= 2


@pytest.mark.parametrize(("classes", "ascents"), [(2, 1), (3, 3), (9, 4)])
def test_targets_cost_an_ascent_each_and_one_answer(classes, ascents) -> None:
    """The answer at the example, which ranks the classes. A single wrong class is no target."""
    model, x = linear(torch.eye(classes)), 100 * torch.eye(classes)[:1]
    found = run(Pgd(steps=6, targets=3), model, x, Linf(1.0))
    assert found.forwards.tolist() == [1 + 8 * ascents + 1 + 1]
    assert found.backwards.tolist() == [6 * ascents]


def shattered(net: Callable[[Tensor], Tensor]) -> nn.Module:
    """The same answers as a net, and no gradient."""
    return Function(lambda x: net(x).detach())


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
    net, x, ball = random_net(4), torch.randn(60, 4, generator=generator), L2(0.2)
    expected, found = run(exact, net, x, ball), run(replaced(net), shattered(net), x, ball)
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.forwards, expected.forwards)
    assert not found.backwards.any()
    assert found.accuracy < run(exact, shattered(net), x, ball).accuracy


@pytest.mark.parametrize("regression", [False, True])
def test_bpda_is_the_networks_jacobian_at_the_defended_answer(regression, generator) -> None:
    """J_network(x)^T dloss/doutputs, the loss being taken at the outputs of the defended model."""
    network, other = (random_net(4, seed=seed).double() for seed in range(2))
    y, loss = torch.tensor([0, 1, 2, 0, 1]), cross_entropy
    if regression:
        for net in (network, other):
            net.append(nn.Linear(3, 1).double()).append(nn.Flatten(0)).eval()
        y = torch.rand(5, generator=generator, dtype=torch.float64)
        loss = loss_for("margin", y)
    defended, rows = shattered(other), torch.tensor([3, 1, 4])
    x = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    climbed = substitute_gradient(Target(defended, y), loss, network, straight_through=True)
    answer = climbed(x[rows], rows)
    assert torch.equal(answer.outputs, defended(x[rows]))
    torch.testing.assert_close(answer.value, loss(defended(x[rows]), y[rows]))
    for gradient, row in zip(answer.gradient, rows.tolist(), strict=True):
        outputs = defended(x[[row]]).requires_grad_()
        (pull,) = torch.autograd.grad(loss(outputs, y[[row]]).sum(), outputs)
        jacobian = torch.autograd.functional.jacobian(lambda point: network(point[None])[0], x[row])
        torch.testing.assert_close(gradient, torch.tensordot(pull[0], jacobian, pull[0].dim()))


def test_raw_steps_are_as_long_as_the_gradient() -> None:
    """Of the margin of two classes along the first axis, whose gradient has the length 2."""
    x = torch.tensor([[3.0, 0.0]])
    for normalize, length in ((True, 1.0), (False, 2.0)):
        steps = {"steps": 1, "step_size": 0.2, "random_start": False, "last_only": True}
        attack = Pgd(normalize=normalize, **steps)
        found = attack(linear(SIDES), x, torch.tensor([0]), L2(5.0), generator=torch.Generator())
        assert found.distance.item() == pytest.approx(length)


def test_last_only_forgets_what_it_met_on_the_way() -> None:
    """The paper's protocol misses it, ours does not."""
    # Wrong only where the first feature is between 0.45 and 0.55.
    gate = Function(lambda x: torch.eye(2)[((x[:, 0] - 0.5).abs() < 0.05).long()])
    network, x = linear(-SIDES), torch.zeros(3, 2)
    options = {"steps": 10, "step_size": 0.1, "random_start": False}
    ours = run(Bpda(network, **options), gate, x, L2(1.0))
    assert ours.accuracy == 0
    torch.testing.assert_close(ours.inputs[:, 0], torch.full((3,), 0.5))
    paper = Bpda(network, last_only=True, **options)
    missed = run(paper, gate, x, L2(1.0))
    assert missed.accuracy == 1
    assert missed.forwards.tolist() == [1 + 11 + 1] * 3
    assert run(paper, gate, x, L2(0.5)).accuracy == 0  # ends at 0.5


def test_metric_attack_finds_the_top_singular_direction(generator) -> None:
    """Around 0, the embedding x -> A x is moved by at most eps times the norm of A."""
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    matrix = torch.tensor([3.0, 1.0, 0.5, 0.0], dtype=torch.float64)[:, None] * rotation
    attack = MetricAttack(lambda x: x @ matrix.T, steps=100)
    model = shattered(lambda x: (x @ matrix.T).norm(dim=1))
    found = run(attack, model, torch.zeros(5, 4, dtype=torch.float64), L2(0.7))
    largest = 0.7 * 3
    assert bool((found.gain <= largest * (1 + 1e-9)).all())
    assert bool((found.gain > 0.97 * largest).all())


@pytest.mark.parametrize("inner", [Pgd(steps=20), Apgd(steps=20)])
def test_a_source_is_pushed_beyond_its_own_boundary(inner) -> None:
    """The source breaks at distance 0.1, the model at 0.9: a step that stops early is no use."""
    source, model, x = linear(SIDES, bias=1.8), linear(SIDES, bias=0.2), torch.tensor([[1.0, 0.0]])
    assert source(x).argmax(1) == 0
    found = run(Transfer(source, inner), model, x, L2(1.0))
    assert found.accuracy == 0
    assert found.forwards.tolist() == [3]  # clean, the result, and the final check
    assert found.backwards.tolist() == [0]
    assert run(Transfer(source, inner), model, x, L2(0.89)).accuracy == 1
    wrong_itself, x = linear(SIDES, bias=9.0), torch.tensor([[0.5, 0.0]])
    assert wrong_itself(x).argmax(1) == 1
    assert run(Transfer(wrong_itself, inner), linear(SIDES), x, L2(0.6)).accuracy == 0


def test_more_starts_find_more_and_ask_survivors_only(generator) -> None:
    """Noise on the source as inner attack: every start is another chance."""
    net, source, x = random_net(3), linear(torch.eye(3)), torch.rand(100, 3, generator=generator)
    one, ten = (
        run(Transfer(source, RandomNoise(2), starts=starts), net, x, Linf(0.15))
        for starts in (1, 10)
    )
    assert ten.accuracy < one.accuracy < 1
    assert bool((ten.broken | ~one.broken).all())
    assert ten.forwards[~ten.broken].eq(12).all()
    assert ten.forwards[one.broken].eq(3).all()


def test_non_adaptive_regression(generator) -> None:
    """The network's error is maximized, the model's is what that happens to give."""
    network, model = (linear(torch.tensor([weights])) for weights in ([2.0, 1.0], [0.0, 3.0]))
    x = torch.rand(6, 2, generator=generator)
    # below the network's values, so that the ascent has a side to start on
    y = torch.minimum(model(x), network(x) - 0.1).detach()
    attack = Transfer(network, Pgd(steps=50, random_start=False))
    step = 0.5 * torch.tensor([2.0, 1.0]) / 5**0.5
    torch.testing.assert_close(run(attack, model, x, L2(0.5), y).inputs, x + step)


@pytest.mark.parametrize("starts", [1, 2])
def test_an_inner_attack_that_fails_once_does_no_harm(starts) -> None:
    """It finds nothing but NaN the first time, and something the second."""
    net, x, found = linear(SIDES), torch.tensor([[0.5, 0.0]]), iter([torch.nan, -0.1])
    erratic = Scripted(lambda target, x, ball: torch.full_like(x, next(found)))
    result = run(Transfer(net, erratic, starts), net, x, Linf(1.0))
    assert result.broken.tolist() == [starts == 2]
    assert torch.equal(result.inputs, x) == (starts == 1)


def test_embeddings_and_sources_of_the_wrong_shape_are_refused(generator) -> None:
    net, x = random_net(4), torch.rand(3, 4, generator=generator)
    with pytest.raises(InputError, match=r"metric.*\(3, d\).*\(3,\)"):
        run(MetricAttack(lambda x: x.sum(1)), net, x, L2(0.1))
    values = nn.Sequential(net, nn.Linear(3, 1), nn.Flatten(0)).eval()
    with pytest.raises(InputError, match=r"source.*\(3,\).*\(3, 3\)"):
        run(Transfer(net), values, x, L2(1.0))


def test_checkpoints_are_the_published_ones() -> None:
    assert list(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert list(checkpoints(100).values()) == [22, 19, 16, 13, 10, 7, 6, 6]
    for steps in (1, 2, 3, 10, 37):
        found = checkpoints(steps)
        assert max(found) <= steps
        assert sum(found.values()) == max(found)
        assert min(found.values()) > 0


def transcribed(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, order: int
) -> list[Tensor]:
    """Algorithm 1 of Croce and Hein (2020) for one example, with all history in lists."""

    def f(point: Tensor) -> Tensor:
        return ((model(point[None])[0] - y) ** 2).squeeze()

    def gradient(point: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(f, point)

    def normalized(g: Tensor) -> Tensor:
        return g / g.norm() if order == 2 else g.sign()

    def project(point: Tensor) -> Tensor:
        step = point - x
        if order == 2:
            return x + step * min(1.0, eps / float(step.norm()))
        return x + step.clamp(-eps, eps)

    w, p = [0], [0.0, 0.22]
    while p[-1] <= 1:
        w.append(math.ceil(round(p[-1] * steps, 9)))
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    eta = 2 * eps
    x_max, f_max = x, float(f(x))
    points, values, tried = [x], [f_max], [x]
    eta_at, f_max_at = {0: eta}, {0: f_max}
    for k in range(steps):
        if k in w[1:]:
            last = max(mark for mark in w if mark < k)
            eta_at[k], f_max_at[k] = eta, f_max
            rises = sum(values[i + 1] > values[i] for i in range(last, k))
            stuck = eta_at[last] == eta_at[k] and f_max_at[last] == f_max_at[k]
            if rises < 0.75 * (k - last) or stuck:
                eta /= 2
                points[k], values[k] = x_max, f_max
        new = project(points[k] + eta * normalized(gradient(points[k])))
        if k > 0:
            inertia = points[k] - points[k - 1]
            new = project(points[k] + 0.75 * (new - points[k]) + 0.25 * inertia)
        tried.append(new)
        points.append(new)
        values.append(float(f(new)))
        if values[-1] > f_max:
            x_max, f_max = new, values[-1]
    return tried


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize("steps", [1, 2, 9, 30])
def test_same_path_as_the_pseudo_code(kind, steps, generator) -> None:
    weights = torch.randn(10, 3, generator=generator, dtype=torch.float64)
    hills = Function(lambda x: (2 * x @ weights.T).sin().sum(1) + x.square().sum(1))
    for x in torch.randn(3, 3, generator=generator, dtype=torch.float64):
        model, y = Recorder(hills), torch.zeros((), dtype=torch.float64)
        run(Apgd(steps=steps, random_start=False), model, x[None], kind(1.0), y[None])
        found = torch.cat(model.asked)[1:-1]  # without the example itself, and the final check
        expected = transcribed(model, x, y, 1.0, steps, 2 if kind is L2 else 0)
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ball", [L2(0.25, (0.0, 1.0)), Linf(0.08, (0.0, 1.0))])
@pytest.mark.parametrize(("loss", "theirs"), [("cross_entropy", "ce"), ("dlr", "dlr")])
def test_as_strong_as_the_authors_program(ball, loss, theirs, generator) -> None:
    base = pytest.importorskip("pyautoattack.autopgd_base", reason="needs the extra 'attacks'")
    x = torch.rand(150, 20, generator=generator)
    norm = {"l2": "L2", "linf": "Linf"}[ball.norm]
    for seed in (0, 3):  # where no gradient is zero, of which the program warns
        net = random_net(20, 4, seed).requires_grad_(False)
        program = base.APGDAttack(
            net, n_iter=30, norm=norm, n_restarts=1, eps=ball.eps, seed=1, loss=theirs, device="cpu"
        )
        y = net(x).argmax(1)
        expected = float((net(program.perturb(x, y)).argmax(1) == y).double().mean())
        found = run(Apgd(steps=30, loss=loss), net, x, ball, seed=1).accuracy
        assert abs(found - expected) <= 0.02


def test_step_sizes_belong_to_each_example(generator) -> None:
    """An example has the same result alone and in a batch."""
    net = random_net(20, 4).double()
    x = torch.rand(8, 20, generator=generator, dtype=torch.float64)
    attack = Apgd(steps=30, random_start=False)
    together = run(attack, net, x, L2(0.4))
    assert 0 < together.accuracy < 1
    for row in range(len(x)):
        alone = run(attack, net, x[[row]], L2(0.4))
        # batches of other sizes are summed in another order, and steps carry that on
        torch.testing.assert_close(alone.inputs[0], together.inputs[row], rtol=1e-4, atol=1e-5)
        assert alone.forwards[0] == together.forwards[row]


def test_targets_in_double_precision_leave_inputs_as_they_are(generator) -> None:
    """As they come from NumPy, for a model that insists on its own precision."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).eval().requires_grad_(False)
    x, y = torch.rand(4, 3, generator=generator), torch.zeros(4, dtype=torch.float64)
    found = run(Apgd(steps=12, random_start=False), model, x, L2(0.5), y)
    assert found.inputs.dtype == torch.float32
    expected = model(x).abs() + 0.5 * model[0].weight.norm()
    torch.testing.assert_close(found.gain, expected.double(), rtol=1e-4, atol=1e-5)
