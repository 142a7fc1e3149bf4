"""The distance from the bank, the threshold chosen by it, and what abstaining changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import KINDS, exact, images, model, points, queries, refuses
from torch import Tensor

import otad
from otad.estimators import OTADClassifier, OTADRegressor
from otad.evaluate.identity import Identity


def nearest(keys: Tensor, bank: Tensor) -> Tensor:
    """By brute force in float64."""
    gaps = keys.detach().double().numpy()[:, None] - bank.double().numpy()
    return torch.from_numpy(np.sqrt((gaps**2).sum(2)).min(1))


def limited(seed: int = 0, **options: Any) -> tuple[otad.OTAD, Tensor, Tensor]:
    """A model that abstains on about half of its queries; these, and their distances."""
    made = model(seed, **options)
    x = queries(made)
    distances = made.distance(x)
    made.abstain_beyond = float(distances.median())
    return made, x, distances


@pytest.mark.parametrize("kind", KINDS)
def test_distance_is_that_to_the_nearest_point_where_neighbors_are_searched(kind: str) -> None:
    made = KINDS[kind](0)
    x = queries(made, 8)
    expected = nearest(made.query_keys(x), made.bank_points)
    torch.testing.assert_close(made.distance(x), expected)
    torch.testing.assert_close(made.trace(x).distance, expected)


def test_a_bank_point_is_measured_without_itself() -> None:
    made, x = model(), points()
    rows = torch.arange(len(x))
    found = made.trace(x, exclude=rows).distance
    embedded = made.backbone.embed(x)
    others = [nearest(embedded[k : k + 1], embedded[rows != k]) for k in rows]
    torch.testing.assert_close(found, torch.cat(others))


@pytest.mark.parametrize("options", [{}, {"scope": "global"}, {"task": "regression"}])
def test_far_inputs_get_no_answer_and_others_the_same(options: dict[str, Any]) -> None:
    made, x, distances = limited(**options)
    far = distances > made.abstain_beyond
    assert 0 < int(far.sum()) < len(x)
    x.requires_grad_()
    outputs = made(x)
    free = made.replace(abstain_beyond=None)(x)
    assert torch.equal(outputs[~far], free[~far])
    assert outputs[far].isnan().all()
    assert torch.equal(outputs.isnan(), made.trace(x).outputs.isnan())
    (slope,) = torch.autograd.grad(outputs[~far].sum(), x)
    (expected,) = torch.autograd.grad(free[~far].sum(), x)
    assert torch.equal(slope, expected)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_the_limit_is_saved_with_the_model(scope: str, tmp_path: Path) -> None:
    made, x, _ = limited(scope=scope)
    made.save(tmp_path)
    loaded = otad.load(tmp_path)
    assert loaded.abstain_beyond == made.abstain_beyond
    torch.testing.assert_close(loaded(x), made(x), equal_nan=True, atol=0, rtol=0)
    assert f"abstain_beyond={made.abstain_beyond:g}" in repr(made)
    assert made.replace(n_neighbors=3).abstain_beyond == made.abstain_beyond
    free = made.replace(abstain_beyond=None)
    assert Identity().model(free)["fingerprint"] != Identity().model(made)["fingerprint"]
    assert "abstain_beyond" not in Identity().model(free)
    for value in (-1.0, 0.0, math.nan, math.inf, "far"):
        refuses(made.replace, abstain_beyond=value, match="abstain_beyond")
        refuses(setattr, made, "abstain_beyond", value, match="abstain_beyond")


@pytest.mark.parametrize(("count", "quantile"), [(19, 0.95), (20, 0.95), (100, 0.9), (7, 0.5)])
def test_the_threshold_is_a_conformal_quantile(count: int, quantile: float) -> None:
    made = model()
    x = torch.rand(count, 5, generator=torch.Generator().manual_seed(1))
    rank = math.ceil((count + 1) * quantile)
    found = otad.distance_threshold(made, x, quantile=quantile, batch_size=8)
    assert found == sorted(made.distance(x).tolist())[rank - 1]
    assert float((made.distance(x) > found).double().mean()) <= 1 - quantile
    if count == 19:
        refuses(
            otad.distance_threshold, made, x[1:], quantile=quantile, match="at least 19.*got 18"
        )


def test_new_inputs_are_refused_as_rarely_as_stated() -> None:
    """Over 200 draws of 30 held-out inputs, on 5,000 new ones each."""
    made, generator = model(), torch.Generator().manual_seed(3)
    pool = made.distance(torch.rand(6000, 5, generator=generator))
    new, shares = pool[1000:], []
    for _ in range(200):
        some = pool[:1000][torch.randperm(1000, generator=generator)[:30]]
        shares.append(float((new > some.sort().values[math.ceil(31 * 0.8) - 1]).double().mean()))
    assert 0.15 < np.mean(shares) <= 0.2


def test_thresholds_that_mean_nothing_are_refused() -> None:
    made = model()
    refuses(otad.distance_threshold, made, points(), match="x: expected held-out")
    for value in (0.0, 1.0, math.nan):
        refuses(otad.distance_threshold, made, points(seed=1), quantile=value, match="quantile")
    refuses(otad.distance_threshold, made.backbone, points(), match="model: expected")


def test_evaluations_count_abstentions_as_errors() -> None:
    made, x, distances = limited()
    y = made.replace(abstain_beyond=None)(x).argmax(1)  # all right, but for those without answer
    found = otad.evaluate(
        made, x, y, otad.L2(0.05), attacks=("noise",), flags=False, undefended=False
    )
    answered = distances <= made.abstain_beyond
    assert found.model["abstained"] == int((~answered).sum())
    assert found.clean["otad"].value == 100 * float(answered.double().mean())
    assert found.clean_right == tuple(answered.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("scope", ["local", "global"])
def test_no_abstention_within_a_certified_radius(scope: str) -> None:
    made, x, distances = limited(scope=scope)
    far, free = distances > made.abstain_beyond, made.replace(abstain_beyond=None)
    found, expected = otad.certify(made, x), otad.certify(free, x)
    assert (found.prediction[far] == -1).all()
    assert (found.radius[far] == 0).all()
    assert torch.equal(found.prediction[~far], expected.prediction[~far])
    assert (found.radius <= expected.radius).all()
    room = (made.abstain_beyond - distances).clamp_min(0) * 0.3  # the std of every feature
    assert (found.radius <= room).all()
    limits = torch.minimum(expected.radius, room)[~far]
    torch.testing.assert_close(found.radius[~far], limits, rtol=1e-3, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    for row in (found.radius > 0).nonzero()[:, 0].tolist():
        steps = torch.randn(50, 5, generator=generator)
        steps *= 0.999 * found.radius[row].float() / steps.norm(dim=1, keepdim=True)
        inside = (x[row] + steps).clamp(0, 1)
        assert (made(inside).argmax(1) == found.prediction[row]).all()
        assert not made(inside).isnan().any()


def test_intervals_are_all_numbers_where_the_model_may_abstain() -> None:
    made, x, distances = limited(task="regression")
    eps = 0.01
    found = otad.certify_values(made, x, eps)
    expected = otad.certify_values(made.replace(abstain_beyond=None), x, eps)
    safe = distances + eps / 0.3 * (1 + 1e-4) < made.abstain_beyond
    assert 0 < int(safe.sum()) < len(x)
    assert torch.equal(found.low[safe], expected.low[safe])
    unsafe = distances + eps / 0.3 > made.abstain_beyond
    assert found.low[unsafe].eq(-math.inf).all()
    assert found.high[unsafe].eq(math.inf).all()


def test_a_metric_measures_in_its_own_space() -> None:
    made, (x, _) = exact(), images(seed=4)
    made.abstain_beyond = otad.distance_threshold(made, x, quantile=0.5)
    far = nearest(made.metric(x), made.bank_keys) > made.abstain_beyond
    assert torch.equal(made(x).isnan().all(1), far)
    assert 0 < int(far.sum()) <= len(x) // 2


@pytest.mark.parametrize("kind", [OTADClassifier, OTADRegressor])
def test_estimators_say_which_inputs_are_foreign(kind: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 3))
    y = x[:, 0] > 0 if kind is OTADClassifier else x[:, 0]
    quick = {"n_neighbors": 5, "n_blocks": 1, "epochs": 2, "random_state": 0}
    made = kind(**quick, validation_fraction=0.5, abstain_beyond=0.9).fit(x, y)
    strange = np.vstack([generator.normal(size=(100, 3)), np.full((20, 3), 9.0)])
    foreign = made.is_foreign(strange)
    assert foreign[100:].all()
    assert foreign[:100].mean() < 0.25
    np.testing.assert_array_equal(foreign, made.distance(strange) > made.module_.abstain_beyond)
    free = kind(**quick, validation_fraction=0.5).fit(x, y)
    np.testing.assert_array_equal(made.predict(strange), free.predict(strange))
    inputs = torch.tensor(strange, dtype=torch.float32)
    silent = made.module_(inputs).isnan().reshape(120, -1).all(1)
    np.testing.assert_array_equal(silent.numpy(), foreign)
    made.save(tmp_path)
    np.testing.assert_array_equal(kind.load(tmp_path).is_foreign(strange), foreign)
    refuses(free.is_foreign, strange, match="abstain_beyond")
    refuses(
        kind(**quick, abstain_beyond=0.9).fit, x, y, match="abstain_beyond.*validation_fraction"
    )
    for value, message in ((2.0, "quantile.*2.0"), (0.99, "at least 99.*got 60")):
        half = {"validation_fraction": 0.5, "abstain_beyond": value}
        refuses(kind(**quick, **half).fit, x, y, match=message)
