"""Learned metrics: nets that give each input a key, so that neighbors are searched among keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count
from otad.errors import InputError
from otad.nets.base import draw_linear
from otad.nets.inputs import InputNet
from otad.nets.registry import Registry

KEY_NORMS = ("unit", "ball", "free")
AnyMetric = TypeVar("AnyMetric", bound="type[Metric]")


class Metric(InputNet, ABC):
    """x (B,*input_shape) within `bounds` -> keys (B,m); near inputs are those with near keys in l2.

    `features(u)` (B,f) of normalized inputs u are projected linearly to m = `key_dim` numbers k.
    Then `key_norm` decides: "unit" gives k / |k|, "ball" k / max(|k|, 1), and "free" k itself.
    The ball is convex, so going to its nearest point never lengthens a distance; k / |k| does so
    without limit near 0.
    """

    kind: ClassVar[str]
    projection: nn.Module
    is_capturable: ClassVar[bool] = True
    """Whether a CUDA graph can capture a training step (`MetricConfig.cuda_graph`)."""

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        key_dim: int = 128,
        key_norm: str = "unit",
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
    ) -> None:
        super().__init__(input_shape, bounds=bounds, mean=mean, std=std)
        self.key_dim = check_count(key_dim, "key_dim")
        self.key_norm = check_choice(key_norm, "key_norm", KEY_NORMS)

    @property
    def lipschitz(self) -> float | None:
        """A proved Q with |key(x) - key(x')| <= Q |x - x'| in l2 in evaluation mode, None where
        none is known."""
        return None

    @abstractmethod
    def features(self, u: Tensor) -> Tensor:
        """Normalized inputs (B,*input_shape) -> features (B,f)."""

    def forward(self, x: Tensor) -> Tensor:
        keys: Tensor = self.projection(self.features(self.normalize(x)))
        if self.key_norm == "unit":
            return functional.normalize(keys, dim=1)
        if self.key_norm == "ball":
            keys = keys / torch.linalg.vector_norm(keys, dim=1, keepdim=True).clamp_min(1.0)
        return keys

    def config(self) -> dict[str, Any]:
        """What `build_metric` needs, beside the state dict, to make this net again. Plain JSON."""
        return {
            "kind": _KINDS.kind_of(self),
            "input_shape": list(self.input_shape),
            "key_dim": self.key_dim,
            "key_norm": self.key_norm,
            "bounds": None if self.bounds is None else list(self.bounds),
        }

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Metric:
        """The reverse of `config`, its "kind" taken off; weights are loaded afterwards."""
        return cls(**options)


_KINDS: Registry[Metric] = Registry("metric", "otad.nets.register_metric")


def register_metric(kind: str) -> Callable[[AnyMetric], AnyMetric]:
    """Class decorator: lets `build_metric` make this metric from its `config()`."""
    return _KINDS.register(kind)


def build_metric(config: Mapping[str, Any]) -> Metric:
    """The metric `config` describes, with fresh weights; load its state dict afterwards."""
    return _KINDS.build(config)


def draw_projection(features: int, key_dim: int, generator: torch.Generator) -> nn.Linear:
    """The last layer of a metric, without a bias: moving all keys alike changes no distance."""
    return draw_linear(nn.Linear(features, key_dim, bias=False, device="meta"), generator, gain=1.0)


def check_image_shape(input_shape: Sequence[int], multiple: int) -> tuple[int, int, int]:
    """(C,H,W) with sides that are multiples of a number."""
    if len(input_shape) != 3 or any(side % multiple for side in input_shape[1:]):
        raise InputError(
            f"input_shape: expected images (C,H,W) with sides that {multiple} divides, "
            f"got {tuple(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width
