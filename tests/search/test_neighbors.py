"""The search against brute force, where a matrix product alone would go wrong, and its bounds."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from otad.errors import InputError, MissingExtraError
from otad.io.mapped_rows import in_file, remember
from otad.search import confirmed_product, neighbors
from otad.search.confirmed_product import row_norms, shortlist, squared_distances
from otad.search.neighbors import FaissSearch, Neighbors, NeighborSearch, TorchSearch


@pytest.fixture(params=[TorchSearch, FaissSearch])
def search_type(request: pytest.FixtureRequest) -> type[NeighborSearch]:
    if request.param is FaissSearch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its generated bindings
            pytest.importorskip("faiss", reason="needs the extra 'index' (faiss-cpu)")
    return request.param


def brute_force(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices and distances by plain differences in float64; NumPy adds in another order."""
    gaps = points.double().numpy()[None] - queries.double().numpy()[:, None]
    distances = np.sqrt(np.square(gaps).sum(2))
    order = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return torch.from_numpy(order), torch.from_numpy(np.take_along_axis(distances, order, 1))


def assert_exact(found: Neighbors, points: Tensor, queries: Tensor) -> None:
    indices, distances = brute_force(points, queries, found.indices.shape[1])
    assert torch.equal(found.indices, indices)
    assert_close(found.distances, distances, rtol=1e-14, atol=0)


def assert_same(found: Neighbors, other: Neighbors) -> None:
    assert torch.equal(found.indices, other.indices)
    assert torch.equal(found.distances, other.distances)  # to the bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (300, 2, 300), (1000, 50, 10), (400, 1300, 7)]
)
def test_random_points(search_type, dtype, n, d, k, generator) -> None:
    points = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
    queries = torch.randn(20, d, generator=generator)
    search = search_type(points.requires_grad_())
    assert len(search) == n
    found = search(queries, k)
    assert not found.distances.requires_grad
    points = points.detach()
    assert (found.indices.dtype, found.distances.dtype) == (torch.int64, torch.float64)
    if dtype in (torch.float32, torch.float64) or d > 2:  # few bits in few dimensions: many ties
        assert_exact(found, points, queries)


@settings(max_examples=50)
@given(*map(st.integers, (1, 1, 1, 0), (3, 4, 120, 10**6)), st.floats(0, 1))
def test_ties_and_copies_on_a_grid(d, side, n, seed, share) -> None:
    """Small integers: all distances are exact, most are equal, and K may be N."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(side + 1, (n, d), generator=generator).float()
    queries = torch.randint(side + 1, (9, d), generator=generator).float()
    k = 1 + round(share * (n - 1))
    assert_exact(TorchSearch(points)(queries, k), points, queries)


def test_equal_points_come_in_order_of_index(search_type) -> None:
    found = search_type(torch.full((300, 5), 0.1))(torch.rand(4, 5), 10)
    assert torch.equal(found.indices, torch.arange(10).expand(4, 10))
    assert bool((found.distances == found.distances[:, :1]).all())


@pytest.mark.parametrize(
    ("dtype", "origin", "spread"),
    [
        *((torch.float32, 1e5, 1.0), (torch.float64, 1e9, 1e-3), (torch.float64, -1e3, 1e-9)),
        *((torch.float32, 0.0, spread) for spread in (1e-44, 1e-30, 1e30, 1e36)),
    ],
)
def test_far_from_the_origin_or_at_any_scale(search_type, dtype, origin, spread, generator) -> None:
    cloud = torch.randn(510, 8, generator=generator, dtype=torch.float64)
    points, queries = (origin + spread * cloud).to(dtype).split([500, 10])
    if origin == 0:
        queries = torch.cat([queries, torch.ones(1, 8), torch.full((1, 8), 1e38)])
    assert_exact(search_type(points)(queries, 10), points, queries)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_points_around_the_origin_are_not_copied(shift, generator, monkeypatch) -> None:
    """A bank beyond the budget of a ready copy would be copied anew in each call."""
    points, queries = torch.randn(510, 30, generator=generator).add(shift).split([500, 10])
    monkeypatch.setattr(neighbors, "WORKING_BYTES", 2**16)
    search, copied = TorchSearch(points), []
    product = confirmed_product.add_product

    def watched(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
        copied.append(right.untyped_storage().data_ptr() != points.untyped_storage().data_ptr())
        return product(base, left, right)

    monkeypatch.setattr(confirmed_product, "add_product", watched)
    assert_exact(search(queries, 10), points, queries)
    assert set(copied) == {shift > 0}


def test_order_that_float32_cannot_see(search_type, generator, monkeypatch) -> None:
    """Radii 1 + 1e-9 i around the query: every row has to come back with longer shortlists."""
    sizes = []
    attempt = NeighborSearch._attempt

    def watched(self, queries, k, size, *options):
        sizes.append(size)
        return attempt(self, queries, k, size, *options)

    monkeypatch.setattr(NeighborSearch, "_attempt", watched)
    directions = normalize(torch.randn(400, 20, generator=generator, dtype=torch.float64))
    order = torch.randperm(400, generator=generator)
    points = (1 + 1e-9 * order.double()[:, None]) * directions
    found = search_type(points)(torch.zeros(1, 20, dtype=torch.float64), 5)
    assert torch.equal(found.indices[0], order.argsort()[:5])
    assert sizes == [13, 52, 208, 400]


def test_one_outlier_does_not_spoil_the_rest(generator, monkeypatch) -> None:
    """The bound is each point's own: shortlists of the first size are enough."""
    monkeypatch.setattr(neighbors, "GROWTH", 0)  # a second attempt would fail
    points = torch.randn(800, 20, generator=generator)
    points[7] = 1e4
    queries = torch.randn(50, 20, generator=generator)
    assert_exact(TorchSearch(points)(queries, 5), points, queries)


def test_squares_too_small_for_float32(search_type, generator) -> None:
    """Next to two points so far apart, every other product is flushed to zero."""
    points = torch.randn(300, 5, generator=generator)
    points[150:] += 50
    points[17], points[18] = 1e30, -1e30
    queries = 50 + torch.randn(10, 5, generator=generator)
    assert_exact(search_type(points)(queries, 6), points, queries)


@pytest.mark.parametrize(("b", "d"), [(30, 37), (100, 3)])
def test_neither_batch_nor_memory_changes_a_bit(search_type, b, d, generator, monkeypatch) -> None:
    points, queries = torch.rand(500 + b, d, generator=generator).split([500, b])
    together = search_type(points)(queries, 9)
    monkeypatch.setattr(neighbors, "WORKING_BYTES", 2**16)
    small = search_type(points)
    assert_same(small(queries, 9), together)
    alone = [small(query, 9) for query in queries.split(1)]
    fields = (torch.cat([getattr(one, name) for one in alone]) for name in ("indices", "distances"))
    assert_same(Neighbors(*fields), together)


@pytest.mark.parametrize("known", [False, True])
def test_memory_mapped_points(tmp_path: Path, search_type, known, generator, monkeypatch) -> None:
    """Points that are `known` to be in a file are read by their position in it."""
    points = torch.rand(200, 12, generator=generator).half()
    save_file({"points": points}, tmp_path / "points")
    mapped = load_file(tmp_path / "points")["points"]
    if known:
        remember(tmp_path / "points", {"points": mapped})
    queries = torch.rand(10, 12, generator=generator)
    expected = search_type(points)(queries, 5)
    monkeypatch.setattr(neighbors, "WORKING_BYTES", 2**16)
    search = search_type(mapped)
    assert (in_file(search.points) is not None) == known
    assert_same(search(queries, 5), expected)


def test_rounded_matrix_products_change_nothing(generator, monkeypatch) -> None:
    """Autocast is shut out, and a setting that lets products round to bfloat16 is allowed for:
    here they do, in the worst way, and push the true neighbors back."""
    queries = torch.zeros(1, 64)
    directions = 1 + 0.1 * torch.randn(400, 64, generator=generator)  # the mean is far away
    points = torch.linspace(1, 1.001, 400)[:, None] * normalize(directions)
    expected = TorchSearch(points)(queries, 5)
    assert_exact(expected, points, queries)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(TorchSearch(points)(queries, 5), expected)

    def rough(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
        error = 2.0**-8 * left.norm(dim=1)[:, None] * right.norm(dim=1)
        return base + left @ right.T - error * (torch.arange(len(right)) < 5)

    monkeypatch.setattr(confirmed_product, "add_product", rough)
    torch.set_float32_matmul_precision("medium")
    try:
        assert_same(TorchSearch(points)(queries, 5), expected)
    finally:
        torch.set_float32_matmul_precision("highest")
    # the allowance is what makes it right
    assert not torch.equal(TorchSearch(points)(queries, 5).indices, expected.indices)


def test_excluded_by_index(search_type, generator) -> None:
    points = torch.rand(60, 4, generator=generator)
    points[1] = points[0]
    exclude = torch.arange(60)
    exclude[5] = -1
    found = search_type(points)(points, 59, exclude=exclude)
    everything, _ = brute_force(points, points, 60)
    for row in range(60):
        kept = everything[row][everything[row] != exclude[row]][:59]
        assert torch.equal(found.indices[row], kept)
    assert found.indices[[0, 1, 5], 0].tolist() == [1, 0, 5]  # a copy is another bank point
    nothing = torch.full((60,), -1)
    assert_same(search_type(points)(points, 60, exclude=nothing), search_type(points)(points, 60))


NAN = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": torch.zeros(3, 2).long()}, "points: .*int64"),
        ({"points": torch.zeros(3)}, r"points: .*N,d.*\(3,\)"),
        ({"points": torch.zeros(0, 2)}, r"points: .*along N.*\(0, 2\)"),
        ({"points": NAN}, r"points\[0:2\]: .*nan at \(1, 0\)"),
        ({"points": torch.tensor([[3e38], [-3e38], [-3e38], [-3e38]])}, "points: .*float32.*inf"),
        ({"points": [[0.0]]}, "points: .*list"),
        ({"k": 6}, "k: .*at most 5 .*6"),
        ({"k": 5, "exclude": torch.zeros(4).long()}, "k: .*at most 4 .*5"),
        ({"k": 0}, "k: .*at least 1.*0"),
        ({"queries": torch.zeros(4, 3)}, r"queries: .*\(4, 2\).*\(4, 3\)"),
        ({"queries": torch.zeros(4, 2).long()}, "queries: .*int64"),
        ({"queries": NAN}, "queries: .*nan"),
        ({"queries": torch.zeros(0, 2)}, "queries: .*along B"),
        ({"exclude": torch.zeros(3).long()}, r"exclude: .*\(4,\).*\(3,\)"),
        ({"exclude": torch.zeros(4)}, "exclude: .*int64.*float32"),
        ({"exclude": torch.full((4,), 5)}, "exclude: .*below 5.*5 to 5"),
        ({"exclude": torch.full((4,), -2)}, "exclude: .*below 5.*-2 to -2"),
    ],
)
def test_refusals(changes, message) -> None:
    call = {"points": torch.rand(5, 2), "queries": torch.zeros(4, 2), "k": 1, "exclude": None}
    call |= changes
    with pytest.raises(InputError, match=message):
        TorchSearch(call["points"])(call["queries"], call["k"], exclude=call["exclude"])


def test_missing_faiss_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"otad\[index\]"):
        FaissSearch(torch.rand(5, 2))


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
    assert bool((found.floors <= listed).all())
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
