"""Modules of the user's own: tried on one input, and stacks of well-known layers as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from otad.errors import InputError

# Constructor arguments, which are also attributes of the layer.
_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Identity: (),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Linear: ("in_features", "out_features", "bias"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine", "bias"),
    nn.BatchNorm1d: ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    nn.Dropout: ("p",),
    nn.ReLU: (),
    nn.LeakyReLU: ("negative_slope",),
    nn.ELU: ("alpha",),
    nn.GELU: ("approximate",),
    nn.SiLU: (),
    nn.Softplus: ("beta", "threshold"),
    nn.Tanh: (),
    nn.Sigmoid: (),
}
_BY_NAME = {cls.__name__: cls for cls in _ARGUMENTS}


def run(module: nn.Module, x: Tensor, name: str, gives: str = "an output of shape (B,d)") -> Tensor:
    """The output (B,d) of the module for x (B,...), or an error that names the expected shapes."""
    try:
        output = module(x)
    except (RuntimeError, ValueError, IndexError) as error:
        dtype = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"{name}: expected a module that takes a {dtype} tensor of shape {tuple(x.shape)} on "
            f"{x.device}, got: {error}"
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"{name}: expected {gives}, got {got}")
    return output


def describe(module: nn.Module) -> dict[str, Any]:
    """{"layer": name, **constructor arguments}, nested for nn.Sequential."""
    if type(module) is nn.Sequential:
        return {"layer": "Sequential", "layers": [describe(layer) for layer in module]}
    name = type(module).__name__
    if type(module) not in _ARGUMENTS:
        raise InputError(
            f"net: expected layers among Sequential, {', '.join(_BY_NAME)} to write as JSON, got "
            f"{name}; subclass Backbone and decorate it with otad.nets.register"
        )
    arguments = {argument: getattr(module, argument) for argument in _ARGUMENTS[type(module)]}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    if "normalized_shape" in arguments:
        arguments["normalized_shape"] = list(arguments["normalized_shape"])
    description = {"layer": name} | arguments
    with torch.device("meta"):
        plain = state_shapes(restore(description))
    if (found := state_shapes(module)) != plain:  # changed by weight_norm, for instance
        raise InputError(
            f"net: expected a {name} with weights {plain} to write as JSON, got one with {found}; "
            "remove its parametrization (weight_norm, pruning), or subclass Backbone and decorate "
            "it with otad.nets.register"
        )
    return description


def restore(description: Mapping[str, Any]) -> nn.Module:
    """The reverse of `describe`; weights are loaded afterwards."""
    arguments = dict(description)
    name = arguments.pop("layer", None)
    if name == "Sequential":
        return nn.Sequential(*(restore(layer) for layer in arguments["layers"]))
    if name not in _BY_NAME:
        raise InputError(f"layer: expected one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name](**arguments)


def state_shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the state dict, by name."""
    state = net.state_dict()
    return {name: tuple(part.shape) for name, part in state.items() if isinstance(part, Tensor)}
