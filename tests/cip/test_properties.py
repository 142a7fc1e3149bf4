"""What holds for every fixed set of neighbors, whatever it is."""

from __future__ import annotations

import numpy as np
import torch
from cip.instances import CONVEXITIES, normal, random_problem, rows_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from otad.cip import CipProblem, CipSolution, ExactCip
from otad.cip.judge import map_curvature
from otad.cip.reference import difference_bounds

MODES = st.sampled_from(["consistent", "paper"])
PROBLEMS = st.builds(
    lambda seed, count, dim, high, low, noise: random_problem(
        torch.Generator().manual_seed(seed),
        1,
        count,
        dim,
        smoothness=high,
        strong_convexity=low,
        noise=noise,
    ),
    seed=st.integers(0, 2**31),
    count=st.integers(1, 12),
    dim=st.sampled_from([1, 2, 3, 11, 60]),
    high=st.floats(0.5, 4.0),
    low=st.sampled_from(CONVEXITIES),
    noise=st.sampled_from([0.0, 0.01]),
)
SPREADS = st.sampled_from([1e-3, 0.1, 1.0, 10.0])


def solved(problem: CipProblem, **options: str) -> CipSolution:
    """The solution of a problem that has one: others are no examples."""
    solution = ExactCip(on_failure="abstain", **options)(problem)
    assume(not bool(solution.failed.any()))
    return solution


def at_queries(problem: CipProblem, queries: Tensor) -> CipProblem:
    """Many queries with the neighbors of the one row."""
    many = rows_of(problem, torch.zeros(len(queries), dtype=torch.int64))
    return CipProblem(queries, many.anchors, many.images, many.smoothness, many.strong_convexity)


@settings(max_examples=80)
@given(problem=PROBLEMS, mode=MODES, spread=SPREADS, seed=st.integers(0, 2**31))
def test_map_is_lipschitz_and_monotone(problem, mode, spread, seed) -> None:
    """l |dx|^2 <= <dz, dx> and |dz| <= max(L, -l) |dx|, with the curvature of the map."""
    generator = torch.Generator().manual_seed(seed)
    queries = problem.query + spread * normal(generator, 12, problem.shape[2])
    queries[6:] = queries[:6] + 1e-3 * spread * normal(generator, 6, problem.shape[2])
    many = at_queries(problem, queries)
    solution = solved(many, mode=mode)
    high, low = map_curvature(many, solution)
    if mode == "paper":
        assert torch.equal(high, many.smoothness)
    assert_close(solution.smoothness, solution.smoothness[:1].expand(12))
    dx = queries[:, None] - queries
    dz = solution.image[:, None] - solution.image
    length = dx.norm(dim=-1)
    rounding = 1e-10 * (1 + problem.images.norm(dim=-1).max()) * (1 + spread)
    assert bool((dz.norm(dim=-1) <= torch.maximum(high, -low) * length + rounding).all())
    assert bool(((dz * dx).sum(-1) >= low * length.square() - rounding * length).all())
    if float(low[0]) == 0.0:
        assert bool(((dz * dx).sum(-1) >= -rounding * length).all())


@settings(max_examples=80)
@given(problem=PROBLEMS)
def test_consistent_map_passes_through_its_anchors(problem) -> None:
    many = at_queries(problem, problem.anchors[0])
    solution = solved(many)
    size = problem.images.norm(dim=-1).max()
    assert float((solution.image - problem.images[0]).norm(dim=1).max() / size) <= 1e-8
    assert float(many.residual(solution).max()) <= 1e-9
    levels = solution.potentials[0]
    scale = size * (1 + size)
    assert float((solution.value - levels).abs().max() / scale) <= 1e-9


@settings(max_examples=80)
@given(problem=PROBLEMS, mode=MODES, rule=st.sampled_from(["canonical", "lowest", "highest"]))
def test_potentials_satisfy_eq_2(problem, mode, rule) -> None:
    solution = solved(problem, mode=mode, potential=rule)
    high, low = float(solution.smoothness[0]), float(solution.strong_convexity[0])
    bounds = difference_bounds(problem.anchors[0].numpy(), problem.images[0].numpy(), high, low)
    levels = solution.potentials[0].numpy()
    slack = levels[:, None] - levels - bounds
    assert slack.min() >= -1e-11 * (1 + np.abs(bounds).max())
    assert float(solution.residual) <= 1e-9
    assert float(problem.residual(solution)) <= 1e-9
