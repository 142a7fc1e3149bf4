"""The metrics of an experiment: made, trained or taken from the work folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from otad.data import Dataset
from otad.errors import InputError
from otad.experiments.features import FEATURES
from otad.experiments.kept import Deadline
from otad.experiments.nets import FOREVER, Source, identity_of, input_units, learn_by
from otad.experiments.part_specs import UNLEARNED, MetricSpec
from otad.io.codec import digest_of
from otad.nets import (
    AttentionMetric,
    CNNMetric,
    LipschitzMetric,
    Metric,
    PretrainedMetric,
    ResNetMetric,
    ViTMetric,
)
from otad.training import MetricConfig, train_metric
from otad.training.adversary import Adversary

Report = Callable[[int, int], None]
_NETS: dict[str, Callable[..., Metric]] = {
    "resnet": ResNetMetric,
    "cnn": CNNMetric,
    "vit": ViTMetric,
    "attention": AttentionMetric,
    "lipschitz": LipschitzMetric,
}


@dataclass(frozen=True, eq=False)
class TrainedMetric:
    """A metric and how it was trained, `config` None for one that was not; `identity` names it."""

    metric: Metric
    config: MetricConfig | None
    identity: dict[str, str]
    train_score: float | None = None
    seconds: float = 0.0

    @property
    def weights(self) -> str:
        return self.identity["weights"]


def trained_metric(
    spec: MetricSpec,
    source: Source,
    *,
    seed: int,
    device: str,
    folder: Path,
    report: Report,
    deadline: Deadline = FOREVER,
) -> TrainedMetric:
    """Train in a folder below `folder`, go on there, or take what is finished."""
    data, metric = source.data, fresh_metric(spec, source.data, seed)
    if spec.kind in UNLEARNED:
        report(1, 1)
        return TrainedMetric(metric.to(device).eval(), None, identity_of(metric))
    config = metric_config(spec.train, seed=seed, device=device)
    depends = {"metric": metric.config(), "normalize": spec.normalize, "config": asdict(config)}
    place = folder / digest_of(depends | {"data": source.fingerprint})
    learned = learn_by(train_metric, metric, data, config, place, deadline, report)
    identity, score = identity_of(metric), learned.facts["train_score"]
    return TrainedMetric(metric.to(device).eval(), config, identity, score, learned.seconds)


def metric_config(settings: dict[str, Any], *, seed: int = 0, device: str = "cpu") -> MetricConfig:
    """Settings as a TOML file has them."""
    settled = dict(settings)
    try:
        if "adversary" in settled:
            settled["adversary"] = Adversary(**settled["adversary"])
        return MetricConfig(**settled, seed=seed, device=device)
    except TypeError as error:
        raise InputError(f"train: expected settings of MetricConfig, got: {error}") from error


def fresh_metric(spec: MetricSpec, data: Dataset, seed: int) -> Metric:
    """The metric of a spec for the inputs of a data set."""
    common: dict[str, Any] = {"bounds": data.bounds} | spec.options
    shape = data.input_shape
    try:
        if spec.kind == "pixels":
            flat = {"key_norm": "free"} | common
            return PretrainedMetric(nn.Flatten(), input_shape=shape, **flat)
        if spec.kind == "pretrained":
            found = FEATURES[spec.features]
            units: dict[str, Any] = {"mean": found.mean, "std": found.std, "builder": spec.features}
            return PretrainedMetric(found.build(), input_shape=shape, **units, **common)
        generator = torch.Generator().manual_seed(seed)
        fitted = input_units(data.train_x, spec.normalize)
        units = {"mean": 0.0, "std": 1.0}
        if fitted is not None:
            units = {"mean": fitted.mean, "std": fitted.std}
        return _NETS[spec.kind](shape, generator=generator, **units, **common)
    except TypeError as error:
        raise InputError(f"options: expected those of {spec.kind!r}, got: {error}") from error
