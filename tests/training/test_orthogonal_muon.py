"""Training of orthogonal matrices: steps against singular values, and a loop beside AdamW."""

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
from otad.training.orthogonal_muon import (
    ANGLE,
    MOMENTUM,
    OrthogonalMuon,
    turned,
    unit_singular_values,
)

# A CPU without bfloat16 warns once and computes it all the same.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")

SETTINGS = {"optimizer": "orthogonal_muon", "loss": "soft_margin", "weight_decay": 0.0}
CONFIG = TrainConfig(epochs=4, batch_size=16, learning_rate=2e-3, target_margin=0.1, **SETTINGS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(seed: int = 0) -> OrthogonalNet:
    return OrthogonalNet((3, 8, 8), 3, width=16, blocks=2, stages=2, seed=seed, bounds=(0, 1))


def off(weight: Tensor) -> float:
    """How far the rows of matrices are from orthonormal."""
    wide = weight.detach().double()
    return float((wide @ wide.mT - torch.eye(wide.shape[-2])).abs().max())


def orthonormal(*shape: int, seed: int = 0) -> Tensor:
    *others, rows, size = shape
    return torch.linalg.qr(random(*others, size, size, seed=seed))[0][..., :rows, :]


@pytest.mark.parametrize("rows", [12, 5])
def test_singular_values_become_nearly_1_and_directions_stay(rows: int) -> None:
    left, right = orthonormal(2, rows, rows), orthonormal(2, rows, 12, seed=1)
    values = torch.logspace(0, -1.5, rows, dtype=torch.float64)
    found = left.mT @ unit_singular_values(7 * left * values @ right) @ right.mT
    diagonal = found.diagonal(dim1=1, dim2=2)
    assert (found - torch.diag_embed(diagonal)).abs().max() < 1e-12
    assert 0.6 < diagonal.min() < diagonal.max() < 1.25
    assert torch.equal(unit_singular_values(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("rows", [12, 5])
def test_a_step_turns_every_plane_by_its_angle_and_keeps_rows_orthonormal(rows: int) -> None:
    start, slope, angle = orthonormal(2, rows, 12), random(2, rows, 12, seed=1), 0.02
    found = turned(start, slope, angle)
    assert off(found) < angle ** (4 if rows == 12 else 3) < off(start - angle * slope)
    lengths = torch.linalg.svdvals(found - start) / angle
    assert 0.4 < lengths.min() < lengths.max() < 1.25
    assert ((found - start) * slope).sum() < 0  # downhill


@pytest.mark.parametrize("rows", [12, 5])
def test_errors_of_large_steps_do_not_add_up(rows: int) -> None:
    found = orthonormal(2, rows, 12)
    for seed in range(100):
        found = turned(found, random(2, rows, 12, seed=seed), 0.3)
        assert off(found) < 0.05


@pytest.mark.parametrize("rows", [5, 12])
def test_rows_return_to_length_1_although_the_loss_falls_with_it(rows: int) -> None:
    found = 1.01 * orthonormal(2, rows, 12)
    before = off(found)
    for seed in range(100):
        found = turned(found, random(2, rows, 12, seed=seed) - 3 * found, 0.04)
    assert off(found) < before / 20


def test_the_optimizer_finds_the_nearest_matrix_and_is_adamw_for_other_weights() -> None:
    target, wanted = orthonormal(3, 6, 8, seed=2), random(4, seed=3)
    matrix, vector = orthonormal(3, 6, 8).requires_grad_(), random(4).requires_grad_()
    twin, mean = vector.detach().clone().requires_grad_(), torch.zeros(3, 6, 8)
    options = {"lr": 0.003, "weight_decay": 0.0}
    optimizer = OrthogonalMuon([{"params": [vector]}], [matrix], **options)
    adam, losses = torch.optim.AdamW([twin], **options), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (matrix - target).square().sum() + (vector - wanted).square().sum()
        loss.backward()
        slope = matrix.grad.clone()
        mean = MOMENTUM * mean + (1 - MOMENTUM) * slope
        ahead = MOMENTUM * mean + (1 - MOMENTUM) * slope
        known = turned(matrix.detach(), ahead, ANGLE * options["lr"])
        losses.append(loss.item())
        optimizer.step()
        torch.testing.assert_close(matrix.detach(), known)
        adam.zero_grad()
        (twin - wanted).square().sum().backward()
        adam.step()
    assert torch.equal(vector, twin)
    assert losses[-1] < 0.5 * losses[0]
    assert off(matrix) < (ANGLE * options["lr"]) ** 2


def test_training_learns_and_keeps_all_matrices_orthogonal() -> None:
    x, y = images(48)
    for changes in ({}, {"ema": 0.9, "mixed_precision": True, "gradient_clip": 1.0}):
        trained = net()
        before = [weight.detach().clone() for weight in trained.parameters()]
        settings = {"epochs": 6, "learning_rate": 3e-3, "target_margin": 0.1, "batch_size": 16}
        result = train(trained, (x, y), TrainConfig(**settings, **SETTINGS, **changes))
        assert result.final.loss < 0.8 * result.history[0].loss
        for weight in orthogonal_weights(trained):
            assert off(weight) < 1e-6
        for old, new in zip(before, trained.parameters(), strict=True):
            assert (new - old).abs().max().item() > 1e-3
        assert trained.lipschitz.constant < 1 + 1e-4


def test_frozen_matrices_stay() -> None:
    frozen, (x, y) = net(), images(32)
    matrices = frozen.parts[1].matrices.requires_grad_(False)
    before = matrices.clone()
    train(frozen, (x, y), CONFIG)
    torch.testing.assert_close(matrices, before, rtol=0, atol=1e-6)


def test_the_optimizer_fits_the_network() -> None:
    x, y = images(32)
    for name in ("sgd", "adamw"):
        config = TrainConfig(epochs=1, optimizer=name)
        refuses(train, net(), (x, y), config, match="'orthogonal_muon' for a OrthogonalNet")
    other = fc_resnet((3, 8, 8), 3, blocks=1)
    refuses(train, other, (x, y), CONFIG, match="'sgd' or 'adamw' for a FCResNet")
    refuses(TrainConfig, optimizer="adam", match="optimizer: expected one of .*orthogonal_muon")


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
