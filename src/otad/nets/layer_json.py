"""Layers of torch.nn written as JSON and made again from it: constructor arguments, never code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import MOST_VALUES, require

# The constructor arguments of layers in torch.nn, which are attributes of the layer as well.
_CONV = "in_channels out_channels kernel_size stride padding {}dilation groups bias padding_mode"
_NORM = "num_features eps momentum affine track_running_stats"
_ALIGN = "size scale_factor mode align_corners recompute_scale_factor"
_LAYERS = {
    "Identity ReLU ReLU6 SiLU Mish Tanh Sigmoid LogSigmoid Softsign Tanhshrink Hardswish": "",
    "Hardsigmoid Softmax2d": "",
    "Softmax LogSoftmax Softmin": "dim",
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "Linear": "in_features out_features bias",
    "Bilinear": "in1_features in2_features out_features bias",
    "Embedding": "num_embeddings embedding_dim padding_idx",
    "Conv1d Conv2d Conv3d": _CONV.format(""),
    "ConvTranspose1d ConvTranspose2d ConvTranspose3d": (
        "in_channels out_channels kernel_size stride padding output_padding groups bias dilation"
    ),
    "MaxPool1d MaxPool2d MaxPool3d": "kernel_size stride padding dilation ceil_mode",
    "AvgPool1d": "kernel_size stride padding ceil_mode count_include_pad",
    "AvgPool2d AvgPool3d": (
        "kernel_size stride padding ceil_mode count_include_pad divisor_override"
    ),
    "LPPool1d LPPool2d": "norm_type kernel_size stride ceil_mode",
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d": "output_size",
    "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d": "output_size",
    "BatchNorm1d BatchNorm2d BatchNorm3d": _NORM,
    "InstanceNorm1d InstanceNorm2d InstanceNorm3d": _NORM,
    "GroupNorm": "num_groups num_channels eps affine",
    "LayerNorm": "normalized_shape eps elementwise_affine bias",
    "RMSNorm": "normalized_shape eps elementwise_affine",
    "LocalResponseNorm": "size alpha beta k",
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout": "p",
    "ZeroPad1d ZeroPad2d ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d": (
        "padding"
    ),
    "PixelShuffle": "upscale_factor",
    "PixelUnshuffle": "downscale_factor",
    "ChannelShuffle": "groups",
    "Upsample": _ALIGN,
    "LeakyReLU": "negative_slope",
    "PReLU": "num_parameters",
    "ELU CELU": "alpha",
    "SELU": "",
    "GELU": "approximate",
    "GLU": "dim",
    "Hardtanh": "min_val max_val",
    "Hardshrink Softshrink": "lambd",
    "Threshold": "threshold value",
    "Softplus": "beta threshold",
    "MultiheadAttention": "embed_dim num_heads dropout bias kdim vdim batch_first",
}
_ARGUMENTS = {
    getattr(nn, name): tuple(arguments.split())
    for names, arguments in _LAYERS.items()
    for name in names.split()
}
_BY_NAME = {cls.__name__: cls for cls in _ARGUMENTS}
_ACTIVATIONS = {"relu": functional.relu, "gelu": functional.gelu}


MODULES: dict[str, type[Any]] = {}
"""The modules of this library, by name, that write themselves by `to_json` and `from_json`."""


def describe(module: nn.Module) -> dict[str, Any]:
    """Return {"layer": name, **constructor arguments}, nested for containers."""
    name = type(module).__name__
    if name in MODULES and isinstance(module, MODULES[name]):
        return {"layer": name, **module.to_json()}
    if type(module) is nn.Sequential:
        return {"layer": name, "layers": [describe(layer) for layer in module]}
    if type(module) is nn.TransformerEncoder:
        description: dict[str, Any] = {"layers": [describe(layer) for layer in module.layers]}
        description["norm"] = None if module.norm is None else describe(module.norm)
        description["nested"] = module.enable_nested_tensor
    elif type(module) is nn.TransformerEncoderLayer:
        description = _transformer_layer(module)
    else:
        description = _plain_layer(module, name)
    description = {"layer": name} | description
    with torch.device("meta"):
        plain = state_shapes(restore(description))
    found = state_shapes(module)  # changed by weight_norm, for instance
    got = f"{found}; remove its parametrization (weight_norm, pruning)"
    require(found == plain, "net", f"a {name} with weights {plain} to write as JSON", got)
    return description


def _plain_layer(module: nn.Module, name: str) -> dict[str, Any]:
    remedy = "subclass Backbone and decorate it with otad.nets.register"
    expected = f"layers of torch.nn to write as JSON (Sequential, {', '.join(_BY_NAME)})"
    require(type(module) in _ARGUMENTS, "net", expected, f"{name}; {remedy}")
    description: dict[str, Any] = {}
    for argument in _ARGUMENTS[type(module)]:
        value: Any = getattr(module, argument, None)
        if argument == "bias":
            value = module.in_proj_bias if isinstance(module, nn.MultiheadAttention) else value
            value = value is not None
        description[argument] = list(value) if isinstance(value, tuple) else value
    if isinstance(module, nn.MultiheadAttention):
        description["add_bias_kv"] = module.bias_k is not None
        description["add_zero_attn"] = module.add_zero_attn
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse
        require(plain, "net", "an Embedding without max_norm to write as JSON", str(module))
    return description


def _transformer_layer(layer: nn.TransformerEncoderLayer) -> dict[str, Any]:
    known = {name for name, act in _ACTIVATIONS.items() if layer.activation is act}
    known |= {name for name in _ACTIVATIONS if type(layer.activation).__name__.lower() == name}
    got = f"a TransformerEncoderLayer with activation {layer.activation}"
    require(known, "net", f"activation {' or '.join(_ACTIVATIONS)} to write as JSON", got)
    attention = layer.self_attn
    return {
        "d_model": attention.embed_dim,
        "nhead": attention.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "activation": known.pop(),
        "layer_norm_eps": layer.norm1.eps,
        "batch_first": attention.batch_first,
        "norm_first": layer.norm_first,
        "bias": layer.linear1.bias is not None,
    }


def restore(description: Mapping[str, Any] | nn.Module) -> nn.Module:
    """Make a layer from what `describe` returned, with fresh weights.

    A module is returned as it is."""
    if isinstance(description, nn.Module):
        return description
    arguments = dict(description)
    name = arguments.pop("layer", None)
    if name in MODULES:
        return MODULES[name].from_json(arguments)  # type: ignore[no-any-return]
    if name == "Sequential":
        return nn.Sequential(*(restore(layer) for layer in arguments["layers"]))
    if name == "TransformerEncoder":  # layer by layer, because copies would not be counted
        layers = [restore(layer) for layer in arguments["layers"]]
        norm = None if arguments["norm"] is None else restore(arguments["norm"])
        require(len(layers) > 0, "layers", "at least one", "none")
        nested = {"enable_nested_tensor": bool(arguments["nested"])}
        encoder = nn.TransformerEncoder(layers[0], 1, norm, **nested)  # type: ignore[arg-type]
        encoder.layers, encoder.num_layers = nn.ModuleList(layers), len(layers)
        return encoder
    known = _BY_NAME | {"TransformerEncoderLayer": nn.TransformerEncoderLayer}
    require(name in known, "layer", f"one of {', '.join(known)}", repr(name))
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    with torch.device("meta"):  # weights are counted before they use memory, see `restored`
        known[name](**arguments)
    return known[name](**arguments)  # type: ignore[no-any-return]


@torch.no_grad()
def check_activations(modules: Sequence[nn.Module], input_shape: Sequence[int]) -> None:
    """Refuse modules from a file if a layer returns too many numbers for one input.

    The modules run one after another on the meta device, which uses no memory."""

    def count(module: nn.Module, given: object, output: object) -> None:
        values = output.numel() if isinstance(output, Tensor) else 0
        require(values <= MOST_VALUES, "net", f"layers of at most {MOST_VALUES} values", values)

    x = torch.empty(1, *input_shape, device="meta")
    for module in modules:
        shadow = copy.deepcopy(module).to("meta").eval()
        for layer in shadow.modules():
            layer.register_forward_hook(count)
        x = shadow(x)


def state_shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the state dict, by name."""
    state = net.state_dict()
    return {name: tuple(part.shape) for name, part in state.items() if isinstance(part, Tensor)}
