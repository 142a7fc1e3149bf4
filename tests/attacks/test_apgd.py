"""Auto-PGD against a plain transcription of its pseudo-code, PGD and the authors' own program."""

from __future__ import annotations

import math

import pytest
import torch
from attacks.linear_models import Function, Recorder, random_net, run
from torch import Tensor, nn

from otad.attacks.pgd import Apgd, checkpoints
from otad.threat import L2, Linf


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


BALLS = pytest.mark.parametrize(
    "ball", [L2(0.25, (0.0, 1.0)), Linf(0.08, (0.0, 1.0))], ids=lambda ball: ball.norm
)


@BALLS
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
