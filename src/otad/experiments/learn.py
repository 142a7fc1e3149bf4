"""Data sets, nets and metrics before training, and training settings, as specs ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from otad import baselines, nets
from otad.checks import refusing
from otad.cip.surrogate import CipNet
from otad.data import Dataset, Standardizer, split
from otad.experiments.records import DataRecord, LearnedRecord
from otad.experiments.spec import BLOCKLESS, MetricSpec, NetSpec, Options, PurifierSpec
from otad.io.codec import digest_of
from otad.io.environment import resident_peak
from otad.model.prototypes import prototype_net
from otad.nets.pretrained import efficientnet_lite0
from otad.training import make_backbone
from otad.training.adversary import Adversary
from otad.training.config import LoopConfig

N = TypeVar("N", nets.Backbone, nets.Metric, CipNet, baselines.Purifier)
C = TypeVar("C", bound=LoopConfig)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set with the fingerprint of its contents."""

    data: Dataset
    fingerprint: str

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        return self.data.train_x, self.data.train_y

    @property
    def record(self) -> DataRecord:
        data = self.data
        sizes = len(data.train_x), len(data.test_x), data.input_shape, len(data.classes)
        return DataRecord(*sizes, self.fingerprint, data.source)

    def validation_part(self, share: float, seed: int) -> Source:
        """The train part alone, in which a share takes the place of the test part."""
        names = ("train_x", "train_y", "test_x", "test_y")
        parts: Options = dict(zip(names, split(self.data, share, seed), strict=True))
        name = digest_of({"of": self.fingerprint, "share": share, "seed": seed})
        return Source(replace(self.data, **parts), name)


@dataclass(frozen=True, eq=False)
class Learned(Generic[N]):
    """A net, what identifies it, and the record of its training."""

    net: N
    identity: dict[str, str]
    record: LearnedRecord


def fresh_net(spec: NetSpec, data: Dataset, seed: int, device: str = "cpu") -> nets.Backbone:
    """The net of a spec for a data set, standardizing by the statistics of its train part."""
    sizes = data.input_shape, len(data.classes) or 1
    common: Options = {"task": data.task, "bounds": data.bounds}
    common["inputs"] = _units(data.train_x, spec.normalize)
    with refusing(f"options: expected those of {spec.kind!r}"):
        if spec.kind == "prototypes":
            frame = make_backbone("lifted", *sizes, blocks=0, **common).to(device)
            options: Options = {"generator": torch.Generator().manual_seed(seed)} | spec.options
            points = data.train_x, data.train_y
            return prototype_net(cast(nets.LiftedNet, frame), *points, **options)
        common |= {} if spec.kind in BLOCKLESS else {"blocks": spec.blocks}
        common |= {"seed": seed} | spec.options
        if spec.kind == "fc":
            return make_backbone("fc_resnet", *sizes, residual=spec.residual, **common)
        return make_backbone(spec.kind, *sizes, **common)


def fresh_metric(
    spec: MetricSpec, data: Dataset, seed: int, classifier: nets.Backbone | None
) -> nets.Metric:
    shape, options = data.input_shape, Options(bounds=data.bounds) | spec.options
    with refusing(f"options: expected those of {spec.kind!r}"):
        if classifier is not None:
            return nets.metric_of(classifier, **spec.options)
        if spec.kind == "pixels":
            options = Options(key_norm="free") | options
            return nets.PretrainedMetric(nn.Flatten(), input_shape=shape, **options)
        if spec.kind == "pretrained":  # levels of 0 to 255 are taken by (level - 127) / 128
            units: Options = {"mean": 127 / 255, "std": 128 / 255, "builder": spec.features}
            net = efficientnet_lite0()
            return nets.PretrainedMetric(net, input_shape=shape, **units, **options)
        fitted = _units(data.train_x, spec.normalize)
        units = {} if fitted is None else {"mean": fitted.mean, "std": fitted.std}
        made: Options = {"kind": spec.kind, "input_shape": shape, "seed": seed}
        return nets.build_metric(made | units | options)


def fresh_purifier(spec: PurifierSpec, net: nets.Backbone, seed: int) -> baselines.Purifier:
    options: Options = {"kind": spec.kind, "input_shape": net.input_shape, "bounds": net.bounds}
    options |= spec.options | ({} if spec.kind == "median_filter" else {"seed": seed})
    with refusing(f"options: expected those of {spec.kind!r}"):
        return baselines.Purifier.family.build(options)


def config_of(kind: type[C], settings: Options, **place: Any) -> C:
    """Training settings as a TOML file has them, where `adversary` is a table."""
    with refusing(f"train: expected settings of {kind.__name__}"):
        if "adversary" in settings:
            settings = settings | {"adversary": Adversary(**settings["adversary"])}
        return kind(**settings, **place)


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int | None]]:
    """Measure the largest memory in use on a GPU within the block, and that of the whole process so
    far, in bytes. The dictionary is filled at the end."""
    found: dict[str, int | None] = {}
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    found["device_memory"] = torch.cuda.max_memory_allocated(device) if on_cuda else None
    found["resident"] = resident_peak()


def _units(x: Tensor, normalize: str) -> Standardizer | None:
    """What a net standardizes its inputs by, from the train part x (N,...); None for nothing."""
    return None if normalize == "none" else Standardizer.fit(x, normalize)  # type: ignore[arg-type]
