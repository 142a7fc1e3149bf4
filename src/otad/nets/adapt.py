"""The user's own trained modules as a `Backbone`, and stacks of well-known layers as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otad.checks import require
from otad.errors import InputError
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.fully_connected import LiftedNet
from otad.nets.inputs import evaluating

_ONE_SPACE = (
    "embedded inputs and features must be in one space R^d; widen the last layer before the head "
    "to that size, or move the layers that change the size into `embed`"
)
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


@register("sequential")
class SequentialBackbone(Backbone):
    """embed -> blocks one after another -> head, from modules that share the user's weights.

    `embed` maps normalized inputs (B,*input_shape) to (B,d), None flattens them. A block maps
    x^(k-1) (B,d) to x^k (B,d), shortcut included; the energy is sum_k |x^k - x^(k-1)|^2.
    """

    def __init__(
        self,
        embed: nn.Module | None,
        blocks: Sequence[nn.Module],
        head: nn.Linear,
        *,
        input_shape: Sequence[int],
        **options: Any,
    ) -> None:
        """`options` (task, bounds, mean, std) are those of `Backbone`."""
        require(isinstance(head, nn.Linear), "head", "an nn.Linear", type(head).__name__)
        expected = "an nn.Linear whose weight is a parameter"
        hint = "a parametrized one; remove its parametrization (weight_norm, pruning)"
        require(isinstance(head.weight, nn.Parameter), "head", expected, hint)
        super().__init__(input_shape, head.out_features, dim=head.in_features, **options)
        self.embedding = nn.Flatten() if embed is None else embed
        self.blocks = nn.ModuleList(blocks)
        self.head = LinearHead(self.dim, self.n_outputs, self.task, bias=head.bias is not None)
        self.head.weight, self.head.bias = head.weight, head.bias
        self.mean = self.mean.to(head.weight)
        self.std = self.std.to(head.weight)
        with evaluating(self), torch.no_grad():
            x = run(self.embedding, self.mean.clone().unsqueeze(0), "embed")
            dim = x.shape[1]
            for number, block in enumerate(self.blocks):
                x = run(block, x, f"blocks[{number}]")
                expected = f"features of dimension {dim} like the embedded input"
                got = f"dimension {x.shape[1]}: {_ONE_SPACE}"
                require(x.shape[1] == dim, f"blocks[{number}]", expected, got)
        expected = f"in_features {dim} like the embedded input"
        require(self.dim == dim, "head", expected, f"{self.dim}: {_ONE_SPACE}")

    def embed(self, x: Tensor) -> Tensor:
        return self.embedding(self.normalize(x))  # type: ignore[no-any-return]

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x.clone())  # the layers may work in place
            energy = energy + squared_lengths(moved - x)
            x = moved
        return x, energy

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "embed": describe(self.embedding),
            "blocks": [describe(block) for block in self.blocks],
            "dim": self.dim,
            "bias": self.head.bias is not None,
        }

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> SequentialBackbone:
        rest = dict(options)
        head_shape = (rest.pop("dim"), rest.pop("n_outputs"), rest.pop("bias"))
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            embed, head = restore(rest.pop("embed")), nn.Linear(*head_shape)
            blocks = [restore(block) for block in rest.pop("blocks")]
        return cls(embed, blocks, head, **rest)


def adapt(net: nn.Module, *, input_shape: Sequence[int] | None = None, **options: Any) -> Backbone:
    """A trained nn.Sequential as a `Backbone`: its last Linear is the head, all before it is one
    transport step over the flattened input, whose size it must keep. Weights are shared; `options`
    (task, bounds) are those of `Backbone`.

    A net that first changes the size is given in parts: `SequentialBackbone(embed, blocks, head)`.
    """
    if isinstance(net, Backbone):
        return net
    if not isinstance(net, nn.Sequential) or len(net) == 0:
        raise InputError(
            f"net: expected a Backbone or a non-empty nn.Sequential, got {type(net).__name__}; "
            "give its parts to SequentialBackbone(embed, blocks, head)"
        )
    *body, head = net
    if not isinstance(head, nn.Linear):
        raise InputError(f"net: expected an nn.Linear as last layer, got {type(head).__name__}")
    if input_shape is None:
        first = next(layer for layer in net if not isinstance(layer, nn.Flatten))
        if not isinstance(first, nn.Linear):
            kind = type(first).__name__
            raise InputError(
                f"input_shape: expected a shape, since the first layer is {kind}, got None"
            )
        input_shape = (first.in_features,)
    blocks = [nn.Sequential(*body)] if body else []
    return SequentialBackbone(None, blocks, head, input_shape=input_shape, **options)


def only_normalizes(backbone: Backbone) -> bool:
    """Whether the embedding is normalization and flattening, with zeros for the coordinates of a
    lift, and nothing else."""
    kind = type(backbone)
    if kind.normalize is not Backbone.normalize:
        return False
    if isinstance(backbone, SequentialBackbone) and kind.embed is SequentialBackbone.embed:
        layer = backbone.embedding
        return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return kind.embed is (LiftedNet.embed if backbone.lift else Backbone.embed)


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
    remedy = "subclass Backbone and decorate it with otad.nets.register"
    expected = f"layers among Sequential, {', '.join(_BY_NAME)} to write as JSON"
    require(type(module) in _ARGUMENTS, "net", expected, f"{name}; {remedy}")
    arguments = {argument: getattr(module, argument) for argument in _ARGUMENTS[type(module)]}
    if "bias" in arguments:
        arguments["bias"] = arguments["bias"] is not None
    if "normalized_shape" in arguments:
        arguments["normalized_shape"] = list(arguments["normalized_shape"])
    description = {"layer": name} | arguments
    with torch.device("meta"):
        plain = state_shapes(restore(description))
    found = state_shapes(module)  # changed by weight_norm, for instance
    got = f"one with {found}; remove its parametrization (weight_norm, pruning), or {remedy}"
    require(found == plain, "net", f"a {name} with weights {plain} to write as JSON", got)
    return description


def restore(description: Mapping[str, Any]) -> nn.Module:
    """The reverse of `describe`; weights are loaded afterwards."""
    arguments = dict(description)
    name = arguments.pop("layer", None)
    if name == "Sequential":
        return nn.Sequential(*(restore(layer) for layer in arguments["layers"]))
    require(name in _BY_NAME, "layer", f"one of {', '.join(_BY_NAME)}", repr(name))
    return _BY_NAME[name](**arguments)


def state_shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of the state dict, by name."""
    state = net.state_dict()
    return {name: tuple(part.shape) for name, part in state.items() if isinstance(part, Tensor)}
