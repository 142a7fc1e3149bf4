"""Measures of regularity against closed forms (linear maps) and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from otad.errors import InputError
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


def symmetric(spectrum: list[float], generator: torch.Generator) -> Tensor:
    basis = torch.linalg.qr(normal(DIM, generator)).Q
    return basis @ torch.diag(torch.tensor(spectrum)) @ basis.T


def test_distribution_counts_infinity_as_the_largest_and_skips_nan() -> None:
    found = Distribution.of(torch.tensor([1.0] * 98 + [3.0, math.inf, math.nan]))
    assert found == Distribution(100, math.inf, 1.0, 1.0, 1.0, 3.0, math.inf)
    assert Distribution.of(torch.full((3,), math.nan)) is None
    plain = Distribution.of(torch.arange(101).flip(0))
    assert plain == Distribution(101, 50.0, 0.0, 50.0, 90.0, 99.0, 100.0)


def test_least_smoothness_of_linear_maps(generator: torch.Generator) -> None:
    """z = c x is the gradient of (c/2)|x|^2, which is c-smooth and no smoother; others are within
    the spectrum, of which ten neighbors in five dimensions see most."""
    x, query = normal(200, generator), normal(30, generator)
    least = neighborhood_smoothness(linear_model(1.7 * torch.eye(DIM), x, n_neighbors=6), query)
    torch.testing.assert_close(least, torch.full_like(least, 1.7), rtol=1e-5, atol=0)
    model = linear_model(symmetric([0.5, 0.8, 1.0, 2.0, 3.0], generator), x)
    least = neighborhood_smoothness(model, query)
    assert float(least.min()) > 0.5
    assert 2.0 < float(least.median()) < float(least.max()) <= 3.0001


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
        local_lipschitz(jump, points, radius=2.0, steps=steps, generator=source)
        for steps in (0, 40)
        for source in [torch.Generator().manual_seed(3)]
    )
    assert bool((many >= few).all())
    torch.testing.assert_close(many, torch.full((4,), 0.5))  # a jump of 1 over a way of 2


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


@pytest.mark.parametrize("options", [{"scope": "global"}, {"n_neighbors": 60, "smoothness": 1.6}])
def test_the_same_map_for_all_is_as_smooth_as_promised(
    generator: torch.Generator, options: dict[str, object]
) -> None:
    """A linear gradient map: the least L is at most its largest eigenvalue. Global, or local with
    K = N, where no neighbor ever changes."""
    x = normal(60, generator)
    model = linear_model(symmetric([0.3, 0.5, 0.8, 1.1, 1.6], generator), x, **options)
    assert 1.5 < model.smoothness <= 1.6 * (1 + 1e-4)
    function = defended_map(model)
    torch.testing.assert_close(
        function(model.bank_inputs), model.bank_features, rtol=1e-3, atol=1e-4
    )
    queries = normal(20, generator)
    embedded = model.backbone.embed(queries)
    trace = model.trace(queries)
    torch.testing.assert_close(function(embedded), trace.solution.image)
    steepest = local_lipschitz(function, embedded, radius=0.05, generator=generator, steps=10)
    assert 1.0 < float(steepest.max()) <= model.smoothness * 1.001
    if model.scope == "global":
        twin = linear_model(model.backbone.blocks[0].weight.detach(), x)
        least = (neighborhood_smoothness(one, queries) for one in (model, twin))
        torch.testing.assert_close(*least)
        residual = model.answerer.residual(model, embedded, trace)
        assert torch.equal(residual, trace.solution.residual)
        torch.testing.assert_close(residual > 0, trace.gap > 0)
        with pytest.raises(InputError, match=r"answerer: .*WholeBankAnswerer"):
            changed_by_potential(model, embedded, trace.neighbors)
