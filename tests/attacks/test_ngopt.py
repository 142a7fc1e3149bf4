"""NGOpt on the Carlini-Wagner loss: nevergrad's own candidates, one batch a step, closed forms."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from attacks.linear_models import (
    DUAL,
    AbstainsAbove,
    Linear,
    Recorder,
    assert_legal,
    global_randomness,
    halving_ball,
    inner_points,
)
from torch import Tensor

from otad.attacks import L2, Linf, LpBall
from otad.attacks.ngopt import NgOpt
from otad.attacks.optimizers import SearchSettings, optimizers
from otad.errors import InputError, MissingExtraError

nevergrad = pytest.importorskip("nevergrad", reason="needs the extra attacks")


@pytest.mark.parametrize(("dimension", "chosen"), [(3, "CMA"), (50, "MetaModelOnePlusOne")])
def test_the_candidates_are_those_of_ngopt_itself(dimension: int, chosen: str) -> None:
    space = nevergrad.p.Array(shape=(dimension,)).set_mutation(sigma=0.2)
    space.random_state = np.random.RandomState(5)
    theirs = nevergrad.optimizers.NGOpt(space, budget=850)
    assert theirs.optim.name == chosen
    with optimizers(SearchSettings(dimension, 850, 0.2), [5]) as ours:
        for _ in range(70):
            candidate, own = theirs.ask(), ours.ask([0])
            np.testing.assert_array_equal(candidate.value, own[0])
            loss = float(((candidate.value - 0.3) ** 2).sum())
            theirs.tell(candidate, loss)
            ours.tell([0], [loss])


def test_several_processes_find_what_one_finds() -> None:
    x = inner_points(5, (64,))
    model = Linear((64,))
    y = model(x).argmax(1)
    results = [
        NgOpt(budget=12, processes=processes)(
            model, x, y, L2(0.15), generator=torch.Generator().manual_seed(3)
        )
        for processes in (1, 2)
    ]
    assert torch.equal(results[0].inputs, results[1].inputs)
    assert torch.equal(results[0].forwards, results[1].forwards)


@pytest.mark.parametrize("kind", [L2, Linf])
def test_breaks_what_can_be_broken_with_ease_and_nothing_that_cannot(
    kind: type[LpBall], generator: torch.Generator
) -> None:
    model, x = Linear((12,)), inner_points(30, (12,))
    y, radius = model(x).argmax(1), model.radius(x, DUAL[kind.norm])
    ball = halving_ball(kind, model, x, bounds=(0.0, 1.0))
    result = NgOpt(budget=80)(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert int((radius > ball.eps).sum()) > 2
    assert bool(result.broken[radius < 0.5 * ball.eps].all())
    assert not bool(result.broken[radius > ball.eps].any())
    assert int(result.forwards.max()) == 80 + 2
    assert int(result.backwards.max()) == 0


def test_the_model_sees_one_batch_a_step_and_every_query_is_counted(
    generator: torch.Generator,
) -> None:
    x = inner_points(12, (64,))
    model = Recorder(Linear((64,)))
    y = model(x).argmax(1)
    model.asked.clear()
    assert float(torch.cdist(x, x).fill_diagonal_(torch.inf).amin()) > 2 * 0.15
    result = NgOpt(budget=15)(model, x, y, L2(0.15), generator=generator)
    assert len(model.asked) == 15 + 2
    assert torch.equal(result.forwards, model.counts(x))


def test_the_loss_is_that_of_carlini_and_wagner() -> None:
    """By hand: margins -1 and 3, steps of squared length 5 and 0.25."""
    outputs = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 4.0]])
    step = torch.tensor([[1.0, 2.0], [0.0, 0.5]])
    attack = NgOpt(weight=3.0, confidence=2.0)
    assert attack._losses(outputs, torch.tensor([1, 1]), step) == [3 * (2 + 1) + 5, 0.25]
    assert attack._losses(torch.tensor([3.0]), torch.tensor([5.5]), step[:1]) == [-2.5]


def test_units_and_immutable_features_count_in_a_regression(generator: torch.Generator) -> None:
    model, x = Linear((6,), outputs=1), inner_points(2, (6,))
    scale = torch.tensor([1.0, 10.0, 0.1, 2.0, 1.0, 5.0])
    mutable = torch.arange(6) != 1
    ball = L2(0.5, None, scale, mutable)
    largest = 0.5 * float((model.weight.detach() * scale * mutable).norm())
    result = NgOpt(budget=100)(model, x, model(x).detach(), ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert torch.equal(result.inputs[:, 1], x[:, 1])
    assert 0.7 * largest < float(result.gain.min())
    assert float(result.gain.max()) <= 1.001 * largest


def test_an_abstention_is_a_success(generator: torch.Generator) -> None:
    x, y = inner_points(3, (5,)), torch.zeros(3, dtype=torch.int64)
    result = NgOpt(budget=200)(AbstainsAbove(0.6), x, y, Linf(0.2), generator=generator)
    assert bool(result.abstained.all())


def test_all_randomness_comes_from_the_generator_and_none_leaks() -> None:
    model, x = Linear((6,)), inner_points(5, (6,))
    y = model(x).argmax(1)

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return NgOpt(budget=10)(model, x, y, L2(0.1), generator=generator).inputs

    before = global_randomness()
    first = attacked(3)
    assert global_randomness() == before
    np.random.rand()  # the global state plays no part
    assert torch.equal(attacked(3), first)
    assert not torch.equal(attacked(4), first)


def test_where_nothing_can_change_nothing_does(generator: torch.Generator) -> None:
    model, x = Linear((4,)), inner_points(3, (4,))
    ball = L2(1.0, mutable=torch.zeros(4, dtype=torch.bool))
    result = NgOpt()(model, x, model(x).argmax(1), ball, generator=generator)
    assert torch.equal(result.inputs, x)


def test_settings_are_checked() -> None:
    for wrong in ({"budget": 0}, {"sigma": 0.0}, {"weight": -1.0}, {"confidence": -0.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            NgOpt(**wrong)  # type: ignore[arg-type]


def test_without_the_library_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    model, x = Linear((4,)), inner_points(2, (4,))
    with pytest.raises(MissingExtraError, match=r"otad\[attacks\]"):
        NgOpt()(model, x, model(x).argmax(1), L2(0.1), generator=generator)


def test_permuted_images_are_searched_as_well() -> None:
    model, x = Linear((2, 3, 3)), inner_points(4, (2, 3, 3))
    permuted = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    y, ball = model(x).argmax(1), halving_ball(L2, model, x)
    first, second = (
        NgOpt(budget=40)(model, inputs, y, ball, generator=torch.Generator().manual_seed(0))
        for inputs in (x, permuted)
    )
    assert float(first.distance.max()) > 0
    assert torch.equal(first.inputs, second.inputs)
