"""Random search: any shape, any ball, classifiers and regressions, against closed forms."""

from __future__ import annotations

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
from otad.attacks.random_search import RandomSearch
from otad.errors import InputError

SHAPES = [(12,), (1, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "bounds"), [(L2, None), (Linf, (0.0, 1.0))])
def test_breaks_nearly_all_that_can_be_broken_and_nothing_that_cannot(
    shape: tuple[int, ...],
    kind: type[LpBall],
    bounds: tuple[float, float] | None,
    generator: torch.Generator,
) -> None:
    model, x = Linear(shape), inner_points(60, shape)
    y, radius = model(x).argmax(1), model.radius(x, DUAL[kind.norm])
    ball = halving_ball(kind, model, x, bounds=bounds)
    result = RandomSearch(queries=400)(model, x, y, ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert bool(result.broken[radius < 0.9 * ball.eps].all())
    assert not bool(result.broken[radius > ball.eps].any())
    assert int((radius > ball.eps).sum()) > 2
    assert int(result.forwards.max()) == 400 + 2
    assert int(result.backwards.max()) == 0


def test_each_query_is_counted_for_its_example(generator: torch.Generator) -> None:
    x = inner_points(10, (64,))
    model = Recorder(Linear((64,)))
    y = model(x).argmax(1)
    model.asked.clear()
    assert float(torch.cdist(x, x).fill_diagonal_(torch.inf).amin()) > 2 * 0.15
    result = RandomSearch(queries=30)(model, x, y, L2(0.15), generator=generator)
    assert torch.equal(result.forwards, model.counts(x))


@pytest.mark.parametrize("kind", [L2, Linf])
def test_units_and_immutable_features_count_in_a_regression(
    kind: type[LpBall], generator: torch.Generator
) -> None:
    """The largest error of a linear model is eps times the dual norm of scale * weight."""
    model, x = Linear((8,), outputs=1), inner_points(5, (8,))
    scale = torch.tensor([1.0, 10.0, 0.1, 2.0, 1.0, 5.0, 1.0, 1.0])
    mutable = torch.arange(8) != 1
    ball = kind(0.2, None, scale, mutable)
    slopes = (model.weight.detach() * scale * mutable)[0]
    largest = 0.2 * float(torch.linalg.vector_norm(slopes, DUAL[ball.norm]))
    result = RandomSearch(queries=300)(model, x, model(x).detach(), ball, generator=generator)
    assert_legal(result.inputs, x, ball)
    assert torch.equal(result.inputs[:, 1], x[:, 1])
    assert 0.95 * largest < float(result.gain.min())
    assert float(result.gain.max()) <= 1.001 * largest


def test_more_queries_never_get_less_far() -> None:
    model, x = Linear((30,), outputs=1), inner_points(6, (30,))
    y = model(x).detach()
    gains = [
        RandomSearch(queries=queries)(
            model, x, y, L2(0.3), generator=torch.Generator().manual_seed(2)
        ).gain
        for queries in (5, 40, 200)
    ]
    assert bool((gains[0] < gains[1]).all())
    assert bool((gains[1] < gains[2]).all())


def test_where_nothing_can_change_nothing_does(generator: torch.Generator) -> None:
    model, x = Linear((4,)), inner_points(3, (4,))
    ball = L2(1.0, mutable=torch.zeros(4, dtype=torch.bool))
    result = RandomSearch()(model, x, model(x).argmax(1), ball, generator=generator)
    assert torch.equal(result.inputs, x)
    assert result.accuracy == 1.0


def test_an_abstention_is_a_success(generator: torch.Generator) -> None:
    x, y = inner_points(6, (5,)), torch.zeros(6, dtype=torch.int64)
    result = RandomSearch()(AbstainsAbove(0.6), x, y, Linf(0.2), generator=generator)
    assert bool(result.abstained.all())


def test_all_randomness_comes_from_the_generator() -> None:
    model, x = Linear((6,)), inner_points(10, (6,))

    def attacked(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        y = model(x).argmax(1)
        return RandomSearch(queries=20)(model, x, y, L2(0.15), generator=generator).inputs

    before = global_randomness()
    first = attacked(3)
    assert global_randomness() == before
    assert torch.equal(attacked(3), first)
    assert not torch.equal(attacked(4), first)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="queries"):
        RandomSearch(queries=1)
