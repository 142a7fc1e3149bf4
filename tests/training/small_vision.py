"""A small vision transformer and images it can learn from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from otad.io.tensor_files import fingerprint
from otad.nets import VisionTransformer, vision_transformer


def images(rows: int = 60) -> tuple[Tensor, Tensor]:
    """A bright row of pixels on noise tells the class; all values are whole levels."""
    generator = torch.Generator().manual_seed(4)
    y = torch.arange(rows) % 3
    x = torch.randint(100, (rows, 3, 8, 8), generator=generator)
    x[torch.arange(rows), :, 2 * y] += 120
    return x / 255, y


def small_vit() -> VisionTransformer:
    return vision_transformer((3, 8, 8), 3, width=12, blocks=2, heads=2, bounds=(0, 1))


def weights_print(net: nn.Module) -> str:
    return fingerprint(net.state_dict())
