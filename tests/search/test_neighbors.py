"""The search against brute force, where a matrix product alone would go wrong."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from otad.errors import InputError, MissingExtraError
from otad.io.mapped_rows import in_file, remember
from otad.search import confirmed_product, neighbors
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


@given(
    d=st.integers(1, 3),
    side=st.integers(1, 4),
    n=st.integers(1, 120),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_ties_and_copies_on_a_grid(d, side, n, share, seed) -> None:
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
    [(torch.float32, 1e5, 1.0), (torch.float64, 1e9, 1e-3), (torch.float64, -1e3, 1e-9)],
)
def test_points_far_from_the_origin(search_type, dtype, origin, spread, generator) -> None:
    cloud = torch.randn(510, 30, generator=generator, dtype=torch.float64)
    points, queries = (origin + spread * cloud).to(dtype).split([500, 10])
    assert_exact(search_type(points)(queries, 10), points, queries)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_points_around_the_origin_are_not_copied(shift, generator, monkeypatch) -> None:
    """A bank beyond the budget of a ready copy would be copied anew in each call."""
    points, queries = torch.randn(510, 30, generator=generator).add(shift).split([500, 10])
    monkeypatch.setattr(neighbors, "WORKING_BYTES", 2**16)
    search = TorchSearch(points)
    seen = []
    product = confirmed_product.add_product

    def watched(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
        seen.append(right.untyped_storage().data_ptr())
        return product(base, left, right)

    monkeypatch.setattr(confirmed_product, "add_product", watched)
    assert_exact(search(queries, 10), points, queries)
    copied = [place != points.untyped_storage().data_ptr() for place in seen]
    assert copied == [shift > 0] * len(seen)


def test_order_that_float32_cannot_see(search_type, generator, monkeypatch) -> None:
    """Radii 1 + 1e-9 i around the query: every row has to come back with longer shortlists."""
    sizes = []
    attempt = NeighborSearch._attempt

    def watched(self, queries, k, size, *options):
        sizes.append(size)
        return attempt(self, queries, k, size, *options)

    monkeypatch.setattr(NeighborSearch, "_attempt", watched)
    directions = torch.randn(400, 20, generator=generator, dtype=torch.float64)
    order = torch.randperm(400, generator=generator)
    radii = 1 + 1e-9 * order.double()[:, None]
    points = radii * directions / directions.norm(dim=1, keepdim=True)
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


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e30, 1e36])
def test_any_scale(search_type, scale, generator) -> None:
    points, queries = torch.randn(210, 8, generator=generator).mul(scale).split([200, 10])
    queries = torch.cat([queries, torch.ones(1, 8), torch.full((1, 8), 1e38)])
    assert_exact(search_type(points)(queries, 6), points, queries)


def test_squares_too_small_for_float32(search_type, generator) -> None:
    """Next to two points so far apart, every other product is flushed to zero."""
    points = torch.randn(300, 5, generator=generator)
    points[150:] += 50
    points[17], points[18] = 1e30, -1e30
    queries = 50 + torch.randn(10, 5, generator=generator)
    assert_exact(search_type(points)(queries, 6), points, queries)


def test_bounds_hold_for_every_point_left_out(search_type, generator) -> None:
    points = torch.randn(500, 600, generator=generator) * torch.rand(500, 1, generator=generator)
    queries = torch.randn(30, 600, generator=generator)
    search = search_type(points)
    x = (queries.double() - search._center) * 2.0**-search._exponent
    indices, floor = search._shortlist(x, 40)
    squares = torch.cdist(queries.double(), points.double()).mul(2.0**-search._exponent).square()
    squares.scatter_(1, indices, torch.inf)
    assert bool((floor <= squares.amin(1)).all())
    assert bool((floor >= 0.99 * squares.amin(1)).all())  # and are of use


@pytest.mark.parametrize(("b", "d"), [(30, 37), (100, 3)])
def test_neither_batch_nor_memory_changes_a_bit(search_type, b, d, generator, monkeypatch) -> None:
    points, queries = torch.rand(500 + b, d, generator=generator).split([500, b])
    together = search_type(points)(queries, 9)
    monkeypatch.setattr(neighbors, "WORKING_BYTES", 2**16)
    small = search_type(points)
    assert_same(small(queries, 9), together)
    for row in range(b):
        alone = small(queries[row : row + 1], 9)
        assert torch.equal(alone.indices[0], together.indices[row])
        assert torch.equal(alone.distances[0], together.distances[row])


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
    radii = torch.linspace(1, 1.001, 400)[:, None]
    points = radii * directions / directions.norm(dim=1, keepdim=True)
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
    assert found.indices[0, 0] == 1  # its copy is another bank point
    assert found.indices[1, 0] == 0
    assert found.indices[5, 0] == 5
    nothing = torch.full((60,), -1)
    assert_same(search_type(points)(points, 60, exclude=nothing), search_type(points)(points, 60))


NAN = torch.tensor([[0.0, 1.0], [float("nan"), 0.0]])
QUERIES = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.zeros(3, 2).long(), "points: .*int64"),
        (torch.zeros(3), r"points: .*N,d.*\(3,\)"),
        (torch.zeros(0, 2), r"points: .*along N.*\(0, 2\)"),
        (NAN, r"points\[0:2\]: .*nan at \(1, 0\)"),
        (torch.tensor([[3e38], [-3e38], [-3e38], [-3e38]]), "points: .*float32.*inf"),
        ([[0.0]], "points: .*list"),
    ],
)
def test_bad_points(points, message) -> None:
    with pytest.raises(InputError, match=message):
        TorchSearch(points)


@pytest.mark.parametrize(
    ("queries", "k", "exclude", "message"),
    [
        (QUERIES, 6, None, "k: .*at most 5 .*got 6"),
        (QUERIES, 5, torch.zeros(4).long(), "k: .*at most 4 .*got 5"),
        (QUERIES, 0, None, "k: .*at least 1.*got 0"),
        (torch.zeros(4, 3), 1, None, r"queries: .*\(4, 2\).*\(4, 3\)"),
        (QUERIES.long(), 1, None, "queries: .*int64"),
        (NAN, 1, None, "queries: .*nan"),
        (QUERIES[:0], 1, None, "queries: .*along B"),
        (QUERIES, 1, torch.zeros(3).long(), r"exclude: .*\(4,\).*\(3,\)"),
        (QUERIES, 1, torch.zeros(4), "exclude: .*int64.*float32"),
        (QUERIES[:1], 1, torch.tensor([5]), "exclude: .*below 5.*5 to 5"),
        (QUERIES[:1], 1, torch.tensor([-2]), "exclude: .*below 5.*-2 to -2"),
    ],
)
def test_bad_calls(queries, k, exclude, message) -> None:
    with pytest.raises(InputError, match=message):
        TorchSearch(torch.rand(5, 2))(queries, k, exclude=exclude)


def test_missing_faiss_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"otad\[index\]"):
        FaissSearch(torch.rand(5, 2))
