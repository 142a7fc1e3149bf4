"""No input within a certified radius changes the prediction, and none within eps leaves its
interval: fine grids in the plane, and attacks on models with neighbors by a metric."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attacks.bank_models import SHAPE, keyed_model, tiles
from certify.small import (
    SETTINGS,
    Folded,
    answers_around,
    broken,
    distance_to,
    global_model,
    keyed_plane,
    plane_model,
    queries,
)
from factories import refuses
from torch import Tensor, nn

from otad.attacks import L2, MetricAttack, Pgd, RandomNoise
from otad.attacks.adaptive import Keys, SoftKnn
from otad.certify import Certificate, certify, certify_values
from otad.certify.input_reach import KEY_ROUNDOFFS
from otad.certify.rules import Batch, Rule
from otad.model.otad import OTAD
from otad.nets import CNNMetric, LipschitzMetric
from otad.nets.lipschitz import OrthogonalLinear

CASES = [
    *((plane_model, name) for name in SETTINGS),
    *((keyed_plane, name) for name in SETTINGS if name not in ("eight", "dropping", "many points")),
]
OF_VALUES = ("one neighbor", "three", "curved down", "curved up", "copies", "spares",
             "other scales", "all neighbors")  # fmt: skip


@pytest.mark.parametrize(("make", "name"), CASES)
def test_nothing_changes_within_a_radius(make: Any, name: str) -> None:
    proved = 0
    for seed in range(2):
        model = make(seed, **SETTINGS[name])
        x = queries(model, 6, seed + 50)
        found = certify(model, x)
        assert broken(model, x, found.radius) == []
        assert torch.equal(found.prediction, model(x).argmax(1))
        proved += int((found.radius > 0.01).sum())
    assert proved >= 3, "radii of 0 prove nothing"


@pytest.mark.parametrize("make", [plane_model, keyed_plane], ids=["plain", "keyed"])
@pytest.mark.parametrize("name", OF_VALUES)
def test_every_answer_is_in_its_interval(name: str, make: Any) -> None:
    model = make(0, task="regression", **SETTINGS[name])
    x = queries(model, 10, 0)
    narrower = torch.full((10,), -torch.inf)
    for eps in (0.0, 0.1, 0.8):
        found = certify_values(model, x, eps)
        answers = answers_around(model, x, eps)
        assert bool((answers.amin(1) >= found.low).all())
        assert bool((answers.amax(1) <= found.high).all())
        assert bool((found.high - found.low >= narrower).all()), "intervals grow with eps"
        narrower = found.high - found.low


@pytest.mark.parametrize(
    "make",
    [
        partial(plane_model, std=(0.5, 2.0), n_neighbors=2),
        partial(keyed_plane, n_neighbors=2),
        partial(global_model, std=(0.5, 2.0)),
    ],
    ids=["plain", "keyed", "global"],
)
@pytest.mark.parametrize("unit", [(0.2, 3.0), (2.0, 0.5)])
def test_distances_are_in_the_unit_asked_for(unit: tuple[float, float], make: Any) -> None:
    measured, model = torch.tensor(unit), make(0)
    x = queries(model, 12, 0)
    found = certify(model, x, unit=measured)
    assert broken(model, x, found.radius, measured) == []
    assert int((found.radius > 0).sum()) >= 3
    doubled = certify(model, x, unit=2 * measured).radius
    torch.testing.assert_close(doubled, found.radius / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "factor", "least"), [(plane_model, 1.25, 15), (keyed_plane, 3.75, 10)]
)
def test_a_wrong_certificate_is_caught(make: Any, factor: float, least: int) -> None:
    """The grid finds radii that are too large, so its silence above means something."""
    caught = 0
    for seed in range(3):
        model = make(seed, n_neighbors=1)
        x = queries(model, 12, seed)
        caught += len(broken(model, x, factor * certify(model, x).radius))
    assert caught >= least


def test_an_interval_too_narrow_is_caught() -> None:
    """The grid does find the ends: 70 % of an interval does not hold all answers. Of one neighbor
    the answer at the input itself is known nearly exactly."""
    model = plane_model(1, task="regression", n_neighbors=1, points=60)
    x = queries(model, 12, 1)
    found = certify_values(model, x, 0.4)
    middle, span = (found.low + found.high) / 2, found.high - found.low
    away = (answers_around(model, x, 0.4) - middle[:, None]).abs().amax(1)
    assert int((away > 0.35 * span).sum()) >= 8
    exact = certify_values(model, x, 0.0)
    assert (exact.high - exact.low).median() < 1e-4
    assert span.max() > 0.1


def test_radii_are_close_to_the_truth_for_one_neighbor() -> None:
    """The truth: the distance of the nearest Voronoi cell that votes for another class."""
    model = plane_model(2, points=60, n_neighbors=1)
    x = queries(model, 25, 2)
    found, bank = certify(model, x), model.bank_inputs.double().numpy()
    votes = model.backbone.head(model.bank_features).argmax(1)
    truth = []
    for query, own in zip(model.backbone.embed(x).double().numpy(), found.prediction, strict=True):
        squares = ((bank - query) ** 2).sum(1)
        truth.append(min(
            distance_to(2 * (bank[i] - np.delete(bank, i, 0)), squares[i] - np.delete(squares, i))
            for i in (votes != own).nonzero()[:, 0].tolist()
        ))  # fmt: skip
    ratio = found.radius.numpy() / truth
    assert min(truth) > 0
    assert 0.7 <= ratio.min() <= ratio.max() <= 1
    assert np.median(ratio) >= 0.999


@pytest.mark.parametrize(
    ("make", "rule"), [(plane_model, "hull"), (global_model, "lipschitz")], ids=["local", "global"]
)
def test_a_bank_of_one_class_cannot_be_moved(make: Any, rule: str) -> None:
    model = make(0)
    with torch.no_grad():
        model.backbone.head.weight.zero_()
        model.backbone.head.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    found = certify(model, queries(model, 4, 0))
    assert found.radius.isinf().all()
    assert set(found.rules) == {rule}


def test_both_rules_have_their_rows() -> None:
    """Where all points are neighbors, the cell rule has a Lipschitz bound; with one neighbor the
    hull rule is better."""
    settings = SETTINGS["all neighbors"]
    whole, single = plane_model(1, **settings), plane_model(1, n_neighbors=1)
    found = certify(whole, queries(whole, 20, 3))
    assert found.rules.count("cell") >= 5
    assert any("cell" in words for words in found.assumptions)
    assert "hull" in certify(single, queries(single, 20, 3)).rules
    values = plane_model(0, task="regression", **settings)
    x = queries(values, 10, 0)[2:]
    interval = certify_values(values, x, 0.05)
    width = (interval.high - interval.low).median()
    slope = float(values.backbone.head.weight.detach().norm()) * values.smoothness
    assert (interval.high - values(x).detach().double() >= 0).all()
    votes = values.backbone.head(values.bank_features).detach()
    assert width < min(2 * 0.05 * slope * 3, 0.7 * float(votes.max() - votes.min()))
    assert any("cell" in words for words in interval.assumptions)


def test_spares_are_neighbors_too() -> None:
    """A spare may take a neighbor's place, so its vote counts: no radius beyond that of K + spares
    neighbors is proved."""
    shorter = 0
    for seed in range(4):
        with_spares = plane_model(seed, **SETTINGS["spares"])
        more, fewer = plane_model(seed, n_neighbors=4), plane_model(seed, n_neighbors=2)
        x = queries(with_spares, 20, seed)
        found, limit, without = (certify(one, x) for one in (with_spares, more, fewer))
        same = (found.prediction == limit.prediction) & (limit.radius > 0)
        assert bool((found.radius <= limit.radius * (1 + 1e-9))[same].all())
        shorter += int((found.radius < without.radius).sum())
    assert shorter >= 10


@pytest.mark.parametrize("solver", [{"spares": 1, "max_smoothness": 3.0}, {"climb": (0.5, 0.0)}])
def test_the_cell_rule_knows_its_limits(solver: dict[str, Any]) -> None:
    """Not with spares, and not where the curvature had to be raised."""
    noise = 0.02 if "spares" in solver else 3.0
    model = plane_model(1, points=12, n_neighbors=11, noise=noise, solver=solver)
    assert "cell" not in certify(model, queries(model, 20, 3)).rules


def test_a_new_rule_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant(Rule):
        """Claims the same radius everywhere."""

        name = "constant"
        if_used = ("rule 'constant': wishful thinking",)

        @staticmethod
        def rows_at_once(model: OTAD) -> int:
            return 3

        def radius(self, batch: Batch, known: Tensor) -> Tensor:
            return torch.full_like(known, 0.2)

        def interval(self, batch: Batch, reached: Tensor) -> tuple[Tensor, Tensor]:
            return -torch.ones_like(reached), torch.ones_like(reached)

    model = plane_model(1)
    x = queries(model, 20, 1)
    plain = certify(model, x)
    monkeypatch.setattr(model.answerer, "rules", ("hull", "cell", "constant"))
    found = certify(model, x)
    larger = plain.radius < 0.19
    assert 0 < int(larger.sum()) < len(x)
    assert {rule for rule, used in zip(found.rules, larger, strict=True) if used} == {"constant"}
    torch.testing.assert_close(found.radius[~larger], plain.radius[~larger])
    assert "wishful" in found.assumptions[-1]


def test_the_radius_is_that_of_keys_over_the_constant() -> None:
    """K = 1, l = 0: no radius is below the least distance, over wrong bank points, of the bisectors
    in key space; and without groups of rivals (two points a class) it is that distance."""
    model = keyed_plane(4, points=40, n_neighbors=1, noise=0.2)
    x = queries(model, 15, 4)[2:]
    found = certify(model, x)
    keys, places = model.bank_keys.double(), model.query_keys(x).detach().double()
    votes = model.backbone.head(model.bank_features).argmax(1)
    constant = model.metric.lipschitz
    squares, gaps = torch.cdist(places, keys).square(), 2 * torch.cdist(keys, keys)
    away = (squares[:, :, None] - squares[:, None]) / gaps.fill_diagonal_(1)  # of bisectors
    entry = away.diagonal_scatter(torch.full_like(squares, -math.inf), dim1=1, dim2=2).amax(2)
    entry = entry.clamp_min(0).masked_fill(votes == found.prediction[:, None], math.inf)
    hulls = torch.tensor([rule == "hull" for rule in found.rules])
    radius, least = found.radius[hulls], entry.amin(1)[hulls] / constant
    assert len(radius) > 3
    assert bool((radius >= 0.999 * least - 1e-4).all())
    assert bool((radius <= 1.5 * least + 1e-4).all())


def image_model(*, metric: nn.Module | None = None, neighbors: int = 3) -> OTAD:
    """A small ViT on 4 x 4 images with neighbors by an orthogonal net."""
    sizes = {"widths": (8, 16), "depth": 1, "key_dim": 8, "bounds": (0.0, 1.0)}
    return keyed_model(metric=metric or LipschitzMetric(SHAPE, **sizes), neighbors=neighbors)[0]


def test_attacks_never_succeed_within_the_radius_of_a_vision_transformer() -> None:
    model = image_model()
    x, _ = tiles(40, 5)
    found = certify(model, x)
    assert set(found.rules) <= {"hull", "none"}
    words = " ".join(found.assumptions)
    assert "rule 'cell' is left out" in words
    assert "LipschitzMetric" in words
    certified = (found.radius > 0.01) & found.radius.isfinite()
    assert int(certified.sum()) >= 10
    generator = torch.Generator().manual_seed(3)
    attacks = (
        SoftKnn(temperatures=(0.1, 0.01), steps=8, polish=5),
        Keys(steps=8, targets=1, temperatures=(0.1,), restarts=1, polish=5),
        Pgd(steps=8),
        MetricAttack(model.query_keys, steps=8),
        RandomNoise(draws=10),
    )
    fell = 0
    for row in certified.nonzero()[:2, 0].tolist():
        one, own, radius = x[row : row + 1], found.prediction[row : row + 1], found.radius[row]
        inside, outside = (L2(share * float(radius), (0.0, 1.0)) for share in (0.9999, 6))
        for attack in attacks:
            assert not bool(attack(model, one, own, inside, generator=generator).broken)
        fell += int(attacks[0](model, one, own, outside, generator=generator).broken)
    assert fell >= 1, "attacks that never succeed prove nothing"


def test_the_stated_stretch_of_an_embedding_brings_the_cell_rule() -> None:
    model = image_model(neighbors=5)
    x, _ = tiles(30, 6)
    patches = model.backbone.patch_embed.proj.weight.detach().flatten(1).double()
    stretch = float(torch.linalg.matrix_norm(patches, ord=2)) * 1.0001
    alone, both = certify(model, x), certify(model, x, embedding_lipschitz=stretch)
    assert bool((both.radius >= alone.radius - 1e-9).all())
    assert any("the embedding stretches by" in words for words in both.assumptions)
    assert not any("left out" in words for words in both.assumptions)
    assert_steady(model, x, both)


def assert_steady(model: OTAD, x: Tensor, found: Certificate) -> None:
    """Random steps of nearly the radius change nothing."""
    generator = torch.Generator().manual_seed(4)
    for row in (found.radius > 0).nonzero()[:10, 0].tolist():
        step = torch.randn(200, *SHAPE, generator=generator)
        step /= step.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        moved = (x[row] + 0.999 * float(found.radius[row]) * step).clamp(0.0, 1.0)
        assert bool((model(moved).argmax(1) == found.prediction[row]).all())


def test_computed_keys_are_as_exact_as_is_assumed() -> None:
    """Float32 against float64 with the very same matrices, on a net of the default size."""
    metric = LipschitzMetric((3, 32, 32), bounds=(0.0, 1.0), mean=0.5, std=0.25).eval()
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    class Kept(nn.Module):
        def __init__(self, layer: OrthogonalLinear) -> None:
            super().__init__()
            self.weight, self.bias = layer.weight.detach(), layer.bias.detach()

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight.double(), self.bias.double())

    twin = copy.deepcopy(metric)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, OrthogonalLinear):
                setattr(module, name, Kept(child))
    with torch.no_grad():
        keys, exact = metric(x).double(), twin.double()(x.double())
    size = keys.norm(dim=1) + metric.lipschitz * (x.double() - 0.5).flatten(1).norm(dim=1)
    error = (keys - exact).norm(dim=1) / (size * torch.finfo(torch.float32).eps)
    assert 0 < float(error.max()) < KEY_ROUNDOFFS / 8


def test_what_is_not_known_is_refused_or_stated() -> None:
    metric = CNNMetric(SHAPE, key_dim=4, bounds=(0.0, 1.0), seed=2)
    model, (x, _) = image_model(metric=metric), tiles(4, 7)
    refuses(certify, model, x, match=r"got a metric \(CNNMetric\) without")
    refuses(certify, model, x, metric_lipschitz=0.0, match=r"metric_lipschitz.*positive.*0\.0")
    stated = certify(model, x, metric_lipschitz=50.0)
    assert any("by 50 times" in words for words in stated.assumptions)
    assert torch.allclose(certify(model, x, metric_lipschitz=100.0).radius, stated.radius / 2)
    known = image_model()
    refuses(certify, known, x, metric_lipschitz=1.0, match=r"metric_lips.*LipschitzMetric.*1\.0")
    plane = plane_model(0), torch.zeros(1, 2)
    refuses(certify, *plane, metric_lipschitz=1.0, match=r"metric_lipschitz.*None.*1\.0")
    known.metric.train()
    refuses(certify, known, x, match=r"model\.metric.*evaluation mode")


@pytest.mark.parametrize("constant", [math.nan, math.inf, 0.0, -1.0])
def test_a_metric_without_a_valid_constant_is_refused(constant: float) -> None:
    class Wrong(Folded):
        lipschitz = constant

    model = keyed_plane(1, Wrong(1), n_neighbors=2)
    refuses(certify, model, torch.zeros(1, 2), match=rf"Wrong\.lipschitz.*{constant}")


def test_votes_that_turn_with_the_query_need_the_embedding() -> None:
    base = image_model()
    bent = base.replace(strong_convexity=-0.2)
    x, _ = tiles(6, 8)
    refuses(certify, bent, x, match=r"embedding_lipschitz.*None")
    found = certify(bent, x, embedding_lipschitz=5.0)
    assert int((found.radius > 0).sum()) >= 3
    assert_steady(bent, x, found)
