"""Nets, metrics and CIP-nets of an experiment: made, trained, or loaded from the work folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from otad.cip.surrogate import CIP_NET_RECIPE, CipNet, CipNetConfig
from otad.data import Dataset, Standardizer, holdout
from otad.errors import InputError
from otad.experiments.cache import Report, WorkFolder
from otad.experiments.records import DataRecord, LearnedRecord
from otad.experiments.spec import UNLEARNED, MetricSpec, NetSpec, SurrogateSpec
from otad.io.codec import digest_of
from otad.io.tensor_files import fingerprint
from otad.model.imitation import imitate
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import (
    AttentionMetric,
    Backbone,
    CNNMetric,
    LiftedNet,
    LipschitzMetric,
    Metric,
    PretrainedMetric,
    ResNetMetric,
    ViTMetric,
)
from otad.nets.pretrained import efficientnet_lite0
from otad.training import MetricConfig, TrainConfig, make_backbone, train, train_metric
from otad.training.adversary import Adversary
from otad.training.config import LoopConfig

N = TypeVar("N", Backbone, Metric, CipNet)
_METRICS: dict[str, Callable[..., Metric]] = {
    "resnet": ResNetMetric,
    "cnn": CNNMetric,
    "vit": ViTMetric,
    "attention": AttentionMetric,
    "lipschitz": LipschitzMetric,
}


@dataclass(frozen=True, eq=False)
class Source:
    """A data set with the fingerprint of its contents."""

    data: Dataset
    fingerprint: str

    @property
    def record(self) -> DataRecord:
        data = self.data
        sizes = len(data.train_x), len(data.test_x), data.input_shape, len(data.classes)
        return DataRecord(*sizes, self.fingerprint, data.source)

    def validation_part(self, share: float, seed: int) -> Source:
        """The train part alone, in which a share takes the place of the test part."""
        data = self.data
        rest, held = holdout(data.train_y, share, seed, task=data.task)
        part = replace(
            data,
            train_x=data.train_x[rest],
            train_y=data.train_y[rest],
            test_x=data.train_x[held],
            test_y=data.train_y[held],
        )
        return Source(part, digest_of({"of": self.fingerprint, "share": share, "seed": seed}))


@dataclass(frozen=True, eq=False)
class Learned(Generic[N]):
    """A net, what identifies it, and the record of its training."""

    net: N
    identity: dict[str, str]
    record: LearnedRecord


@dataclass(frozen=True, eq=False)
class Learner:
    """Trains one net, on a device and from a seed, in the work folder."""

    work: WorkFolder
    device: str
    seed: int
    report: Report

    def net(self, spec: NetSpec, source: Source, settings: dict[str, Any]) -> Learned[Backbone]:
        """A net of `spec`, trained with `settings`."""
        with _refusing("train: expected settings of TrainConfig"):
            config = TrainConfig(**settings, seed=self.seed, device=self.device)
        data, net = source.data, fresh_net(spec, source.data, self.seed, self.device)
        if spec.untrained:
            return _learned(net, asdict(config), {"train_score": None})

        def run(**saving: Any) -> tuple[int, dict[str, Any]]:
            result = train(net, (data.train_x, data.train_y), config, **saving)
            return len(result.history), {"train_score": result.final.train_score}

        # Options decide how prototypes are drawn, which their configuration does not show.
        identity = [source.fingerprint, spec.normalize, spec.options]
        return self._train("nets", net, config, identity, run)

    def metric(self, spec: MetricSpec, source: Source) -> Learned[Metric]:
        data, net = source.data, fresh_metric(spec, source.data, self.seed)
        about = {"key_dim": net.key_dim, "lipschitz": net.lipschitz}
        if spec.kind in UNLEARNED:
            self.report(1, 1)
            return _learned(net.to(self.device), None, about)
        config = metric_config(spec.train, seed=self.seed, device=self.device)

        def run(**saving: Any) -> tuple[int, dict[str, Any]]:
            result = train_metric(net, (data.train_x, data.train_y), config, **saving)
            return len(result.history), about | {"train_score": result.final.train_score}

        return self._train("metrics", net, config, [source.fingerprint, spec.normalize], run)

    def surrogate(self, spec: SurrogateSpec, model: OTAD, identity: Any) -> Learned[CipNet]:
        """A CIP-net that learned the answers of `model`, which `identity` names, at its bank."""
        config = surrogate_config(spec.train, seed=self.seed, device=self.device)
        generator = torch.Generator().manual_seed(self.seed)
        with _refusing("options: expected those of CipNet"):
            sizes = model.backbone.dim, model.n_neighbors
            net = CipNet(*sizes, generator=generator, **spec.options)

        def run(**saving: Any) -> tuple[int, dict[str, Any]]:
            taught = {"alpha": spec.alpha, "held_out": spec.held_out, **saving}
            history = imitate(model, config, net=net, **taught).result.history
            last = history[-1]
            return len(history), {"error": last.error, "held_out_error": last.held_out_error}

        own = [identity, spec.alpha, spec.held_out]
        return self._train("surrogates", net, config, own, run)

    def _train(
        self,
        kind: str,
        net: N,
        config: LoopConfig,
        identity: Any,
        run: Callable[..., tuple[int, dict[str, Any]]],
    ) -> Learned[N]:
        settings = asdict(config)
        name = {"net": net.config(), "settings": settings, "identity": identity}
        results = self.work.trained(kind, name, net, config.epochs, run, self.report)
        return _learned(net.to(self.device), settings, results, results.pop("seconds"))


def _learned(
    net: N, train: dict[str, Any] | None, results: dict[str, Any], seconds: float = 0.0
) -> Learned[N]:
    identity, parameters = identity_of(net), sum(one.numel() for one in net.parameters())
    record = LearnedRecord(train, results, parameters, identity["weights"], seconds)
    return Learned(net.eval(), identity, record)


def identity_of(net: Backbone | Metric | CipNet) -> dict[str, str]:
    """The fingerprint of the weights, and of the settings that weights do not show."""
    return {"weights": fingerprint(net.state_dict()), "config": digest_of(net.config())}


def fresh_net(spec: NetSpec, data: Dataset, seed: int, device: str = "cpu") -> Backbone:
    """The net of a spec for a data set, standardizing by the statistics of its train part."""
    sizes = data.input_shape, len(data.classes) or 1
    common: dict[str, Any] = {"task": data.task, "bounds": data.bounds}
    common["inputs"] = _units(data.train_x, spec.normalize)
    if spec.kind == "prototypes":
        frame = cast(LiftedNet, make_backbone("lifted", *sizes, blocks=0, **common)).to(device)
        generator = torch.Generator().manual_seed(seed)
        pairs = data.train_x, data.train_y
        with _refusing(f"options: expected those of {spec.kind!r}"):
            return prototype_net(frame, *pairs, generator=generator, **spec.options)
    common |= {"blocks": spec.blocks, "seed": seed} | spec.options
    if spec.kind == "fc":
        return make_backbone("fc_resnet", *sizes, residual=spec.residual, **common)
    return make_backbone(spec.kind, *sizes, **common)


def fresh_metric(spec: MetricSpec, data: Dataset, seed: int) -> Metric:
    """The metric of a spec for the inputs of a data set."""
    common: dict[str, Any] = {"bounds": data.bounds} | spec.options
    shape = data.input_shape
    with _refusing(f"options: expected those of {spec.kind!r}"):
        if spec.kind == "pixels":
            flat = {"key_norm": "free"} | common
            return PretrainedMetric(nn.Flatten(), input_shape=shape, **flat)
        if spec.kind == "pretrained":  # levels of 0 to 255 are taken by (level - 127) / 128
            units: dict[str, Any] = {"mean": 127 / 255, "std": 128 / 255, "builder": spec.features}
            return PretrainedMetric(efficientnet_lite0(), input_shape=shape, **units, **common)
        fitted = _units(data.train_x, spec.normalize)
        units = {} if fitted is None else {"mean": fitted.mean, "std": fitted.std}
        return _METRICS[spec.kind](shape, seed=seed, **units, **common)


def metric_config(settings: dict[str, Any], *, seed: int = 0, device: str = "cpu") -> MetricConfig:
    """Settings as a TOML file has them, with a table `adversary`."""
    with _refusing("train: expected settings of MetricConfig"):
        if "adversary" in settings:
            settings = settings | {"adversary": Adversary(**settings["adversary"])}
        return MetricConfig(**settings, seed=seed, device=device)


def surrogate_config(
    settings: dict[str, Any], *, seed: int = 0, device: str = "cpu"
) -> CipNetConfig:
    """The recipe of CIP-net with some settings changed."""
    with _refusing("train: expected settings of CipNetConfig"):
        return replace(CIP_NET_RECIPE, **settings, seed=seed, device=device)


def _units(x: Tensor, normalize: str) -> Standardizer | None:
    """What a net standardizes its inputs by, from the train part x (N,...); None for nothing."""
    return None if normalize == "none" else Standardizer.fit(x, normalize)  # type: ignore[arg-type]


@contextmanager
def _refusing(expected: str) -> Iterator[None]:
    """Options of a TOML file that a constructor does not know are an error of the user."""
    try:
        yield
    except TypeError as error:
        raise InputError(f"{expected}, got: {error}") from error
