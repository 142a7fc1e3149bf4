"""Training of orthogonal matrices: steps against matrix exponentials and a loop of Adam."""

from __future__ import annotations

import pytest
import torch
from factories import refuses
from torch import Tensor
from training.small_vision import images

from otad.nets import OrthogonalNet, fc_resnet
from otad.nets.orthogonal import orthogonal_weights
from otad.training import TrainConfig, train
from otad.training.backbone_config import soft_margin_loss
from otad.training.margins import scaled_margins
from otad.training.orthogonal_adam import OrthogonalAdam, turned

# A CPU without bfloat16 warns once and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

SETTINGS = {"optimizer": "orthogonal_adam", "loss": "soft_margin", "weight_decay": 0.0}
CONFIG = TrainConfig(epochs=4, batch_size=16, learning_rate=5e-3, target_margin=0.1, **SETTINGS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(seed: int = 0) -> OrthogonalNet:
    return OrthogonalNet((3, 8, 8), 3, width=16, blocks=2, seed=seed, bounds=(0, 1))


def off(weight: Tensor) -> float:
    """How far the rows of matrices are from orthonormal."""
    wide = weight.detach().double()
    return float((wide @ wide.mT - torch.eye(wide.shape[-2])).abs().max())


def test_a_step_is_nearly_the_exponential_and_keeps_rows_orthonormal() -> None:
    skew = random(2, 12, 12)
    skew = 0.05 * (skew - skew.mT) / torch.linalg.matrix_norm(skew, 2).max()
    rows = torch.linalg.qr(random(2, 12, 12, seed=1))[0][:, :5]
    found, exact = turned(rows, skew), rows @ torch.linalg.matrix_exp(skew)
    error = torch.linalg.matrix_norm(found - exact, 2).max()
    size = torch.linalg.matrix_norm(skew, 2).max()
    assert 0 < error <= size**4 / 24 * (1 + size)  # the first term that is left out
    assert off(found) < 1e-6 < off(rows + rows @ skew)


def test_the_optimizer_is_adam_in_the_space_of_skew_matrices() -> None:
    start, plain = torch.linalg.qr(random(3, 8, 8))[0][:, :6], random(4)
    target, wanted = torch.linalg.qr(random(3, 8, 8, seed=2))[0][:, :6], random(4, seed=3)
    matrix, vector = start.clone().requires_grad_(), plain.clone().requires_grad_()
    optimizer = OrthogonalAdam([{"params": [vector]}], [matrix], lr=0.003, weight_decay=0.0)
    twin = plain.clone().requires_grad_()
    known, adam = start.clone(), torch.optim.AdamW([twin], lr=0.003, weight_decay=0.0)
    first, second, losses = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8), []
    for step in range(1, 41):
        optimizer.zero_grad()
        loss = (matrix - target).square().sum() + (vector - wanted).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        adam.zero_grad()
        (twin - wanted).square().sum().backward()
        adam.step()
        slope = known.mT @ (2 * (known - target))
        slope = slope - slope.mT
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
        moments = first / (1 - 0.9**step), second / (1 - 0.999**step)
        known = known @ torch.linalg.matrix_exp(-0.003 * moments[0] / (moments[1].sqrt() + 1e-8))
    torch.testing.assert_close(matrix.detach(), known, rtol=0, atol=1e-6)
    assert torch.equal(vector, twin)
    assert losses[-1] < 0.9 * losses[0]


def test_training_learns_and_keeps_all_matrices_orthogonal() -> None:
    x, y = images(48)
    for changes in ({}, {"ema": 0.9, "mixed_precision": True, "gradient_clip": 1.0}):
        trained = net()
        before = [weight.detach().clone() for weight in trained.parameters()]
        settings = {"epochs": 6, "learning_rate": 0.02, "target_margin": 0.1, "batch_size": 16}
        result = train(trained, (x, y), TrainConfig(**settings, **SETTINGS, **changes))
        assert result.final.loss < 0.8 * result.history[0].loss
        for weight in orthogonal_weights(trained):
            assert off(weight) < 1e-6
        for old, new in zip(before, trained.parameters(), strict=True):
            assert (new - old).abs().max().item() > 1e-3
        assert trained.lipschitz.constant < 1 + 1e-4


def test_frozen_matrices_stay() -> None:
    frozen, (x, y) = net(), images(32)
    frozen.matrices.requires_grad_(False)
    before = frozen.matrices.clone()
    train(frozen, (x, y), CONFIG)
    torch.testing.assert_close(frozen.matrices, before, rtol=0, atol=1e-6)


def test_the_optimizer_fits_the_network() -> None:
    x, y = images(32)
    for name in ("sgd", "adamw"):
        config = TrainConfig(epochs=1, optimizer=name)
        refuses(train, net(), (x, y), config, match="'orthogonal_adam' for a OrthogonalNet")
    other = fc_resnet((3, 8, 8), 3, blocks=1)
    refuses(train, other, (x, y), CONFIG, match="'sgd' or 'adamw' for a FCResNet")
    refuses(TrainConfig, optimizer="adam", match="optimizer: expected one of .*orthogonal_adam")


def test_the_soft_margin_is_a_cross_entropy_and_tends_to_the_margin() -> None:
    head, labels = net().double().head, torch.tensor([0, 2, 1, 1])
    outputs, target, root = random(4, 3), 0.3, 2**0.5
    config = TrainConfig(loss="soft_margin", target_margin=target, margin_temperature=0.4)
    lowered = outputs - root * target * torch.nn.functional.one_hot(labels, 3)
    known = torch.nn.functional.cross_entropy(lowered / (root * 0.4), labels, reduction="none")
    loss = soft_margin_loss("classification", config)
    found = loss(outputs, labels, head, reduction="none")
    torch.testing.assert_close(found, 0.4 * known, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss(outputs, labels, head), found.mean())
    sharp = TrainConfig(loss="soft_margin", target_margin=target, margin_temperature=1e-4)
    hinge = (target - scaled_margins(outputs, labels, head)).clamp_min(0)
    found = soft_margin_loss("classification", sharp)(outputs, labels, head, reduction="none")
    torch.testing.assert_close(found, hinge, rtol=0, atol=1e-3)
    refuses(soft_margin_loss, "regression", config, match="'fit' for regression")
