"""AutoAttack by its library: exact on linear models, its warnings kept, no side effects; and other
people's libraries that attack an OTAD module handed to them as it is."""

from __future__ import annotations

import logging
import sys
from functools import partial

import numpy as np
import pytest
import torch
from attacks import linear_models as models
from attacks.linear_models import inner_points, run
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from otad.attacks import L2, AutoAttackSuite, Linf, Square
from otad.attacks.needs import Setting
from otad.errors import InputError
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet

square = pytest.importorskip("pyautoattack.square", reason="needs the extra attacks")
SHAPE, LARGER = (1, 6, 6), (1, 10, 10)
UNIT = (0.0, 1.0)
FAST = AutoAttackSuite("custom", ("apgd-ce",))


@pytest.mark.parametrize(("kind", "part"), [(L2, "apgd-t"), (Linf, "fab-t")])
def test_breaks_a_linear_model_exactly_where_it_can_be_broken(kind, part) -> None:
    model, x = models.Linear(SHAPE, outputs=4), inner_points(15, SHAPE)
    radius = model.radius(x, models.DUAL[kind.norm])
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    result = run(AutoAttackSuite("custom", (part,)), model, x, ball)
    models.assert_legal(result.inputs, x, ball)
    clear = (radius / ball.eps - 1).abs() > 0.03
    assert bool((radius > ball.eps)[clear].any())
    assert torch.equal(result.broken[clear], (radius < ball.eps)[clear])


def test_the_standard_version_runs_in_other_bounds_and_double_precision() -> None:
    linear = models.Linear(SHAPE, outputs=10).double()

    def stretched(x: Tensor) -> Tensor:
        assert x.dtype == torch.float64
        return linear((x + 1) / 2)

    x = inner_points(6, SHAPE).double()
    ball = L2(2.2 * float(linear.radius(x, 2.0).max()), (-1.0, 1.0))  # one unit is two here
    attack = AutoAttackSuite()
    result = run(attack, models.Function(stretched), 2 * x - 1, ball)
    models.assert_legal(result.inputs, 2 * x - 1, ball)
    assert bool(result.broken.all())
    assert attack.remarks == []


def test_queries_are_right_in_total() -> None:
    x, linear = inner_points(7, SHAPE), models.Linear(SHAPE, outputs=3)
    model, attack = models.Recorder(linear), AutoAttackSuite("custom", ("fab", "square"))
    result = run(attack, model, x, L2(0.4, UNIT), linear(x).argmax(1))
    assert int(result.forwards.sum()) == sum(len(batch) for batch in model.asked)
    assert int(result.backwards.sum()) == model.gradients > 0
    assert int(result.forwards.max() - result.forwards.min()) <= 1


def test_too_few_classes_are_reported_and_regressions_refused() -> None:
    model, x = models.Linear(SHAPE), inner_points(4, SHAPE)
    attack = AutoAttackSuite()
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)
    assert run(attack, model, x, ball).accuracy == 0
    assert attack.remarks == [
        "left out, as there are only 2 classes: apgd-t",
        "1 target classes instead of 9, as there are no more",
    ]
    with pytest.raises(InputError, match="2 classes, got apgd-dlr"):
        run(AutoAttackSuite("custom", ("apgd-dlr",)), model, x, ball)
    with pytest.raises(InputError, match=r"autoattack.*regression"):
        run(FAST, models.Linear(SHAPE, outputs=1), x, ball)


def flat(model: nn.Module, x: Tensor) -> Tensor:
    """The same logits in steps: right, and without any slope."""
    return model(x).detach() + 0.0 * x.flatten(1).sum(1, keepdim=True)


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    return logits + 0.1 * torch.randn_like(logits)


def dynamic(model: nn.Module, x: Tensor) -> Tensor:
    """Follows a gradient of its own before it answers."""
    with torch.enable_grad():
        moved = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(moved).sum(), moved)
    return model(x + 0.0 * gradient)


@pytest.mark.parametrize(
    ("answer", "attacks", "expected"),
    [
        (flat, ("apgd-t",), "there are 5 points with zero gradient"),
        (lambda model, x: model(x).detach(), ("apgd-ce",), "the model has no gradient"),
        (noisy, ("apgd-ce",), "randomized defense"),
        (lambda model, x: model(x).softmax(1), ("apgd-ce",), "the output is a probability"),
        (dynamic, ("apgd-ce",), "dynamic defense"),
        (flat, ("apgd-ce", "apgd-t", "square"), "Square Attack has decreased"),
        (lambda model, x: model(x + (0 * x).sqrt()), ("apgd-ce",), "gradients were NaN"),
    ],
)
def test_what_the_library_finds_suspicious_is_reported(answer, attacks, expected) -> None:
    linear, x = models.Linear(SHAPE, outputs=4), inner_points(5, SHAPE)
    y = linear(x).argmax(1)
    ball = L2(3 * float(linear.radius(x, 2.0).max()), UNIT)
    attack = AutoAttackSuite("custom", attacks)
    run(attack, models.Function(partial(answer, linear)), x, ball, y)
    assert any(expected in remark for remark in attack.remarks), attack.remarks


def test_remarks_do_not_stick_to_the_next_model() -> None:
    linear, x = models.Linear(SHAPE, outputs=4), inner_points(5, SHAPE)
    y, ball = linear(x).argmax(1), L2(3 * float(linear.radius(x, 2.0).max()), UNIT)
    run(FAST, models.Function(partial(noisy, linear)), x, ball, y)
    assert FAST.remarks
    run(FAST, linear, x, ball, y)
    assert FAST.remarks == []


def test_abstentions_are_reported() -> None:
    x, y = inner_points(3, SHAPE), torch.zeros(3, dtype=torch.int64)
    run(FAST, models.abstains_above(0.55), x, Linf(0.2, UNIT), y)
    (remark,) = FAST.remarks
    assert remark.startswith("the model abstained on ")


def test_nothing_is_left_behind() -> None:
    model, x = models.Linear(SHAPE, outputs=4), inner_points(3, SHAPE)
    ball = L2(2 * float(model.radius(x, 2.0).max()), UNIT)

    def tracer(*_: object) -> None:
        return None

    outer = sys.gettrace()
    sys.settrace(tracer)
    try:
        run(AutoAttackSuite("custom", ("fab-t",)), model, x, ball)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(outer)
    assert model.weight.grad is None
    assert model.weight.requires_grad


BALLS = [L2(0.3, UNIT), Linf(0.03, UNIT)]


@pytest.mark.parametrize(("kind", "eps"), [(L2, 0.8), (Linf, 0.06)])
def test_square_breaks_at_least_as_much_as_that_of_the_library(kind, eps) -> None:
    model, x = models.random_net(inputs=100, classes=4), inner_points(120, LARGER)
    y, ball, counts = model(x).argmax(1), kind(eps, UNIT), []
    for seed in range(2):
        norm = {"l2": "L2", "linf": "Linf"}[ball.norm]
        theirs = square.SquareAttack(model, norm=norm, n_queries=200, eps=eps, seed=seed)
        with torch.no_grad(), torch.random.fork_rng():
            broken = model(theirs.perturb(x, y)).argmax(1) != y
        ours = run(Square(queries=200), model, x, ball, seed=seed).broken
        counts.append((int(ours.sum()), int(broken.sum())))
    own, known = (sum(each) for each in zip(*counts, strict=True))
    assert 20 < known < 220  # neither too easy nor too hard
    assert own > 0.95 * known, counts


def test_one_survivor_is_attacked_alone() -> None:
    model, x = models.Linear(LARGER), inner_points(40, LARGER)
    x = x[model.radius(x, 2.0).argsort()[[0, 1, -1]]]
    ball = L2(float(model.radius(x, 2.0)[-1]) * 0.9, UNIT)
    assert run(Square(queries=40), model, x, ball).broken.tolist() == [True, True, False]


@pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.norm)
def test_other_bounds_are_the_same_attack_in_another_unit(ball) -> None:
    model, x = models.Linear(LARGER).double(), inner_points(12, LARGER).double()
    wide = type(ball)(5 * ball.eps, (-2.0, 3.0))
    attack, stretched = Square(queries=30), models.Function(lambda x: model((x + 2) / 5))
    here, there = run(attack, model, x, ball), run(attack, stretched, 5 * x - 2, wide)
    assert torch.equal(here.broken, there.broken)
    # What is left of eps is a square root, so rounding errors have only half of the digits.
    torch.testing.assert_close((there.inputs + 2) / 5, here.inputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1e-18, 1e18])
@pytest.mark.parametrize("kind", [L2, Linf])
def test_square_attacks_tiny_and_huge_numbers_alike(kind, size) -> None:
    model, x = models.Linear(LARGER), inner_points(40, LARGER)
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    there = kind(size * ball.eps, (0.0, size))
    scaled = models.Function(lambda x: model(x / size))
    counts = [
        int(run(Square(queries=60), *case).broken.sum())
        for case in ((model, x, ball), (scaled, size * x, there))
    ]
    assert 5 < counts[0] < 35
    assert counts[1] == pytest.approx(counts[0], abs=3)


def test_the_sizes_refused_are_those_the_library_fails_on() -> None:
    """Its first l2 step, tried with every size: it raises exactly where we refuse."""

    def judge(units: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones(len(units)), torch.zeros(len(units))

    for height, width in [(n, n) for n in range(1, 33)] + [(28, w) for w in range(24, 36)]:
        engine = square.SquareAttack(None, norm="L2", n_queries=1, eps=0.1)
        engine.margin_and_loss = judge
        x = torch.rand(2, 1, height, width)
        engine.init_hyperparam(x)
        try:
            engine.attack_single_run(x, torch.arange(2))
            works = True
        except (RuntimeError, ZeroDivisionError):
            works = False
        setting = Setting(x.shape[1:], "classification", BALLS[0])
        assert works == (AutoAttackSuite.needs.unmet_in(setting) is None), (height, width)


@pytest.fixture(scope="module")
def case() -> tuple[OTAD, Tensor, Tensor]:
    """A model of 300 digits, and ten others of which it answers some wrong."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    net = fc_resnet((1, 8, 8), 10, blocks=1, bounds=(0.0, 1.0)).train()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(net(x[:300]), y[:300]).backward()
        optimizer.step()
    model = defend(net, x[:300], y[:300], n_neighbors=4)
    answers = model(x[1000:1300]).argmax(1)
    right, wrong = ((answers == y[1000:1300]) == value for value in (True, False))
    rows = 1000 + torch.cat([right.nonzero()[:8, 0], wrong.nonzero()[:2, 0]])
    return model, x[rows], y[rows]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def assert_nearly_legal(found: Tensor, x: Tensor, norm: float, eps: float) -> None:
    """In the ball, up to the single precision the libraries work in, and in [0, 1] exactly."""
    assert float(torch.linalg.vector_norm((found - x).flatten(1), norm, dim=1).max()) <= eps + 1e-5
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1


def test_autoattack_runs_and_its_flags_tell_what_otad_is(case, caplog) -> None:
    """It finds points without gradient (one neighbor has all weight there), and that Square, which
    needs none, breaks what its gradient attacks could not: attacks of other kinds are needed."""
    library = pytest.importorskip("pyautoattack", reason="needs the extra attacks")
    model, x, y = case
    attack = library.AutoAttack(model, norm="L2", eps=1.5, seed=0)
    for part in (attack.apgd, attack.apgd_targeted, attack.fab):
        part.n_iter = 5
    attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = 2
    attack.square.n_queries = 60
    with caplog.at_level(logging.WARNING, "auto-attack"), torch.random.fork_rng():
        found, answers = attack.run_standard_evaluation(x, y)
    assert_nearly_legal(found, x, 2, 1.5)
    assert torch.equal(model(found).argmax(1), answers)
    assert accuracy(model, found, y) < accuracy(model, x, y) == 0.8
    flags = {record.getMessage() for record in caplog.records}
    assert any("points with zero gradient" in flag for flag in flags), flags
    assert any("Square Attack has decreased the robust accuracy" in flag for flag in flags), flags
    for absent in ("randomized", "dynamic", "probability"):
        assert not any(absent in flag for flag in flags)


def test_foolbox_runs(case) -> None:
    foolbox = pytest.importorskip("foolbox", reason="needs the extra clients")
    model, x, y = case
    client = foolbox.PyTorchModel(model, bounds=(0, 1))
    assert torch.equal(client(x), model(x))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        _, (found,), success = foolbox.attacks.L2PGD(steps=10)(client, x, y, epsilons=[1.5])
    assert_nearly_legal(found, x, 2, 1.5)
    assert torch.equal(success[0], model(found).argmax(1) != y)
    assert accuracy(model, found, y) <= accuracy(model, x, y)
    assert bool((found != x).flatten(1).any(1).all())


def test_art_runs(case) -> None:
    pytest.importorskip("art", reason="needs the extra clients")
    classification = pytest.importorskip("art.estimators.classification")
    evasion = pytest.importorskip("art.attacks.evasion")
    model, x, y = case
    client = classification.PyTorchClassifier(
        model, nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0.0, 1.0)
    )
    with torch.no_grad():
        np.testing.assert_array_equal(client.predict(x.numpy()), model(x).numpy())
    before = np.random.get_state()
    np.random.seed(0)
    attack = evasion.SquareAttack(client, eps=0.3, max_iter=25, nb_restarts=1, verbose=False)
    found = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
    np.random.set_state(before)
    assert_nearly_legal(found, x, torch.inf, 0.3)
    assert accuracy(model, found, y) < accuracy(model, x, y)
