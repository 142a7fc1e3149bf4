"""The contract every network of the library keeps: embed, transport, linear head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count, check_finite, check_shape, check_tensor
from otad.errors import InputError

TASKS = ("classification", "regression")
Bounds = tuple[float, float]
AnyLinear = TypeVar("AnyLinear", bound=nn.Linear)
AnyBackbone = TypeVar("AnyBackbone", bound="type[Backbone]")


class LinearHead(nn.Linear):
    """w.z + b: logits (B,C), or for regression one value per row (B,)."""

    def __init__(self, dim: int, n_outputs: int, task: str, *, bias: bool = True) -> None:
        # Built on the meta device: the parameters come from the owner, not from the global RNG.
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
        """Answer shift + scale * (what it answers now): the units of the targets."""
        self.weight.mul_(scale)
        self.bias.mul_(scale).add_(shift)


class Backbone(nn.Module, ABC):
    """x -> head(transport(embed(x))), with input and feature in one space R^d.

    `embed(x)` (B,d) takes inputs (B,*input_shape) within `bounds` and normalizes them itself;
    `transport(e)` gives features z (B,d) and the energy (B,) of the way there,
    sum_k |x^k - x^(k-1)|^2, which for residual blocks is sum_k |R_k(x^(k-1))|^2;
    `head(z)` (B,C), or (B,) for regression, is linear in z.
    """

    kind: ClassVar[str]
    head: LinearHead
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        n_outputs: int,
        *,
        task: str = "classification",
        dim: int | None = None,
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
    ) -> None:
        """`dim` is d where `embed` changes the size; `bounds` are the lowest and highest legal
        input value, None for unbounded inputs; `mean` and `std` broadcast to `input_shape`."""
        super().__init__()
        if len(input_shape) == 0:
            raise InputError("input_shape: expected at least one axis, got ()")
        self.input_shape = tuple(check_count(size, "input_shape") for size in input_shape)
        self.dim = math.prod(self.input_shape) if dim is None else check_count(dim, "dim")
        self.task = check_choice(task, "task", TASKS)
        self.n_outputs = check_count(n_outputs, "n_outputs")
        if (self.n_outputs == 1) != (task == "regression"):
            raise InputError(
                "n_outputs: expected 1 for regression and at least 2 for classification, "
                f"got {n_outputs} for {task}"
            )
        self.bounds = None if bounds is None else _check_bounds(bounds)
        self.register_buffer("mean", self._per_input(mean, "mean"))
        self.register_buffer("std", self._per_input(std, "std"))
        if not bool((self.std > 0).all()):
            raise InputError(f"std: expected positive values, got {self.std.min().item()}")

    def _per_input(self, value: float | Sequence[float] | Tensor, name: str) -> Tensor:
        given = torch.as_tensor(value, dtype=torch.float32)
        check_finite(given, name)
        try:
            return given.expand(self.input_shape).clone()
        except RuntimeError as error:
            raise InputError(
                f"{name}: expected a shape that broadcasts to {self.input_shape}, "
                f"got {tuple(given.shape)}"
            ) from error

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std, same shape as x."""
        return (x - self.mean) / self.std

    def embed(self, x: Tensor) -> Tensor:
        """(B,*input_shape) -> (B,d): normalized and flattened unless a subclass does more."""
        return self.normalize(x).flatten(1)

    @abstractmethod
    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """(B,d) -> features (B,d) and energy (B,)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transport(self.embed(x))[0])  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        """What `build` needs, beside the state dict, to make this net again. Plain JSON."""
        if type(self) not in _KINDS.values():
            raise InputError(
                f"net: expected a registered kind of backbone to describe, got "
                f"{type(self).__name__}; decorate the class with otad.nets.register(name)"
            )
        return {
            "kind": self.kind,
            "input_shape": list(self.input_shape),
            "n_outputs": self.n_outputs,
            "task": self.task,
            "bounds": None if self.bounds is None else list(self.bounds),
        }

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Backbone:
        """The reverse of `config`, its "kind" taken off; weights are loaded afterwards."""
        return cls(**options)

    def check_inputs(self, x: object, name: str = "x") -> Tensor:
        """Inputs (B,*input_shape) of the net's dtype, finite and within the declared bounds."""
        axes = ",".join(["B", *(str(size) for size in self.input_shape)])
        inputs = check_tensor(x, name, axes, dtypes=(self.mean.dtype,))
        expected = (inputs.shape[0], *self.input_shape)
        check_shape(inputs, name, expected, "as the net declares")
        if self.bounds is not None:
            low, high = (float(value) for value in torch.aminmax(inputs.detach()))
            if low < self.bounds[0] or high > self.bounds[1]:
                raise InputError(
                    f"{name}: expected values within the declared bounds {self.bounds}, "
                    f"got values from {low} to {high}"
                )
        return inputs

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


def draw_linear(
    layer: AnyLinear, generator: torch.Generator, *, gain: float = 3**-0.5
) -> AnyLinear:
    """Fill a layer by `generator` alone: weights uniform with variance gain^2 / fan_in, biases
    within 1 / sqrt(fan_in). The default gain is PyTorch's own initialization."""
    fan_in = layer.in_features
    layer.to_empty(device="cpu")
    with torch.no_grad():
        bound = gain * (3 / fan_in) ** 0.5
        layer.weight.uniform_(-bound, bound, generator=generator)
        if layer.bias is not None:
            layer.bias.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return layer


def _check_bounds(bounds: Sequence[float]) -> Bounds:
    if len(bounds) != 2 or not all(math.isfinite(value) for value in bounds):
        raise InputError(f"bounds: expected two finite numbers (low, high), got {bounds!r}")
    low, high = (float(value) for value in bounds)
    if low >= high:
        raise InputError(f"bounds: expected low < high, got {bounds!r}")
    return low, high


_KINDS: dict[str, type[Backbone]] = {}


def register(kind: str) -> Callable[[AnyBackbone], AnyBackbone]:
    """Class decorator: lets `build` make this backbone from its `config()`."""

    def name_class(cls: AnyBackbone) -> AnyBackbone:
        if kind in _KINDS:
            raise InputError(f"kind: expected a new name, got {kind!r}, which is registered")
        cls.kind = kind
        _KINDS[kind] = cls
        return cls

    return name_class


def build(config: Mapping[str, Any]) -> Backbone:
    """The net `config` describes, with fresh weights; load its state dict afterwards."""
    options = dict(config)
    kind = check_choice(str(options.pop("kind", None)), "config['kind']", tuple(_KINDS))
    try:
        return _KINDS[kind].from_config(options)
    except (KeyError, TypeError) as error:
        raise InputError(f"config: expected the options of {kind}, got {options!r}") from error
