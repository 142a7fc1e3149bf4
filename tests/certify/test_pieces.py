"""The rule of pieces and certificates within the bounds, against quadratic programs and grids."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import cvxpy
import numpy as np
import pytest
import torch
from certify.small import keyed_plane
from factories import refuses
from torch import Tensor

import otad
from otad.certify import certify
from otad.certify.bisectors import BankBisectors
from otad.certify.half_spaces import Box, HalfSpaces
from otad.certify.hull import Entrance
from otad.certify.pieces import OwnClass
from otad.model.otad import OTAD

STD = (0.5, 2.0, 0.7, 1.0, 1.0, 1.3)


def labeled(seed: int, points: int, dim: int, *, neighbors: int = 1, **options: Any) -> OTAD:
    """Labeled points in the unit cube, of which the nearest answer: three slanting layers."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.rand(points, dim, generator=drawn)
    y = (1.5 * x[:, :2].sum(1)).long()
    units = {"mean": 0.2, "std": torch.tensor(STD[:dim]), "bounds": (0.0, 1.0)} | options
    frame = otad.nets.lifted_net((dim,), 3, blocks=0, **units)
    net = otad.prototypes.prototype_net(frame, x, y, neighbors=1).eval()
    return OTAD(net, net.bank(), n_neighbors=neighbors).eval()


def queries(count: int, dim: int, seed: int) -> Tensor:
    """Inputs in the unit cube, some of them at its border."""
    x = torch.rand(count, dim, generator=torch.Generator().manual_seed(seed))
    x[::2, 0], x[1::2, 1] = 0.0, 1.0
    return x


def to_wrong_cells(model: OTAD, x: Tensor, unit: Tensor, *, bounded: bool) -> float:
    """The least |delta / unit| at which a point of another class is as near as all of the class
    that answers, by one quadratic program for each such point."""
    net: Any = model.backbone
    std, mean = net.std.double().numpy(), net.mean.double().numpy()
    points, labels = net.points.detach().double().numpy(), net.labels.numpy()
    here = (x.double().numpy() - mean) / std
    label, best = int(model(x[None]).argmax()), math.inf
    own = points[labels == label]
    for wrong in points[labels != label]:
        delta = cvxpy.Variable(len(here))
        room = ((here - own) ** 2).sum(1) - ((here - wrong) ** 2).sum()
        rules = [2 * (own - wrong) @ cvxpy.multiply(delta, 1 / std) <= room]
        if bounded:
            rules += [delta >= -x.double().numpy(), delta <= 1 - x.double().numpy()]
        length = cvxpy.sum_squares(cvxpy.multiply(delta, 1 / unit.double().numpy()))
        program = cvxpy.Problem(cvxpy.Minimize(length), rules)
        program.solve(solver=cvxpy.CLARABEL)
        if program.status == cvxpy.OPTIMAL:
            best = min(best, math.sqrt(max(program.value, 0.0)))
    return best


@pytest.mark.parametrize(("points", "dim"), [(9, 2), (24, 6)])
@pytest.mark.parametrize("bounded", [False, True])
def test_radii_are_distances_to_the_cells_of_other_classes(
    points: int, dim: int, bounded: bool
) -> None:
    unit = torch.tensor(STD[:dim]).flip(0)
    model, x = labeled(points, points, dim), queries(3, dim, points)
    found = certify(model, x, unit=unit, within_bounds=bounded)
    assert found.within_bounds == bounded
    for row, radius in enumerate(found.radius.tolist()):
        exact = to_wrong_cells(model, x[row], unit, bounded=bounded)
        assert radius <= exact * (1 + 1e-6)
        assert radius >= 0.98 * exact


def nearest_change(model: OTAD, x: Tensor, steps: Tensor, *, bounded: bool) -> float:
    """The length of the shortest of these steps that changes the answer of x (d,)."""
    moved = x + steps
    legal = ((moved >= 0) & (moved <= 1)).all(1) if bounded else torch.ones(len(steps)).bool()
    net: Any = model.backbone
    embedded = ((moved - net.mean) / net.std).double()
    answers = net.labels[torch.cdist(embedded, net.points.detach().double()).argmin(1)]
    changed = legal & (answers != int(model(x[None]).argmax()))
    lengths = steps.double().norm(dim=1)[changed]
    return float(lengths.min()) if len(lengths) else math.inf


def test_in_the_plane_a_grid_finds_changes_at_the_radius_and_not_before() -> None:
    angle = torch.linspace(0, 2 * math.pi, 241)[:-1]
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    steps = (torch.linspace(0.0, 1.5, 201)[1:][:, None, None] * circle).flatten(0, 1)
    wider = 0
    for seed in (0, 7):
        model, x = labeled(seed, 12, 2), queries(8, 2, seed)
        whole, inside = certify(model, x), certify(model, x, within_bounds=True)
        assert bool((inside.radius >= whole.radius).all())
        wider += int((inside.radius > 1.01 * whole.radius).sum())
        for found in (whole, inside):
            for row, radius in enumerate(found.radius.tolist()):
                seen = nearest_change(model, x[row], steps, bounded=found.within_bounds)
                assert seen >= radius
                assert math.isinf(seen) or radius >= seen - 0.03
    assert wider > 0, "the bounds matter for some of these inputs"


def test_no_less_than_a_bisector_and_than_the_hull_rule() -> None:
    model, x = labeled(5, 50, 6), queries(12, 6, 5)
    net: Any = model.backbone
    keys, points = net.embed(x).double(), net.bank().inputs
    stretch = torch.nn.functional.pad(1 / net.std.double(), (0, 3))
    around, rows = BankBisectors(keys, points, stretch), torch.arange(12)
    every, limit = torch.arange(50).expand(12, 50), torch.full((12,), torch.inf).double()
    wrong = net.labels != model(x).argmax(1)[:, None]
    hull = Entrance(around, 1)(rows, every, limit)
    single = around.against(around.rivals(every), rows, every).distances
    single = single.masked_fill(wrong[:, None], -torch.inf).amax(2)
    joint = OwnClass(around, 1, preferred=~wrong)(rows, every, limit)
    assert bool((joint >= single * (1 - 1e-12))[wrong].all())
    radii = [one.masked_fill(~wrong, torch.inf).amin(1) for one in (single, hull, joint)]
    assert bool((radii[2] > 1.001 * radii[0]).any())
    found = certify(model, x)
    assert bool((found.radius >= torch.stack(radii[:2]).amax(0) - 1e-5).all())
    assert "pieces" in found.rules


@pytest.mark.parametrize(("neighbors", "dim"), [(1, 6), (3, 2)])
def test_attacks_within_the_bounds_never_succeed_below_the_radius(neighbors: int, dim: int) -> None:
    model, x = labeled(0, 40, dim, neighbors=neighbors), queries(16, dim, 0)
    y = model(x).argmax(1)
    whole, inside = certify(model, x), certify(model, x, within_bounds=True)
    assert bool((inside.radius >= whole.radius).all())
    assert bool((inside.radius > 1.001 * whole.radius).any()), "the bounds matter"
    threat = otad.L2(0.5, bounds=(0.0, 1.0))
    names = ["straight", "soft_knn", "region", "random_search", "noise"]
    tried = otad.evaluate(
        model, x, y, threat, attacks=names, within_bounds=True, flags=False, undefended=False
    )
    assert tried.is_sound
    assert tried.certificate_within_bounds is not None
    assert tried.certificate_within_bounds.radius == tuple(inside.radius.tolist())
    assert tried.certificate is not None
    assert tried.certificate.radius == tuple(whole.radius.tolist())
    broken = [(row, found) for row, found in enumerate(tried.distances()) if found < math.inf]
    assert len(broken) >= 4, "attacks that break nothing show nothing"
    assert all(found >= float(inside.radius[row]) for row, found in broken)
    assert tried.certified_accuracy(0.1).value <= (
        tried.certified_accuracy(0.1, within_bounds=True).value
    )


def test_a_box_bound_is_below_the_quadratic_program() -> None:
    """Also where a normal has zeros, a bound is 0, and no legal point is in the half-spaces."""
    drawn, ratios = np.random.default_rng(3), []
    for trial in range(12):
        normals, heights = drawn.normal(size=(5, 8)) + 0.5, drawn.uniform(0.1, 0.8, size=5)
        normals[:, 0] = 0.0
        low, high = -drawn.uniform(0, 0.5, size=8), drawn.uniform(0, 0.5, size=8)
        low[1], high[2] = 0.0, 0.0
        u = cvxpy.Variable(8)
        rules = [normals @ u >= heights, u >= low, u <= high]
        program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(u)), rules)
        program.solve(solver=cvxpy.CLARABEL)
        given = [torch.tensor(one)[None] for one in (normals, heights)]
        sizes = torch.tensor((normals**2).sum(1))[None]
        spaces = HalfSpaces.of(given[0] @ given[0].mT, given[1], sizes)
        box = Box(torch.tensor(low)[None], torch.tensor(high)[None])
        found = float(box.joint_distance(*given, sizes, spaces.weights()))
        feasible = program.status == cvxpy.OPTIMAL
        exact = math.sqrt(program.value) if feasible else math.inf
        assert found <= exact * (1 + 1e-6), trial
        ratios += [found / exact] if feasible else []
    assert np.mean(ratios) > 0.95
    assert len(ratios) >= 4


def test_a_half_space_is_not_ruled_out_by_rounding() -> None:
    """Weights that cancel a computed normal need not cancel the exact one, which reaches far in a
    large box."""
    low, high = torch.tensor([[-1e9, -1.0]]).double(), torch.tensor([[0.0, 1e-3]]).double()
    heights, met = torch.full((1, 2), 1e-14, dtype=torch.float64), 0
    for a, b in np.random.default_rng(0).uniform(0.1, 3, size=(500, 2)).tolist():
        normals = torch.tensor([[[a, 1e-12], [-b, 1e-12]]], dtype=torch.float64)
        weights = torch.tensor([[1 / a, 1 / b]], dtype=torch.float64)
        exact = Fraction(1 / a) * Fraction(a) - Fraction(1 / b) * Fraction(b)
        goal = (Fraction(1 / a) + Fraction(1 / b)) * Fraction(1e-14)
        if exact * -(10**9) > goal:  # at the border of the box
            sizes = normals.square().sum(2)
            assert float(Box(low, high).distance(normals, heights, sizes, weights)[0]) < math.inf
            met += 1
    assert met > 10


def test_bounds_that_do_not_bound_the_keys_change_nothing() -> None:
    model = keyed_plane(1, n_neighbors=1)
    model.backbone.bounds = (-9.0, 9.0)
    x = torch.zeros(3, 2)
    assert torch.equal(certify(model, x).radius, certify(model, x, within_bounds=True).radius)
    net = otad.nets.SOCNet((1, 8, 8), 3, widths=(8,), bounds=(0.0, 1.0)).eval()
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    whole, inside = certify(net, x), certify(net, x, within_bounds=True)
    assert torch.equal(whole.radius, inside.radius)
    assert inside.within_bounds
    assert any("(0.0, 1.0)" in words for words in inside.assumptions)


def test_refusals_within_bounds() -> None:
    unbounded, x = labeled(0, 9, 2, bounds=None), torch.zeros(1, 2)
    refuses(certify, unbounded, x, within_bounds=True, match="within_bounds.*bounds.*None")
    bounded = labeled(0, 9, 2)
    refuses(certify, bounded, x, within_bounds="yes", match="within_bounds.*bool.*yes")
    refuses(certify, bounded, x + 2, within_bounds=True, match="bounds.*2")
    refuses(certify, bounded, x * torch.nan, within_bounds=True, match="finite")
    attacked = x, torch.zeros(1, dtype=torch.int64), otad.L2(0.5)
    refuses(otad.evaluate, unbounded, *attacked, within_bounds=True, match="within_bounds.*None")
    alone = {"within_bounds": True, "certificate": False}
    refuses(otad.evaluate, bounded, *attacked, **alone, match="within_bounds.*certificate")
