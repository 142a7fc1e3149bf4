"""Tiny images whose neighbors are searched by a metric, behind an embedding that hides them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import VisionTransformer, vision_transformer

SHAPE = (1, 4, 4)


class Bent(nn.Module):
    """Keys of 6 numbers: a random layer and a tanh, with gradients that turn on the way."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        drawn_by = torch.Generator().manual_seed(seed)
        self.register_buffer("weight", torch.randn(16, 6, generator=drawn_by) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - 0.5).flatten(1) @ self.weight).tanh()


def tiles(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes of images, by their brightness."""
    y = torch.arange(count) % 3
    drawn = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return 0.4 * drawn + 0.3 * y.view(-1, 1, 1, 1), y


def token_net(x: Tensor, y: Tensor) -> VisionTransformer:
    """A small ViT whose head is fitted to classes or values by least squares."""
    outputs, task = (1, "regression") if y.is_floating_point() else (3, "classification")
    net = vision_transformer(
        SHAPE, outputs, patch=2, width=8, blocks=1, heads=2, bounds=(0.0, 1.0), task=task
    ).eval()
    with torch.no_grad():
        pooled = net.transport(net.embed(x))[0].unflatten(1, (4, 8)).mean(1)
        design = torch.cat([pooled, torch.ones(len(x), 1)], 1)
        wanted = y[:, None] if outputs == 1 else 4 * torch.eye(3)[y]
        fitted = torch.linalg.lstsq(design.double(), wanted.double()).solution.float()
        net.head.weight.copy_(fitted[:-1].T)
        net.head.bias.copy_(fitted[-1])
    return net


def keyed_model(
    *, neighbors: int = 5, metric: nn.Module | None = None, values: bool = False
) -> tuple[OTAD, Tensor]:
    """A model with a bank of 90 images, and these images, which its bank does not hold."""
    x, y = tiles(90, seed=0)
    if values:
        y = x.mean((1, 2, 3))
    return defend(token_net(x, y), x, y, n_neighbors=neighbors, metric=metric or Bent()), x
