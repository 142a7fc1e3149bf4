"""Attacks without gradients: closed forms, counts, randomness, refusals, NGOpt's candidates."""

from __future__ import annotations

import math
import multiprocessing
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from attacks import linear_models as models
from attacks.linear_models import Function, Linear, Recorder, inner_points, run
from torch import Tensor

from otad.attacks import L2, AutoAttackSuite, Linf, NgOpt, Pixle, RandomNoise, RandomSearch, Square
from otad.attacks.ngopt import _losses, _Optimizers
from otad.attacks.random_search import HALVED_AFTER, bumps
from otad.errors import InputError, MissingExtraError

pytest.importorskip("pyautoattack", reason="needs the extra attacks")
nevergrad = pytest.importorskip("nevergrad", reason="needs the extra attacks")
VECTOR, IMAGE, SMALL = (12,), (1, 10, 10), (1, 5, 7)
UNIT = (0.0, 1.0)
EVERYTHING = Linf(1.0, UNIT)  # no image of the bounds is outside
FEW_PATCHES = Pixle(restarts=4, max_iterations=5)


@pytest.mark.parametrize("kind", [L2, Linf])
@pytest.mark.parametrize(
    ("attack", "queries", "shape", "share"),
    [
        (RandomSearch(400), 400, VECTOR, 0.9),
        (RandomSearch(400), 400, SMALL, 0.9),
        (Square(queries=150), 150, IMAGE, 0.3),
        (NgOpt(budget=80), 80, VECTOR, 0.5),
    ],
)
def test_breaks_all_it_easily_can_and_nothing_else(attack, queries, shape, share, kind) -> None:
    model, x = Linear(shape), inner_points(28, shape)
    radius = model.radius(x, models.DUAL[kind.norm])
    ball = models.halving_ball(kind, model, x, bounds=UNIT)
    result = run(attack, model, x, ball)
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
        (Square(queries=25), IMAGE, 25),
        (FEW_PATCHES, (1, 8, 8), 4 * 5 + 1),  # and the image itself
    ],
)
def test_each_query_is_counted_for_its_example(attack, shape, batches) -> None:
    x = inner_points(12, shape)
    model = Recorder(Linear(shape))
    apart = torch.cdist(x.flatten(1), x.flatten(1)).fill_diagonal_(torch.inf).amin()
    assert float(apart) > 2 * 0.15  # the nearest example is the one that was attacked
    result = run(attack, model, x, L2(0.15, UNIT), model.model(x).argmax(1))
    assert len(model.asked) == batches + 2
    nearest = torch.cdist(torch.cat(model.asked).flatten(1), x.flatten(1)).argmin(1)
    assert torch.equal(result.forwards, nearest.bincount(minlength=12))
    assert int(result.backwards.max()) == 0


SCALE = torch.tensor([1.0, 10.0, 0.1, 2.0, 1.0, 5.0])
LIMITS = {"scale": SCALE, "mutable": torch.arange(6) != 1}


@pytest.mark.parametrize(
    ("attack", "shape", "ball", "share"),
    [
        (RandomSearch(300), (6,), L2(0.2, **LIMITS), 0.95),
        (RandomSearch(300), (6,), Linf(0.2, **LIMITS), 0.95),
        (NgOpt(budget=100), (6,), L2(0.2, **LIMITS), 0.7),
        *(
            (attack, IMAGE, ball, share)
            for attack, share in ((Square(queries=200), 0.3), (Pixle(), 0.0))
            for ball in (L2(0.3, UNIT), Linf(0.03, UNIT))
        ),
    ],
)
def test_the_error_of_a_linear_regression_grows_within_the_ball(attack, shape, ball, share) -> None:
    """By at most eps times the dual norm of scale * weight, over the features that can change."""
    model, x = Linear(shape, outputs=1), inner_points(3, shape)
    slopes = model.weight.detach()[0]
    if ball.scale is not None:
        slopes = (slopes * ball.scale)[ball.mutable]
        fixed = replace(ball, mutable=torch.zeros(6, dtype=torch.bool))
        assert torch.equal(run(attack, model, x, fixed).inputs, x)
    largest = ball.eps * float(torch.linalg.vector_norm(slopes, models.DUAL[ball.norm]))
    result = run(attack, model, x, ball)
    models.assert_legal(result.inputs, x, ball)
    assert share * largest < float(result.gain.min())
    assert float(result.gain.max()) <= 1.001 * largest
    assert not bool(result.broken.any())


@pytest.mark.parametrize(
    ("attack", "shape"),
    [
        (RandomSearch(), (5,)),
        (NgOpt(budget=200), (5,)),
        (Square(queries=150), IMAGE),
        (Pixle((1.0, 1.0), (1.0, 1.0), restarts=5), (1, 4, 4)),
    ],
)
def test_an_abstention_is_a_success(attack, shape) -> None:
    x, y = inner_points(3, shape), torch.zeros(3, dtype=torch.int64)
    x.flatten(1)[:, 0] = 0.9  # a bright pixel to copy
    level = float(x.flatten(1).mean(1).max()) + 0.02
    result = run(attack, models.abstains_above(level), x, Linf(0.5, UNIT), y)
    assert bool(result.abstained.all())
    assert bool(result.broken.all())


@pytest.mark.parametrize(
    ("attack", "shape"),
    [
        (RandomSearch(20), (6,)),
        (NgOpt(budget=10), (6,)),
        (Square(queries=30), IMAGE),
        (FEW_PATCHES, (3, 9, 7)),
        (AutoAttackSuite("custom", ("apgd-ce",)), IMAGE),
    ],
)
def test_all_randomness_comes_from_the_generator_and_none_leaks(attack, shape) -> None:
    model, x, ball = Linear(shape), inner_points(5, shape), L2(0.2, UNIT)
    before = models.global_randomness()
    first = run(attack, model, x, ball, seed=3).inputs
    assert models.global_randomness() == before
    torch.rand(1)  # the global state plays no part
    assert torch.equal(run(attack, model, x, ball, seed=3).inputs, first)
    assert not torch.equal(run(attack, model, x, ball, seed=4).inputs, first)


@pytest.mark.parametrize("attack", [NgOpt(budget=8), RandomSearch(20), FEW_PATCHES])
def test_permuted_images_give_the_same_result(attack) -> None:
    """As they come from arrays (rows, height, width, channels)."""
    x = inner_points(3, (4, 5, 2)).permute(0, 3, 1, 2)
    assert not x.is_contiguous()
    model = Linear((2, 4, 5))
    found, expected = (run(attack, model, one, L2(0.2)) for one in (x, x.contiguous()))
    assert torch.equal(found.inputs, expected.inputs)
    assert not torch.equal(found.inputs, x)


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
        (AutoAttackSuite(), (1, 14, 14), L2(0.1, UNIT), r"autoattack.*14 x 14"),
        (AutoAttackSuite(), (1, 4, 4), L2(0.1, UNIT), r"autoattack.*4 x 4"),
    ],
)
def test_inputs_and_threats_that_do_not_fit(attack, shape, ball, message) -> None:
    with pytest.raises(InputError, match=message):
        run(attack, Linear(shape), inner_points(2, shape), ball)


@pytest.mark.parametrize(
    ("attack", "module"),
    [
        (AutoAttackSuite(), "pyautoattack"),
        (NgOpt(), "nevergrad"),
    ],
)
def test_without_the_library_the_extra_is_named(attack, module, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"otad\[attacks\]"):
        run(attack, Linear(IMAGE), inner_points(2, IMAGE), L2(0.1, UNIT))


@pytest.mark.parametrize(("dimension", "chosen"), [(3, "CMA"), (50, "MetaModelOnePlusOne")])
def test_the_candidates_are_those_of_ngopt_itself(dimension, chosen) -> None:
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=0.2)
    space.random_state = np.random.RandomState(5)
    theirs = nevergrad.optimizers.NGOpt(space, budget=850)
    assert theirs.optim.name == chosen
    ours = _Optimizers((dimension, 850, 0.2), {0: 5})
    for _ in range(70):
        candidate, own = theirs.ask(), ours.ask([0])
        np.testing.assert_array_equal(candidate.value, own[0])
        loss = float(((candidate.value - 0.3) ** 2).sum())
        theirs.tell(candidate, loss)
        ours.tell({0: loss})


@pytest.mark.usefixtures("fork_server")
def test_several_processes_find_what_one_finds(monkeypatch) -> None:
    server = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": server}.__getitem__)
    model, x = Linear((64,)), inner_points(3, (64,))
    one, two = (run(NgOpt(6, processes=count), model, x, L2(0.15)) for count in (1, 2))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.forwards, two.forwards)


def test_the_loss_is_that_of_carlini_and_wagner() -> None:
    """By hand: margins 1 and 3 either way, steps of squared length 5 and 0.25."""
    outputs = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 4.0]])
    step = torch.tensor([[1.0, 2.0], [0.0, 0.5]])
    assert _losses(outputs, torch.tensor([0, 1]), step, 10.0) == [5.0, 0.25]
    assert _losses(outputs, torch.tensor([1, 2]), step, 10.0) == [10 * 1 + 5, 10 * 3 + 0.25]
    assert _losses(outputs, torch.tensor([1, 2]), step, 0.5) == [0.5 * 1 + 5, 0.5 * 3 + 0.25]
    assert _losses(torch.tensor([3.0]), torch.tensor([5.5]), step[:1], 10.0) == [-2.5]


@pytest.mark.parametrize("draws", [1, 5])
def test_half_of_the_noise_is_on_the_surface_half_within(draws) -> None:
    model = Recorder(Function(lambda x: x.norm(dim=1)))
    found = run(RandomNoise(draws), model, torch.zeros(50, 3), L2(2.0), torch.zeros(50))
    lengths = torch.stack(model.asked[1:-1]).norm(dim=2)
    assert len(lengths) == draws
    on_surface = lengths > 2 * (1 - 1e-5)
    assert on_surface[::2].all()
    assert not on_surface[1::2].any()
    assert found.forwards.tolist() == [draws + 2] * 50
    torch.testing.assert_close(found.gain, lengths.amax(0))


def test_success_rate_of_noise_is_the_share_of_the_ball() -> None:
    """In the plane, x_0 > 1/2 is 1/3 of the unit circle: the surface draw wins that often."""
    model = Function(lambda x: torch.stack([torch.full_like(x[:, 0], 0.5), x[:, 0]], 1))
    x = torch.zeros(20000, 2)
    assert 1 - run(RandomNoise(1), model, x, L2(1.0)).accuracy == pytest.approx(1 / 3, abs=0.015)
    # and 1/3 - sqrt(3) / (4 pi) of the disk: two draws, one of each
    disk = 1 / 3 - math.sqrt(3) / (4 * math.pi)
    twice = run(RandomNoise(2), model, x, L2(1.0))
    assert twice.accuracy == pytest.approx(2 / 3 * (1 - disk), abs=0.015)
    assert int(twice.forwards.min()) == 3  # broken by the first draw
    assert int(twice.forwards.max()) == 4


def test_bumps_are_sums_of_nested_squares() -> None:
    for side in (1, 2, 3, 7, 8):
        expected = torch.zeros(side, side)
        for rows, first, sign in ((side // 2, 0, 1), (side - side // 2, side // 2, -1)):
            bump = torch.zeros(rows, side)
            for k in range(side // 2 + 1):
                top, start = max(0, rows // 2 - k), max(0, side // 2 - k)
                bump[top : rows // 2 + k + 1, start : side // 2 + k + 1] += 1 / (k + 1) ** 2
            expected[first : first + rows] = sign * bump / bump.norm().clamp_min(1e-9)
        found = bumps(side, torch.device("cpu"))
        torch.testing.assert_close(found, expected / expected.norm())


@pytest.mark.parametrize("ball", [L2(0.1, UNIT), Linf(0.1, UNIT)], ids=lambda ball: ball.norm)
@pytest.mark.parametrize("shape", [(3, 14, 11), (1, 2, 4)])
def test_square_changes_windows_of_the_best_image(ball, shape) -> None:
    model = Recorder(Function(lambda x: x.new_tensor([1.0, 0.0]).repeat(len(x), 1)))
    x = torch.full((4, *shape), 0.5)
    run(Square(queries=300), model, x, ball)
    first, *others = model.asked[2:-1]  # nothing is better than the first change
    assert len(others) == 299
    for query, asked in enumerate(others, 1):
        area = 0.8 * math.prod(shape[1:]) / 2 ** sum(query > 0.03 * k for k in HALVED_AFTER)
        side = round(area**0.5)
        side = min(max(1, side) if ball.norm == "linf" else max(3, side | 1), *shape[1:])
        step, moved = asked - x, (asked != first).any(1)
        if ball.norm == "linf":
            torch.testing.assert_close(step.abs(), torch.full_like(step, ball.eps))
            for image in moved:
                places = image.nonzero()
                assert not len(places) or int((places.amax(0) - places.amin(0)).max()) < side
        else:
            assert ball.distance(asked, x).tolist() == pytest.approx([0.1] * 4, rel=1e-3)
            assert int((asked - first).abs().gt(1e-6).any(1).flatten(1).sum(1).max()) <= 2 * side**2


def test_an_image_is_rearranged_and_nothing_else() -> None:
    shape = (3, 9, 7)
    x = inner_points(20, shape)
    attack = Pixle((0.1, 0.4), (0.1, 0.4), restarts=4, max_iterations=5)
    result = run(attack, Linear(shape), x, EVERYTHING)
    moved = (result.inputs != x).any(1).flatten(1).sum(1)
    # each pixel of an image, all channels together, is one of the original's
    same = (result.inputs.flatten(2)[:, :, :, None] == x.flatten(2)[:, :, None, :]).all(1)
    assert bool(same.any(2).all())
    # Every restart writes at most one patch, of 4 x 3 pixels here, over what was there before.
    assert 1 < int(moved.max()) <= 4 * 4 * 3
    assert bool(result.broken.any())


def test_each_restart_of_pixle_continues_from_the_best_of_the_last() -> None:
    """With one try a restart and a patch of one pixel, an image differs from the best so far in
    one pixel at most."""
    model, x = Recorder(Linear((1, 6, 6), outputs=1)), inner_points(1, (1, 6, 6))
    y = model.model(x).detach()
    run(Pixle(restarts=40, max_iterations=1), model, x, EVERYTHING, y)

    def error_of(image: Tensor) -> float:
        return float((model.model(image) - y).detach().abs())

    best = x
    for image in model.asked[2:-1]:
        assert int((image != best).sum()) <= 1
        best = max(best, image, key=error_of)
    assert error_of(best) > 0
