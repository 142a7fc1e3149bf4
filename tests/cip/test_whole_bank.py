"""The map of a whole bank: against a full quadratic program, and the properties that certify it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cip.instances import normal
from cip.test_bank_potential import BANKS, BENDS, smooth_bank
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch import Tensor
from torch.testing import assert_close

from otad.cip import Status
from otad.cip.whole_bank import pricing
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.pairs import Pairs
from otad.cip.whole_bank.potential import BankPotential, integrate_most, least_bank_smoothness
from otad.cip.whole_bank.pricing import Prices
from otad.errors import InputError

clarabel = pytest.importorskip("clarabel", reason="needs the extra 'reference' (clarabel)")


def queries(count: int, dim: int, seed: int) -> Tensor:
    """Around the bank, some far outside."""
    generator = torch.Generator().manual_seed(seed)
    return 2 + 2 * torch.randn(count, dim, generator=generator, dtype=torch.float64)


def full_program(
    x: Tensor, z: Tensor, potential: BankPotential, query: Tensor
) -> tuple[float, np.ndarray]:
    """Value and gradient of the potential at one query by Clarabel, over all points at once.

    min over (v, y) of v with  v >= s_i + <z~_i, x'> - <z~_i, y> / M + |y|^2 / (2M): here as
    max over the simplex of c.w - |Z^T w|^2 / (2M), with Y = Z^T w as variables of its own.
    """
    modulus, bend = potential.modulus, potential.strong_convexity
    kept = ~potential.levels.isnan()
    points, images = x[kept], z[kept] - bend * x[kept]
    levels = potential.levels[kept] - bend / 2 * points.square().sum(1)
    lines = levels + ((query - points) * images).sum(1) + images.square().sum(1) / (2 * modulus)
    count, dim = images.shape
    shift = float(lines.max())  # weights sum to one: a constant moves the value alone
    quadratic = sparse.diags([0.0] * count + [1 / modulus] * dim, format="csc")
    linear = np.concatenate([-(lines.numpy() - shift), np.zeros(dim)])
    rows = np.zeros((1 + dim + count, count + dim))
    rows[0, :count], rows[1 : 1 + dim, :count] = 1.0, images.numpy().T
    rows[1 : 1 + dim, count:], rows[1 + dim :, :count] = -np.eye(dim), -np.eye(count)
    constraints = sparse.csc_matrix(rows)
    bounds = np.concatenate([[1.0], np.zeros(dim + count)])
    cones = [clarabel.ZeroConeT(1 + dim), clarabel.NonnegativeConeT(count)]
    options = clarabel.DefaultSettings()
    options.verbose = False
    for name in ("tol_gap_abs", "tol_gap_rel", "tol_feas"):
        setattr(options, name, 1e-13)
    found = clarabel.DefaultSolver(quadratic, linear, constraints, bounds, cones, options).solve()
    mixed = np.array(found.x[count:])
    value = shift - found.obj_val + bend / 2 * float(query.square().sum())
    return value, mixed + bend * query.numpy()


@pytest.mark.parametrize("bend", BENDS)
def test_far_from_the_origin_the_map_is_the_same(bend: float) -> None:
    x, z = (part.mul(2**20).round() / 2**20 for part in smooth_bank(60, 4, 5))
    query = queries(100, 4, 6).mul(2**20).round() / 2**20
    near = WholeBank(x, z, least_bank_smoothness(x, z, bend))(query).solution
    for away in (2.0**10, 2.0**20):
        potential = least_bank_smoothness(x + away, z, bend)
        found = WholeBank(x + away, z, potential)(query + away)
        assert (found.solution.status == int(Status.SOLVED)).all()
        assert_close(found.solution.image, near.image, rtol=0, atol=1e-8)
        at_bank = WholeBank(x + away, z, potential)(x + away).solution
        assert_close(at_bank.value, potential.levels, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dim", [2, 3])
def test_every_query_is_solved_where_almost_all_points_are_as_good(dim: int, seed: int) -> None:
    """The identity: all points around a query have slopes near the largest."""
    x, query = queries(40, dim, seed), queries(400, dim, 9 + seed)
    found = WholeBank(x, x.clone(), least_bank_smoothness(x, x.clone()))(query)
    assert (found.solution.status == int(Status.SOLVED)).all()


@pytest.mark.parametrize("bend", BENDS)
def test_equals_the_full_program_on_random_banks(bend: float) -> None:
    """15 banks of up to 400 points for each l, a query each."""
    for seed in range(15):
        size, dim = 5 + (37 * seed) % 396, 1 + seed % 7
        x, z = smooth_bank(size, dim, seed)
        potential = integrate_most(x, z, 40.0, bend)
        if seed % 5 == 0:  # the least L makes the hardest program
            potential = least_bank_smoothness(x, z, bend, tolerance=0.05)
        assert len(potential.left_out) == 0
        query = queries(1, dim, seed)
        found = WholeBank(x, z, potential)(query)
        value, image = full_program(x, z, potential, query[0])
        assert int(found.solution.status[0]) == Status.SOLVED
        assert float(found.solution.value[0]) == pytest.approx(value, rel=1e-8, abs=1e-8)
        np.testing.assert_allclose(found.solution.image[0].numpy(), image, rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(**BANKS, bend=st.sampled_from(BENDS))
def test_passes_through_every_pair_with_the_level_it_has(seed, size, dim, bend) -> None:
    x, z = smooth_bank(size, dim, seed)
    potential = least_bank_smoothness(x, z, bend)
    found = WholeBank(x, z, potential)(x)
    assert_close(found.solution.image, z, rtol=0, atol=1e-6)
    assert_close(found.solution.value, potential.levels, rtol=0, atol=1e-8)
    assert bool((found.solution.status == int(Status.SOLVED)).all())


@pytest.mark.parametrize("bend", BENDS)
def test_no_pair_of_inputs_exceeds_the_lipschitz_constant(bend: float) -> None:
    x, z = smooth_bank(120, 3, 2)
    bank = WholeBank(x, z, least_bank_smoothness(x, z, bend))
    limit = max(abs(bend), bank.potential.smoothness)
    start = queries(60, 3, 3)
    step = 1e-3 * torch.randn(60, 3, generator=torch.Generator().manual_seed(4)).double()
    for _ in range(5):  # power method: along the direction in which the map stretches most
        step.requires_grad_()
        shift = bank(start + step).solution.image - bank(start).solution.image.detach()
        ratio = (shift.norm(dim=1) / step.norm(dim=1)).detach()
        assert float(ratio.max()) <= limit * (1 + 1e-6)
        (gradient,) = torch.autograd.grad(shift.square().sum(), step)
        flat = gradient.norm(dim=1, keepdim=True) == 0
        step = torch.where(flat, step, gradient).detach()
        step = 1e-3 * step / step.norm(dim=1, keepdim=True)
    assert float(ratio.max()) > 0.5 * limit  # the search comes near what it looks for
    far = queries(60, 3, 5)
    ratio = (bank(far).solution.image - bank(start).solution.image).norm(dim=1)
    assert bool((ratio <= limit * (far - start).norm(dim=1) * (1 + 1e-9)).all())


@pytest.mark.parametrize("bend", BENDS)
def test_the_gradient_is_that_of_the_map(bend: float) -> None:
    x, z = smooth_bank(90, 4, 6)
    bank = WholeBank(x, z, least_bank_smoothness(x, z, bend))
    query = queries(40, 4, 7).requires_grad_()
    direction = torch.randn(40, 4, generator=torch.Generator().manual_seed(8)).double()
    found = bank(query).solution
    weight = torch.linspace(-1, 1, 4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found.image @ weight).sum(), query, retain_graph=True)
    ahead, behind = (bank(query.detach() + sign * 1e-6 * direction).solution for sign in (1, -1))
    expected = (ahead.image - behind.image) @ weight / 2e-6
    off = ((gradient * direction).sum(1) - expected).abs()
    assert float(off.median()) < 1e-6  # at a kink the two sides differ
    assert float((off < 1e-5).double().mean()) > 0.9
    (slope,) = torch.autograd.grad(found.value.sum(), query)
    assert_close(slope, found.image)  # the map is the gradient of its potential


def test_the_gap_covers_the_points_without_weight() -> None:
    x, z = smooth_bank(150, 5, 9)
    potential = least_bank_smoothness(x, z)
    query = queries(30, 5, 10)
    found = WholeBank(x, z, potential)(query)
    weight = found.solution.multipliers
    lines = potential.levels - (x * z).sum(1) + z.square().sum(1) / (2 * potential.modulus)
    slopes = lines + (query - found.solution.image / potential.modulus) @ z.T
    mean = (weight * slopes.gather(1, found.indices)).sum(1)
    assert_close(slopes.amax(1) - mean, found.gap, rtol=0, atol=1e-9)
    assert_close(weight.sum(1), torch.ones(30).double())
    # Most weight first, and the rest is padding.
    assert bool((weight[:, :-1] >= weight[:, 1:]).all())
    assert int((weight > 0).sum(1).max()) == weight.shape[1]
    assert torch.equal(found.solution.active, weight > 0)
    assert bool((found.indices == found.indices[:, :1])[weight <= 0].all())


def test_points_left_out_have_no_influence() -> None:
    x, z = smooth_bank(60, 3, 11)
    z[17] += 5.0
    potential = integrate_most(x, z, 4.0)
    kept = ~potential.levels.isnan()
    query = queries(20, 3, 12)
    whole = WholeBank(x, z, potential)(query)
    levels = potential.levels[kept]
    alone = BankPotential(levels, 4.0, 0.0, torch.empty(0, dtype=torch.int64), 1, 0.0)
    part = WholeBank(x[kept], z[kept], alone)(query)
    assert_close(whole.solution.image, part.solution.image)
    assert not bool((whole.indices[whole.solution.multipliers > 0] == 17).any())


@pytest.mark.parametrize("cells", [10**9, 40])
def test_an_index_only_helps_to_find_the_points(cells, monkeypatch) -> None:
    """With one cell, and with so many that most of the bank is not searched."""
    pytest.importorskip("faiss", reason="needs the extra `index`")
    sizes = {"FEWEST_FOR_CELLS": cells, "POINTS_PER_CELL": 20, "PROBED_CELLS": 1}
    for name, size in (sizes | {"TRAINING_ROWS": 40}).items():
        monkeypatch.setattr(pricing, name, size)
    x, z = smooth_bank(900, 5, 18)
    z[100] += 4.0
    potential = integrate_most(x, z, 6.0)
    query = queries(50, 5, 19)
    exact, found = (
        WholeBank(x, z, potential, pricing=pricing)(query) for pricing in ("exact", "faiss")
    )
    assert_close(found.solution.image, exact.solution.image, rtol=0, atol=1e-6)
    assert_close(found.solution.value, exact.solution.value, rtol=0, atol=1e-9)
    assert bool((found.solution.status == int(Status.SOLVED)).all())
    assert float(found.gap.max()) < 1e-10
    assert float(found.rounds.double().mean()) <= float(exact.rounds.double().mean()) + 1


def test_pieces_of_a_batch_and_threads_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    x, z = smooth_bank(150, 5, 22)
    bank, query = WholeBank(x, z, least_bank_smoothness(x, z)), queries(60, 5, 23)
    whole = bank(query).solution
    monkeypatch.setitem(pricing.GATHERED_AT_ONCE, "cpu", 5 * 20 * 7)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pieces = bank(query).solution
    finally:
        torch.set_num_threads(before)
    assert_close(whole.image, pieces.image, rtol=0, atol=1e-9)
    assert_close(whole.value, pieces.value, rtol=0, atol=1e-11)
    rough = bank(query.float()).solution.image
    assert_close(rough, whole.image.float(), rtol=1e-5, atol=1e-5)  # in its own dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bank_device", ["cpu", "cuda"])
def test_queries_are_answered_where_they_are(bank_device: str, dtype: torch.dtype) -> None:
    x, z = smooth_bank(300, 8, 24, dtype=torch.float32)
    potential = least_bank_smoothness(x, z)
    query = queries(30, 8, 25).to(dtype)
    expected = WholeBank(x, z, potential)(query).solution
    moved = replace(potential, levels=potential.levels.to(bank_device))
    found = WholeBank(x.to(bank_device), z.to(bank_device), moved)(query.cuda()).solution
    assert found.image.is_cuda
    assert_close(found.image.cpu(), expected.image, rtol=1e-5, atol=1e-5)
    assert_close(found.value.cpu(), expected.value, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    x, z = smooth_bank(20, 3, 17)
    potential = least_bank_smoothness(x, z)
    bank = WholeBank(x, z, potential)
    for message, work in (
        (r"levels: .*\(19,\).*\(20,\)", lambda: WholeBank(x[:19], z[:19], potential)),
        (r"query: .*\(4, 3\).*\(4, 2\)", lambda: bank(torch.zeros(4, 2))),
        (r"pricing: .*guess", lambda: WholeBank(x, z, potential, pricing="guess")),
        (r"query: .*nan", lambda: bank(torch.full((4, 3), torch.nan))),
    ):
        with pytest.raises(InputError, match=message):
            work()


def all_prices(pairs: Pairs, lines: Tensor, points: Tensor) -> Tensor:
    return lines + points @ pairs.read(slice(None))[1].T


@pytest.mark.parametrize("scale", [1.0, 1e60])
def test_prices_are_those_of_all_products(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where float32 overflows, with points left out, and in blocks."""
    generator = torch.Generator().manual_seed(4)
    pairs, lines = Pairs(*smooth_bank(90, 5, 4), 0.0), normal(generator, 90)
    points = scale * normal(generator, 40, 5)
    lines[30:60] = -torch.inf
    every = all_prices(pairs, lines, points)
    few = torch.tensor([3, 80, 17])
    for size in (2**20, 21):
        monkeypatch.setitem(pricing.POINTS_AT_ONCE, "cpu", size // 3)
        monkeypatch.setitem(pricing.PRODUCTS_AT_ONCE, "cpu", size)
        monkeypatch.setattr(pricing, "CACHE_BYTES", 2**20 if size > 21 else 0)
        prices = Prices(pairs)
        assert_close(prices.largest(points, lines), tuple(every.max(1)), rtol=1e-12, atol=1e-12)
        top, place = prices.largest_of(few, points, lines)
        assert_close((top, place), (every[:, few].amax(1), few[every[:, few].argmax(1)]))
        for count in (1, 5, 300) if scale == 1 else ():
            places, close = prices.contenders(points, lines, count)
            best = every.topk(min(count, 60), dim=1)
            assert_close(every.gather(1, places[:, :60]), best.values, rtol=0, atol=1e-5)
            assert torch.equal(places[:, 0], best.indices[:, 0])
            assert bool(close[:, 0].all())


def test_the_largest_price_is_right_where_float32_cannot_tell() -> None:
    """All points are so close that their prices agree to twelve digits."""
    x, z = smooth_bank(120, 4, 1)
    z = z[:1] + 1e-12 * (z - z[:1])
    z[0] += 100.0  # far from the center, so that float32 loses all of the differences
    pairs, lines = Pairs(x, z, 0.0), torch.zeros(120, dtype=torch.float64)
    points = -torch.rand(10, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    every = all_prices(pairs, lines, points)
    assert_close(Prices(pairs).largest(points, lines), tuple(every.max(1)), rtol=1e-15, atol=0)
    assert not torch.equal(every.float().argmax(1), every.argmax(1))
