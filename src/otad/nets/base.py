"""Backbones embed an input, transport it to a feature and read the feature linearly; metrics map
an input to a key, by which neighbors are searched."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count, check_shape, check_tensor, require
from otad.nets.inputs import InputNet, Registry, Sizes


class LinearHead(nn.Linear):
    """W z + b: logits (B,C), or for regression one value per row (B,)."""

    def __init__(self, dim: int, n_outputs: int, task: str, *, bias: bool = True) -> None:
        # On the meta device: the owner sets the parameters, not the global generator.
        sizes = check_count(dim, "dim"), check_count(n_outputs, "n_outputs")
        super().__init__(*sizes, bias=bias, device="meta")
        self.is_value = task == "regression"

    @property
    def matrix(self) -> Tensor:
        """W (C,d) of the map W z + b on all of z; a head that pools has fewer weights."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        outputs = functional.linear(input, self.weight, self.bias)
        return outputs.squeeze(-1) if self.is_value else outputs

    @torch.no_grad()
    def take_units(self, shift: float, scale: float) -> None:
        """Return shift + scale * (the present output): the units of the targets."""
        self.weight.mul_(scale)
        self.bias.mul_(scale).add_(shift)


class Backbone(InputNet, ABC):
    """x -> head(transport(embed(x))), with input and feature in one space R^d.

    `embed(x)` (B,d) normalizes inputs (B,*input_shape); `transport(e)` returns features z (B,d) and
    the energy (B,) of the path, sum_k |x^k - x^(k-1)|^2; `head(z)` (B,C), or (B,) for regression,
    is linear. `lift`: how many coordinates, the last ones, are 0 in every embedded input and all
    that `transport` changes (`LiftedNet`)."""

    family: ClassVar[Registry[Backbone]] = Registry("register")
    settings: ClassVar[Sequence[str]] = ("n_outputs", "task")
    head: LinearHead
    lift: int = 0

    def __init__(
        self,
        input_shape: Sizes,
        n_outputs: int,
        *,
        task: str = "classification",
        dim: int | None = None,
        **options: Any,
    ) -> None:
        """`dim` is d where `embed` changes the size; `options` are those of `InputNet`."""
        super().__init__(input_shape, **options)
        self.dim = math.prod(self.input_shape) if dim is None else check_count(dim, "dim")
        self.task = check_choice(task, "task", ("classification", "regression"))
        self.n_outputs = check_count(n_outputs, "n_outputs")
        expected = "1 for regression and at least 2 for classification"
        fits = (n_outputs == 1) == (task == "regression")
        require(fits, "n_outputs", expected, f"{n_outputs} for {task}")

    def embed(self, x: Tensor) -> Tensor:
        """(B,*input_shape) -> (B,d): normalized and flattened unless a subclass does more."""
        return self.normalize(x).flatten(1)

    @abstractmethod
    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """(B,d) -> features (B,d) and energy (B,)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transport(self.embed(x))[0])  # type: ignore[no-any-return]

    def check_targets(self, y: object, rows: int, name: str = "y") -> Tensor:
        """Labels 0..C-1 (B,) in int64, or for regression finite values (B,) of the net's dtype."""
        dtype = torch.int64 if self.task == "classification" else self.mean.dtype
        targets = check_tensor(y, name, "B", dtypes=(dtype,))
        check_shape(targets, name, (rows,), "with one target per input")
        if self.task == "classification":
            low, high = (int(value) for value in torch.aminmax(targets))
            expected = f"labels from 0 to {self.n_outputs - 1}"
            known = 0 <= low <= high < self.n_outputs
            require(known, name, expected, f"the unknown label {low if low < 0 else high}")
        return targets


class Metric(InputNet, ABC):
    """x (B,*input_shape) within `bounds` -> keys (B,m); near inputs are those with near keys in l2.

    `features(u)` (B,f) of normalized inputs u are projected linearly to m = `key_dim` numbers k.
    The key is k / |k| for `key_norm` "unit", k / max(|k|, 1) for "ball", and k for "free". The ball
    is convex, so projecting to it never lengthens a distance; k / |k| does, without limit near 0.
    """

    family: ClassVar[Registry[Metric]] = Registry("register_metric")
    settings: ClassVar[Sequence[str]] = ("key_dim", "key_norm")
    projection: nn.Module
    is_capturable: ClassVar[bool] = True
    """Whether a CUDA graph can capture a training step (`MetricConfig.cuda_graph`)."""

    def __init__(
        self, input_shape: Sizes, *, key_dim: int = 128, key_norm: str = "unit", **options: Any
    ) -> None:
        super().__init__(input_shape, **options)
        self.key_dim = check_count(key_dim, "key_dim")
        self.key_norm = check_choice(key_norm, "key_norm", ("unit", "ball", "free"))

    @property
    def lipschitz(self) -> float | None:
        """A proved Q with |key(x) - key(x')| <= Q |x - x'| in l2 in evaluation mode, if known."""
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


def squared_lengths(steps: Tensor) -> Tensor:
    """(B,...) -> (B,), at least in single precision: bfloat16 has too few digits for sums."""
    wide = steps.to(torch.promote_types(steps.dtype, torch.float32))
    return wide.square().sum(tuple(range(1, steps.dim())))


register, build = Backbone.family.register, Backbone.family.build
register_metric, build_metric = Metric.family.register, Metric.family.build
