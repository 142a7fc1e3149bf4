"""Measures of regularity against closed forms (linear maps) and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from otad.cip import ExactCip
from otad.errors import InputError
from otad.model.account import AccountBuilder
from otad.model.defend import defend
from otad.model.diagnostics import (
    Distribution,
    changed_by_potential,
    defended_map,
    local_lipschitz,
    monotonicity_violations,
    neighborhood_smoothness,
    transport_energy,
)
from otad.model.otad import OTAD
from otad.nets import SequentialBackbone, fc_resnet

DIM = 5


def linear_backbone(matrix: Tensor) -> SequentialBackbone:
    """Transport z = A x by one block, and some head."""
    block, head = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 2)
    with torch.no_grad():
        block.weight.copy_(matrix)
    return SequentialBackbone(None, [block], head, input_shape=(DIM,))


def linear_model(matrix: Tensor, x: Tensor, **options: object) -> OTAD:
    return defend(linear_backbone(matrix), x, torch.arange(len(x)) % 2, **options)


def normal(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, DIM, generator=generator)


def relative_error(model: OTAD, x: Tensor) -> Tensor:
    builder = AccountBuilder(model, relative_error=True)
    builder.add(x)
    return builder.rows("relative_error")


def symmetric(spectrum: list[float], generator: torch.Generator) -> Tensor:
    basis = torch.linalg.qr(normal(DIM, generator)).Q
    return basis @ torch.diag(torch.tensor(spectrum)) @ basis.T


def test_distribution_counts_infinity_as_the_largest_and_skips_nan() -> None:
    values = torch.tensor([1.0] * 98 + [3.0, math.inf, math.nan])
    found = Distribution.of(values)
    assert found is not None
    assert (found.count, found.least, found.median, found.quantile_90) == (100, 1.0, 1.0, 1.0)
    assert (found.quantile_99, found.most, found.mean) == (3.0, math.inf, math.inf)
    assert Distribution.of(torch.full((3,), math.nan)) is None
    assert Distribution.of(torch.arange(101).flip(0)) == Distribution(
        101, 50.0, 0.0, 50.0, 90.0, 99.0, 100.0
    )


def test_scaling_needs_exactly_its_factor(generator: torch.Generator) -> None:
    """z = c x is the gradient of (c/2)|x|^2, which is c-smooth and no smoother."""
    x = normal(60, generator)
    model = linear_model(1.7 * torch.eye(DIM), x, n_neighbors=6)
    least = neighborhood_smoothness(model, normal(20, generator))
    torch.testing.assert_close(least, torch.full_like(least, 1.7), rtol=1e-5, atol=0)


def test_least_smoothness_of_two_neighbors(generator: torch.Generator) -> None:
    """Two points are integrable iff <dz, dx> >= |dz|^2 / L: no other cycle exists."""
    x, query = normal(40, generator), normal(30, generator)
    matrix = normal(DIM, generator)
    least = neighborhood_smoothness(linear_model(matrix, x, n_neighbors=2), query)
    nearest = torch.cdist(query, x).topk(2, largest=False).indices
    step = (x[nearest[:, 0]] - x[nearest[:, 1]]).double()
    image = step @ matrix.double().T
    along = (image * step).sum(1)
    expected = torch.where(along > 0, image.square().sum(1) / along, math.inf)
    assert 0 < int(expected.isinf().sum()) < len(query)
    torch.testing.assert_close(least, expected, rtol=1e-4, atol=1e-6)


def test_least_smoothness_lies_within_the_spectrum(generator: torch.Generator) -> None:
    spectrum = [0.5, 0.8, 1.0, 2.0, 3.0]
    model = linear_model(symmetric(spectrum, generator), normal(200, generator))
    least = neighborhood_smoothness(model, normal(50, generator))
    assert float(least.min()) > 0.5
    assert float(least.max()) <= 3.0 + 1e-4
    assert float(least.median()) > 2.0  # ten neighbors in five dimensions see most of the map


def test_energy_is_the_sum_over_blocks(generator: torch.Generator) -> None:
    x, matrix = normal(9, generator), normal(DIM, generator)
    energy = transport_energy(linear_backbone(matrix), x)
    torch.testing.assert_close(energy, (x @ matrix.T - x).square().sum(1))
    net, x = fc_resnet((DIM,), 3, blocks=3), normal(6, generator)
    total, at = torch.zeros(6), x
    for block in net.blocks:
        total, at = total + block(at).square().sum(1), at + block(at)
    torch.testing.assert_close(transport_energy(net, x), total)


def test_monotone_and_reversing_maps(generator: torch.Generator) -> None:
    x, same = normal(50, generator), torch.ones(11, DIM)
    for factor, points, share in ((1.0, x, 0.0), (-1.0, x, 1.0), (-1.0, same, 0.0)):
        assert monotonicity_violations(linear_model(factor * torch.eye(DIM), points)) == share


def test_monotonicity_violations_one_pair_at_a_time(generator: torch.Generator) -> None:
    x, matrix = (normal(40, generator), normal(DIM, generator))
    model = linear_model(matrix, x, n_neighbors=4)
    rows = torch.tensor([0, 3, 17, 39])
    expected = 0
    for row in rows.tolist():
        distance = (x - x[row]).norm(dim=1)
        distance[row] = math.inf
        for other in distance.topk(4, largest=False).indices.tolist():
            step = x[row] - x[other]
            expected += int(float(step @ (matrix @ step)) < 0)
    assert 0 < expected < 16
    assert monotonicity_violations(model, rows) == expected / 16


def test_relative_error_of_one_neighbor_and_on_the_bank(generator: torch.Generator) -> None:
    """With K = 1 the defended feature is the nearest point's own."""
    x, query = normal(30, generator), normal(12, generator)
    matrix = symmetric([1.0, 1.1, 1.2, 1.3, 1.4], generator)
    found = relative_error(linear_model(matrix, x, n_neighbors=1), query)
    nearest = x[torch.cdist(query, x).argmin(1)]
    gap = (query - nearest) @ matrix.T
    expected = gap.square().sum(1) / (query @ matrix.T).square().sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    model = linear_model(symmetric([0.5, 0.6, 0.7, 0.8, 0.9], generator), x, n_neighbors=5)
    assert float(relative_error(model, x).max()) < 1e-8


def test_local_lipschitz_of_a_linear_map_is_its_largest_singular_value(
    generator: torch.Generator,
) -> None:
    left, right = (
        torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)).Q
        for _ in range(2)
    )
    spectrum = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    matrix = left @ torch.diag(spectrum) @ right
    points = torch.randn(7, DIM, generator=generator, dtype=torch.float64)
    found = local_lipschitz(lambda x: x @ matrix.T, points, radius=0.3, generator=generator)
    torch.testing.assert_close(found, torch.full((7,), 4.0, dtype=torch.float64))


def test_local_lipschitz_grows_with_every_step_and_needs_no_gradient(
    generator: torch.Generator,
) -> None:
    points = normal(4, generator)
    side = torch.randn(DIM, generator=generator)

    def jump(x: Tensor) -> Tensor:
        return (x @ side > 0).float()[:, None]

    few, many = (
        local_lipschitz(
            jump, points, radius=2.0, steps=steps, generator=torch.Generator().manual_seed(3)
        )
        for steps in (0, 40)
    )
    assert bool((many >= few).all())
    torch.testing.assert_close(many, torch.full((4,), 0.5))  # a jump of 1 over a way of 2


def test_one_neighborhood_for_all_is_as_smooth_as_promised(generator: torch.Generator) -> None:
    """With K = N no neighbor ever changes, so the defended map is L-Lipschitz everywhere."""
    x = normal(12, generator)
    matrix = symmetric([0.2, 0.4, 0.6, 1.0, 1.5], generator)
    model = linear_model(matrix, x, n_neighbors=12, smoothness=1.5)
    points = normal(20, generator)
    found = local_lipschitz(defended_map(model), points, radius=0.05, generator=generator)
    assert float(found.max()) <= 1.5 + 1e-3
    assert float(found.max()) > 1.0


def test_defended_map_is_the_map_of_the_model(generator: torch.Generator) -> None:
    x, query = normal(40, generator), normal(9, generator)
    solver = ExactCip(mode="paper", climb=(0.2, 0.2), on_failure="fallback")
    model = linear_model(normal(DIM, generator), x, solver=solver)
    torch.testing.assert_close(defended_map(model)(query), model.trace(query).solution.image)


def test_refusals(generator: torch.Generator) -> None:
    model = linear_model(torch.eye(DIM), normal(20, generator))
    with pytest.raises(InputError, match="expected 2 axes"):
        neighborhood_smoothness(model, torch.zeros(DIM))
    with pytest.raises(InputError, match="finite"):
        transport_energy(model.backbone, torch.full((2, DIM), math.nan))
    with pytest.raises(InputError, match="rows: expected dtype int64"):
        monotonicity_violations(model, torch.zeros(3))
    for radius in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="radius"):
            local_lipschitz(lambda x: x, torch.zeros(2, DIM), radius=radius, generator=generator)


def test_one_map_is_measured_as_such(generator: torch.Generator) -> None:
    """A linear gradient map: the least L is at most its largest eigenvalue."""
    x = normal(60, generator)
    model = linear_model(symmetric([0.3, 0.5, 0.8, 1.1, 1.6], generator), x, scope="global")
    assert 1.5 < model.smoothness <= 1.6 * (1 + 1e-4)
    function = defended_map(model)
    torch.testing.assert_close(function(model.bank_inputs), model.bank_features)
    assert float(relative_error(model, x).max()) < 1e-8
    queries = normal(20, generator)
    embedded = model.backbone.embed(queries)
    trace = model.trace(queries)
    with torch.no_grad():
        learned = model.backbone.transport(embedded)[0]
        away = (learned - trace.solution.image).square().sum(1) / learned.square().sum(1)
    torch.testing.assert_close(relative_error(model, queries), away)
    steepest = local_lipschitz(function, embedded, radius=0.05, generator=generator)
    assert float(steepest.max()) <= model.smoothness * 1.001
    twin = linear_model(model.backbone.blocks[0].weight.detach(), x)
    torch.testing.assert_close(
        neighborhood_smoothness(model, queries), neighborhood_smoothness(twin, queries)
    )


def test_the_residual_of_one_map_is_its_gap_over_all_points(generator: torch.Generator) -> None:
    x = normal(40, generator)
    model = linear_model(symmetric([0.3, 0.5, 0.8, 1.1, 1.6], generator), x, scope="global")
    embedded = model.backbone.embed(x[:9])
    trace = model.trace(x[:9])
    residual = model.answerer.residual(model, embedded, trace)
    assert torch.equal(residual, trace.solution.residual)
    torch.testing.assert_close(residual > 0, trace.gap > 0)
    with pytest.raises(InputError, match=r"answerer: .*WholeBankAnswerer"):
        changed_by_potential(model, embedded, model.neighbors(embedded))
    local = linear_model(torch.eye(DIM), x)
    trace = local.trace(x[:9])
    problem = local.problem(embedded, trace.neighbors.indices)
    assert torch.equal(
        local.answerer.residual(local, embedded, trace), problem.residual(trace.solution)
    )
