"""Certificates of models whose neighbors are searched by a metric."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from attacks.bank_models import SHAPE, keyed_model, tiles
from certify.small import Folded, keyed_plane, plane_model, queries
from torch import Tensor, nn

from otad.attacks import L2, MetricAttack, Pgd, RandomNoise
from otad.attacks.adaptive import Keys, SoftKnn
from otad.certify import Certificate, certify
from otad.certify.input_reach import KEY_ROUNDOFFS
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import CNNMetric, LipschitzMetric
from otad.nets.lipschitz import OrthogonalLinear


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
    with pytest.raises(InputError, match=r"got a metric \(CNNMetric\) without"):
        certify(model, x)
    with pytest.raises(InputError, match=r"metric_lipschitz.*positive.*0\.0"):
        certify(model, x, metric_lipschitz=0.0)
    stated = certify(model, x, metric_lipschitz=50.0)
    assert any("by 50 times" in words for words in stated.assumptions)
    assert torch.allclose(certify(model, x, metric_lipschitz=100.0).radius, stated.radius / 2)
    known = image_model()
    with pytest.raises(InputError, match=r"metric_lipschitz.*LipschitzMetric.*1\.0"):
        certify(known, x, metric_lipschitz=1.0)
    with pytest.raises(InputError, match=r"metric_lipschitz: expected None.*1\.0"):
        certify(plane_model(0), torch.zeros(1, 2), metric_lipschitz=1.0)
    known.metric.train()
    with pytest.raises(InputError, match=r"model\.metric.*evaluation mode"):
        certify(known, x)


@pytest.mark.parametrize("constant", [math.nan, math.inf, 0.0, -1.0])
def test_a_metric_without_a_valid_constant_is_refused(constant: float) -> None:
    class Wrong(Folded):
        lipschitz = constant

    model = keyed_plane(1, Wrong(1), n_neighbors=2)
    with pytest.raises(InputError, match=rf"Wrong\.lipschitz.*{constant}"):
        certify(model, torch.zeros(1, 2))


def test_votes_that_turn_with_the_query_need_the_embedding() -> None:
    base = image_model()
    bent = base.replace(strong_convexity=-0.2)
    x, _ = tiles(6, 8)
    with pytest.raises(InputError, match=r"embedding_lipschitz.*None"):
        certify(bent, x)
    found = certify(bent, x, embedding_lipschitz=5.0)
    assert int((found.radius > 0).sum()) >= 3
    assert_steady(bent, x, found)
