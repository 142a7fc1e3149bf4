"""Backbones: embed an input, transport it to a feature, read the feature linearly."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count, check_shape, check_tensor
from otad.errors import InputError
from otad.nets.inputs import InputNet, Registry

TASKS = ("classification", "regression")
AnyBackbone = TypeVar("AnyBackbone", bound="type[Backbone]")


class LinearHead(nn.Linear):
    """w.z + b: logits (B,C), or for regression one value per row (B,)."""

    def __init__(self, dim: int, n_outputs: int, task: str, *, bias: bool = True) -> None:
        # On the meta device: the owner sets the parameters, not the global generator.
        super().__init__(dim, n_outputs, bias=bias, device="meta")
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

    `embed(x)` (B,d) takes inputs (B,*input_shape) within `bounds` and normalizes them itself;
    `transport(e)` returns features z (B,d) and the energy (B,) of the path,
    sum_k |x^k - x^(k-1)|^2, which for residual blocks is sum_k |R_k(x^(k-1))|^2;
    `head(z)` (B,C), or (B,) for regression, is linear in z. `lift`: number of coordinates, the
    last ones, that are 0 in every embedded input and all that `transport` changes (`LiftedNet`).
    """

    family: ClassVar[Registry[Backbone]] = Registry("backbone", "otad.nets.register")
    head: LinearHead
    lift: int = 0

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        task: str = "classification",
        dim: int | None = None,
        **options: Any,
    ) -> None:
        """`dim` is d where `embed` changes the size; `options` (bounds, mean, std) are those of
        `InputNet`."""
        super().__init__(input_shape, **options)
        self.dim = math.prod(self.input_shape) if dim is None else check_count(dim, "dim")
        self.task = check_choice(task, "task", TASKS)
        self.n_outputs = check_count(n_outputs, "n_outputs")
        if (self.n_outputs == 1) != (task == "regression"):
            raise InputError(
                "n_outputs: expected 1 for regression and at least 2 for classification, "
                f"got {n_outputs} for {task}"
            )

    def embed(self, x: Tensor) -> Tensor:
        """(B,*input_shape) -> (B,d): normalized and flattened unless a subclass does more."""
        return self.normalize(x).flatten(1)

    @abstractmethod
    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """(B,d) -> features (B,d) and energy (B,)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transport(self.embed(x))[0])  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        return super().config() | {"n_outputs": self.n_outputs, "task": self.task}

    def check_targets(self, y: object, rows: int, name: str = "y") -> Tensor:
        """Labels 0..C-1 (B,) in int64, or for regression finite values (B,) of the net's dtype."""
        dtype = torch.int64 if self.task == "classification" else self.mean.dtype
        targets = check_tensor(y, name, "B", dtypes=(dtype,))
        check_shape(targets, name, (rows,), "with one target per input")
        if self.task == "classification":
            low, high = (int(value) for value in torch.aminmax(targets))
            if low < 0 or high >= self.n_outputs:
                raise InputError(
                    f"{name}: expected labels from 0 to {self.n_outputs - 1}, "
                    f"got the unknown label {low if low < 0 else high}"
                )
        return targets


def squared_lengths(steps: Tensor) -> Tensor:
    """(B,...) -> (B,), at least in single precision: bfloat16 has too few digits for sums."""
    wide = steps.to(torch.promote_types(steps.dtype, torch.float32))
    return wide.square().sum(tuple(range(1, steps.dim())))


def register(kind: str) -> Callable[[AnyBackbone], AnyBackbone]:
    """Class decorator: lets `build` make this backbone from its `config()`."""
    return Backbone.family.register(kind)


def build(config: Mapping[str, Any]) -> Backbone:
    """The net `config` describes, with fresh weights; load its state dict afterwards."""
    return Backbone.family.build(config)
