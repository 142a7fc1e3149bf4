"""What all networks share: input shape, bounds, normalization, and a description as JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from otad.checks import (
    check_bounds,
    check_choice,
    check_count,
    check_finite,
    check_shape,
    check_tensor,
    refusing,
    require,
)
from otad.errors import InputError

Sizes = Sequence[int]
AnyClass = TypeVar("AnyClass", bound=type)
AnyLinear = TypeVar("AnyLinear", bound=nn.Linear)
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class InputNet(nn.Module):
    """A net on inputs (B,*input_shape) within `bounds`, which it normalizes itself."""

    kind: ClassVar[str]
    family: ClassVar[Registry[Any]]
    settings: ClassVar[Sequence[str]] = ("input_shape", "bounds")
    """Arguments of the constructor that `config` holds, attributes of the same name. A subclass
    lists only those it adds."""
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        input_shape: Sizes,
        *,
        bounds: Sequence[float] | None = None,
        mean: float | Sequence[float] | Tensor = 0.0,
        std: float | Sequence[float] | Tensor = 1.0,
    ) -> None:
        """`bounds` are the lowest and highest legal input value, None for unbounded inputs; `mean`
        and `std` broadcast to `input_shape`."""
        super().__init__()
        require(len(input_shape) > 0, "input_shape", "at least one axis", "()")
        self.input_shape = tuple(check_count(size, "input_shape") for size in input_shape)
        self.bounds = None if bounds is None else check_bounds(bounds)
        for name, value in (("mean", mean), ("std", std)):
            given = torch.as_tensor(value, dtype=torch.get_default_dtype())  # that of layers
            check_finite(given, name)
            try:
                spread = given.expand(self.input_shape)
            except RuntimeError as error:
                expected = f"a shape that broadcasts to {self.input_shape}"
                got = tuple(given.shape)
                raise InputError(f"{name}: expected {expected}, got {got}") from error
            self.register_buffer(name, spread)  # before it uses memory, see `restored`
            setattr(self, name, spread.clone())
        require((self.std > 0).all(), "std", "positive values", self.std.min().item())

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std, same shape as x."""
        return (x - self.mean) / self.std

    def from_bytes(self, x: Tensor) -> Tensor:
        """Bytes 0 to 255 spread over the bounds of the net; floats unchanged."""
        if x.dtype != torch.uint8 or self.bounds is None:
            return x
        low, high = self.bounds
        return low + (high - low) * (x.to(self.mean.dtype) / 255)

    def check_inputs(
        self, x: object, name: str = "x", *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Inputs (B,*input_shape) of the net's dtype, finite and within the bounds; or of another
        `dtype`, whose values are not checked."""
        axes = ",".join(["B", *map(str, self.input_shape)])
        bounds = None if dtype else self.bounds
        finite = not (dtype or bounds)
        inputs = check_tensor(x, name, axes, dtypes=(dtype or self.mean.dtype,), finite=finite)
        check_shape(inputs, name, (len(inputs), *self.input_shape), "as the net declares")
        if bounds is not None:
            low, high = torch.stack(torch.aminmax(inputs.detach())).tolist()
            within = bounds[0] <= low <= high <= bounds[1]
            if not within:  # also where one of them is NaN
                check_finite(inputs, name)
            expected = f"values within the declared bounds {bounds}"
            require(within, name, expected, f"values from {low} to {high}")
        return inputs

    def config(self) -> dict[str, Any]:
        """What is needed, beside the state dict, to build this net again. Plain JSON."""
        classes = reversed(type(self).__mro__)
        names = [name for cls in classes for name in cls.__dict__.get("settings", ())]
        got = f"{type(self).__name__}; decorate it with otad.nets.{self.family.decorator}(name)"
        require("kind" in vars(type(self)), "net", "a registered class to describe", got)
        described: dict[str, Any] = {"kind": self.kind}
        for name in names:
            value = getattr(self, name)
            if isinstance(value, nn.ModuleList):  # of blocks, which are counted
                value = len(value)
            described[name] = list(value) if isinstance(value, tuple) else value
        return described

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        """The reverse of `config`, without its "kind"; weights are loaded afterwards."""
        return cls(**options)


AnyNet = TypeVar("AnyNet", bound=InputNet)


class Registry(Generic[AnyNet]):
    """The classes of one family of nets by kind, registered by the decorator of this name."""

    def __init__(self, decorator: str) -> None:
        self.decorator = decorator
        self._kinds: dict[str, type[AnyNet]] = {}

    def register(self, kind: str) -> Callable[[AnyClass], AnyClass]:
        """Class decorator: `build` or `build_metric` makes this class from its `config()`."""

        def add(cls: AnyClass) -> AnyClass:
            require(kind not in self._kinds, "kind", "a new name", f"{kind!r}, which is registered")
            cls.kind = kind  # type: ignore[attr-defined]
            self._kinds[kind] = cls
            return cls

        return add

    def build(self, config: Mapping[str, Any]) -> AnyNet:
        """The net `config` describes, with fresh weights; load its state dict afterwards."""
        require(isinstance(config, Mapping), "config", "a table of options", repr(config))
        options = dict(config)
        kind = check_choice(str(options.pop("kind", None)), "config['kind']", tuple(self._kinds))
        with refusing(f"config: expected the options of {kind}"):
            return self._kinds[kind].from_config(options)


def restored(
    make: Callable[[Mapping[str, Any]], AnyModule],
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> AnyModule:
    """The net `make(config)` with the weights of a state, in evaluation mode. Weights must be
    finite, and a config that asks for far more of them is refused before it uses memory or time."""
    for name, tensor in state.items():
        if tensor.is_floating_point():
            check_finite(tensor, name)
    with _built_within(state):
        net = make(config)
    with refusing("net: expected weights that fit its config"):
        net.load_state_dict(state, assign=True)
    return net.eval()


@contextmanager
def _built_within(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse to register far more tensors than a state has. A net may register one repeatedly."""
    values = sum(tensor.numel() for tensor in state.values())
    room = {"tensors": 4 * len(state) + 64, "values": 4 * values + 64}
    thread = threading.get_ident()

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and threading.get_ident() == thread:
            found["tensors"] += 1
            found["values"] += tensor.numel()
            for unit, most in room.items():
                require(found[unit] <= most, "net", f"at most {most} {unit} to load", "more")

    found = dict.fromkeys(room, 0)
    with (
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ):
        yield


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode within the context; then every part is in its previous mode again."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def draw(weight: Tensor, how: str, *limits: float, generator: torch.Generator) -> None:
    """Fill a tensor by a method such as "uniform_", with the same numbers in every dtype."""
    drawn = torch.empty_like(weight, dtype=torch.float32)
    weight.copy_(getattr(drawn, how)(*limits, generator=generator))


def standard_normal(*shape: int, generator: torch.Generator) -> Tensor:
    """The same numbers in every default dtype."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
    return drawn.to(torch.get_default_dtype())


def linear(
    fan_in: int, fan_out: int, generator: torch.Generator, *, bias: bool = True, **options: float
) -> nn.Linear:
    return draw_linear(nn.Linear(fan_in, fan_out, bias=bias, device="meta"), generator, **options)


def draw_linear(
    layer: AnyLinear, generator: torch.Generator, *, gain: float = 3**-0.5
) -> AnyLinear:
    """Fill a layer by `generator`: weights uniform with variance gain^2 / fan_in, biases within
    1 / sqrt(fan_in). The default gain is PyTorch's own initialization."""
    fan_in = layer.in_features
    layer.to_empty(device="cpu")
    with torch.no_grad():
        bound = gain * (3 / fan_in) ** 0.5
        draw(layer.weight, "uniform_", -bound, bound, generator=generator)
        if layer.bias is not None:
            draw(layer.bias, "uniform_", -(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return layer


def check_image_shape(input_shape: Sizes, multiple: int) -> tuple[int, int, int]:
    """(C,H,W) with sides that are multiples of a number."""
    fits = len(input_shape) == 3 and not any(side % multiple for side in input_shape[1:])
    expected = f"images (C,H,W) with sides that {multiple} divides"
    require(fits, "input_shape", expected, tuple(input_shape))
    return input_shape[0], input_shape[1], input_shape[2]
