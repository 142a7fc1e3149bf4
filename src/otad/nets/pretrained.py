"""A user's own network as a metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from otad.checks import check_choice
from otad.errors import InputError
from otad.nets.layers import describe, restore
from otad.nets.metric import Metric, register_metric

AnyBuilder = TypeVar("AnyBuilder", bound=Callable[..., nn.Module])
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register_features(name: str) -> Callable[[AnyBuilder], AnyBuilder]:
    """Function decorator: names a builder of feature extractors, so that a `PretrainedMetric` made
    of one is told as that name in JSON. A reader must have registered the same name."""

    def keep(build: AnyBuilder) -> AnyBuilder:
        if name in _BUILDERS:
            raise InputError(f"name: expected a new name, got {name!r}, which is registered")
        _BUILDERS[name] = build
        return build

    return keep


@register_metric("pretrained")
class PretrainedMetric(Metric):
    """Any module of the user's, normalized inputs (B,*input_shape) -> features (B,f), then an
    nn.Linear, or None for keys that are the features. Weights are shared.

    It is saved where the module is a stack of well-known layers, or where it came from a
    registered function: `builder` and `builder_options` then say how to make it again.
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
        if projection is not None and not isinstance(projection, nn.Linear):
            raise InputError(
                f"projection: expected an nn.Linear or None, got {type(projection).__name__}"
            )
        if builder is not None:
            check_choice(builder, "builder", tuple(_BUILDERS))
        super().__init__(input_shape, **options)
        self.extractor = extractor
        self.builder, self.builder_options = builder, dict(builder_options or {})
        self.projection = nn.Identity() if projection is None else projection
        width = self._probe()
        if projection is None:
            self.key_dim = width
        elif projection.in_features != width:
            raise InputError(
                f"projection: expected in_features {width} like the features, "
                f"got {projection.in_features}"
            )
        else:
            self.key_dim = projection.out_features

    def features(self, u: Tensor) -> Tensor:
        return self.extractor(u)  # type: ignore[no-any-return]

    def _probe(self) -> int:
        """Send one input through for the number of features; batch statistics stay as they are."""
        modes = {module: module.training for module in self.extractor.modules()}
        self.extractor.eval()
        with torch.no_grad():
            found = self.extractor(torch.zeros_like(self.mean).unsqueeze(0))
        for module, training in modes.items():
            module.training = training
        if not isinstance(found, Tensor) or found.dim() != 2:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"extractor: expected features of shape (B,f), got {got}")
        return found.shape[1]

    def config(self) -> dict[str, Any]:
        linear = isinstance(self.projection, nn.Linear)
        if self.builder is None:
            extractor = describe(self.extractor)
        else:
            extractor = {"builder": self.builder, "options": self.builder_options}
        described = describe(self.projection) if linear else None
        return super().config() | {"extractor": extractor, "projection": described}

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> PretrainedMetric:
        rest = dict(options)
        told, described = rest.pop("extractor"), rest.pop("projection")
        rest.pop("key_dim")  # read off the parts
        with torch.random.fork_rng(devices=[]):  # layers draw at birth; leave the global RNG alone
            projection = None if described is None else restore(described)
            if "builder" not in told:
                return cls(restore(told), projection, **rest)  # type: ignore[arg-type]
            name = check_choice(told["builder"], "builder", tuple(_BUILDERS))
            extractor = _BUILDERS[name](**told["options"])
        made = {"builder": name, "builder_options": told["options"]}
        return cls(extractor, projection, **made, **rest)  # type: ignore[arg-type]
