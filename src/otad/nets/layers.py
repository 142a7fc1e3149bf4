"""Stacks of well-known layers as plain JSON, so that a user's net travels without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from otad.errors import InputError

# Constructor arguments that are kept under their own name as attributes of the layer.
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


def describe(module: nn.Module) -> dict[str, Any]:
    """{"layer": name, **constructor arguments}, nested for nn.Sequential."""
    if type(module) is nn.Sequential:
        return {"layer": "Sequential", "layers": [describe(layer) for layer in module]}
    if type(module) not in _ARGUMENTS:
        raise InputError(
            f"net: expected layers among Sequential, {', '.join(_BY_NAME)} to write as JSON, got "
            f"{type(module).__name__}; subclass Backbone and decorate it with otad.nets.register"
        )
    arguments = {name: getattr(module, name) for name in _ARGUMENTS[type(module)]}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    if "normalized_shape" in arguments:
        arguments["normalized_shape"] = list(arguments["normalized_shape"])
    description = {"layer": type(module).__name__} | arguments
    _refuse_other_weights(module, description)
    return description


def state_shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all that is saved of a net, by name."""
    state = net.state_dict()
    return {name: tuple(part.shape) for name, part in state.items() if isinstance(part, Tensor)}


def _refuse_other_weights(module: nn.Module, description: Mapping[str, Any]) -> None:
    """Refuse a layer that was changed, by `weight_norm` for one: no reader could make it again."""
    with torch.device("meta"):
        plain = state_shapes(restore(description))
    if (found := state_shapes(module)) != plain:
        raise InputError(
            f"net: expected a {type(module).__name__} of weights {plain} to write as JSON, got one "
            f"of {found}; take off what was put on it (weight_norm, pruning), or subclass Backbone "
            "and decorate it with otad.nets.register"
        )


def restore(description: Mapping[str, Any]) -> nn.Module:
    """The module `describe` told of; its weights are still to be loaded."""
    arguments = dict(description)
    name = arguments.pop("layer", None)
    if name == "Sequential":
        return nn.Sequential(*(restore(layer) for layer in arguments["layers"]))
    if name not in _BY_NAME:
        raise InputError(f"layer: expected one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name](**arguments)
