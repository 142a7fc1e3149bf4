"""Small nets for images and data they can learn from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from otad.io.tensor_files import fingerprint
from otad.nets import CNNMetric, VisionTransformer, vision_transformer

FILE = "checkpoint.safetensors"
KEYS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
LABELS = torch.tensor([0, 0, 1, 1])


def images(rows: int = 60, channels: int = 3) -> tuple[Tensor, Tensor]:
    """A bright row of pixels on noise shows the class; all values are whole levels."""
    generator = torch.Generator().manual_seed(4)
    y = torch.arange(rows) % 3
    x = torch.randint(100, (rows, channels, 8, 8), generator=generator)
    x[torch.arange(rows), :, 2 * y] += 120
    return x / 255, y


def moons(count: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    angle = torch.pi * torch.rand(count, generator=generator)
    side = 1 - 2 * labels.float()
    x = torch.stack([angle.cos() * side + labels, angle.sin() * side + labels / 2], dim=1)
    return x + 0.05 * torch.randn(count, 2, generator=generator), labels


def small_vit() -> VisionTransformer:
    return vision_transformer((3, 8, 8), 3, width=12, blocks=2, heads=2, bounds=(0, 1))


def small_cnn(channels: int = 3) -> CNNMetric:
    return CNNMetric((channels, 8, 8), widths=(4, 6), key_dim=5, bounds=(0, 1))


def weights_print(net: nn.Module) -> str:
    return fingerprint(net.state_dict())
