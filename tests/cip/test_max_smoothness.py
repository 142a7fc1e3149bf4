"""Neighbors left out or substituted to stay within `max_smoothness`, against all cycles."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from cip.instances import changed, converted, random_problem, rows_of
from torch.testing import assert_close

from otad.cip import CipProblem, ExactCip, Status, least_smoothness
from otad.cip.reference import difference_bounds

CAP = 1.7


def restricted(problem: CipProblem, row: int, keep: list[int]) -> CipProblem:
    """One row with some of its neighbors only."""
    one = rows_of(problem, slice(row, row + 1))
    return changed(one, anchors=one.anchors[:, keep], images=one.images[:, keep])


def flatness_of_cycles(problem: CipProblem, row: int) -> dict[tuple[int, ...], float]:
    """For every simple cycle the largest 1/L (l = 0) that it allows; not positive: no L will do.

    Its gain is rise + bend / L, and must not be positive.
    """
    pair = problem.anchors[row].numpy(), problem.images[row].numpy()
    near, far = (difference_bounds(*pair, high, 0.0) for high in (1.0, 2.0))
    bend = 2 * (near - far)
    rise = near - bend
    found = {}
    for length in range(2, len(rise) + 1):
        for cycle in permutations(range(len(rise)), length):
            if cycle[0] == min(cycle):
                steps = (list(cycle), [*cycle[1:], cycle[0]])
                found[cycle] = -rise[steps].sum() / bend[steps].sum()
    return found


def expected_active(problem: CipProblem, row: int, spares: int = 0) -> list[bool]:
    """Leave out the farthest neighbor of the worst cycle, call the next spare, and again."""
    flatness = flatness_of_cycles(problem, row)
    distance = (problem.anchors[row] - problem.query[row]).norm(dim=-1)
    count = len(distance)
    active, waiting = set(range(count - spares)), list(range(count - spares, count))
    while len(active) > 1:
        worst = min((cycle for cycle in flatness if active >= set(cycle)), key=flatness.get)
        if flatness[worst] >= 1 / CAP:
            break
        active.remove(max(worst, key=lambda i: float(distance[i])))
        active.update(waiting[:1])
        del waiting[:1]
    return [i in active for i in range(count)]


@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_what_is_left_fits(count, noise, mode, generator) -> None:
    problem = random_problem(generator, 15, count, 3, noise=noise, smoothness=1.2)
    solution = ExactCip(mode=mode, max_smoothness=CAP)(problem)
    assert float(solution.smoothness.max()) <= CAP
    assert float(problem.residual(solution).max()) <= 1e-9
    assert float(solution.residual.max()) <= 1e-9
    free = ExactCip(mode=mode, on_failure="abstain")(problem)
    for row in range(15):
        active = solution.active[row]
        fits = bool(free.smoothness[row] <= CAP)  # NaN where nothing fits
        assert bool(active.all()) == fits
        assert solution.status[row] == (free.status[row] if fits else Status.REPAIRED)
        assert bool(solution.potentials[row].isnan().eq(~active).all())
        assert float(solution.multipliers[row, ~active].sum()) == 0.0

        keep = active.nonzero()[:, 0].tolist()
        part = restricted(problem, row, keep)
        assert float(least_smoothness(part)) <= CAP
        alone = ExactCip(mode=mode)(part)
        for name in ("image", "value", "smoothness", "multipliers", "potentials"):
            found, expected = getattr(solution, name)[row], getattr(alone, name)[0]
            found = found[keep] if name in ("multipliers", "potentials") else found
            assert_close(found, expected, rtol=0, atol=1e-11)
    assert bool((solution.status == Status.REPAIRED).any())


@pytest.mark.parametrize(("count", "spares"), [(2, 0), (3, 0), (5, 0), (4, 1), (5, 2), (6, 3)])
def test_which_neighbors_are_left_out(count, spares, generator) -> None:
    problem = random_problem(generator, 30, count, 3, noise=0.2, smoothness=1.2)
    solution = ExactCip(max_smoothness=CAP, spares=spares)(problem)
    expected = [expected_active(problem, row, spares) for row in range(30)]
    assert solution.active.tolist() == expected
    changed = solution.active != torch.arange(count).lt(count - spares)
    assert torch.equal(changed.any(1), solution.status == Status.REPAIRED)
    assert bool(changed.any())
    assert not bool(changed.any(1).all())
    if spares:
        assert bool(changed[:, -spares:].any())
    if count > 4:  # some rows lost two or more
        assert int(changed[:, : count - spares].sum(1).max()) >= 2


def test_cap_with_a_climb(generator) -> None:
    """Steps that end on the cap count; beyond it, a neighbor goes and the climb starts anew."""
    problem = random_problem(generator, 60, 4, 3, smoothness=0.8)
    climb, cap = (0.1, 0.0), 1.7  # in floating point, 0.8 + 9 * 0.1 > 1.7
    solution = ExactCip(climb=climb, max_smoothness=cap)(problem)
    free = ExactCip(climb=climb)(problem)
    assert float(solution.smoothness.max()) <= cap
    fits = free.smoothness <= cap + 1e-9
    assert torch.equal(solution.status == Status.REPAIRED, ~fits)
    assert torch.equal(solution.active.all(1), fits)
    last = (free.smoothness - cap).abs() <= 1e-9
    assert bool(last.any())  # some end exactly on the cap
    assert bool((~fits).any())
    for row in (~fits).nonzero()[:, 0].tolist():
        keep = solution.active[row].nonzero()[:, 0].tolist()
        alone = ExactCip(climb=climb)(restricted(problem, row, keep))
        assert_close(solution.image[row], alone.image[0], rtol=0, atol=1e-11)
        assert_close(solution.smoothness[row], alone.smoothness[0])


@pytest.mark.parametrize("dim", [2, 784])
@pytest.mark.parametrize("climb", [None, (0.5, 0.0), (0.5, 0.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contradicting_images_of_one_anchor(climb, dtype, dim, generator) -> None:
    """No smoothness at all helps: one of the two is left out, and no other."""
    twins = converted(random_problem(generator, 20, 5, dim), dtype)
    twins.anchors[:, 3] = twins.anchors[:, 1]
    twins.images[:, 3] = twins.images[:, 1] + 0.02  # beside the others, either of the two would do
    assert least_smoothness(twins).tolist() == [math.inf] * 20
    if climb is None or (climb[1] == 0 and dtype == torch.float64):  # in float32 a huge L will do
        free = ExactCip(climb=climb, on_failure="abstain")(twins)
        assert free.status.tolist() == [Status.INFEASIBLE] * 20
    solution = ExactCip(max_smoothness=3.0, climb=climb)(twins)
    assert solution.status.tolist() == [Status.REPAIRED] * 20
    assert bool((solution.active[:, [1, 3]].sum(1) == 1).all())
    assert bool(solution.active[:, [0, 2, 4]].all())
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert float(twins.residual(solution).max()) <= tolerance


def test_one_neighbor_remains_in_the_worst_case(generator) -> None:
    anchors = torch.randn(10, 6, 3, generator=generator, dtype=torch.float64)
    problem = CipProblem(anchors[:, 0] + 0.1, anchors, -anchors, 1.0)  # decreasing everywhere
    solution = ExactCip(max_smoothness=5.0)(problem)
    assert solution.active.sum(1).tolist() == [1] * 10
    assert solution.status.tolist() == [Status.REPAIRED] * 10
    last = solution.active.int().argmax(1)
    assert_close(solution.image, problem.images[torch.arange(10), last])
