"""Bounds of float32 products hold for the exact scores."""

from __future__ import annotations

import pytest
import torch

from otad.search.confirmed_product import row_norms, shortlist, squared_distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "size", "width"), [(3, 1, 7), (60, 10, 50), (1500, 5, 200)])
def test_bounds_floor_and_ceiling_hold(dim, size, width, dtype, generator) -> None:
    """In several blocks of rows and of queries, with a row that may never be chosen."""
    rows = torch.randn(120, dim, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(-3, 3, 120, dtype=torch.float64)[:, None]
    queries = torch.randn(9, dim, generator=generator, dtype=torch.float64)
    offsets = 5 * torch.randn(120, generator=generator, dtype=torch.float64)
    offsets[117] = -torch.inf
    blocks = [(start, rows[start : start + width].to(dtype)) for start in range(0, 120, width)]
    found = shortlist(queries, blocks, row_norms(rows), offsets, size, 300, dtype)
    scores = offsets + queries @ rows.T
    listed = scores.gather(1, found.indices)
    assert bool((found.bounds >= listed).all())
    assert bool((found.bounds[:, :-1] >= found.bounds[:, 1:]).all())
    assert bool((found.floor <= listed[:, 0]).all())
    others = scores.scatter(1, found.indices, -torch.inf).amax(1)
    assert bool((found.ceiling >= others).all())
    room = 1e-3 if dtype == torch.float32 else 1e-11
    slack = room * (1 + row_norms(queries) * float(row_norms(rows).max()))
    assert bool((found.bounds - listed <= slack[:, None]).all())  # and are of use
    assert not bool((found.indices == 117).any())


def test_all_rows_leave_none_outside(generator) -> None:
    rows = torch.randn(6, 4, generator=generator)
    queries = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    offsets = torch.zeros(6, dtype=torch.float64)
    found = shortlist(queries, [(0, rows)], row_norms(rows), offsets, 10, 100)
    assert found.indices.sort(dim=1).values.tolist() == [list(range(6))] * 3
    assert found.ceiling.tolist() == [-torch.inf] * 3


def test_squared_distances_are_within_their_error(generator) -> None:
    one, two = torch.randn(2, 40, 300, generator=generator)
    two[:5] = one[:5] + 1e-6
    values, error = squared_distances(one, two)
    exact = torch.cdist(one.double(), two.double()).square()
    assert bool(((values - exact).abs() <= error).all())
