"""The features of any network: the numbers that enter the last Linear layer it calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from otad.checks import refusing, require
from otad.errors import InputError
from otad.nets.base import Metric
from otad.nets.inputs import Sizes, evaluating
from otad.nets.layer_json import MODULES, describe, restore

ALIKE = 1e-3  # equal outputs differ by less than this share of the largest, because of rounding
PROBED = 16  # outputs by which a network is recognized
_running = threading.local()  # the layer whose inputs this thread collects, and these inputs
OUTPUTS = "outputs (B,C), or an object with .logits"
_WRAPPERS = (nn.DataParallel, DistributedDataParallel)


def _collect(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    wanted = getattr(_running, "wanted", None)
    if wanted is not None and wanted[0] is layer:
        wanted[1].append(args[0] if args else options["input"])


class Features(nn.Module):
    """Maps inputs (B,*input_shape) to the numbers (B,f) that enter the Linear layer `head`.

    Inputs may be flattened. The layer of `net` gets a hook, which does nothing while other code
    runs the network.

    The module is written as JSON if all its layers are layers of torch.nn. If the user wrote the
    class of the network, only its name is written, for information: whoever loads the folder must
    provide a module of that class."""

    def __init__(self, net: nn.Module, head: str, input_shape: Sizes) -> None:
        super().__init__()
        self.net, self.head, self.input_shape = net, head, tuple(input_shape)
        layer = dict(net.named_modules()).get(head)
        if not isinstance(layer, nn.Linear):
            got = f"{type(net).__name__}, where it is {type(layer).__name__}"
            raise InputError(f"net: expected a module with the Linear layer {head!r}, got {got}")
        if _collect not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_collect, with_kwargs=True)
            if any(_is_compiled(part) for part in net.modules()):
                torch.compiler.reset()  # code that was compiled earlier does not run the hook

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        _running.wanted = (self.net.get_submodule(self.head), found)
        try:
            # `len(x)` would be a constant in what is exported.
            self.net(x.reshape(x.shape[0], *self.input_shape))
        finally:
            _running.wanted = None
        require(found, "net", f"a call of its layer {self.head!r}, as before", "none")
        return found[-1]

    def to_json(self) -> dict[str, Any]:
        try:
            net = describe(self.net)
        except InputError:
            net = {"class": f"{type(self.net).__module__}.{type(self.net).__qualname__}"}
        return {"net": net, "head": self.head, "input_shape": list(self.input_shape)}

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> Self:
        net = description["net"]
        if not isinstance(net, nn.Module):
            net = restore(net)
        return cls(net, description["head"], description["input_shape"])

    @torch.no_grad()
    def probe(self) -> list[float]:
        """Return the first outputs for two fixed inputs, by which the network is recognized."""
        drawn = torch.rand(2, *self.input_shape, generator=torch.Generator().manual_seed(0))
        with evaluating(self.net):
            outputs = outputs_of(self.net(drawn.to(_like(self.net))))
        return outputs.flatten()[:PROBED].double().nan_to_num().tolist()


MODULES["Features"] = Features


class Head(NamedTuple):
    """The Linear `layer` that gives the outputs of a network, its `name` and its inputs (B,f).

    `is_last` says whether the network returns the outputs of the layer as they are."""

    name: str
    layer: nn.Linear
    features: Tensor
    is_last: bool


@torch.no_grad()
def find_head(net: nn.Module, x: Tensor, *, task: str) -> Head:
    """Find the Linear layer that gives the outputs of a network for inputs x (B,*).

    A network may apply a function that keeps their order to the outputs of the layer, such as a
    softmax or a sigmoid. Networks that do more are refused."""
    called: list[tuple[str, nn.Linear, Any, Any]] = []

    def note(name: str) -> Callable[..., None]:
        def called_with(
            layer: nn.Linear, args: tuple[Any, ...], options: dict[str, Any], out: Any
        ) -> None:
            called.append((name, layer, args[0] if args else options["input"], out))

        return called_with

    kind, takes = type(net).__name__, f"{x.dtype} of shape {tuple(x.shape)}"
    with ExitStack() as stack:
        stack.enter_context(evaluating(net))
        stack.enter_context(refusing(f"net: expected a module that takes {takes}"))
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear):
                stack.enter_context(layer.register_forward_hook(note(name), with_kwargs=True))
        outputs = outputs_of(net(x.to(_like(net).device, copy=True)))
    expected = f"a last Linear layer of {kind}, called on features (B,f)"
    got = "none: let it end with an nn.Linear; of a compiled module, give the one before compiling"
    require(called, "net", expected, got)
    flat = outputs.reshape(len(outputs), -1)
    same = [one for one in called if _alike(one[3], flat)]
    likely = same
    if task == "classification":
        alike = [one for one in called if getattr(one[3], "shape", None) == flat.shape]
        for fits in (_is_function, _in_order):
            likely = likely or [one for one in alike if fits(one[3], flat)]
    name, layer, features, _ = (likely or called)[-1]
    is_row = isinstance(features, Tensor) and features.dim() == 2 and len(features) == len(x)
    got = f"{name!r} on {tuple(features.shape)}: take the mean or one token before it"
    require(is_row, "net", expected, got)
    expected = f"outputs of {kind} that are those of its last Linear layer {name!r}"
    expected += "" if task == "regression" else ", or in their order"
    got = f"others of shape {tuple(flat.shape)}; return its outputs, or give a module that does"
    require(likely, "net", expected, got)
    return Head(name, layer, features, bool(same))


def _is_function(logits: Tensor, outputs: Tensor) -> bool:
    """Return whether outputs (B,C) are a usual function of logits (B,C)."""
    functions = partial(torch.softmax, dim=1), partial(torch.log_softmax, dim=1), torch.sigmoid
    return any(_alike(function(logits), outputs) for function in functions)


def _in_order(logits: Tensor, outputs: Tensor) -> bool:
    """Return whether outputs (B,C) rise with logits (B,C): all by one function, or row by row, as
    those of a softmax do."""
    by_one = _rises(logits.flatten(), outputs.flatten())
    if outputs.shape[1] == 1:  # one number, above a half or not
        return by_one and torch.equal(outputs > 0.5, logits > 0)
    # The order of two classes says little, so their margins have to rise as well.
    margins = logits.diff(dim=1)[:, 0], outputs.diff(dim=1)[:, 0]
    by_rows = _rises(logits, outputs) and (outputs.shape[1] > 2 or _rises(*margins))
    return by_one or by_rows


def _rises(one: Tensor, other: Tensor) -> bool:
    """Return whether the second tensor (...,n) rises with the first, up to rounding."""
    order = one.argsort(-1)
    (low, high), (less, more) = (
        (part.gather(-1, order)[..., :-1], part.gather(-1, order)[..., 1:]) for part in (one, other)
    )
    apart = high - low > 1e-4 * (1 + one.abs().amax())
    falls = less - more > 1e-4 * torch.maximum(less.abs(), more.abs())
    return not bool((apart & falls).any())


def outputs_of(result: Any) -> Tensor:
    """Return the tensor of outputs: the result itself, its logits, or the first of a tuple."""
    if isinstance(result, Mapping):
        result = result.get("logits", result)
    result = getattr(result, "logits", result)
    if isinstance(result, (tuple, list)) and result:
        shapes = [tuple(one.shape) for one in result if isinstance(one, Tensor) and one.dim() == 2]
        several = f"a tuple of tensors {', '.join(map(str, shapes))}, of which each may be meant"
        require(len({*shapes}) < 2, "net", OUTPUTS, several)
        result = result[0]
    if not isinstance(result, Tensor) or result.dim() == 0:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        got = f"a mapping of {', '.join(map(str, result))}" if isinstance(result, Mapping) else got
        raise InputError(f"net: expected {OUTPUTS}, got {got}")
    return result


def unwrapped(net: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `torch.compile` and of data parallelism."""
    while True:
        if isinstance(net, _WRAPPERS):
            net = net.module
        elif isinstance(inner := getattr(net, "_orig_mod", None), nn.Module):
            net = inner
        else:
            return net


def keys_of(x: Tensor, metric: nn.Module) -> Tensor:
    """Return the keys (B,m) of x. A user's own layers get a copy, as they may work in place."""
    return metric(x if isinstance(metric, Metric) else x.clone())  # type: ignore[no-any-return]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def parts_of_user(net: nn.Module) -> Iterator[Features]:
    """Yield the parts of a network that run a user's own module."""
    return (part for part in net.modules() if isinstance(part, Features))


def classes_of_user(config: Any) -> set[str]:
    """Return the names of the classes that the config of a network needs, but does not describe."""
    if isinstance(config, Mapping):
        if config.get("layer") == "Features" and "class" in config["net"]:
            return {config["net"]["class"]}
        config = list(config.values())
    parts = map(classes_of_user, config) if isinstance(config, list) else ()
    return set[str]().union(*parts)


def with_module(config: Any, net: nn.Module | None) -> Any:
    """Return the config of a network in which `net` replaces the description of a user's module.

    If no `net` is given, a config that needs one is refused."""
    if isinstance(config, list):
        return [with_module(one, net) for one in config]
    if not isinstance(config, Mapping):
        return config
    if config.get("layer") != "Features":
        return {name: with_module(one, net) for name, one in config.items()}
    described = config["net"]
    if net is None and isinstance(described, Mapping) and "class" in described:
        raise InputError(
            f"net: expected a module of the class {described['class']}, whose code the folder does "
            "not contain, got None: load it in Python with one, otad.load(folder, net=...)"
        )
    return {**config, "net": described if net is None else net}


def _alike(one: Any, outputs: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.numel() != outputs.numel():
        return False
    far = (one.reshape(outputs.shape) - outputs).abs().max()
    return bool(far <= ALIKE * outputs.abs().max())


def _like(net: nn.Module) -> Tensor:
    """Return a tensor on the device and in the dtype of a network."""
    tensors = (*net.parameters(), *net.buffers())
    return next((one for one in tensors if one.is_floating_point()), torch.empty(0))
