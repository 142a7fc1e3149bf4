"""Training of metrics: losses by hand, the adversary, robustness gained, resuming, refusals."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from otad.errors import InputError, MissingExtraError
from otad.io.tensor_files import fingerprint
from otad.nets.lipschitz import LipschitzMetric
from otad.nets.metric import Metric
from otad.nets.metric_nets import CNNMetric
from otad.nets.pretrained import PretrainedMetric
from otad.training import EpochRecord
from otad.training.adversary import Adversary
from otad.training.augmentation import RandomFlip
from otad.training.metric import MetricConfig, encode, neighbor_accuracy, train_metric
from otad.training.metric_losses import (
    make_loss,
    means_loss,
    neighborhood_loss,
    squared_distances,
)

FILE = "checkpoint.safetensors"
SHORT = MetricConfig(epochs=3, batch_size=16, learning_rate=0.01)
KEYS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
LABELS = torch.tensor([0, 0, 1, 1])


def _points(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes told apart for sure by a faint direction (+-0.1), and by a strong one (+-0.4)
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


def _images(rows: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    y = torch.arange(rows) % 3
    x = 0.3 * torch.rand(rows, 1, 8, 8, generator=generator)
    x[torch.arange(rows), 0, 2 * y] += 0.5
    return x, y


def _cnn() -> CNNMetric:
    return CNNMetric((1, 8, 8), widths=(4, 6), key_dim=5, bounds=(0, 1))


def test_the_neighborhood_loss_is_the_hand_computed_one() -> None:
    own = torch.arange(4)
    loss = neighborhood_loss(KEYS, LABELS, KEYS, LABELS, temperature=2.0, own=own)
    for i in range(4):
        weight = [
            0.0 if i == j else torch.exp(-(KEYS[i] - KEYS[j]).square().sum() / 2) for j in range(4)
        ]
        right = sum(weight[j] for j in range(4) if LABELS[j] == LABELS[i])
        torch.testing.assert_close(loss[i], -torch.log(right / sum(weight)))


def test_the_margin_lengthens_distances_within_a_class() -> None:
    query, label = torch.tensor([[0.0, 0.0]]), torch.tensor([0])
    loss = neighborhood_loss(query, label, KEYS[1:3], LABELS[1:3], temperature=1.0, margin=0.5)
    near, far = torch.exp(torch.tensor(-(1.5**2))), torch.exp(torch.tensor(-4.0))
    torch.testing.assert_close(loss, -torch.log(near / (near + far))[None])


def test_a_row_without_its_class_counts_nothing_and_spoils_no_gradient() -> None:
    keys = KEYS.clone().requires_grad_()
    labels = torch.tensor([0, 0, 1, 2])
    own = torch.arange(4)
    loss = neighborhood_loss(keys, labels, keys, labels, margin=0.1, own=own)
    assert loss[2:].tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert bool(keys.grad.isfinite().all())


@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("loss", [neighborhood_loss, means_loss])
def test_a_row_that_is_all_there_is_costs_nothing(
    loss: Callable[..., Tensor], margin: float
) -> None:
    keys = KEYS[:1].clone().requires_grad_()
    found = loss(keys, LABELS[:1], keys, LABELS[:1], margin=margin, own=torch.tensor([0]))
    assert found.tolist() == [0.0]
    found.sum().backward()
    assert keys.grad is not None
    assert not keys.grad.any()


def test_the_loss_by_means_is_the_hand_computed_one() -> None:
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    references = keys + 0.1 * torch.randn(7, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 2, 2, 5, 2])
    settings = {"temperature": 0.3, "margin": 0.4}
    found = means_loss(keys, labels, references, labels, torch.arange(7), **settings)
    for i in range(7):
        shares = {}
        for label in (0, 2, 5):
            others = [j for j in range(7) if labels[j] == label and j != i]
            if others:
                off = float((keys[i] - references[others].mean(0)).norm())
                shares[label] = math.exp(-(off + 0.4 * (label == int(labels[i]))) / 0.3)
        own = shares.get(int(labels[i]))
        expected = 0.0 if own is None else -math.log(own / sum(shares.values()))
        assert float(found[i]) == pytest.approx(expected, abs=1e-9)


def test_equal_keys_spoil_no_gradient_of_the_loss_by_means() -> None:
    keys = torch.zeros(6, 2, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    means_loss(keys, labels, keys, labels, torch.arange(6)).sum().backward()
    assert bool(keys.grad.isfinite().all())


def _by_hand(name: str, keys: Tensor, references: Tensor, margin: float) -> Tensor:
    """The mean over what is not 0, by loops."""
    distance = [[(a - b).norm() for b in references] for a in keys]
    if name == "triplet":
        triplets = [
            distance[a][p] - distance[a][n] + margin
            for a in range(len(keys))
            for p in range(len(keys))
            for n in range(len(keys))
            if a != p and LABELS[a] == LABELS[p] != LABELS[n]
            and 0 < distance[a][n] - distance[a][p] <= margin
        ]  # fmt: skip
        groups = [triplets]
    else:
        pairs = [(a, b) for a in range(len(keys)) for b in range(len(keys)) if a != b]
        same = [distance[a][b] for a, b in pairs if LABELS[a] == LABELS[b]]
        other = [margin - distance[a][b] for a, b in pairs if LABELS[a] != LABELS[b]]
        groups = [same, other]
    means = []
    for group in groups:
        positive = [value for value in group if value > 0]
        means.append(torch.stack(positive).mean() if positive else torch.tensor(0.0))
    return torch.stack(means).sum()


@pytest.mark.parametrize(("name", "margin"), [("triplet", 1.4), ("contrastive", 2.5)])
def test_triplets_and_pairs_are_the_hand_computed_ones(name: str, margin: float) -> None:
    pytest.importorskip("pytorch_metric_learning", reason="needs the extra `metric`")
    loss = make_loss(name, margin, 0.1)
    moved = KEYS + torch.tensor([[0.1, 0.2], [-0.1, 0.0], [0.3, 0.0], [0.0, -0.2]])
    for keys in (KEYS, moved):  # a batch among itself, and a moved one among the clean
        value = loss(keys, LABELS, KEYS, LABELS, torch.arange(4))
        expected = _by_hand(name, keys, KEYS, margin)
        assert expected > 0
        torch.testing.assert_close(value, expected)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("losses", "distances"):
        monkeypatch.setitem(sys.modules, f"pytorch_metric_learning.{part}", None)
    with pytest.raises(MissingExtraError, match=r"otad\[metric\]"):
        train_metric(_metric(), _points(20, 0), replace(SHORT, loss="triplet"))


@pytest.mark.parametrize("random_start", [True, False])
def test_the_adversary_stays_in_ball_and_bounds_and_climbs(random_start: bool) -> None:
    metric, (x, y) = _cnn(), _images()
    references = encode(metric, x)

    def loss(keys: Tensor) -> Tensor:
        return neighborhood_loss(keys, y, references, y, own=torch.arange(len(y)))

    adversary = Adversary(0.5, steps=10, random_start=random_start)
    metric.train()
    state = fingerprint(metric.state_dict())
    start = adversary.start(x, torch.Generator().manual_seed(0))
    moved = adversary.attack(metric, x, loss, start)
    assert torch.equal(start, x) is not random_start
    assert metric.training
    assert fingerprint(metric.state_dict()) == state  # batch statistics stayed
    assert all(weight.grad is None for weight in metric.parameters())
    assert not moved.requires_grad
    assert float((moved - x).flatten(1).norm(dim=1).max()) <= 0.5 + 1e-6
    assert 0 <= moved.min() <= moved.max() <= 1
    assert torch.equal(moved, adversary.attack(metric, x, loss, start))
    before, after = loss(encode(metric, x)).mean(), loss(encode(metric, moved)).mean()
    assert after > before + 0.1


def test_random_starts_fill_the_ball() -> None:
    x = torch.tensor([3.0, -4.0]).expand(4000, 2)
    ways = Adversary(2.0).start(x, torch.Generator().manual_seed(0)) - x
    radii = ways.norm(dim=1)
    assert radii.max() <= 2 + 1e-6
    assert (radii < 1).double().mean().item() == pytest.approx(0.25, abs=0.03)  # share of the area
    assert ways.mean(0).abs().max() < 0.1


@pytest.mark.parametrize(("step_size", "reached"), [(None, 0.6), (0.2, 0.2), (5.0, 0.6)])
def test_one_step_on_a_linear_metric_is_the_exact_one(
    step_size: float | None, reached: float
) -> None:
    metric = PretrainedMetric(nn.Identity(), input_shape=(3,), key_norm="free")
    direction = torch.tensor([2.0, -1.0, 2.0])
    adversary = Adversary(0.6, steps=1, step_size=step_size, random_start=False)
    x = torch.zeros(2, 3)
    moved = adversary.attack(metric, x, lambda keys: keys @ direction, x)
    torch.testing.assert_close(moved, (reached * direction / 3).expand(2, 3))


def _attacked_accuracy(metric: Metric, eps: float) -> float:
    """Accuracy among 5 neighbors under a longer attack than any used in training."""
    (train_x, train_y), (x, y) = _points(300, 0), _points(150, 1)
    references = encode(metric, train_x)
    adversary = Adversary(eps, steps=20)
    moved = adversary.attack(
        metric,
        x,
        lambda keys: neighborhood_loss(keys, y, references, train_y),
        adversary.start(x, torch.Generator().manual_seed(1)),
    )
    return neighbor_accuracy(encode(metric, moved), y, references, train_y, n_neighbors=5)


@pytest.mark.parametrize("references", ["batch", "bank"])
def test_adversarial_training_makes_neighbors_robust(references: str) -> None:
    config = MetricConfig(
        epochs=12, batch_size=75, learning_rate=5e-3, references=references, n_neighbors=5
    )
    data = (*_points(300, 0), *_points(150, 1))
    plain, robust = _metric(), _metric()
    clean = train_metric(plain, data, config).final
    assert clean.val_score > 0.98  # the faint direction gives it away ...
    assert _attacked_accuracy(plain, 0.2) < 0.3  # ... and is easily crossed
    hardened = train_metric(robust, data, replace(config, adversary=Adversary(0.2, steps=5))).final
    assert hardened.val_score > 0.85  # the strong direction is right nine times of ten
    assert _attacked_accuracy(robust, 0.2) > 0.65


@pytest.mark.parametrize("loss", ["neighborhood", "means", "triplet", "contrastive"])
def test_every_loss_finds_what_tells_classes_apart(loss: str) -> None:
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
    assert result.metric == "accuracy"
    assert not metric.training


def test_the_lipschitz_metric_learns_under_attack_and_keeps_its_constant() -> None:
    metric, (x, y) = (
        LipschitzMetric((1, 8, 8), key_dim=5, widths=(8, 12), depth=1, std=0.5),
        _images(),
    )
    config = MetricConfig(
        epochs=12, batch_size=24, learning_rate=0.02, temperature=0.5, adversary=Adversary(0.2, 2)
    )
    result = train_metric(metric, (x[:24], y[:24], x[24:], y[24:]), config)
    assert result.final.val_score > 0.95
    assert 2 <= metric.lipschitz < 2.001


def test_scores_are_those_of_the_final_weights() -> None:
    x, y = _images()
    for ema in (0.0, 0.9):
        metric = _cnn()
        config = replace(SHORT, ema=ema, n_neighbors=1)
        result = train_metric(metric, (x[:32], y[:32], x[32:], y[32:]), config)
        keys, references = metric(x[32:]), metric(x[:32])
        nearest = torch.cdist(keys, references).argmin(1)
        expected = (y[:32][nearest] == y[32:]).double().mean().item()
        assert result.final.val_score == pytest.approx(expected)


def test_the_average_is_that_of_the_weights_after_every_step() -> None:
    x, y = _images(16)
    config = replace(SHORT, batch_size=16, schedule="constant", ema=0.75, optimizer="sgd")
    averaged, states = _cnn(), []
    train_metric(averaged, (x, y), config)
    for epochs in (1, 2, 3):  # one step each
        metric = _cnn()
        train_metric(metric, (x, y), replace(config, epochs=epochs, ema=0.0))
        states.append(metric.state_dict())
    for name, value in averaged.state_dict().items():
        if value.is_floating_point():
            first, *later = (state[name] for state in states)
            for state in later:
                first = 0.75 * first + 0.25 * state
            torch.testing.assert_close(value, first)


class _StopError(Exception):
    pass


def _stop_after(epoch: int):
    def report(record: EpochRecord) -> None:
        if record.epoch == epoch:
            raise _StopError

    return report


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "ema": 0.5},
        {"adversary": Adversary(0.3, steps=2), "references": "bank"},
        {"adversary": Adversary(0.3, steps=2), "mixed_precision": True, "channels_last": True},
        {"adversary": Adversary(0.3, steps=1, weight_share=0.01), "ema": 0.5},
    ],
)
def test_a_stopped_run_ends_like_an_uninterrupted_one(tmp_path: Path, options: dict) -> None:
    config, flip, data = replace(SHORT, epochs=4, **options), RandomFlip(), _images()
    whole, resumed, bare = _cnn(), _cnn(), _cnn()
    expected = train_metric(whole, data, config, augment=flip, checkpoint_dir=tmp_path / "whole")
    with pytest.raises(_StopError):
        train_metric(_cnn(), data, config, augment=flip, checkpoint_dir=tmp_path / "cut",
                     progress=_stop_after(2))  # fmt: skip
    result = train_metric(resumed, data, config, augment=flip, checkpoint_dir=tmp_path / "cut")
    assert (result, result.resumed_after) == (expected, 2)
    torch.manual_seed(123)  # the global generator decides nothing
    state = torch.random.get_rng_state()
    assert train_metric(bare, data, config, augment=flip) == expected
    assert torch.equal(state, torch.random.get_rng_state())
    prints = {fingerprint(metric.state_dict()) for metric in (whole, resumed, bare)}
    assert len(prints) == 1
    assert (tmp_path / "whole" / FILE).read_bytes() == (tmp_path / "cut" / FILE).read_bytes()
    finished = _cnn()
    train_metric(finished, data, config, augment=flip, checkpoint_dir=tmp_path / "cut")
    assert fingerprint(finished.state_dict()) in prints


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    data = _images()
    config = replace(SHORT, epochs=1, adversary=Adversary(0.3, steps=2))
    train_metric(_cnn(), data, config, augment=RandomFlip(0.5), checkpoint_dir=tmp_path)
    others = {
        r"config\.adversary\.eps": (replace(config, adversary=Adversary(0.4, steps=2)), 0.5),
        r"config\.temperature": (replace(config, temperature=0.2), 0.5),
        r"augment \('RandomFlip\(probability=0.4\)'": (config, 0.4),
    }
    for message, (other, probability) in others.items():
        with pytest.raises(InputError, match=f"differs in {message}"):
            train_metric(_cnn(), data, other, augment=RandomFlip(probability),
                         checkpoint_dir=tmp_path)  # fmt: skip


def test_augmented_images_are_what_the_net_sees() -> None:
    x, y = _images()
    seen = []

    def blacken(images: Tensor, generator: torch.Generator) -> Tensor:
        seen.append((len(images), generator.device))
        return torch.zeros_like(images)

    result = train_metric(_cnn(), (x, y), replace(SHORT, epochs=1), augment=blacken)
    assert seen == [(16, torch.device("cpu"))] * 3
    assert result.final.train_score < 0.6  # all images are alike


def test_an_incomplete_batch_is_left_out_but_a_small_set_is_not() -> None:
    sizes = []

    def note(images: Tensor, _: torch.Generator) -> Tensor:
        sizes.append(len(images))
        return images

    for rows in (40, 10):
        train_metric(_cnn(), _images(rows), replace(SHORT, epochs=1), augment=note)
    assert sizes == [16, 16, 10]


_X, _Y = _images(12)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((_X, torch.ones_like(_Y)), "train_y: expected at least two classes, got only the label 1"),
        ((_X, _Y - 1), "train_y: expected labels from 0, got -1"),
        ((_X, _Y.float()), "train_y: expected dtype int64, got float32"),
        ((_X * 9, _Y), "train_x: expected values within the declared bounds"),
        ((_X, _Y[:5]), r"train_y: expected shape \(12,\) with one label per input, got \(5,\)"),
        ((_X, _Y, _X), "data: expected train_x, train_y or .* got train_x, train_y, val_x"),
    ],
)
def test_bad_data_are_refused(data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_metric(_cnn(), data, SHORT)


def test_a_metric_without_weights_has_nothing_to_learn() -> None:
    pixels = PretrainedMetric(nn.Flatten(), input_shape=_X.shape[1:])
    with pytest.raises(InputError, match="net: expected weights to train, got none"):
        train_metric(pixels, (_X, _Y), SHORT)


@pytest.mark.parametrize("references", ["batch", "bank"])
def test_a_metric_in_double_precision_learns(references: str) -> None:
    metric = _cnn().double()
    result = train_metric(metric, (_X.double(), _Y), replace(SHORT, references=references))
    assert math.isfinite(result.final.loss)
    assert metric.projection.weight.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        *(partial(torch.autocast, "cpu", enabled=on) for on in (False, True)),
    ],
)
@pytest.mark.parametrize("mixed_precision", [False, True])
def test_the_mode_of_the_caller_does_not_matter(mode: Callable, mixed_precision: bool) -> None:
    plainly, within = _cnn(), _cnn()
    adversary = Adversary(0.1, steps=1, weight_share=0.1)
    config = replace(SHORT, adversary=adversary, mixed_precision=mixed_precision)
    train_metric(plainly, (_X, _Y), config)
    with mode():
        train_metric(within, (_X, _Y), config)
    assert fingerprint(plainly.state_dict()) == fingerprint(within.state_dict())


def test_parts_that_were_in_evaluation_mode_are_so_after_encoding() -> None:
    metric = _cnn().train()
    metric.layers.eval()
    encode(metric, _X)
    assert metric.projection.training
    assert not any(part.training for part in metric.layers.modules())


def test_labels_may_be_any_numbers() -> None:
    for labels in (LABELS, 10**12 * LABELS + 7):
        assert neighbor_accuracy(KEYS + 0.1, labels, KEYS, labels, n_neighbors=3) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "angular"}, "loss: expected one of neighborhood, means, triplet, contrastive"),
        ({"references": "queue"}, "references: expected one of batch, bank"),
        ({"references": "bank", "loss": "triplet"}, "expected 'batch' for the loss triplet"),
        ({"temperature": 0.0}, "temperature: expected a number of at least 1e-12"),
        ({"temperature": np.float32(0.1)}, "temperature: expected a number"),
        ({"margin": np.float32(0.1)}, "margin: expected a number"),
        ({"margin": -1.0}, "margin: expected a number of at least 0"),
        ({"ema": 1.0}, "ema: expected a number of at least 0 and below 1"),
        ({"batch_size": 1}, "batch_size: expected an integer of at least 2"),
        ({"n_neighbors": 0}, "n_neighbors: expected an integer"),
        ({"optimizer": "lion"}, "optimizer: expected one of sgd, adamw"),
    ],
)
def test_bad_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MetricConfig(**options)


def test_distances_keep_their_digits_far_from_the_origin_and_in_mixed_precision() -> None:
    keys = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.cdist(keys.double(), keys.double()).square().float()
    for offset, tolerance in ((0.0, 1e-5), (3000.0, 2e-2)):
        with torch.autocast("cpu", torch.bfloat16):
            found = squared_distances(keys + offset, keys + offset)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"eps": 0.0},
        {"eps": 1.0, "step_size": -1},
        {"eps": 1, "steps": 0},
        {"eps": 1, "weight_share": -0.1},
        {"eps": 1, "weight_share": 1.0},
        {"eps": 1, "weight_share": math.nan},
        {"eps": np.float32(1)},  # no JSON, and so no checkpoint, could tell it
        {"eps": "1"},
        {"eps": 1, "weight_share": np.float32(0.1)},
    ],
)
def test_bad_adversaries_are_refused(options: dict) -> None:
    with pytest.raises(InputError, match="expected"):
        Adversary(**options)


def test_a_diverging_run_is_stopped_and_says_so() -> None:
    config = replace(SHORT, learning_rate=1e30, optimizer="sgd", weight_decay=1e10)
    with pytest.raises(InputError, match="learning_rate: expected one at which training converges"):
        train_metric(_metric(key_norm="free"), _points(32, 0), config)


def test_every_row_counts_alike_and_none_is_its_own_neighbor() -> None:
    """The second batch is one row, without a neighbor: it counts once, and as wrong."""
    x, _ = _images(6)
    config = MetricConfig(epochs=1, batch_size=5, learning_rate=1e-9, whole_batches=False)
    told = train_metric(CNNMetric((1, 8, 8), widths=(4, 4)), (x, torch.arange(6) // 5), config)
    known = told.final.train_score * 6
    assert known == pytest.approx(round(known))
    assert known <= 5
