"""The search of a GPU against distances in float64: compiled on a GPU, else interpreted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

HAS_CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="needs Triton, which comes with torch for CUDA")

from otad.errors import InputError  # noqa: E402
from otad.search import grouped_product  # noqa: E402
from otad.search.grouped_product import (  # noqa: E402
    GroupedProduct,
    HalvesProduct,
    padded,
    tree_order,
)
from otad.search.neighbors import SPARE, NeighborSearch, TorchSearch  # noqa: E402

# NumPy, which interprets kernels here, warns of numbers that the kernel masks out afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if HAS_CUDA else "cpu"
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
N = 2085  # not a multiple of the size of a group


class Plain(TorchSearch):
    """The same search without the kernel."""

    _attempt = NeighborSearch._attempt


def search_of(
    monkeypatch: pytest.MonkeyPatch, points: Tensor, *, by: torch.dtype
) -> tuple[TorchSearch, GroupedProduct]:
    monkeypatch.setattr(GroupedProduct, "covers", staticmethod(lambda points: True))
    monkeypatch.setattr(grouped_product, "is_fast_in_double", lambda device: by == DOUBLE)
    monkeypatch.setattr(grouped_product, "multiplies_halves", lambda device: by == HALF)
    if not HAS_CUDA:
        in_single = lambda left, right: left.float() @ right.float().T  # noqa: E731
        monkeypatch.setattr(grouped_product, "multiplied", in_single)
    search = TorchSearch(points.to(DEVICE))
    assert search._grouped is not None
    assert search._grouped.product.dtype == (DOUBLE if by == DOUBLE and search._plain else SINGLE)
    assert isinstance(search._grouped.product, HalvesProduct) == (by == HALF)
    return search, search._grouped


def drawn(dim: int, dtype: torch.dtype, shift: float, spread: float) -> tuple[Tensor, Tensor]:
    """Clusters with equal points among them, and queries of which some are points."""
    generator = torch.Generator().manual_seed(dim)
    centers = torch.randn(5, dim, generator=generator)
    noise = spread * torch.randn(N + 3, dim, generator=generator)
    both = (centers[torch.randint(5, (N + 3,), generator=generator)] + noise + shift).to(dtype)
    both[5] = both[9]
    both[17] = both[9]
    both[100:160] = both[3]  # more than a shortlist holds
    return both[:N], torch.cat([both[N:], both[[9, 3]]]).float()


def reference(points: Tensor, queries: Tensor, exclude: Tensor) -> tuple[Tensor, Tensor]:
    """All points of each query, nearest first, and equal distances by index."""
    gaps = points.double()[None] - queries.double()[:, None]
    lengths = gaps.square().sum(2).sqrt()
    lengths[torch.arange(len(queries)), exclude] = torch.where(
        exclude < 0, lengths[:, -1], torch.inf
    )
    return lengths.sort(dim=1, stable=True)


@pytest.mark.parametrize("by", [HALF, SINGLE, DOUBLE])
@pytest.mark.parametrize(
    ("dim", "dtype", "shift", "spread", "k"),
    [
        (1, SINGLE, 0.0, 1.0, 10),
        (16, HALF, 0.0, 0.3, 10),
        (37, SINGLE, 0.0, 0.01, 7),
        (9, DOUBLE, 60.0, 1.0, 1),
    ],
)
def test_neighbors_are_those_of_all_distances(
    monkeypatch: pytest.MonkeyPatch, dim, dtype, shift, spread, k, by
) -> None:
    points, queries = drawn(dim, dtype, shift, spread)
    plain = Plain(points)
    search, grouped = search_of(monkeypatch, points, by=by)
    exclude = torch.tensor([-1, 5, -1, 9, 3])
    lengths, order = reference(points, queries, exclude)
    found = search(queries.to(DEVICE), k, exclude=exclude.to(DEVICE))
    expected = plain(queries, k, exclude=exclude)
    assert torch.equal(found.indices.cpu(), order[:, :k])
    assert torch.equal(found.indices.cpu(), expected.indices)
    assert torch.equal(found.distances.cpu(), expected.distances)  # bit by bit
    assert bool(found.proved.all())

    how = k, k + SPARE, exclude.to(DEVICE)
    first = search.candidates(queries.to(DEVICE), *how)
    size = padded(k + SPARE)  # of the shortlist, in which there may be an excluded point
    assert bool((first.beyond.cpu() <= lengths[:, size]).all())
    if grouped.product.dtype == DOUBLE:  # then the bound is tight
        assert bool((first.beyond.cpu() >= lengths[:, size - 2] - 1e-4).all())


def test_nothing_is_proved_of_queries_that_are_not_finite_or_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, queries = drawn(7, SINGLE, 0.0, 1.0)
    none = torch.full((len(queries),), -1, device=DEVICE)
    for value, by in ((3e38, SINGLE), (1e6, HALF), (torch.nan, DOUBLE), (torch.inf, DOUBLE)):
        search, _ = search_of(monkeypatch, points, by=by)
        queries[2, 3] = value
        found = search.candidates(queries.to(DEVICE), 3, 3 + SPARE, none)
        assert (found.distances[:, -1] < found.beyond).tolist()[:4] == [True, True, False, True]
        assert bool(((found.indices >= 0) & (found.indices < N)).all())  # a graph gathers them
    with pytest.raises(InputError, match=r"queries: expected finite values, got inf at \(2, 3\)"):
        search(queries.to(DEVICE), 3)


def test_nothing_is_proved_by_sums_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    points, queries = drawn(7, SINGLE, 0.0, 1.0)
    search, _ = search_of(monkeypatch, points, by=HALF)
    none = torch.full((len(queries),), -1, device=DEVICE)
    assert bool((search.candidates(queries.to(DEVICE), 3, 3 + SPARE, none).beyond > 0).any())
    asked = SimpleNamespace(allow_fp16_accumulation=True, fp32_precision="ieee")
    monkeypatch.setattr(torch.backends.cuda, "matmul", asked)
    assert bool((search.candidates(queries.to(DEVICE), 3, 3 + SPARE, none).beyond == 0).all())
    found, expected = search(queries.to(DEVICE), 3), Plain(points)(queries, 3)
    assert torch.equal(found.indices.cpu(), expected.indices)


def test_small_banks_and_long_shortlists_are_left_to_the_plain_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, queries = drawn(7, SINGLE, 0.0, 1.0)
    search, grouped = search_of(monkeypatch, points, by=HALF)
    assert grouped.holds(32)
    assert not grouped.holds(33)  # 64 of 33 groups
    found, expected = search(queries.to(DEVICE), 40), Plain(points)(queries, 40)
    assert torch.equal(found.indices.cpu(), expected.indices)


def test_the_order_of_columns_makes_the_additions_of_halves() -> None:
    for dim in (1, 2, 3, 5, 8, 49, 784):
        row = torch.rand(dim, dtype=DOUBLE, generator=torch.Generator().manual_seed(dim)) ** 9
        halves, order = row.tolist(), tree_order(dim)
        while len(halves) > 1:
            half = (len(halves) + 1) // 2
            halves = [a + b for a, b in zip(halves[:half], [*halves[half:], 0.0], strict=False)]
        lanes = torch.where(order < 0, 0.0, row[order.clamp_min(0).long()])
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        assert lanes.item() == halves[0]
        assert sorted(order[order >= 0].tolist()) == list(range(dim))
