"""Training of metrics: losses by hand, the adversary, robustness gained, resuming, refusals."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from training.small_vision import KEYS, LABELS, images, small_cnn

from otad.errors import InputError, MissingExtraError
from otad.nets.adapt import PretrainedMetric
from otad.nets.base import Metric
from otad.nets.lipschitz import LipschitzMetric
from otad.nets.metric_nets import CNNMetric
from otad.training.adversary import Adversary
from otad.training.metric import MetricConfig, encode, neighbor_accuracy, train_metric
from otad.training.metric_losses import neighborhood_loss

SHORT = MetricConfig(epochs=3, batch_size=16, learning_rate=0.01)


def _points(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes separated for sure by a faint direction (+-0.1), and by a strong one (+-0.4)
    in nine cases of ten."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (rows,), generator=generator)
    sign = 2.0 * y - 1
    honest = torch.where(torch.rand(rows, generator=generator) < 0.1, -1.0, 1.0)
    x = 0.02 * torch.randn(rows, 10, generator=generator)
    x[:, 0] += 0.4 * sign * honest
    x[:, 1:] += 0.1 * sign[:, None] / 3
    return x, y


def _metric(**options) -> PretrainedMetric:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        return PretrainedMetric(layers, nn.Linear(32, 8, bias=False), input_shape=(10,), **options)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("losses", "distances"):
        monkeypatch.setitem(sys.modules, f"pytorch_metric_learning.{part}", None)
    with pytest.raises(MissingExtraError, match=r"otad\[metric\]"):
        train_metric(_metric(), _points(20, 0), replace(SHORT, loss="triplet"))


def _attacked_accuracy(metric: Metric, eps: float) -> float:
    """Accuracy among 5 neighbors under a longer attack than any used in training."""
    (train_x, train_y), (x, y) = _points(300, 0), _points(150, 1)
    known, adversary = (encode(metric, train_x), train_y), Adversary(eps, steps=20)
    start = adversary.start(x, torch.Generator().manual_seed(1))
    moved = adversary.attack(metric, x, lambda keys: neighborhood_loss(keys, y, *known), start)
    return neighbor_accuracy(encode(metric, moved), y, *known, n_neighbors=5)


def test_adversarial_training_makes_neighbors_robust() -> None:
    config = MetricConfig(epochs=12, batch_size=75, learning_rate=5e-3, n_neighbors=5)
    data = (*_points(300, 0), *_points(150, 1))
    plain = _metric()
    assert train_metric(plain, data, config).final.val_score > 0.98  # by the faint direction ...
    assert _attacked_accuracy(plain, 0.2) < 0.3  # ... which is easily crossed
    for references in ("batch", "bank"):
        attacked = {"references": references, "adversary": Adversary(0.2, steps=5)}
        robust = _metric()
        result = train_metric(robust, data, replace(config, **attacked))
        assert result.final.val_score > 0.85  # the strong direction is right nine times of ten
        assert _attacked_accuracy(robust, 0.2) > 0.65


@pytest.mark.parametrize("loss", ["neighborhood", "means", "triplet", "contrastive"])
def test_every_loss_finds_what_separates_classes(loss: str) -> None:
    if loss in ("triplet", "contrastive"):
        pytest.importorskip("pytorch_metric_learning", reason="needs the extra `metric`")
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.randn(300, 10, generator=generator)  # nine loud coordinates that mean nothing
    x[:, 0] = y - 1 + 0.1 * x[:, 0]
    data = x[:200], y[:200], x[200:], y[200:]
    untrained = neighbor_accuracy(*data[2:], *data[:2], n_neighbors=5)
    config = MetricConfig(epochs=15, batch_size=50, learning_rate=0.01, loss=loss, n_neighbors=5)
    metric = _metric()
    result = train_metric(metric, data, config)
    assert untrained < 0.75
    assert result.final.val_score > 0.93
    assert (result.metric, metric.training) == ("accuracy", False)


def test_the_lipschitz_metric_learns_under_attack_and_keeps_its_constant() -> None:
    metric = LipschitzMetric((3, 8, 8), key_dim=5, widths=(8, 12), depth=1, std=0.5)
    x, y = images()
    config = MetricConfig(
        epochs=12, batch_size=24, learning_rate=0.02, temperature=0.5, adversary=Adversary(0.2, 2)
    )
    result = train_metric(metric, (x[:24], y[:24], x[24:], y[24:]), config)
    assert result.final.val_score > 0.95
    assert 2 <= metric.lipschitz < 2.001


def test_scores_are_those_of_the_final_weights() -> None:
    x, y = images()
    for ema in (0.0, 0.9):
        metric = small_cnn()
        config = replace(SHORT, ema=ema, n_neighbors=1)
        result = train_metric(metric, (x[:32], y[:32], x[32:], y[32:]), config)
        keys, references = metric(x[32:]), metric(x[:32])
        nearest = torch.cdist(keys, references).argmin(1)
        expected = (y[:32][nearest] == y[32:]).double().mean().item()
        assert result.final.val_score == pytest.approx(expected)


def test_augmented_images_are_what_the_net_sees() -> None:
    def blacken(images: Tensor, generator: torch.Generator) -> Tensor:
        assert (len(images), generator.device) == (16, torch.device("cpu"))
        return torch.zeros_like(images)

    result = train_metric(small_cnn(), images(), replace(SHORT, epochs=1), augment=blacken)
    assert result.final.train_score < 0.6  # all images are alike


_X, _Y = images(12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((_X, torch.ones_like(_Y)), "train_y: .*two classes, got only the label 1"),
        ((_X, _Y - 1), "train_y: expected labels from 0, got -1"),
        ((_X, _Y.float()), "train_y: expected dtype int64, got float32"),
        ((_X * 9, _Y), "train_x.*bounds"),
        ((_X, _Y[:5]), r"train_y: .*\(12,\) .*label.* got \(5,\)"),
    ],
)
def test_bad_data_are_refused(data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_metric(small_cnn(), data, SHORT)


@pytest.mark.parametrize("references", ["batch", "bank"])
def test_a_metric_in_double_precision_learns(references: str) -> None:
    metric = small_cnn().double()
    result = train_metric(metric, (_X.double(), _Y), replace(SHORT, references=references))
    assert math.isfinite(result.final.loss)
    assert metric.projection.weight.dtype == torch.float64


def test_encoding_restores_modes_and_labels_may_be_any_numbers() -> None:
    metric = small_cnn().train()
    metric.layers.eval()
    encode(metric, _X)
    assert metric.projection.training
    assert not any(part.training for part in metric.layers.modules())
    for labels in (LABELS, 10**12 * LABELS + 7):
        assert neighbor_accuracy(KEYS + 0.1, labels, KEYS, labels, n_neighbors=3) == 0.5


def test_every_row_counts_alike_and_none_is_its_own_neighbor() -> None:
    """The second batch is one row, without a neighbor: it counts once, and as wrong."""
    x, _ = images(6)
    config = MetricConfig(epochs=1, batch_size=5, learning_rate=1e-9, whole_batches=False)
    result = train_metric(CNNMetric((3, 8, 8), widths=(4, 4)), (x, torch.arange(6) // 5), config)
    known = result.final.train_score * 6
    assert known == pytest.approx(round(known))
    assert known <= 5
