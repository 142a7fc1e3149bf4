"""Potentials and the least smoothness against linear programs, the climb against counting, and
neighbors left out or substituted to stay within `max_smoothness` against all cycles."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from cip.instances import CONVEXITIES, changed, converted, is_feasible, random_problem, rows_of
from torch.testing import assert_close

from otad.cip import BankProblem, CipProblem, ExactCip, Status, least_smoothness
from otad.cip.reference import canonical_potentials, difference_bounds, least_smoothness_by_lp


def arrays(problem: CipProblem, row: int) -> tuple[np.ndarray, np.ndarray]:
    return problem.anchors[row].numpy(), problem.images[row].numpy()


@pytest.mark.parametrize("spread", [1e-3, 1e-5])
@pytest.mark.parametrize("kind", ["dense", "bank"])
def test_rounding_of_long_sums_makes_nothing_infeasible(kind, spread, generator) -> None:
    """Images of one brightness each, all brighter than the query: terms that are all alike are
    all rounded alike, and float32 products lose more digits than the anchors differ in."""
    shades = 1 + spread * torch.rand(40, generator=generator)
    bank = shades[:, None].expand(40, 24576).contiguous()
    query, indices = torch.full((4, 24576), 0.3), torch.arange(40).view(4, 10)
    for smoothness, expected in ((2.0, Status.SOLVED), (0.5, Status.RAISED)):
        problem = BankProblem(query, bank, bank, indices, smoothness)
        if kind == "dense":
            problem = CipProblem(query, bank[indices], bank[indices], smoothness)
        least = least_smoothness(problem)
        assert_close(least, torch.ones_like(least), rtol=1e-6, atol=0)
        solution = ExactCip()(problem)
        assert solution.status.tolist() == [expected] * 4
        used = torch.full_like(least, max(1.0, smoothness))
        assert_close(solution.smoothness, used, rtol=1e-6, atol=0)


@pytest.mark.parametrize("strong_convexity", CONVEXITIES)
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dim", [2, 11, 128])
def test_least_smoothness_and_feasibility(dim, noise, strong_convexity, generator) -> None:
    """27 cases of 14 rows: 378 in all, with and without potentials."""
    generator.manual_seed(dim + int(10 * noise) + CONVEXITIES.index(strong_convexity))
    for count in (1, 2, 3, 5, 8, 11, 15):
        curvature = {"smoothness": 2.0, "strong_convexity": strong_convexity}
        problem = random_problem(generator, 2, count, dim, noise=noise, **curvature)
        least = least_smoothness(problem)
        status = ExactCip(on_failure="abstain")(problem).status
        for row in range(2):
            pair = problem.anchors[row], problem.images[row]
            expected = least_smoothness_by_lp(*arrays(problem, row), strong_convexity)
            assert float(least[row]) == pytest.approx(expected, rel=1e-7)
            assert is_feasible(*pair, 2.0, strong_convexity) == (expected <= 2.0)
            if 2.0 < expected < 50.0:  # beyond, one percent is less than HiGHS can tell
                assert is_feasible(*pair, 1.01 * expected, strong_convexity)
                assert not is_feasible(*pair, 0.99 * expected, strong_convexity)
            too_small = Status.INFEASIBLE if expected == np.inf else Status.RAISED
            assert status[row] == (Status.SOLVED if expected <= 2.0 else too_small)


def test_extreme_potentials_enclose_the_canonical(generator) -> None:
    """Lowest and highest differ by what eq. (2) leaves open; the canonical is their middle."""
    problem = random_problem(generator, 20, 5, 4, smoothness=3.0)
    rules = ("canonical", "lowest", "highest")
    canonical, lowest, highest = (ExactCip(potential=rule)(problem).potentials for rule in rules)
    assert_close(canonical, (lowest + highest) / 2, rtol=0, atol=1e-12)
    assert float((highest - lowest).abs().amax(1).min()) > 1e-3


@pytest.mark.parametrize("steps", [(0.25, 0.0), (0.1, 0.05), (2.0, 1.0), (0.0, 0.2)])
@pytest.mark.parametrize("strong_convexity", [-0.2, 0.0, 0.3])
def test_climb_stops_at_the_first_feasible_step(steps, strong_convexity, generator) -> None:
    """If l stays, no step helps a falling map; if L stays, none helps where L x - z falls."""
    up, down = steps
    requested = 1.1 if up else 2.0
    curvature = {"smoothness": requested, "strong_convexity": strong_convexity}
    problem = random_problem(generator, 40, 4, 3, noise=0.2, **curvature)
    solution = ExactCip(climb=steps, on_failure="abstain")(problem)
    taken = []
    for row in range(40):
        pair = arrays(problem, row)
        mirrored = pair[0], requested * pair[0] - pair[1]
        low, alone = (strong_convexity, pair) if down == 0 else (0.0, mirrored)
        if 0 in steps and least_smoothness_by_lp(*alone, low) == np.inf:
            assert solution.status[row] == Status.INFEASIBLE
            continue
        step = 0
        while True:  # until there is no positive cycle
            bounds = difference_bounds(*pair, requested + step * up, strong_convexity - step * down)
            if canonical_potentials(bounds)[1] <= 1e-12:
                break
            step += 1
        taken.append(step)
        assert float(solution.smoothness[row]) == pytest.approx(requested + step * up, rel=1e-12)
        low = pytest.approx(strong_convexity - step * down, rel=1e-12, abs=1e-12)
        assert float(solution.strong_convexity[row]) == low
        assert solution.status[row] == (Status.RAISED if step else Status.SOLVED)
    assert max(taken) >= (2 if up < 1 else 1)
    assert up > 0 or len(taken) < 40  # some rows have a slope above L
    if down > 0:
        assert float(solution.strong_convexity[~solution.failed].min()) < 0
    assert float(problem.residual(solution)[~solution.failed].max()) <= 1e-9


def test_climb_in_paper_mode_keeps_the_requested_curvature(generator) -> None:
    """Potentials for (L_t, l_t), the map with (L, l): Algorithm 2 as printed."""
    problem = random_problem(generator, 30, 5, 3, smoothness=1.0, strong_convexity=0.1)
    consistent, paper = (
        ExactCip(mode=mode, climb=(0.2, 0.1))(problem) for mode in ("consistent", "paper")
    )
    assert torch.equal(consistent.smoothness, paper.smoothness)
    assert torch.equal(consistent.potentials, paper.potentials)
    raised = paper.status == Status.RAISED
    assert bool(raised.any())
    assert float((paper.image - consistent.image)[raised].norm(dim=1).min()) > 1e-9
    assert float(problem.residual(paper).max()) <= 1e-9


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
