"""Losses of backbones and metrics: against loops, closed forms, and what training makes of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from training.small_vision import KEYS, LABELS, moons

from otad.certify import certify
from otad.cip.whole_bank.lifted_bank import least_lipschitz
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import fc_resnet, lifted_net
from otad.training import TrainConfig, train
from otad.training.backbone_config import margin_loss
from otad.training.margins import bisector_margins, pair_excess, scaled_margins
from otad.training.metric_losses import make_loss, means_loss, neighborhood_loss, squared_distances

MARGIN = TrainConfig(
    epochs=60, batch_size=100, optimizer="adamw", learning_rate=3e-3, loss="margin"
)


def test_margins_are_the_least_over_rivals() -> None:
    net = fc_resnet((4,), 3, seed=2)
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    margins = scaled_margins(outputs, labels, net.head).detach()
    rows = net.head.weight.detach()
    for row, label in enumerate(labels.tolist()):
        expected = min(
            float((outputs[row, label] - outputs[row, other]) / (rows[label] - rows[other]).norm())
            for other in {0, 1, 2} - {label}
        )
        assert float(margins[row]) == pytest.approx(expected, rel=1e-5)
    loss = margin_loss("classification", TrainConfig(target_margin=0.7))
    shortfall = loss(outputs, labels, net.head)
    assert shortfall.item() == pytest.approx(float((0.7 - margins).clamp_min(0).mean()))
    shortfall.backward()
    assert bool(net.head.weight.grad.isfinite().all())


def test_excess_is_the_sum_over_partners() -> None:
    generator = torch.Generator().manual_seed(3)
    embedded = 5 + torch.randn(9, 4, generator=generator, dtype=torch.float64)
    features = 2 * torch.randn(9, 4, generator=generator, dtype=torch.float64)
    total = 0.0
    for one, other in itertools.product(range(9), repeat=2):
        step, move = embedded[one] - embedded[other], features[one] - features[other]
        total += max(0.0, float(move @ move / 1.5 - move @ step))
    assert total > 1
    assert float(pair_excess(embedded, features, 1.5)) == pytest.approx(total / 9)
    # Gradients of a smooth convex function have none.
    curved = features.T @ features
    largest = float(torch.linalg.eigvalsh(curved)[-1])
    assert float(pair_excess(embedded, embedded @ curved, largest)) < 1e-9
    assert float(pair_excess(embedded, embedded @ curved, 0.8 * largest)) > 1e-2


def test_for_a_lifted_net_excess_is_about_the_lipschitz_constant() -> None:
    net = lifted_net((2,), 2, hidden=(16,))
    x, _ = moons(50)
    embedded = net.embed(x)
    features = net.transport(embedded)[0].detach()
    constant = least_lipschitz(x, features[:, 2:])
    for share, violates in ((1.01, False), (0.95, True)):
        features[:, 2:] *= 1 / (constant * share)
        assert (float(pair_excess(embedded, features, 2.0)) > 1e-6) == violates
        features[:, 2:] *= constant * share


def test_training_widens_margins_within_the_constant() -> None:
    x, y = moons()
    found = {}
    for weight in (0.0, 1.0):
        net = lifted_net((2,), 2, hidden=(64, 64))
        result = train(net, (x, y), replace(MARGIN, target_margin=0.3, pair_weight=weight))
        with torch.no_grad():
            margins, constant = scaled_margins(net(x), y, net.head), least_lipschitz(x, net(x))
        found[weight] = constant, float((margins / constant).clamp_min(0).mean())
        assert result.history[-1].loss < 0.3 * result.history[0].loss
    assert found[1.0][0] < 1.3 < found[0.0][0]
    assert found[1.0][1] > found[0.0][1]
    # A residual net that is not lifted learns by margin too.
    net = fc_resnet((2,), 2, blocks=2, hidden=32)
    settings = {"target_margin": 0.2, "pair_weight": 0.3, "pair_smoothness": 1.2}
    assert train(net, (x, y), replace(MARGIN, **settings)).final.train_score > 0.85


@pytest.mark.parametrize("margin", [0.0, 0.5])
def test_the_neighborhood_loss_is_the_hand_computed_one(margin: float) -> None:
    own = torch.arange(4)
    loss = neighborhood_loss(KEYS, LABELS, KEYS, LABELS, temperature=2.0, margin=margin, own=own)
    for i in range(4):
        alike = LABELS[i] == LABELS
        weight = torch.exp(-((KEYS[i] - KEYS).norm(dim=1) + margin * alike).square() / 2)
        weight[i] = 0
        torch.testing.assert_close(loss[i], -torch.log(weight[alike].sum() / weight.sum()))


@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("loss", [neighborhood_loss, means_loss])
@pytest.mark.parametrize(
    ("keys", "labels", "alone"),
    [
        (KEYS[:1], [0], [0]),
        (KEYS, [0, 0, 1, 2], [2, 3]),
        (torch.zeros(6, 2), [0, 0, 1, 1, 2, 2], []),
    ],
    ids=["all there is", "without its class", "equal keys"],
)
def test_rows_alone_cost_nothing_and_no_gradient_is_spoiled(
    keys: Tensor, labels: list[int], alone: list[int], loss: Callable[..., Tensor], margin: float
) -> None:
    keys, y = keys.clone().requires_grad_(), torch.tensor(labels)
    found = loss(keys, y, keys, y, margin=margin, own=torch.arange(len(y)))
    assert found[alone].tolist() == [0.0] * len(alone)
    found.sum().backward()
    assert bool(keys.grad.isfinite().all())
    assert len(y) > 1 or not keys.grad.any()


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


def _by_hand(name: str, keys: Tensor, references: Tensor, margin: float) -> float:
    """The mean over what is not 0, by loops."""
    distance = [[float((a - b).norm()) for b in references] for a in keys]
    if name == "triplet":
        triplets = [
            distance[a][p] - distance[a][n] + margin
            for a, p, n in itertools.permutations(range(4), 3)
            if LABELS[a] == LABELS[p] != LABELS[n]
            and 0 < distance[a][n] - distance[a][p] <= margin
        ]  # fmt: skip
        groups = [triplets]
    else:
        pairs = list(itertools.permutations(range(4), 2))
        same = [distance[a][b] for a, b in pairs if LABELS[a] == LABELS[b]]
        other = [margin - distance[a][b] for a, b in pairs if LABELS[a] != LABELS[b]]
        groups = [same, other]
    return sum(statistics.mean([value for value in group if value > 0]) for group in groups)


@pytest.mark.parametrize(("name", "margin"), [("triplet", 1.4), ("contrastive", 2.5)])
def test_triplets_and_pairs_are_the_hand_computed_ones(name: str, margin: float) -> None:
    loss = make_loss(name, margin, 0.1)
    moved = KEYS + torch.tensor([[0.1, 0.2], [-0.1, 0.0], [0.3, 0.0], [0.0, -0.2]])
    for keys in (KEYS, moved):  # a batch among itself, and a moved one among the clean
        value = loss(keys, LABELS, KEYS, LABELS, torch.arange(4))
        assert value.item() == pytest.approx(_by_hand(name, keys, KEYS, margin), rel=1e-5)


def test_distances_keep_their_digits_far_from_the_origin_and_in_mixed_precision() -> None:
    keys = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    expected = torch.cdist(keys.double(), keys.double()).square().float()
    for offset, tolerance in ((0.0, 1e-5), (3000.0, 2e-2)):
        with torch.autocast("cpu", torch.bfloat16):
            found = squared_distances(keys + offset, keys + offset)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-3)


def test_bisector_margins_are_radii_of_the_nearest_point() -> None:
    """At a low temperature and with all points, they are the largest radius that one point proves.
    One class has fewer points than rivals count."""
    drawn = torch.Generator().manual_seed(4)
    x, points = (torch.rand(n, 3, generator=drawn, dtype=torch.float64) for n in (7, 12))
    labels, y = torch.tensor([0] * 2 + [1] * 5 + [2] * 5), torch.arange(7) % 3
    margins, right = bisector_margins(x, y, points, labels, 10, 1e-6)
    apart = torch.cdist(x, points)
    assert right.tolist() == (labels[apart.argmin(1)] == y).double().tolist()
    assert 0 < int(right.sum()) < 7
    for row, label in enumerate(y.tolist()):
        own, others = (labels == label).nonzero()[:, 0], (labels != label).nonzero()[:, 0]
        each = [
            min(
                float(
                    (apart[row, j] ** 2 - apart[row, i] ** 2) / (points[i] - points[j]).norm() / 2
                )
                for j in others.tolist()
            )
            for i in own.tolist()
        ]
        assert float(margins[row]) == pytest.approx(max(each), abs=1e-4)
        assert (max(each) > 0) == bool(right[row])


def test_the_bisector_loss_trains_prototypes_for_certified_radii() -> None:
    (x, y), frame = moons(300), lifted_net((2,), 2, blocks=0)
    net = prototype_net(frame, x, y, per_class=6, neighbors=10)
    before = OTAD(net, net.bank(), n_neighbors=1).eval()
    proved = certify(before, x[:80]).accuracy(y[:80], 0.1)
    config = TrainConfig(
        epochs=15, batch_size=100, optimizer="adamw", learning_rate=0.02, loss="bisector",
        target_margin=0.3, margin_temperature=0.05, weight_decay=0.0,
    )  # fmt: skip
    result = train(net, (x, y), config, weights=torch.ones(300))
    after = OTAD(net, net.bank(), n_neighbors=1).eval()
    assert certify(after, x[:80]).accuracy(y[:80], 0.1) > proved + 0.02
    assert result.final.loss < result.history[0].loss
    assert result.final.energy == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"energy_weight": 0.1}, "energy_weight.*bisector"),
        ({"pair_weight": 0.1}, "pair_weight.*bisector"),
        ({"compiled": True}, "compiled.*bisector"),
        ({"label_smoothing": 0.1}, "label_smoothing.*bisector"),
        ({"margin_rivals": 0}, "margin_rivals.*0"),
        ({"margin_temperature": 0.0}, "margin_temperature.*0"),
    ],
)
def test_the_bisector_loss_refuses_what_it_cannot_use(
    changes: dict[str, float], message: str
) -> None:
    (x, y), frame = moons(40), lifted_net((2,), 2, blocks=0)
    net = prototype_net(frame, x, y, per_class=3, neighbors=1)
    with pytest.raises(InputError, match=message):
        train(net, (x, y), replace(TrainConfig(epochs=1, loss="bisector"), **changes))


def test_the_bisector_loss_needs_prototypes_of_each_label() -> None:
    (x, y), frame = moons(40), lifted_net((2,), 3, blocks=0)
    config = TrainConfig(epochs=1, loss="bisector")
    with pytest.raises(InputError, match=r"loss.*prototypes.*LiftedNet"):
        train(frame, (x, y), config)
    net = prototype_net(frame, x, y, per_class=3, neighbors=1)
    with pytest.raises(InputError, match=r"train_y.*2"):
        train(net, (x, torch.arange(40) % 3), config)
