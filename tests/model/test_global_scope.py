"""OTAD with a global map: what it computes, how it is copied, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import D, N, points
from factories import model as any_model
from torch import nn

from otad.cip import ExactCip, Status
from otad.cip.whole_bank.map import WholeBank
from otad.cip.whole_bank.potential import integrate_most, least_bank_smoothness
from otad.errors import InputError, SolverError
from otad.model.otad import OTAD

TASKS = ["classification", "regression"]


def model(seed: int = 0, **options: Any) -> OTAD:
    return any_model(seed, **({"scope": "global"} | options))


QUERIES = points(40, 99)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("convexity", [0.0, -0.4])
def test_it_is_the_global_map_between_embedding_and_head(task: str, convexity: float) -> None:
    ours = model(task=task, strong_convexity=convexity)
    embedded = (QUERIES - 0.5) / 0.3
    inputs, features = ours.bank_inputs, ours.bank_features
    potential = least_bank_smoothness(inputs, features, convexity)
    assert ours.smoothness == potential.smoothness
    assert torch.equal(ours.potential.levels, potential.levels)
    found = WholeBank(inputs, features, potential)(embedded)
    head = ours.backbone.head
    outputs = (found.solution.image @ head.weight.T + head.bias).detach()

    with torch.no_grad():
        trace = ours.trace(QUERIES)
    expected = outputs if task == "classification" else outputs[:, 0]
    torch.testing.assert_close(trace.outputs, expected)
    torch.testing.assert_close(trace.solution.image, found.solution.image)
    torch.testing.assert_close(trace.gap, found.gap)
    assert bool((trace.solution.status == Status.SOLVED).all())
    assert torch.equal(ours(QUERIES), trace.outputs)


def test_the_trace_holds_the_support_most_weight_first() -> None:
    ours = model()
    trace = ours.trace(QUERIES)
    weights, indices = trace.solution.multipliers, trace.neighbors.indices
    assert bool((weights.diff(dim=1) <= 0).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(40))
    assert bool((weights[:, -1] > 0).any())  # cut to the widest support
    assert torch.equal(trace.solution.active, weights > 0)
    image = (weights[:, :, None] * ours.bank_features[indices]).sum(1)
    torch.testing.assert_close(trace.solution.image, image)
    embedded = ours.backbone.embed(QUERIES).double()
    away = (ours.bank_inputs.double()[indices] - embedded[:, None]).norm(dim=2)
    torch.testing.assert_close(trace.neighbors.distances, away)
    assert torch.equal(trace.labels, ours.bank_labels[indices])
    for row, held in zip(indices, weights > 0, strict=True):  # padding repeats, support does not
        assert len(row[held].unique()) == int(held.sum())
    assert model(scope="local").trace(QUERIES).gap is None


def test_a_smaller_smoothness_leaves_out_the_points_that_contradict() -> None:
    """No monotone map passes through all points of this bank."""
    ours = model(scope="local")
    features = ours.bank_features.clone()
    features[7] -= 3 * ours.bank_inputs[7]
    bank = replace(ours.bank, features=features, verify=True)
    with pytest.raises(SolverError, match=r"some that a smoothness .* With a given smoothness"):
        OTAD(ours.backbone, bank, scope="global")
    capped = OTAD(ours.backbone, bank, scope="global", smoothness=3.0).eval()
    expected = integrate_most(bank.inputs, bank.features, 3.0)
    assert capped.potential.left_out.tolist() == expected.left_out.tolist() == [7]
    assert torch.equal(capped.answerer.levels.isnan().nonzero()[:, 0], capped.potential.left_out)
    assert "scope=global, smoothness=3, strong_convexity=0, left_out=1" in repr(capped)
    with torch.no_grad():
        images = capped.solve(bank.inputs).solution.image
    others = torch.arange(N) != 7
    torch.testing.assert_close(images[others], bank.features[others], rtol=1e-4, atol=1e-5)


def test_a_potential_that_is_given_is_used_as_it_is() -> None:
    ours = model()
    potential = least_bank_smoothness(ours.bank_inputs, ours.bank_features, tolerance=0.3)
    given = OTAD(ours.backbone, ours.bank, scope="global", potential=potential)
    assert given.smoothness == potential.smoothness > 1.01 * ours.smoothness
    assert given.potential.sweeps == potential.sweeps
    assert torch.equal(given.answerer.levels, potential.levels)


def test_the_gradient_is_that_of_finite_differences() -> None:
    ours = model(strong_convexity=-0.3).double()
    x = QUERIES[:6].double().requires_grad_()
    assert torch.autograd.gradcheck(ours, x, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)


def test_levels_stay_in_double_precision() -> None:
    ours = model()
    expected = ours(QUERIES)
    levels = ours.answerer.levels.clone()
    for _ in range(2):
        ours.double().float()
    assert ours.answerer.levels.dtype == torch.float64
    assert torch.equal(ours.answerer.levels, levels)
    assert torch.equal(ours(QUERIES), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_mapped_bank_answers_where_the_queries_are(tmp_path: Path) -> None:
    resident = model()
    mapped = model(resident=False, bank_path=str(tmp_path / "bank.safetensors")).to("cuda")
    x = QUERIES.cuda().requires_grad_()
    found = mapped(x)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), resident(QUERIES), rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert slope.is_cuda
    torch.testing.assert_close(resident.to("cuda")(x), found, rtol=1e-5, atol=1e-5)


def test_the_support_may_be_found_by_an_index() -> None:
    pytest.importorskip("faiss", reason="needs the extra 'index' (faiss-cpu)")
    indexed = model(search="faiss")
    torch.testing.assert_close(indexed(QUERIES), model()(QUERIES), rtol=1e-5, atol=1e-5)
    assert indexed.whole_bank.pricing == "faiss"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_bank_has_a_map_of_its_own(dtype: torch.dtype) -> None:
    half = model(bank_dtype=dtype)
    with torch.no_grad():
        images = half.solve(half.bank_inputs.float()).solution.image
    torch.testing.assert_close(images, half.bank_features.float(), rtol=1e-4, atol=1e-4)


def test_defending_reports_the_sweeps() -> None:
    reported: list[tuple[int, float]] = []
    ours = model(smoothness=4.0, sweep_progress=lambda *sweep: reported.append(sweep))
    assert [count for count, _ in reported] == list(range(1, ours.potential.sweeps + 1))
    assert all(isinstance(rise, float) for _, rise in reported)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "regional"}, "scope: expected one of local, global, got 'regional'"),
        ({"metric": nn.Linear(D, 2)}, "metric: expected none in global scope, .* got Linear"),
        ({"solver": ExactCip()}, "solver: expected none in global scope"),
        ({"smoothness": 0.0}, "smoothness: expected a finite value above 0 .* got 0"),
        ({"smoothness": 1.0, "strong_convexity": 1.0}, r"above strong_convexity \(1.0\), got 1"),
        ({"strong_convexity": torch.nan}, "strong_convexity: expected a number, got nan"),
        ({"n_neighbors": N + 1}, "n_neighbors: expected at most the 70 points .* got 71"),
        ({"smoothness": 0.05}, "smoothness.*35 of 70.*0.05"),
    ],
)
def test_refused_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, SolverError), match=message):
        model(**options)


def test_refused_potentials_and_queries() -> None:
    ours, local = model(), model(scope="local")
    found, levels = ours.potential, ours.potential.levels
    for options, message in (
        ({"scope": "local"}, "potential: expected with scope 'global' alone"),
        ({"potential": replace(found, levels=levels[1:])}, r"potential: .*\(70,\).*\(69,\)"),
        ({"potential": replace(found, levels=levels.float())}, "potential: .*float64.*float32"),
        ({"smoothness": 99.0}, "smoothness: expected .* that of the potential, or None, got 99.0"),
    ):
        with pytest.raises(InputError, match=message):
            OTAD(ours.backbone, ours.bank, **{"scope": "global", "potential": found} | options)
    with pytest.raises(InputError, match="scope: expected 'global'"):
        _ = local.whole_bank
    with pytest.raises(InputError, match="exclude: expected None"):
        ours.trace(QUERIES[:1], exclude=torch.tensor([3]))
    assert ours.neighbors(ours.query_keys(QUERIES)).indices.shape == (40, 6)
