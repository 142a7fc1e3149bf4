"""A user's own trained network as a backbone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from otad.checks import check_choice, check_count, require
from otad.errors import InputError
from otad.nets.base import Backbone, LinearHead, register, squared_lengths
from otad.nets.features import Features, Head, find_head, unwrapped
from otad.nets.fully_connected import LiftedNet
from otad.nets.inputs import InputNet, Sizes, evaluating, output_of
from otad.nets.layer_json import check_activations, describe, restore
from otad.nets.lift import Lift, feature_lift
from otad.nets.lipschitz import LipschitzNet, is_lipschitz_in_l2

UNREAD = 0.1  # see `Lift`; on CIFAR-10, one map through all pairs certifies less with 0.3 or 1
FOLLOWS = 0.9  # the share of pairs of points whose features differ in a similar direction
_REMEDY = (
    ". An attack that changes the features changes the answer too, and no radius is certified. "
    "Search neighbors by a metric with a known Lipschitz constant (metric=nn.Flatten() for "
    "pixels, or otad.nets.LipschitzMetric), train with the transport energy (OTADClassifier, "
    "`otad train`), or do without the network (inputs='pixels')"
)
_ONE_SPACE = "embedded inputs and features must be in one space; change sizes in `embed` alone"


@register("sequential")
class SequentialBackbone(Backbone):
    """A backbone made of your own modules: an embedding, blocks one after another, and a head.

    The modules are used as they are, so their weights are shared.

    Parameters
    ----------
    embed : nn.Module or None
        The map from normalized inputs (B, *input_shape) to (B, d). If None, inputs are flattened.
    blocks : sequence of nn.Module
        Maps from (B, d) to (B, d), shortcuts included. The energy of a path is the sum of its
        squared steps, `sum_k |x^k - x^(k-1)|^2`.
    head : nn.Linear
        The last layer, from d features to the outputs.
    input_shape : sequence of int
        The shape of one input.
    task, bounds, mean, std
        As in `Backbone`.

    Raises
    ------
    InputError
        If the sizes of the modules do not fit each other.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> block, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
    >>> net = otad.nets.SequentialBackbone(None, [block], head, input_shape=(4,))
    >>> net.dim, net(torch.rand(2, 4)).shape
    (4, torch.Size([2, 3]))
    """

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
            x = output_of(self.embedding, self.mean.clone().unsqueeze(0), "embed")
            dim = x.shape[1]
            expected = f"dimension {dim} like the embedded input"
            for number, block in enumerate(self.blocks):
                x = output_of(block, x, f"blocks[{number}]")
                got = f"{x.shape[1]}: {_ONE_SPACE}"
                require(x.shape[1] == dim, f"blocks[{number}]", expected, got)
        require(self.dim == dim, "head", f"in_features of {expected}", f"{self.dim}: {_ONE_SPACE}")

    def embed(self, x: Tensor) -> Tensor:
        return self.embedding(self.normalize(x))  # type: ignore[no-any-return]

    def transport(self, e: Tensor) -> tuple[Tensor, Tensor]:
        x, energy = e, e.new_zeros(e.shape[0])
        for block in self.blocks:
            moved = block(x.clone())  # because layers may work in place
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
        with torch.random.fork_rng(devices=[]):  # new layers draw weights by the global generator
            embed, *blocks = [restore(part) for part in parts]
            head = nn.Linear(*head_shape)
        for part in (embed, *blocks):
            if isinstance(part, Features):
                layer = cast(nn.Linear, part.net.get_submodule(part.head))
                sizes = layer.in_features, layer.out_features, layer.bias is not None
                if sizes == head_shape and isinstance(layer.weight, nn.Parameter):
                    head = layer  # as in `adapted`, one layer for both
        if not any(isinstance(part.get("net"), nn.Module) for part in parts):
            check_activations([embed, *blocks], rest["input_shape"])
        return cls(embed, blocks, head, **rest)


class Adapted(NamedTuple):
    """A backbone made of a network, and what a user should know about it.

    `path` names how it was made ("transport", "features", ...), `says` describes it in words, and
    `remedy` says what to do about what it lacks."""

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
    """Turn any trained module into a `Backbone` that computes the same outputs.

    The weights are shared. The last Linear layer that the module calls becomes the head, and the
    numbers that enter it are the features. If features have the size of the flattened input and
    change in similar directions, all layers before the head are one transport step, as in the
    paper. Otherwise the features are the embedding, and the outputs are lifted over them: see
    `Lift`.

    Parameters
    ----------
    net : nn.Module
        A module that maps a batch of inputs to logits (B, C), or to values in regression.
    input_shape : sequence of int or None
        The shape of one input. It is needed if there is no `sample`, unless the first layer is an
        nn.Linear.
    sample : Tensor (B, *input_shape) or None
        Some inputs, by which the last Linear layer is found. By default they are random.
    inputs : str
        "auto", or "features" to lift the outputs over the features in any case.
    task, bounds, mean, std
        As in `Backbone`.

    Returns
    -------
    Backbone
        A `SequentialBackbone` or a `Lift`. A `Backbone` is returned as it is.

    Raises
    ------
    InputError
        If no last Linear layer is found, or the outputs are not in the order of its outputs.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> layers = torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    >>> backbone = otad.nets.adapt(torch.nn.Sequential(*layers))
    >>> type(backbone).__name__, backbone.inner.dim
    ('Lift', 8)
    """
    if sample is None and not isinstance(net, Backbone):
        if input_shape is None:
            first = next((one for one in net.modules() if not any(one.children())), net)
            if not isinstance(first, nn.Linear):
                got = f"None for {type(first).__name__} as first layer"
                raise InputError(f"input_shape: expected a shape, got {got}")
            input_shape = (first.in_features,)
        shape = [check_count(size, "input_shape") for size in input_shape]
        sample = torch.rand(8, *shape, generator=torch.Generator().manual_seed(0))
    return adapted(net, sample, inputs=inputs, **options).backbone


def adapted(
    net: nn.Module,
    sample: Tensor | None,
    *,
    inputs: str = "auto",
    unread: float = UNREAD,
    **options: Any,
) -> Adapted:
    """Do what `adapt` does, and say what was made.

    `unread` is that of `Lift` for a network whose features have a proved constant in l2."""
    check_choice(inputs, "inputs", ("auto", "features"))
    if isinstance(net, Backbone) and inputs == "auto":
        return Adapted(net, "transport", "")
    if sample is None or sample.dim() < 2:
        raise InputError(f"sample: expected inputs (B,...), got {sample}")
    net, shape = unwrapped(net), tuple(sample.shape[1:])
    task = options.get("task", "classification")
    found = find_head(net, sample, task=task)
    head = _plain_head(found.layer, task)
    if task == "regression":
        expected = "one output for regression (y holds floats; labels are int64)"
        require(head.out_features == 1, "net", expected, f"{head.out_features} outputs")
    keeps_size = found.features.shape[1] == math.prod(shape) and inputs == "auto"
    follows = keeps_size and _follows(sample.to(found.features), found.features)
    title = f"{type(net).__name__}{'' if found.name == '' else '.' + found.name}"
    says = "" if found.is_last else f"; the outputs of {title} are its logits, without later layers"
    if keeps_size and (follows or isinstance(net, nn.Sequential)):
        if not follows:
            says += (
                "; but the features of two points often differ in another direction than the points"
                ", so L will be raised: train with the transport energy, or use inputs='features'"
            )
        body = _flat_body(net, found, shape)
        block = [Features(net, found.name, shape)] if body is None else body
        backbone: Backbone = SequentialBackbone(None, block, head, input_shape=shape, **options)
        size = f"the {backbone.dim} features that enter {title} are the transported inputs"
        return Adapted(backbone, "transport", f"OTAD as in the paper: {size}{says}")
    inner: Backbone | None = net if isinstance(net, LipschitzNet) else None
    if inner is None:
        features = Features(net, found.name, shape)
        inner = SequentialBackbone(features, [], head, input_shape=shape, **options)
    lift = feature_lift(inner, unread if is_lipschitz_in_l2(net) else 1.0)
    what = f"the defense works on the {lift.inner.dim} features that enter {title}: each answer is "
    what += f"a mixture of the network's own outputs for neighboring training points{says}"
    return Adapted(lift, "features", what, "" if isinstance(net, LipschitzNet) else _REMEDY)


def _plain_head(layer: nn.Linear, task: str) -> nn.Linear:
    """Return the layer, or a copy of it without parametrization.

    A classifier with a single logit v gets the two logits (0, v)."""
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
    """Return all layers but the head of an nn.Sequential that can be saved, or None.

    It must take flattened inputs and consist of layers that can be written as JSON."""
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
    """Return whether inputs (B,*) and their features mostly differ in similar directions.

    Two directions are similar if they are less than 90 degrees apart. Transport gives such features
    for most pairs of inputs; other networks give them for about half of the pairs."""
    products = x.flatten(1).double() @ features.double().T
    squares = products.diagonal()
    moved = squares[:, None] + squares - products - products.T
    pairs = torch.triu(torch.ones_like(moved), 1).bool()
    return bool((moved[pairs] >= 0).double().mean() >= FOLLOWS) if len(x) > 1 else True


def only_normalizes(backbone: Backbone) -> bool:
    """Return whether the embedding of a backbone only normalizes and flattens inputs.

    The zeros in the coordinates of a lift are allowed. For such backbones, distances of embedded
    inputs are distances of inputs up to the scale of the normalization.

    Parameters
    ----------
    backbone : Backbone
        The backbone. Subclasses with their own `normalize` are not trusted.

    Returns
    -------
    bool

    Examples
    --------
    >>> import otad
    >>> otad.nets.only_normalizes(otad.nets.fc_resnet((4,), 2))
    True
    >>> otad.nets.only_normalizes(otad.nets.vision_transformer((1, 8, 8), 2, width=12, blocks=1))
    False
    """
    kind = type(backbone)
    if kind.normalize is not Backbone.normalize:
        return False
    if kind is Lift and isinstance(backbone, Lift):
        return backbone.read is None and only_normalizes(backbone.inner)
    if isinstance(backbone, SequentialBackbone) and kind.embed is SequentialBackbone.embed:
        layer = backbone.embedding
        return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)
    return kind.embed is (LiftedNet.embed if backbone.lift else Backbone.embed)


def denormalized(net: InputNet, embedded: Tensor) -> Tensor:
    """Return the inputs (..., *input_shape) of embedded ones (..., d), which are only normalized.

    The coordinates of a lift may be left out."""
    flat = embedded[..., : math.prod(net.input_shape)]
    shaped = flat.reshape(*flat.shape[:-1], *net.input_shape)
    return shaped * net.std + net.mean
