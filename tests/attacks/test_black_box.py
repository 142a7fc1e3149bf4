"""What attacks without gradients have in common: closed forms, counts, randomness, refusals."""

from __future__ import annotations

import sys

import pytest
import torch
from attacks import linear_models as models
from torch import Tensor

from otad.attacks import (
    L2,
    AutoAttackSuite,
    Linf,
    NgOpt,
    Pixle,
    RandomSearch,
    Square,
)
from otad.errors import InputError, MissingExtraError

pytest.importorskip("pyautoattack", reason="needs the extra attacks")
pytest.importorskip("nevergrad", reason="needs the extra attacks")
VECTOR, IMAGE, SMALL = (12,), (1, 10, 10), (1, 5, 7)
UNIT = (0.0, 1.0)
LARGE_PATCHES = Pixle((1.0, 1.0), (1.0, 1.0), restarts=5)


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize(
    ("attack", "queries", "shape", "share"),
    [
        (RandomSearch(400), 400, VECTOR, 0.9),
        (RandomSearch(400), 400, SMALL, 0.9),
        (Square(queries=150), 150, IMAGE, 0.3),
        (Square(queries=150, loss="ce"), 150, IMAGE, 0.3),
        (NgOpt(budget=80), 80, VECTOR, 0.5),
    ],
)
def test_breaks_all_it_easily_can_and_nothing_else(
    attack, queries, shape, share, kind, generator
) -> None:
    model, x = models.Linear(shape), models.inner_points(40, shape)
    y, radius = model(x).argmax(1), model.radius(x, models.DUAL[kind.norm])
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    result = attack(model, x, y, ball, generator=generator)
    models.assert_legal(result.inputs, x, ball)
    assert int((radius < share * ball.eps).sum()) > 5
    assert int((radius > ball.eps).sum()) > 2
    assert bool(result.broken[radius < share * ball.eps].all())
    assert not bool(result.broken[radius > ball.eps].any())
    assert int(result.forwards.max()) == queries + 2  # and the first and last answer
    assert int(result.backwards.max()) == 0


@pytest.mark.parametrize(
    ("attack", "shape", "batches"),
    [
        (RandomSearch(30), (64,), 30),
        (NgOpt(budget=15), (64,), 15),
        (Square(queries=25, restarts=2), IMAGE, 50),
        (Pixle(restarts=4, max_iterations=5), (1, 8, 8), 4 * 5 + 1),  # and the image itself
    ],
)
def test_each_query_is_counted_for_its_example(attack, shape, batches, generator) -> None:
    x = models.inner_points(12, shape)
    model = models.Recorder(models.Linear(shape))
    y = model(x).argmax(1)
    model.asked.clear()
    apart = torch.cdist(x.flatten(1), x.flatten(1)).fill_diagonal_(torch.inf).amin()
    assert float(apart) > 2 * 0.15  # the nearest example is the one that was attacked
    result = attack(model, x, y, L2(0.15, UNIT), generator=generator)
    assert len(model.asked) == batches + 2
    assert torch.equal(result.forwards, model.counts(x))
    assert int(result.backwards.max()) == 0


@pytest.mark.parametrize(
    ("attack", "kind", "share"),
    [(RandomSearch(300), L2, 0.95), (RandomSearch(300), Linf, 0.95), (NgOpt(budget=100), L2, 0.7)],
)
def test_units_and_immutable_features_count_in_a_regression(attack, kind, share, generator) -> None:
    """The largest error of a linear model is eps times the dual norm of scale * weight."""
    model, x = models.Linear((6,), outputs=1), models.inner_points(5, (6,))
    scale = torch.tensor([1.0, 10.0, 0.1, 2.0, 1.0, 5.0])
    mutable = torch.arange(6) != 1
    ball = kind(0.2, None, scale, mutable)
    slopes = (model.weight.detach() * scale * mutable)[0]
    largest = 0.2 * float(torch.linalg.vector_norm(slopes, models.DUAL[ball.norm]))
    result = attack(model, x, model(x).detach(), ball, generator=generator)
    models.assert_legal(result.inputs, x, ball)
    assert torch.equal(result.inputs[:, 1], x[:, 1])
    assert share * largest < float(result.gain.min())
    assert float(result.gain.max()) <= 1.001 * largest
    fixed = kind(1.0, mutable=torch.zeros(6, dtype=torch.bool))
    result = attack(model, x, model(x).detach(), fixed, generator=generator)
    assert torch.equal(result.inputs, x)


@pytest.mark.parametrize("ball", [L2(0.3, UNIT), Linf(0.03, UNIT)], ids=lambda ball: ball.norm)
@pytest.mark.parametrize("attack", [Square(queries=200), Pixle()], ids=lambda attack: attack.name)
def test_the_error_of_a_regression_on_images_grows_within_the_ball(attack, ball, generator) -> None:
    model, x = models.Linear(IMAGE, outputs=1), models.inner_points(8, IMAGE)
    largest = ball.eps * float(
        torch.linalg.vector_norm(model.weight.detach(), models.DUAL[ball.norm])
    )
    result = attack(model, x, model(x).detach(), ball, generator=generator)
    models.assert_legal(result.inputs, x, ball)
    assert (0.3 if isinstance(attack, Square) else 0) * largest < float(result.gain.min())
    assert float(result.gain.max()) <= largest * 1.001
    assert not bool(result.broken.any())


@pytest.mark.parametrize(
    ("attack", "shape"),
    [
        (RandomSearch(), (5,)),
        (NgOpt(budget=200), (5,)),
        (Square(queries=150), IMAGE),
        (Square(queries=150, loss="ce"), IMAGE),
        (LARGE_PATCHES, (1, 4, 4)),
    ],
)
def test_an_abstention_is_a_success(attack, shape, generator) -> None:
    x, y = models.inner_points(3, shape), torch.zeros(3, dtype=torch.int64)
    x.flatten(1)[:, 0] = 0.9  # a bright pixel to copy
    level = float(x.flatten(1).mean(1).max()) + 0.02
    result = attack(models.abstains_above(level), x, y, Linf(0.5, UNIT), generator=generator)
    assert bool(result.abstained.all())
    assert bool(result.broken.all())


@pytest.mark.parametrize(
    ("attack", "shape"),
    [
        (RandomSearch(20), (6,)),
        (NgOpt(budget=10), (6,)),
        (Square(queries=30), IMAGE),
        (Pixle(restarts=4, max_iterations=5), (3, 9, 7)),
        (AutoAttackSuite("custom", ("square",)), IMAGE),
    ],
)
def test_all_randomness_comes_from_the_generator_and_none_leaks(attack, shape) -> None:
    model, x = models.Linear(shape), models.inner_points(5, shape)
    y, ball = model(x).argmax(1), L2(0.2, UNIT)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return attack(model, x, y, ball, generator=generator).inputs

    before = models.global_randomness()
    first = attacked(3)
    assert models.global_randomness() == before
    torch.rand(1)  # the global state plays no part
    assert torch.equal(attacked(3), first)
    assert not torch.equal(attacked(4), first)


@pytest.mark.parametrize(
    ("attack", "shape", "ball", "message"),
    [
        *(
            (attack, shape, ball, rf"{attack.name}.*{message}")
            for attack in (Square(), AutoAttackSuite("custom", ("apgd-ce",)))
            for shape, ball, message in (
                ((5,), Linf(0.1, UNIT), r"images.*\(5,\)"),
                (IMAGE, Linf(0.1), "bounds"),
                (IMAGE, Linf(0.1, UNIT, scale=torch.ones(IMAGE)), "scale"),
                (IMAGE, L2(0.1, UNIT, mutable=torch.ones(IMAGE) > 0), "mutable"),
            )
        ),
        (Pixle(), (5,), Linf(0.1, UNIT), r"pixle.*images.*\(5,\)"),
        (Square(), (1, 14, 14), L2(0.1, UNIT), r"square.*14 x 14"),
        (AutoAttackSuite(), (1, 4, 4), L2(0.1, UNIT), r"autoattack.*4 x 4"),
    ],
)
def test_inputs_and_threats_that_do_not_fit(attack, shape, ball, message, generator) -> None:
    model, x = models.Linear(shape), models.inner_points(2, shape)
    with pytest.raises(InputError, match=message):
        attack(model, x, model(x).argmax(1), ball, generator=generator)


@pytest.mark.parametrize(
    ("attack", "module"),
    [
        (Square(), "pyautoattack.square"),
        (AutoAttackSuite(), "pyautoattack"),
        (NgOpt(), "nevergrad"),
    ],
)
def test_without_the_library_the_extra_is_named(attack, module, monkeypatch, generator) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    model, x = models.Linear(IMAGE), models.inner_points(2, IMAGE)
    with pytest.raises(MissingExtraError, match=r"otad\[attacks\]"):
        attack(model, x, model(x).argmax(1), L2(0.1, UNIT), generator=generator)
