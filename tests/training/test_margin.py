"""Training for certificates: wide margins, and pairs that one smooth map can have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from otad.cip.whole_bank.lifted_potential import least_lipschitz
from otad.errors import InputError
from otad.nets import Backbone, fc_resnet, lifted_net
from otad.training import TrainConfig, train
from otad.training.losses import margin_loss, pair_excess, scaled_margins


def moons(count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    angle = torch.pi * torch.rand(count, generator=generator)
    side = 1 - 2 * labels.float()
    x = torch.stack([angle.cos() * side + labels, angle.sin() * side + labels / 2], dim=1)
    return x + 0.05 * torch.randn(count, 2, generator=generator), labels


def test_margins_are_the_least_over_rivals() -> None:
    net = fc_resnet((4,), 3, seed=2)
    outputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    margins = scaled_margins(outputs, labels, net.head).detach()
    rows = net.head.weight.detach()
    for row, label in enumerate(labels.tolist()):
        rivals = [other for other in range(3) if other != label]
        expected = min(
            float((outputs[row, label] - outputs[row, other]) / (rows[label] - rows[other]).norm())
            for other in rivals
        )
        assert float(margins[row]) == pytest.approx(expected, rel=1e-5)
    shortfall = margin_loss("classification", TrainConfig(target_margin=0.7))(
        outputs, labels, net.head
    )
    assert shortfall.item() == pytest.approx(float((0.7 - margins).clamp_min(0).mean()))
    shortfall.backward()
    assert bool(net.head.weight.grad.isfinite().all())


def test_excess_is_the_sum_over_partners() -> None:
    generator = torch.Generator().manual_seed(3)
    embedded = 5 + torch.randn(9, 4, generator=generator, dtype=torch.float64)
    features = 2 * torch.randn(9, 4, generator=generator, dtype=torch.float64)
    total = 0.0
    for one in range(9):
        for other in range(9):
            step, move = embedded[one] - embedded[other], features[one] - features[other]
            total += max(0.0, float(move @ move / 1.5 - move @ step))
    assert total > 1
    assert float(pair_excess(embedded, features, 1.5)) == pytest.approx(total / 9)


def test_gradients_of_smooth_convex_functions_have_no_excess() -> None:
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    half = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    curved = half @ half.T
    largest = float(torch.linalg.eigvalsh(curved)[-1])
    assert float(pair_excess(points, points @ curved, largest)) < 1e-12
    assert float(pair_excess(points, points @ curved, 0.8 * largest)) > 1e-2


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


def constant_of(net: Backbone, x: Tensor) -> float:
    with torch.no_grad():
        return least_lipschitz(x, net(x))


def test_training_widens_margins_within_the_constant() -> None:
    x, y = moons()
    found = {}
    for weight in (0.0, 1.0):
        net = lifted_net((2,), 2, hidden=(64, 64))
        config = TrainConfig(
            epochs=60,
            batch_size=100,
            optimizer="adamw",
            learning_rate=3e-3,
            loss="margin",
            target_margin=0.3,
            pair_weight=weight,
        )
        result = train(net, (x, y), config)
        with torch.no_grad():
            margins = scaled_margins(net(x), y, net.head)
        radii = margins / constant_of(net, x)
        found[weight] = constant_of(net, x), float(radii.clamp_min(0).mean())
        assert result.history[-1].loss < 0.3 * result.history[0].loss
    assert found[1.0][0] < 1.3 < found[0.0][0]
    assert found[1.0][1] > found[0.0][1]


def test_a_plain_residual_net_trains_by_margin_too() -> None:
    x, y = moons()
    excess = []
    for weight in (0.0, 0.3):
        net = fc_resnet((2,), 2, blocks=2, hidden=32)
        config = TrainConfig(
            epochs=60,
            batch_size=100,
            optimizer="adamw",
            learning_rate=3e-3,
            loss="margin",
            target_margin=0.2,
            pair_weight=weight,
            pair_smoothness=1.2,
        )
        result = train(net, (x, y), config)
        assert result.history[-1].train_score > 0.85
        with torch.no_grad():
            embedded = net.embed(x)
            excess.append(float(pair_excess(embedded, net.transport(embedded)[0], 1.2)))
    assert excess[1] < 0.5 * excess[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing: expected 0 for the loss 'margin', got 0.1"),
        ({"mixing": 0.5}, "mixing: expected 0 "),
    ],
)
def test_a_margin_has_whole_labels(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(lifted_net((2,), 2), moons(), TrainConfig(epochs=1, loss="margin", **options))


def test_refusals() -> None:
    x, _ = moons()
    net = fc_resnet((2,), 1, task="regression")
    with pytest.raises(InputError, match="loss: expected 'fit' for regression, got 'margin'"):
        train(net, (x, x[:, 0]), TrainConfig(epochs=1, loss="margin"))
    for name in ("target_margin", "pair_smoothness"):
        with pytest.raises(InputError, match=f"{name}: expected a number of at least"):
            TrainConfig(**{name: 0.0})
    with pytest.raises(InputError, match="pair_weight: expected a number of at least 0"):
        TrainConfig(pair_weight=-1.0)
