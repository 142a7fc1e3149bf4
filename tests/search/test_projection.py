"""Searches by few coordinates against brute force, and their bounds against float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from search.test_neighbors import assert_exact, assert_same
from torch import Tensor

from otad.search import neighbors, projection
from otad.search.confirmed_product import row_norms
from otad.search.neighbors import TorchSearch
from otad.search.projection import Projection

DIM, RANK = 40, 6


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    limits = {"FEWEST_ROWS": 300, "FEWEST_COLUMNS": 20, "FEWEST_QUERIES": 10}
    for name, value in (limits | {"NUMBERS_AT_ONCE": 1000, "PRODUCTS_AT_ONCE": 5000}).items():
        monkeypatch.setattr(projection, name, value)
    monkeypatch.setattr(Projection.__init__, "__defaults__", (RANK + 2,))


def cloud(count: int, noise: float, generator: torch.Generator) -> Tensor:
    """Points near a subspace, with copies."""
    basis = torch.randn(RANK, DIM, generator=torch.Generator().manual_seed(1))
    points = torch.randn(count, RANK, generator=generator) @ basis
    points = points + noise * torch.randn(count, DIM, generator=generator)
    points[count // 2 : count // 2 + 5] = points[:5]
    return points


@pytest.mark.parametrize("noise", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_neighbors_are_exact(noise, shift, generator) -> None:
    points, queries = (cloud(count, noise, generator) + shift for count in (517, 40))
    search = TorchSearch(points)
    found = search(queries, 5)
    assert len(search._projection.coordinates) == 517
    assert_exact(found, points, queries)
    assert_exact(search(points[:40], 6), points, points[:40])
    own = search(points[:40], 5, exclude=torch.arange(40))
    assert not bool((own.indices == torch.arange(40)[:, None]).any())
    assert_same(search(queries[:3], 5), TorchSearch(points)(queries[:3], 5))


def test_threads_find_the_same_from_the_first_call_on(generator, monkeypatch) -> None:
    monkeypatch.setattr(neighbors, "FEWEST_OF_THREAD", 7)
    points, queries = cloud(600, 0.2, generator), cloud(90, 0.2, generator)
    expected, before = TorchSearch(points)(queries, 5), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for _ in range(5):
            assert_same(TorchSearch(points)(queries, 5), expected)
        search = TorchSearch(points)
        with ThreadPoolExecutor(4) as pool:  # whose threads all make the coordinates
            for found in pool.map(lambda part: search(part, 5), [queries] * 4):
                assert_same(found, expected)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_largest_scores_are_proved(generator) -> None:
    """Also if several rows share them."""
    rows, queries = cloud(400, 0.1, generator), cloud(30, 0.1, generator).double()
    rows[7:10] = rows[6]
    made, offsets = Projection(rows), -row_norms(rows).square()
    assert made.prepare(queries)
    found = made.shortlist(2 * queries, row_norms(rows), offsets, 9, 1)
    assert bool(found.is_complete.all())


def test_coordinates_that_do_not_help_are_given_up(generator) -> None:
    points, queries = torch.randn(2, 400, DIM, generator=generator)
    search = TorchSearch(points)
    assert_exact(search(queries[:40], 5), points, queries[:40])
    assert not search._projection.pays
    assert_exact(search(queries[40:80], 5), points, queries[40:80])


@pytest.mark.parametrize(("noise", "section"), [(0.0, 1024), (0.3, 1024), (0.3, 12)])
def test_bounds_hold(noise, section, generator, monkeypatch) -> None:
    """For queries and rows of any length, also in sections, and if rows may never be chosen."""
    monkeypatch.setattr(projection, "SECTION", section)
    rows, queries = cloud(403, noise, generator), cloud(30, noise, generator).double()
    rows *= torch.logspace(-3, 3, 403)[:, None]
    queries *= torch.logspace(-2, 2, 30, dtype=torch.float64)[:, None]
    offsets = 5 * torch.randn(403, generator=generator, dtype=torch.float64)
    offsets[::7] = -torch.inf
    scores = offsets + queries @ rows.double().T
    made = Projection(rows)
    assert made.prepare(queries)
    assert made.sections == (1 if section > DIM else 4)
    found = made.shortlist(queries, row_norms(rows), offsets, 9, 1)
    listed = scores.gather(1, found.indices)
    assert bool((found.bounds >= listed).all())
    assert bool((found.floors <= listed).all())
    outside = scores.scatter(1, found.indices, -torch.inf).amax(1)
    assert bool((found.ceiling >= outside).all())
    assert not bool((found.indices % 7 == 0).any())
    floors = scores.topk(20, dim=1).values[:, -1]
    by = torch.randperm(403, generator=generator)[:150]
    for some in (None, by):
        asked, points, crowded = made.above(made.coordinates_of(queries), offsets, floors, some)
        reached = torch.zeros_like(scores, dtype=torch.bool)
        reached[asked, points] = True
        expected = scores >= floors[:, None]
        if some is not None:
            expected &= torch.isin(torch.arange(403), by)
        assert len(crowded) == 0
        assert bool((reached | ~expected).all())
        assert bool(reached.sum() < 2000 + noise * 1e4)  # of 12,090, so the bounds are of use


def test_queries_with_too_many_rows_are_named(generator, monkeypatch) -> None:
    monkeypatch.setattr(projection, "MOST_GROUPS", 5)
    rows, queries = cloud(400, 0.0, generator), cloud(20, 0.0, generator).double()
    made = Projection(rows)
    assert made.prepare(queries)
    floors = torch.full((20,), -1e9, dtype=torch.float64)
    floors[3] = 1e9
    offsets = torch.zeros(400, dtype=torch.float64)
    asked, _, crowded = made.above(made.coordinates_of(queries), offsets, floors)
    assert len(asked) == 0
    assert crowded.tolist() == [i for i in range(20) if i != 3]


def test_less_precise_products_use_no_coordinates_made_for_others(generator) -> None:
    points, queries = cloud(400, 0.1, generator), cloud(20, 0.1, generator)
    search, before = TorchSearch(points), torch.get_float32_matmul_precision()
    assert search._projection.prepare(queries)
    try:
        torch.set_float32_matmul_precision("medium")
        assert not search._projection.prepare(queries)
        assert_exact(search(queries, 5), points, queries)
    finally:
        torch.set_float32_matmul_precision(before)
    assert search._projection.prepare(queries)
