"""Searches of shards and of cells against the search of the whole bank: the same bits."""

from __future__ import annotations

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from factories import exact, images
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import otad
from otad.certify.certification import UNPROVED
from otad.errors import InputError
from otad.io.mapped_rows import JoinedRows
from otad.io.sharing import Sharing
from otad.search import ivf, neighbors
from otad.search.ivf import IvfSearch, build_lists
from otad.search.neighbors import Neighbors, Search, TorchSearch
from otad.search.sharded import ShardedSearch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its generated bindings
    pytest.importorskip("faiss", reason="needs the extra 'index' (faiss-cpu)")


def assert_same(found: Neighbors, expected: Neighbors) -> None:
    for name in ("indices", "distances", "proved"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def sharded(points: Tensor, cuts: list[int]) -> ShardedSearch:
    edges = [0, *sorted(cuts), len(points)]
    parts = [points[a:b] for a, b in pairwise(edges) if a < b]
    return ShardedSearch([TorchSearch(part) for part in parts])


def grid(n: int, d: int, side: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, of which most distances are equal, and rows to exclude."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(side + 1, (n, d), generator=generator).float()
    queries = torch.randint(side + 1, (9, d), generator=generator).float()
    return points, queries, torch.randint(-1, n, (9,), generator=generator)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_shards_are_one_bank(data) -> None:
    """With ties and copies, uneven shards, and K larger than a shard."""
    n = data.draw(st.integers(2, 120))
    cuts = data.draw(st.lists(st.integers(0, n), max_size=6))
    d, side, seed = (data.draw(st.integers(1, most)) for most in (3, 4, 10**6))
    points, queries, exclude = grid(n, d, side, seed)
    k = data.draw(st.integers(1, n - 1))
    search, whole = sharded(points, cuts), TorchSearch(points)
    assert len(search) == n
    assert_same(search(queries, k), whole(queries, k))
    assert_same(search(queries, k, exclude=exclude), whole(queries, k, exclude=exclude))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_cells_are_one_bank(tmp_path_factory, data) -> None:
    n = data.draw(st.integers(2, 90))
    d, side, seed = (data.draw(st.integers(1, most)) for most in (3, 4, 10**6))
    points, queries, exclude = grid(n, d, side, seed)
    cells, k = data.draw(st.integers(1, n)), data.draw(st.integers(1, n - 1))
    path = build_lists(points, tmp_path_factory.mktemp("lists") / "lists", cells=cells)
    search, whole = IvfSearch(path), TorchSearch(points)
    assert_same(search(queries, k), whole(queries, k))
    assert_same(search(queries, k, exclude=exclude), whole(queries, k, exclude=exclude))
    some = IvfSearch(path, n_probe=1)(queries, k, exclude=exclude)
    expected = whole(queries, k, exclude=exclude)
    right = some.proved
    assert torch.equal(some.indices[right], expected.indices[right])
    assert bool((some.distances >= expected.distances).all())


@pytest.mark.parametrize(
    ("dtype", "origin", "spread"),
    [
        (torch.float32, 0.0, 1.0),
        (torch.bfloat16, 0.0, 1.0),
        (torch.float64, 1e9, 1e-3),
        (torch.float32, 0.0, 1e-30),
        (torch.float32, 0.0, 1e30),
    ],
)
def test_any_scale(tmp_path: Path, dtype, origin, spread, generator, monkeypatch) -> None:
    cloud = torch.randn(430, 6, generator=generator, dtype=torch.float64)
    points, queries = (origin + spread * cloud).to(dtype).split([400, 30])
    expected = TorchSearch(points)(queries, 7)
    with ThreadPoolExecutor(2) as pool:
        shards = [TorchSearch(part) for part in points.split([5, 195, 200])]
        assert_same(ShardedSearch(shards, pool)(queries, 7), expected)
    path = build_lists(JoinedRows(points.split(130)), tmp_path / "lists", cells=20)
    monkeypatch.setattr("otad.search.ivf.WORKING_BYTES", 2**15)  # several batches
    assert_same(IvfSearch(path)(queries, 7), expected)
    few, read = IvfSearch(path).counted(queries, 7)
    assert_same(few, expected)
    assert bool(((read >= 7) & (read <= 400)).all())


def test_order_that_float32_cannot_see(generator) -> None:
    """Radii 1 + 1e-9 i around the query: shards have to come back with longer shortlists."""
    directions = torch.randn(400, 20, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    order = torch.randperm(400, generator=generator)
    points = (1 + 1e-9 * order.double()[:, None]) * directions
    query = torch.zeros(1, 20, dtype=torch.float64)
    assert torch.equal(sharded(points, [3, 170])(query, 5).indices[0], order.argsort()[:5])


def test_a_bound_of_any_shard_counts() -> None:
    """A shard that lists too few points leaves a row open, although all other shards are proved."""

    asked = []

    class Short(TorchSearch):
        def candidates(self, queries, k, size, exclude):
            asked.append(size)
            beyond = queries.new_full((len(queries),), 0.5 if len(asked) == 1 else torch.inf)
            return super().candidates(queries, k, size, exclude)._replace(beyond=beyond)

    points = torch.arange(60.0)[:, None]
    search = ShardedSearch([TorchSearch(points[:20]), Short(points[20:])])
    found = search(torch.tensor([[20.0]]), 3)
    assert found.indices.tolist() == [[20, 19, 21]]
    assert asked == [3 + neighbors.SPARE, neighbors.GROWTH * (3 + neighbors.SPARE)]


def clustered(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten clusters far apart, and queries in them."""
    centers = 100 * torch.randn(10, 4, generator=generator)
    cloud = torch.randn(10, 60, 4, generator=generator)
    points, queries = (centers[:, None] + cloud).split([50, 10], dim=1)
    return points.reshape(-1, 4), queries.reshape(-1, 4)


def test_far_cells_are_not_read(tmp_path: Path, generator) -> None:
    points, queries = clustered(generator)
    path = build_lists(points, tmp_path / "lists", cells=10, seed=1)
    found, read = IvfSearch(path).counted(queries, 5)
    assert_same(found, TorchSearch(points)(queries, 5))
    assert float(read.double().mean()) < 0.3 * len(points)


def test_neighbors_that_are_not_proved_may_be_wrong(tmp_path: Path, generator) -> None:
    points, queries = torch.randn(530, 6, generator=generator).split([500, 30])
    path = build_lists(points, tmp_path / "lists", cells=40)
    found, expected = IvfSearch(path, n_probe=2)(queries, 10), TorchSearch(points)(queries, 10)
    right = (found.indices == expected.indices).all(1)
    assert not bool(right.all())
    assert not bool((found.proved & ~right).any())


def test_bounds_hold_for_every_point(tmp_path: Path, generator) -> None:
    points, queries = torch.randn(530, 5, generator=generator).split([500, 30])
    search = IvfSearch(build_lists(points, tmp_path / "lists", cells=30))
    _, bounds = search._cell_bounds(queries.double())
    distances = torch.cdist(queries.double(), points.double())
    for cell in range(search.cells):
        own = search._ids[search._starts[cell] : search._starts[cell + 1]]
        if len(own):
            nearest = distances[:, own].amin(1)
            assert bool((bounds[:, cell] <= nearest).all())
            assert float((nearest - bounds[:, cell]).min()) < 5.0  # and they say something


def test_certify_refuses_rows_whose_neighbors_are_not_proved(tmp_path: Path) -> None:
    model, (x, _) = exact("fc"), images(12, seed=3)
    expected = otad.certify(model, x)
    assert bool((expected.radius > 0).any())
    path = build_lists(model.bank_points, tmp_path / "lists", cells=12)
    model.use_search(IvfSearch(path))
    found = otad.certify(model, x)
    assert torch.equal(found.radius, expected.radius)
    assert found.assumptions == expected.assumptions
    model.use_search(IvfSearch(path, n_probe=1))
    proved = model.trace(x).neighbors.proved
    assert bool((~proved).any())
    found = otad.certify(model, x)
    assert not bool(found.radius[~proved].any())
    assert [name == UNPROVED for name in found.rules] == (~proved).tolist()
    assert torch.equal(found.radius[proved], expected.radius[proved])
    assert any("stops early" in words for words in found.assumptions)
    sent = Sharing(lambda arrays: lambda: arrays)(model).open()  # as other processes get it
    for copied in (copy.deepcopy(model), sent):
        assert torch.equal(copied.trace(x).neighbors.proved, proved)
    assert bool(model.replace(n_neighbors=model.n_neighbors).trace(x).neighbors.proved.all())


def test_a_global_map_that_abstains_by_a_search_that_stops_early_has_no_radius(
    tmp_path: Path,
) -> None:
    """A changed input may get no answer, although it is near the bank."""
    (train_x, train_y), (x, _) = images(40, seed=1), images(5, seed=3)
    model = otad.defend(None, train_x, train_y, inputs="pixels", scope="global")
    path = build_lists(model.bank_points, tmp_path / "lists", cells=12)
    for n_probe, limit in ((1, 2.0), (1, None), (None, 2.0)):
        model.use_search(IvfSearch(path, n_probe=n_probe))
        model.abstain_beyond = limit
        found, unproved = otad.certify(model, x), n_probe is not None and limit is not None
        assert bool((found.radius > 0).any()) != unproved
        assert ({*found.rules} == {UNPROVED}) == unproved
        assert not any("stops early" in words for words in found.assumptions)


def test_a_search_of_other_points_is_refused(tmp_path: Path, monkeypatch) -> None:
    for module in (neighbors, ivf):
        monkeypatch.setattr(module, "WORKING_BYTES", 2**15)  # several blocks
    model = exact("fc")
    points = model.bank_points
    other, last = points.clone(), len(points) - 2
    other[last] = other[0]
    lists = IvfSearch(build_lists(other, tmp_path / "other", cells=5))
    for search, expected in (
        (TorchSearch(points[1:]), "search: expected shape"),
        (TorchSearch(points.flip(0)), "search: expected the points of the bank"),
        (sharded(other, [3, 9]), rf"the points of the bank, got others, such as in row \[{last}\]"),
        (lists, rf"the points of the bank, got others, such as in row \[{last}\]"),
    ):
        with pytest.raises(InputError, match=expected):
            model.use_search(search)
    model.use_search(IvfSearch(build_lists(points, tmp_path / "lists", cells=5)))
    searches: list[list[Search]] = [[], [TorchSearch(points), TorchSearch(points[:, 1:])]]
    for shards in searches:
        with pytest.raises(InputError, match="shards: expected"):
            ShardedSearch(shards)
    with pytest.raises(InputError, match="cells: expected at most"):
        build_lists(points, tmp_path / "lists", cells=len(points) + 1)
    path = build_lists(points, tmp_path / "lists", cells=5)
    with pytest.raises(InputError, match="n_probe: expected"):
        IvfSearch(path, n_probe=0)
    held = load_file(path)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="checksum"):
        IvfSearch(path)
    about = {"format": "otad-ivf-lists", "version": "1"}
    for change in (
        {"ids": held["ids"] * 0},
        {"starts": held["starts"] + 1},
        {"radii": held["radii"][1:].clone()},
    ):
        save_file(held | change, path, about)
        with pytest.raises(InputError, match="expected"):
            IvfSearch(path, verify=False)
    save_file(held, path, {"format": "other"})
    with pytest.raises(InputError, match="expected otad-ivf-lists"):
        IvfSearch(path, verify=False)
    with pytest.raises(InputError, match=r"path: .* of the format otad-ivf-lists, got .*, other"):
        build_lists(points, path, cells=5)
    assert load_file(path).keys() == held.keys()
