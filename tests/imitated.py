"""Small models whose solver is a network, as drawn or briefly trained: OTAD-T-NN in seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otad.cip.surrogate import CipNet, CipNetConfig
from otad.model.defend import defend
from otad.model.imitation import fresh_net
from otad.model.otad import OTAD
from otad.nets import CNNMetric, fc_resnet, vision_transformer

SHAPE, K = (1, 8, 8), 3
BRIEF = CipNetConfig(
    epochs=3, batch_size=16, learning_rate=2e-3, optimizer="adamw", weight_decay=0.01, warmup=0.5,
    gradient_clip=1.0,
)  # fmt: skip


def images(rows: int = 36, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A bright row of pixels tells one of three classes."""
    y = torch.arange(rows) % 3
    x = 0.6 * torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(seed))
    x[torch.arange(rows), :, 2 * y + 1] += 0.4
    return x, y


def exact(kind: str = "vit", **options: Any) -> OTAD:
    """OTAD-T with a metric of its own ("vit"), or OTAD on inputs only normalized ("fc")."""
    x, y = images()
    if kind == "fc":
        net = fc_resnet(SHAPE, 3, blocks=2, seed=1, bounds=(0.0, 1.0), mean=0.5, std=0.3)
        return defend(net, x, y, **{"n_neighbors": K} | options)
    sizes = {"patch": 4, "width": 8, "blocks": 2, "heads": 2}
    net = vision_transformer(SHAPE, 3, seed=1, bounds=(0.0, 1.0), **sizes)
    drawn_by = torch.Generator().manual_seed(2)
    metric = CNNMetric(SHAPE, key_dim=6, bounds=(0.0, 1.0), generator=drawn_by)
    return defend(net, x, y, **{"n_neighbors": K, "metric": metric} | options)


def small_net(model: OTAD, readout: str = "free", **options: int) -> CipNet:
    sizes = {"width": 16, "blocks": 2, "heads": 2} | options
    return fresh_net(model, readout=readout, **sizes)


def estimated(kind: str = "vit", readout: str = "free") -> OTAD:
    """With a net whose every parameter matters, as those of a trained one do."""
    model = exact(kind)
    net = small_net(model, readout)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.replace(solver=net)
