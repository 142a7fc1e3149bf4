"""The balls against closed forms, plain NumPy and brute force."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from attacks.linear_models import assert_legal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from otad.errors import InputError
from otad.threat import L2, NORMS, Linf, LpBall

UNIFORM = 0.02  # gap of two distribution functions that 20,000 draws exceed 1 time in a million
BOTH = pytest.mark.parametrize("kind", [L2, Linf])


@st.composite
def balls_and_inputs(draw: st.DrawFn) -> tuple[LpBall, Tensor, torch.Generator]:
    """A ball with any mixture of bounds, scale and mask, and inputs (B,*) in its bounds."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from([(1,), (7,), (3, 2, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    center = draw(st.sampled_from([0.0, 1.0, -3000.0]))
    x = center + torch.rand(4, *shape, generator=generator, dtype=dtype)
    scale = torch.rand(shape, generator=generator).exp() * draw(st.sampled_from([0.01, 1.0]))
    mutable = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    ball = draw(st.sampled_from([L2, Linf]))(
        draw(st.sampled_from([0.0, 1e-6, 0.1, 3.0])),
        bounds=draw(st.sampled_from([None, (float(x.min()), float(x.max()) + 0.01)])),
        scale=draw(st.sampled_from([None, scale])),
        mutable=draw(st.sampled_from([None, mutable])),
    )
    ball.check_inputs(x)
    return ball, x, generator


@settings(max_examples=50)
@given(balls_and_inputs(), st.sampled_from([1e-9, 0.3, 10.0, 1e8]))
def test_projections_and_random_points_are_within(case, distance) -> None:
    ball, x, generator = case
    moved = x + distance * torch.randn(x.shape, generator=generator).to(x)
    found = ball.project(moved, x)
    assert found.dtype == x.dtype
    assert_legal(found, x, ball)
    assert bool((ball.distance(found, x) <= ball.eps).all())
    again = ball.project(found, x)
    assert_close(again, found, rtol=1e-6, atol=1e-6 * ball.eps)
    for drawn in (ball.inside(x, generator), ball.surface(x, generator)):
        assert_legal(drawn, x, ball)


@settings(max_examples=50)
@given(balls_and_inputs(), st.sampled_from([0.3, 10.0, 1e8]))
def test_clip_is_the_projection_where_bounds_cut_nothing(case, distance) -> None:
    ball, x, generator = case
    moved = x + distance * torch.randn(x.shape, generator=generator).to(x)
    found = ball.clip(moved, x).double()
    free = type(ball)(ball.eps, scale=ball.scale, mutable=ball.mutable)
    expected = free.project(moved.double(), x.double())
    if ball.bounds is not None:
        expected = expected.clamp(*ball.bounds)
    slack = 16 * torch.finfo(x.dtype).eps * (x.abs().max() + ball.eps)
    assert (found - expected).abs().max() <= slack


@BOTH
@pytest.mark.parametrize("eps", [0.035, 0.05, 0.06])
def test_a_feature_too_coarse_for_its_step_takes_nothing_from_the_others(kind, eps) -> None:
    """Near a million neighboring float32 numbers are 1/16 apart."""
    x = torch.tensor([[0.5, 1e6]])
    found = (kind(eps).project(x + 1, x) - x).tolist()[0]
    share = 1.0 if kind is Linf else math.sqrt(0.5)
    assert found == pytest.approx([share * eps, 0.0], rel=1e-5)


@BOTH
def test_projection_is_the_nearest_point(kind, generator) -> None:
    """Euclidean nearest, which both norms share: no random point of the ball is nearer."""
    ball = kind(0.5)
    x = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    moved = x + torch.randn(1, 3, generator=generator, dtype=torch.float64)
    points = ball.inside(x.expand(20000, 3), generator)
    nearest = (points - moved).norm(dim=1).min()
    found = (ball.project(moved, x) - moved).norm()
    assert 0 <= nearest - found < 0.05
    assert_close(kind(9.0).project(moved, x), moved, rtol=1e-14, atol=1e-14)


def assert_uniform(draws: Tensor) -> None:
    """In [0, 1], in each column."""
    expected = torch.linspace(0, 1, len(draws), dtype=torch.float64)[:, None]
    assert float((draws.sort(0).values - expected).abs().max()) < UNIFORM


@pytest.mark.parametrize("masked", [False, True])
def test_inside_is_uniform_in_l2(masked, generator) -> None:
    """(|delta| / eps)^n is uniform in [0, 1], n being what can change; no direction is favored."""
    mutable = torch.tensor([True, True, False, True]) if masked else None
    ball = L2(0.7, mutable=mutable, scale=torch.tensor([1.0, 2.0, 3.0, 0.5]))
    x = torch.zeros(20000, 4, dtype=torch.float64)
    steps = (ball.inside(x, generator) - x) / ball.scale
    n = 3 if masked else 4
    assert len(ball.free_features(x)) == n
    assert_uniform((steps.norm(dim=1, keepdim=True) / 0.7).pow(n))
    moment = 0.7**2 / (n + 2)  # of each coordinate of a uniform point
    expected = moment * torch.eye(4, dtype=torch.float64)
    if masked:
        expected[2, 2] = 0
    assert_close(steps.T @ steps / len(steps), expected, rtol=0, atol=0.05 * moment)


def test_inside_is_uniform_in_linf(generator) -> None:
    scale = torch.tensor([1.0, 10.0, 0.1])
    steps = Linf(0.2, scale=scale).inside(torch.zeros(20000, 3), generator) / scale
    assert_uniform(steps.double() / 0.4 + 0.5)


@BOTH
def test_surface_has_full_length(kind, generator) -> None:
    x = torch.zeros(300, 5)
    ball = kind(0.3, scale=torch.tensor([1.0, 2.0, 0.1, 1.0, 1.0]))
    drawn = ball.surface(x, generator)
    assert bool((ball.distance(drawn, x) > 0.3 * (1 - 1e-5)).all())
    assert drawn.std(0).gt(0).all()
    bounded, x = kind(0.5, (0.0, 1.0)), torch.zeros(200, 30)  # at a bound in every feature
    assert float(bounded.distance(bounded.surface(x, generator), x).min()) > 0.499


@BOTH
@pytest.mark.parametrize("masked", [False, True])
def test_steepest_against_brute_force(kind, masked, generator) -> None:
    mutable = torch.tensor([True, False, True]) if masked else None
    ball = kind(1.0, scale=torch.tensor([0.5, 1.0, 2.0]), mutable=mutable)
    gradient = torch.randn(1, 3, generator=generator)
    best = (ball.steepest(gradient) * gradient).sum()
    others = (ball.surface(torch.zeros(20000, 3), generator) * gradient).sum(1).max()
    assert float(best) * 0.99 < float(others) < float(best) * (1 + 1e-5)
    scaled = (gradient * ball.scale)[0, mutable if masked else slice(None)]
    dual = scaled.norm() if kind is L2 else scaled.abs().sum()
    assert_close(best, dual)


@BOTH
@pytest.mark.parametrize("size", [1e-37, 1e-20, 1e20, 1e37])
def test_steepest_at_any_scale_and_zero(kind, size, generator) -> None:
    gradient = torch.randn(8, 4, generator=generator)
    gradient[3] = 0
    ball = kind(1.0)
    assert_close(ball.steepest(gradient * size), ball.steepest(gradient))
    assert not ball.steepest(gradient)[3].any()


@BOTH
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("bounded", [False, True])
def test_projections_at_any_scale(kind, size, bounded, generator) -> None:
    """Inputs, bounds and eps times a number give the same points times this number."""
    x = torch.rand(8, 6, generator=generator)
    moved = x + torch.randn(8, 6, generator=generator)
    box, large_box = ((0.0, 1.0), (0.0, size)) if bounded else (None, None)
    usual, ball = kind(0.5, box), kind(0.5 * size, large_box)
    found = ball.project(size * moved, size * x)
    assert_close(found / size, usual.project(moved, x))
    assert bool((ball.distance(found, size * x) <= ball.eps).all())
    assert_close(ball.clip(size * moved, size * x) / size, usual.clip(moved, x))
    assert kind(9 * size, (0.0, size)).allows_everything(size * x)


@BOTH
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_steepest_in_units_of_any_scale(kind, size, generator) -> None:
    gradient, scale = torch.randn(8, 4, generator=generator), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = kind(1.0, scale=size * scale).steepest(size * gradient)
    assert_close(found / size, kind(1.0, scale=scale).steepest(gradient))


def test_distance_is_infinite_where_an_immutable_feature_moved() -> None:
    ball = L2(1.0, mutable=torch.tensor([True, False]), scale=torch.tensor([2.0, 1.0]))
    moved = torch.tensor([[3.0, 0.0], [0.0, 1e-30]])
    assert ball.distance(moved, torch.zeros(2, 2)).tolist() == [1.5, math.inf]


def test_bounds_are_those_of_the_dtype() -> None:
    """0.3 in float32 is above 0.3 in float64, and no less legal."""
    x = torch.full((1, 2), 0.3)
    assert float(x[0, 0]) > 0.3
    Linf(0.1, bounds=(0.0, 0.3)).check_inputs(x)
    with pytest.raises(InputError, match=r"x: .*0.3"):
        Linf(0.1, bounds=(0.0, 0.3)).check_inputs(x.double())


@BOTH
def test_description_and_json(kind) -> None:
    ball = kind(0.5, bounds=(0.0, 1.0), scale=torch.ones(2), mutable=torch.tensor([True, False]))
    for word in (kind.norm, "0.5", "(0.0, 1.0)", "own unit", "1 features immutable"):
        assert word in ball.describe()
    assert "unbounded" in kind(0.5).describe()
    plain = {"norm": kind.norm, "eps": 0.5, "bounds": [0.0, 1.0], "scale": [1.0, 1.0]}
    assert json.loads(json.dumps(ball.to_dict())) == plain | {"mutable": [True, False]}
    larger = ball.with_eps(2.0)
    assert (larger.eps, larger.bounds, larger.scale) == (2.0, ball.bounds, ball.scale)
    assert NORMS[kind.norm] is kind
    x = torch.tensor([[0.25, 0.75]])  # numbers of arrays and tensors become plain
    ball = kind(np.float32(0.5), bounds=(x.min(), x.max()))
    assert json.loads(json.dumps(ball.to_dict())) == kind(0.5, (0.25, 0.75)).to_dict()


@BOTH
def test_arrays_and_lists_become_tensors(kind) -> None:
    ball = kind(1.0, scale=np.array([2.0, 3.0]), mutable=[True, False])
    expected = kind(1.0, scale=torch.tensor([2.0, 3.0]), mutable=torch.tensor([True, False]))
    x = torch.zeros(1, 2)
    assert torch.equal(ball.project(x + 9, x), expected.project(x + 9, x))
    assert ball.to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -0.1}, "eps: .*0.*-0.1"),
        ({"eps": math.nan}, "eps: .*nan"),
        ({"eps": math.inf}, "eps: .*inf"),
        ({"bounds": (1.0, 0.0)}, "bounds: .*low < high"),
        ({"bounds": (0.0, math.inf)}, "bounds: .*finite"),
        ({"bounds": (0.0, 1.0, 2.0)}, "bounds: .*0.0,"),
        ({"bounds": (0.0,)}, "bounds: .*0.0,"),
        ({"scale": torch.tensor([1.0, 0.0])}, "scale: .*positive.*mutable"),
        ({"scale": torch.tensor([1.0, math.nan])}, "scale: .*finite"),
        ({"scale": torch.ones(2).to_sparse()}, "scale: .*Tensor.*sparse"),
        ({"scale": ["a", "b"]}, "scale: expected an array of numbers"),
        ({"mutable": torch.ones(2)}, "mutable: .*bool.*float32"),
        ({"mutable": [1, 0]}, "mutable: .*bool.*int64"),
        # These do not fit the inputs.
        ({"scale": torch.ones(3)}, r"scale: .*\(2,\).*\(3,\)"),
        ({"mutable": torch.ones(2, 1, dtype=torch.bool)}, "mutable: .*shape"),
        ({"bounds": (0.0, 1.0)}, "x: .*1.0.*0.5 to"),
    ],
)
def test_refusals(options, message) -> None:
    with pytest.raises(InputError, match=message):
        Linf(**{"eps": 1.0} | options).check_inputs(torch.tensor([[0.5, 1.5]]))


@BOTH
def test_units_are_broadcast_to_one_input(kind, generator) -> None:
    x, moved = torch.rand(2, 5, 3, 4, 4, generator=generator)
    for scale in (torch.tensor([1.0, 2.0, 3.0])[:, None, None], torch.tensor(2.0)):
        short, full = kind(0.1, scale=scale), kind(0.1, scale=scale.expand(3, 4, 4))
        short.check_inputs(x)
        assert_close(short.project(moved, x), full.project(moved, x), rtol=0, atol=0)
        assert_close(short.distance(moved, x), full.distance(moved, x), rtol=0, atol=0)
    for scale in (torch.ones(3), torch.ones(1, 3, 1, 1), torch.ones(3, 2, 1)):
        with pytest.raises(InputError, match=r"scale: .*\(3, 4, 4\).*\(3, 1, 1\), got \(\d"):
            kind(0.1, scale=scale).check_inputs(x)


def test_a_ball_that_allows_every_input_says_so() -> None:
    x, box = torch.rand(2, 4), (0.0, 1.0)
    first = torch.tensor([True, False, False, False])
    for ball, expected in {
        Linf(8.0, box): True,
        Linf(0.99, box): False,
        Linf(8.0): False,
        Linf(8.0, box, scale=torch.tensor([1.0, 1.0, 1.0, 0.1])): False,
        L2(2.0, box): True,
        L2(1.9, box): False,
        L2(1.0, box, mutable=first): True,
        L2(1.0, box, mutable=first.logical_and(~first)): False,
    }.items():
        assert ball.allows_everything(x) is expected, ball.describe()


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.5, 1.5]))
def test_bounds_cost_no_length(seed, eps) -> None:
    """The projection on ball and box together is clip(x + share * step), share by bisection."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(5, 12, generator=generator, dtype=torch.float64)
    x[:, 4:] = x[:, 4:].round()  # at a bound
    moved = x + 3 * torch.randn(5, 12, generator=generator, dtype=torch.float64)
    low, high = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(5, 2).split(1, dim=1)
    for _ in range(60):
        share = (low + high) / 2
        fits = ((x + share * (moved - x)).clamp(0, 1) - x).norm(dim=1, keepdim=True) <= eps
        low, high = torch.where(fits, share, low), torch.where(fits, high, share)
    nearest = (x + low * (moved - x)).clamp(0, 1)
    found = L2(eps, (0.0, 1.0)).project(moved, x)
    assert_close(found, nearest, rtol=0, atol=2e-6)
