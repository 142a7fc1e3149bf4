"""What all networks share: input shape, bounds, normalization, and a config in plain JSON."""

from __future__ import annotations

import math
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
    MOST_VALUES,
    check_bounds,
    check_choice,
    check_count,
    check_finite,
    check_shape,
    check_tensor,
    refusing,
    require,
    taking,
)
from otad.errors import InputError

Sizes = Sequence[int]
AnyClass = TypeVar("AnyClass", bound=type)
AnyLinear = TypeVar("AnyLinear", bound=nn.Linear)
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class InputNet(nn.Module):
    """A network on inputs (B,*input_shape) within `bounds`, which it normalizes itself.

    `mean` and `std` broadcast to `input_shape`. If `bounds` is None, inputs are unbounded."""

    kind: ClassVar[str]
    family: ClassVar[Registry[Any]]
    settings: ClassVar[Sequence[str]] = ("input_shape", "bounds")
    """The constructor arguments that `config` holds, each also an attribute of that name.

    A subclass lists only those it adds."""
    is_capturable: bool = True
    """Whether a CUDA graph can hold the network, in training (`cuda_graph`) and for its answers."""
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
        super().__init__()
        require(len(input_shape) > 0, "input_shape", "at least one axis", "()")
        self.input_shape = tuple(check_count(size, "input_shape") for size in input_shape)
        fits = math.prod(self.input_shape) <= MOST_VALUES  # not all systems refuse huge tensors
        require(fits, "input_shape", f"at most {MOST_VALUES} values", self.input_shape)
        self.bounds = None if bounds is None else check_bounds(bounds)
        for name, value in (("mean", mean), ("std", std)):
            given = torch.as_tensor(value, dtype=torch.get_default_dtype())  # the dtype of layers
            check_finite(given, name)
            try:
                spread = given.expand(self.input_shape)
            except RuntimeError as error:
                expected = f"a shape that broadcasts to {self.input_shape}"
                got = tuple(given.shape)
                raise InputError(f"{name}: expected {expected}, got {got}") from error
            self.register_buffer(name, spread)  # registered before it uses memory, see `restored`
            setattr(self, name, spread.clone())
        require((self.std > 0).all(), "std", "positive values", self.std.min().item())

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std in the shape of x."""
        return (x - self.mean) / self.std

    def from_bytes(self, x: Tensor) -> Tensor:
        """Return bytes 0 to 255 as numbers spread over the bounds; floats are unchanged."""
        if x.dtype != torch.uint8 or self.bounds is None:
            return x
        low, high = self.bounds
        return low + (high - low) * (x.to(self.mean.dtype) / 255)

    def check_inputs(
        self, x: object, name: str = "x", *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return `x` if it is a legal batch of inputs, and raise `InputError` if not.

        Inputs (B, *input_shape) have the dtype of the network and are finite and within the bounds.
        If another `dtype` is given, values are not checked."""
        axes = ",".join(["B", *map(str, self.input_shape)])
        bounds = None if dtype else self.bounds
        finite = not (dtype or bounds)
        inputs = check_tensor(x, name, axes, dtypes=(dtype or self.mean.dtype,), finite=finite)
        check_shape(inputs, name, (len(inputs), *self.input_shape), "as the net declares")
        if bounds is not None:
            low, high = torch.stack(torch.aminmax(inputs.detach())).tolist()
            within = bounds[0] <= low <= high <= bounds[1]
            if not within:  # NaN is never within the bounds
                check_finite(inputs, name)
                # A bound such as 0.3 is another number in the dtype of the inputs.
                least, most = torch.tensor(bounds, dtype=inputs.dtype).tolist()
                within = least <= low <= high <= most
            expected = f"values within the declared bounds {bounds}"
            require(within, name, expected, f"values from {low} to {high}")
        return inputs

    def config(self) -> dict[str, Any]:
        """Return what is needed, beside the state dict, to build this network again: plain JSON."""
        classes = reversed(type(self).__mro__)
        names = [name for cls in classes for name in cls.__dict__.get("settings", ())]
        got = f"{type(self).__name__}; decorate it with {self.family.decorator}(name)"
        require("kind" in vars(type(self)), "net", "a registered class to describe", got)
        described: dict[str, Any] = {"kind": self.kind}
        for name in names:
            value = getattr(self, name)
            if isinstance(value, nn.ModuleList):  # for blocks the config holds their number
                value = len(value)
            described[name] = list(value) if isinstance(value, tuple) else value
        return described

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        """Make a network from its `config` without the entry "kind", with fresh weights."""
        return cls(**options)


AnyNet = TypeVar("AnyNet", bound=InputNet)


class Registry(Generic[AnyNet]):
    """The classes of one family of networks by kind. `decorator` is named in error messages."""

    def __init__(self, decorator: str) -> None:
        self.decorator = decorator
        self._kinds: dict[str, type[AnyNet]] = {}

    def register(self, kind: str) -> Callable[[AnyClass], AnyClass]:
        """Return a class decorator that registers a class under this kind."""

        def add(cls: AnyClass) -> AnyClass:
            require(kind not in self._kinds, "kind", "a new name", f"{kind!r}, which is registered")
            cls.kind = kind  # type: ignore[attr-defined]
            self._kinds[kind] = cls
            return cls

        return add

    def build(self, config: Mapping[str, Any]) -> AnyNet:
        """Make the network that `config` describes, with fresh weights."""
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
    """Return the network `make(config)` with the weights of a state, in evaluation mode.

    Weights must be finite. A config that asks for far more weights than the state has is refused
    before it uses memory or time."""
    for name, tensor in state.items():
        if tensor.is_floating_point():
            check_finite(tensor, name)
    with _built_within(state):
        net = make(config)
    with refusing("net: expected weights that fit its config"):
        net.load_state_dict(_shared(net, state), assign=True)
    for part in (one for one in net.modules() if isinstance(one, InputNet)):
        require((part.std > 0).all(), "std", "positive values", part.std.min().item())
    return net.eval()


def _shared(net: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state with one parameter for all places where a network uses the same one, as
    far as the state has equal numbers for them. Otherwise each place would get its own copy."""
    found, first, made = dict(state), dict[int, str](), dict[str, nn.Parameter]()
    for name, weight in net.named_parameters(remove_duplicate=False):
        origin = first.setdefault(id(weight), name)
        known = origin in state and name in state
        if known and (origin == name or torch.equal(state[origin], state[name])):
            one = nn.Parameter(state[origin], requires_grad=weight.requires_grad)
            found[name] = made.setdefault(origin, one)
    return found


@contextmanager
def _built_within(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse networks that register far more tensors than a state has.

    There is some room, because a network may register a tensor more than once."""
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
    """Put a network in evaluation mode within the context, and then in its previous mode."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """Compute no gradients of the weights within the context."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def output_of(
    module: nn.Module, x: Tensor, name: str, gives: str = "an output of shape (B,d)"
) -> Tensor:
    """Return the output (B,d) of a module for x (B,...); errors name the expected shapes."""
    with taking(x, name):
        output = module(x)
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"{name}: expected {gives}, got {got}")
    return output


def draw(weight: Tensor, how: str, *limits: float, generator: torch.Generator) -> None:
    """Fill a tensor by a method such as "uniform_", by the same numbers in every dtype."""
    drawn = torch.empty_like(weight, dtype=torch.float32)
    weight.copy_(getattr(drawn, how)(*limits, generator=generator))


def with_memory(layer: AnyModule, device: torch.device | str = "cpu") -> AnyModule:
    """Give a layer of the device "meta" uninitialized memory.

    The method `to_empty` does the same, but its first call in a process imports modules for a
    second."""
    layer._apply(  # type: ignore[no-untyped-call]
        lambda one: torch.empty(one.shape, dtype=one.dtype, device=device)
    )
    return layer


def standard_normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw standard normal numbers, the same in every default dtype."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
    return drawn.to(torch.get_default_dtype())


def linear(
    fan_in: int, fan_out: int, generator: torch.Generator, *, bias: bool = True, **options: float
) -> nn.Linear:
    return draw_linear(nn.Linear(fan_in, fan_out, bias=bias, device="meta"), generator, **options)


def draw_linear(
    layer: AnyLinear, generator: torch.Generator, *, gain: float = 3**-0.5
) -> AnyLinear:
    """Fill a layer by `generator` and return it.

    Weights are uniform with variance gain^2 / fan_in, biases are uniform within 1 / sqrt(fan_in).
    The default gain is PyTorch's own initialization."""
    fan_in = layer.in_features
    with_memory(layer)
    with torch.no_grad():
        bound = gain * (3 / fan_in) ** 0.5
        draw(layer.weight, "uniform_", -bound, bound, generator=generator)
        if layer.bias is not None:
            draw(layer.bias, "uniform_", -(fan_in**-0.5), fan_in**-0.5, generator=generator)
    return layer


def check_image_shape(input_shape: Sizes, multiple: int) -> tuple[int, int, int]:
    """Return the shape (C,H,W) of images, whose sides must be multiples of a number."""
    fits = len(input_shape) == 3 and not any(side % multiple for side in input_shape[1:])
    expected = f"images (C,H,W) with sides that {multiple} divides"
    require(fits, "input_shape", expected, tuple(input_shape))
    return input_shape[0], input_shape[1], input_shape[2]
