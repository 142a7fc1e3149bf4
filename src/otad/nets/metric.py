"""Learned metrics: nets that map each input to a key, by which neighbors are searched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count
from otad.nets.inputs import InputNet, Registry

KEY_NORMS = ("unit", "ball", "free")
AnyMetric = TypeVar("AnyMetric", bound="type[Metric]")


class Metric(InputNet, ABC):
    """x (B,*input_shape) within `bounds` -> keys (B,m); near inputs are those with near keys in l2.

    `features(u)` (B,f) of normalized inputs u are projected linearly to m = `key_dim` numbers k.
    The key is k / |k| for `key_norm` "unit", k / max(|k|, 1) for "ball", and k for "free". The ball
    is convex, so projecting to it never lengthens a distance; k / |k| does, without limit near 0.
    """

    family: ClassVar[Registry[Metric]] = Registry("metric", "otad.nets.register_metric")
    projection: nn.Module
    is_capturable: ClassVar[bool] = True
    """Whether a CUDA graph can capture a training step (`MetricConfig.cuda_graph`)."""

    def __init__(
        self,
        input_shape: Sequence[int],
        *,
        key_dim: int = 128,
        key_norm: str = "unit",
        **options: Any,
    ) -> None:
        """`options` (bounds, mean, std) are those of `InputNet`."""
        super().__init__(input_shape, **options)
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
        return super().config() | {"key_dim": self.key_dim, "key_norm": self.key_norm}


def register_metric(kind: str) -> Callable[[AnyMetric], AnyMetric]:
    """Class decorator: lets `build_metric` make this metric from its `config()`."""
    return Metric.family.register(kind)


def build_metric(config: Mapping[str, Any]) -> Metric:
    """The metric `config` describes, with fresh weights; load its state dict afterwards."""
    return Metric.family.build(config)
