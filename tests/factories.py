"""Small seeded models of every kind, for all tests.

`model`: on vectors, in local or global scope; `exact`: on images, by a vision transformer with a
metric or by a plain net; `estimated`: with a CIP-net in the solver's place; `prototypes`: points
without a net. `KINDS` makes one of each kind that can be saved from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from otad.cip.surrogate import CipNet, CipNetConfig
from otad.errors import InputError
from otad.model.defend import defend
from otad.model.imitation import fresh_net
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import Backbone, CNNMetric, fc_resnet, lifted_net, vision_transformer

N, D = 70, 5
SHAPE, K = (1, 8, 8), 3
BRIEF = CipNetConfig(
    epochs=3, batch_size=16, learning_rate=2e-3, optimizer="adamw", weight_decay=0.01, warmup=0.5,
    gradient_clip=1.0,
)  # fmt: skip


def points(rows: int = N, seed: int = 0, dim: int = D) -> Tensor:
    return torch.rand(rows, dim, generator=torch.Generator().manual_seed(seed))


def net(seed: int = 0, *, task: str = "classification", **options: Any) -> Backbone:
    outputs = 3 if task == "classification" else 1
    sizes = {"blocks": 2, "mean": 0.5, "std": 0.3} | options
    return fc_resnet((D,), outputs, seed=seed, task=task, **sizes)


def model(
    seed: int = 0, *, task: str = "classification", y: Tensor | None = None, **options: Any
) -> OTAD:
    """70 points of three classes, or values, in five dimensions."""
    x = points(seed=seed)
    if y is None:
        y = (3 * x[:, 0]).long() if task == "classification" else x.sum(1)
    return defend(net(seed, task=task, bounds=(0.0, 1.0)), x, y, **({"n_neighbors": 6} | options))


def queries(model: OTAD, rows: int = 20) -> Tensor:
    return torch.rand(rows, *model.backbone.input_shape, generator=torch.Generator().manual_seed(9))


def prototypes(seed: int = 0) -> OTAD:
    bare, x = lifted_net((D,), 3, blocks=0, std=0.3), points(seed=seed)
    made = prototype_net(bare, x, (3 * x[:, 0]).long(), neighbors=4, per_class=8)
    return OTAD(made, made.bank(), scope="global", n_neighbors=4)


def images(rows: int = 36, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes by their bright row of pixels."""
    y = torch.arange(rows) % 3
    x = 0.6 * torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(seed))
    x[torch.arange(rows), :, 2 * y + 1] += 0.4
    return x, y


def exact(kind: str = "vit", seed: int = 1, **options: Any) -> OTAD:
    """OTAD-T with a metric of its own ("vit"), or OTAD on inputs only normalized ("fc")."""
    x, y = images()
    if kind == "fc":
        backbone = fc_resnet(SHAPE, 3, blocks=2, seed=seed, bounds=(0.0, 1.0), mean=0.5, std=0.3)
        return defend(backbone, x, y, **{"n_neighbors": K} | options)
    sizes = {"patch": 4, "width": 8, "blocks": 2, "heads": 2}
    backbone = vision_transformer(SHAPE, 3, seed=seed, bounds=(0.0, 1.0), **sizes)
    metric = CNNMetric(SHAPE, key_dim=6, bounds=(0.0, 1.0), seed=1 + seed)
    return defend(backbone, x, y, **{"n_neighbors": K, "metric": metric} | options)


def small_net(model: OTAD, readout: str = "free", **options: int) -> CipNet:
    sizes = {"width": 16, "blocks": 2, "heads": 2} | options
    return fresh_net(model, readout=readout, **sizes)


def estimated(kind: str = "vit", readout: str = "free", seed: int = 1, **options: int) -> OTAD:
    """With a net whose every parameter matters, as those of a trained one do."""
    model = exact(kind, seed)
    net = small_net(model, readout, **options)
    generator = torch.Generator().manual_seed(2 + seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.replace(solver=net)


KINDS: dict[str, Callable[[int], OTAD]] = {
    "local": model,
    "half": lambda seed: model(seed, bank_dtype=torch.bfloat16, strong_convexity=-0.3),
    "regression": lambda seed: model(seed, task="regression"),
    "global": lambda seed: model(seed, scope="global"),
    "capped": lambda seed: model(seed, scope="global", smoothness=1.6),  # leaves out points
    "prototypes": prototypes,
    "metric": lambda seed: exact("vit", 1 + seed),
    "surrogate": lambda seed: estimated("fc", "free", 1 + seed),
    "surrogate, metric": lambda seed: estimated("vit", "hull", 1 + seed),
}


def refuses(call: Callable[..., object], *given: Any, match: str, **options: Any) -> None:
    """The call raises an InputError whose message matches."""
    with pytest.raises(InputError, match=match):
        call(*given, **options)
