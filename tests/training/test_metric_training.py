"""Training of metrics: the adversary, robustness gained, one step by hand, scores, refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from factories import refuses
from torch import Tensor, nn
from training.small_vision import KEYS, LABELS, images, small_cnn, weights_print

import otad
from otad.attacks.adaptive import SoftKnn
from otad.data import most_central
from otad.nets import CNNMetric, LipschitzMetric, Metric, PretrainedMetric
from otad.training import MetricConfig, TrainConfig, train, train_metric
from otad.training.adversary import Adversary, perturbed_weights, steepest_perturbation
from otad.training.metric import encode, neighbor_accuracy
from otad.training.metric_losses import neighborhood_loss

SHORT = MetricConfig(epochs=3, batch_size=16, learning_rate=0.01)
SHARE = 0.1
ONE_STEP = MetricConfig(
    epochs=1, batch_size=24, optimizer="sgd", learning_rate=0.1, schedule="constant"
)
ORDERS = {"l2": 2, "linf": math.inf}


def straight(norm: str = "l2", share: float = 0.0) -> Adversary:
    return Adversary(0.3, steps=1, random_start=False, norm=norm, weight_share=share)


@pytest.mark.parametrize("norm", ORDERS)
@pytest.mark.parametrize("random_start", [True, False])
def test_the_adversary_stays_in_ball_and_bounds_and_climbs(norm: str, random_start: bool) -> None:
    metric, (x, y) = small_cnn().double(), images(48)
    x = x.double()
    references = encode(metric, x)

    def loss(keys: Tensor) -> Tensor:
        return neighborhood_loss(keys, y, references, y, own=torch.arange(len(y)))

    eps = {"l2": 0.5, "linf": 0.05}[norm]
    adversary = Adversary(eps, steps=10, random_start=random_start, norm=norm)
    metric.train()
    state = weights_print(metric)
    ball = adversary.ball(metric)
    start = adversary.start(ball, x, torch.Generator().manual_seed(0))
    moved = adversary.attack(ball, metric, x, loss, start)
    assert torch.equal(start, x) is not random_start
    assert metric.training
    assert weights_print(metric) == state  # batch statistics did not change
    assert all(weight.grad is None for weight in metric.parameters())
    assert not moved.requires_grad
    lengths = (moved - x).flatten(1).norm(ORDERS[norm], dim=1)
    assert float(lengths.max()) <= eps + 1e-12
    assert 0 <= moved.min() <= moved.max() <= 1
    assert torch.equal(moved, adversary.attack(ball, metric, x, loss, start))
    before, after = loss(encode(metric, x)).mean(), loss(encode(metric, moved)).mean()
    assert after > before + 0.1


@pytest.mark.parametrize(("step_size", "reached"), [(None, 0.6), (0.2, 0.2), (5.0, 0.6)])
@pytest.mark.parametrize(("norm", "direction"), [("l2", [2, -1, 2]), ("linf", [1, -1, 1])])
def test_one_step_on_a_linear_metric_is_the_exact_one(
    step_size: float | None, reached: float, norm: str, direction: list[int]
) -> None:
    metric = PretrainedMetric(nn.Identity(), input_shape=(3,), key_norm="free")
    slope = torch.tensor([2.0, -1.0, 2.0])
    adversary = Adversary(0.6, steps=1, step_size=step_size, random_start=False, norm=norm)
    x = torch.zeros(2, 3)
    ball = adversary.ball(metric)
    moved = adversary.attack(ball, metric, x, lambda keys: keys @ slope, x)
    unit = torch.tensor(direction) / torch.tensor(direction).double().norm(ORDERS[norm])
    torch.testing.assert_close(moved.double(), (reached * unit).expand(2, 3), rtol=1e-5, atol=1e-6)


def test_each_matrix_is_perturbed_by_its_share_along_its_gradient() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), frozen).double()
    net.register_parameter("unused", nn.Parameter(torch.ones(2, 2).double()))
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = steepest_perturbation(net(x).square().sum(), net, SHARE)
    net(x).square().sum().backward()
    perturbed = [net.unused, net[0].weight, net[1].weight]
    assert [id(weight) for weight, _ in pairs] == [id(weight) for weight in perturbed]
    assert not pairs[0][1].any()  # no gradient, no direction
    for weight, step in pairs[1:]:
        assert step.norm().item() == pytest.approx(SHARE * weight.norm().item())
        cosine = nn.functional.cosine_similarity(step.flatten(), weight.grad.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1.0)


def test_without_a_trained_matrix_there_is_nothing_to_perturb() -> None:
    metric = small_cnn()
    for weight in metric.parameters():
        weight.requires_grad_(weight.dim() == 1)
    config = replace(ONE_STEP, adversary=straight(share=SHARE))
    refuses(train_metric, metric, images(24), config, match=r"weight_share.*0\.1")


def test_weights_are_restored_bit_for_bit_even_after_an_error() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 1e-8]]))

    def fail_within() -> None:
        with perturbed_weights([(weight, torch.tensor([[1e8, 1.0]]))]):
            assert weight.tolist() == [[1e8, 1.0]]
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert torch.equal(weight.detach(), torch.tensor([[1.0, 1e-8]]))


@pytest.mark.parametrize("norm", ORDERS)
def test_a_step_is_that_of_the_perturbed_weights_from_the_original_ones(norm: str) -> None:
    x, y = images(24)
    x, metric = x.double(), small_cnn().double()
    by_hand = copy.deepcopy(metric)
    adversary = straight(norm, SHARE)
    train_metric(metric, (x, y), replace(ONE_STEP, adversary=adversary))

    own = torch.arange(24)  # the order of a single batch does not matter

    def loss(keys: Tensor, references: Tensor) -> Tensor:
        keys, references = keys.float(), references.float()  # as in training
        return neighborhood_loss(keys, y, references, y, temperature=0.1, own=own)

    by_hand.eval()
    clean = by_hand(x).detach()
    ball = adversary.ball(by_hand)
    moved = adversary.attack(ball, by_hand, x, lambda keys: loss(keys, clean), x)
    elsewhere = copy.deepcopy(by_hand).train()
    loss(*elsewhere(torch.cat([moved, x])).chunk(2)).mean().backward()
    for weight in elsewhere.parameters():
        if weight.dim() > 1:
            weight.data += SHARE * weight.detach().norm() / weight.grad.norm() * weight.grad
    elsewhere.zero_grad()
    loss(*elsewhere(torch.cat([moved, x])).chunk(2)).mean().backward()
    for trained, weight, other in zip(
        metric.parameters(), by_hand.parameters(), elsewhere.parameters(), strict=True
    ):
        decayed = other.grad + ONE_STEP.weight_decay * weight.detach()
        expected = weight.detach() - ONE_STEP.learning_rate * decayed
        torch.testing.assert_close(trained.detach(), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bfloat16
def test_the_loss_is_that_of_the_perturbed_weights_in_any_precision() -> None:
    def first_loss(share: float, mixed: bool) -> float:
        config = replace(ONE_STEP, adversary=straight(share=share), mixed_precision=mixed)
        return train_metric(small_cnn(), images(24), config).final.loss

    full, mixed = first_loss(0.02, False), first_loss(0.02, True)
    assert full > 1.3 * first_loss(0.0, False)
    assert mixed > 1.3 * first_loss(0.0, True)
    assert mixed == pytest.approx(full, rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("weight_share", value) for value in (-0.1, 1.0, math.nan, np.float32(0.1))),
        *(("eps", value) for value in (0.0, "1", None, np.float32(1))),  # no JSON number
        *(("step_size", -1), ("steps", 0), ("norm", "l1")),
    ],
)
def test_bad_adversaries_are_refused(name: str, value: object) -> None:
    refuses(Adversary, **{"eps": 1.0} | {name: value}, match=f"{name}: expected")


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


def _attacked_accuracy(metric: Metric, eps: float) -> float:
    """Accuracy among 5 neighbors under a longer attack than any used in training."""
    (train_x, train_y), (x, y) = _points(300, 0), _points(150, 1)
    known, adversary = (encode(metric, train_x), train_y), Adversary(eps, steps=20)
    ball = adversary.ball(metric)
    start = adversary.start(ball, x, torch.Generator().manual_seed(1))

    def loss(keys: Tensor) -> Tensor:
        return neighborhood_loss(keys, y, *known)

    moved = adversary.attack(ball, metric, x, loss, start)
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
    ("y", "message"),
    [(_Y - 1, "0, got -1"), (_Y.float(), "int64, got float32"), (_Y[:5], r"\(12,\).*\(5,\)")],
)
def test_bad_labels_are_refused(y: Tensor, message: str) -> None:
    refuses(train_metric, small_cnn(), (_X, y), SHORT, match=f"train_y: expected .*{message}")


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


def test_the_loss_over_the_rows_of_a_bank_is_the_vote_by_hand() -> None:
    (x, y), rows = images(24), torch.tensor([20, 1, 3, 4, 8, 12])
    metric = small_cnn()
    with torch.no_grad():
        bank = encode(metric, x)[rows].numpy()
        keys = copy.deepcopy(metric).train()(x).numpy()  # as in a step, in training mode
    losses, right = [], []
    for row, (key, label) in enumerate(zip(keys, y.tolist(), strict=True)):
        others = [place for place, taken in enumerate(rows.tolist()) if taken != row]
        lengths = np.square(bank[others] - key).sum(1)
        same = y[rows[others]].numpy() == label
        votes = np.exp(-lengths / 0.1)
        losses.append(-math.log(votes[same].sum() / votes.sum()))
        right.append(same[lengths.argmin()])
    config = replace(ONE_STEP, references="bank")
    record = train_metric(metric, (x, y), config, bank_rows=rows).final
    assert record.loss == pytest.approx(np.mean(losses), rel=1e-4)
    assert record.train_score == pytest.approx(np.mean(right))


def test_training_on_the_vote_of_a_bank_makes_it_robust() -> None:
    """Without an attack the faint direction decides, and an attacker moves it: see `_points`."""
    x, y = _points(400, 0)
    net = otad.nets.fc_resnet((10,), 2, blocks=2, hidden=16)
    train(net, (x, y), TrainConfig(epochs=30, batch_size=100, learning_rate=0.1))
    metric, state = otad.metric_of(net, keys="features"), weights_print(net)
    rows = most_central(metric(x).detach(), y, 20)
    test_x, test_y = _points(100, 1)
    scores = []
    config = MetricConfig(epochs=10, batch_size=50, references="bank", learning_rate=0.03)
    config = replace(config, adversary=Adversary(0.3, steps=4))
    attack = SoftKnn(steps=10, temperatures=(0.3,), targets=1, polish=5)
    for tuned in (False, True):
        if tuned:
            result = train_metric(metric, (x, y, test_x, test_y), config, bank_rows=rows)
            known = encode(metric, x[rows]), y[rows]
            clean = neighbor_accuracy(encode(metric, test_x), test_y, *known, n_neighbors=10)
            assert result.final.val_score == clean > 0.85
        model = otad.defend(net, x[rows], y[rows], metric=metric)
        scores.append(otad.attack(model, test_x, test_y, otad.L2(0.3), attack=attack).accuracy)
    assert weights_print(net) == state  # the metric has a copy of the classifier
    assert scores[0] < 0.4
    assert scores[1] > 0.7  # at most 0.9, the share of points whose strong direction is right


@pytest.mark.parametrize(
    ("rows", "message"),
    [([0, 1], "two points of each class, got 0"), ([0, 0, 1, 2], "different rows from 0 to 23")],
)
def test_bad_rows_of_a_bank_are_refused(rows: list[int], message: str) -> None:
    given, bank = (small_cnn(), images(24)), replace(ONE_STEP, references="bank")
    refuses(train_metric, *given, bank, bank_rows=torch.tensor(rows), match=message)
    refuses(train_metric, *given, bank, bank_rows=torch.tensor([0, 24]), match="to 23")
    six = torch.arange(6)
    refuses(train_metric, *given, ONE_STEP, bank_rows=six, match="references: expected 'bank'")
    refuses(train_metric, *given, bank, bank_rows=six.double(), match="bank_rows.*int64")
