"""What the record of an experiment says of its data and of what was learned."""

from __future__ import annotations

from dataclasses import asdict

from torch import nn

from otad.experiments.learned_records import MetricRecord, SurrogateRecord
from otad.experiments.records import DataRecord, NetRecord
from otad.experiments.study import Study


def data_record(study: Study, key: str) -> DataRecord:
    source = study.source(key)
    return DataRecord(
        name=source.data.name,
        options=study.experiment.data[key].options,
        train_size=len(source.data.train_x),
        test_size=len(source.data.test_x),
        input_shape=source.data.input_shape,
        classes=len(source.data.classes),
        fingerprint=source.fingerprint,
        source=source.data.source,
    )


def net_record(study: Study, key: str) -> NetRecord:
    spec, trained = study.experiment.nets[key], study.net(key)
    return NetRecord(
        data=spec.data,
        blocks=spec.blocks,
        residual=spec.residual,
        normalize=spec.normalize,
        train=asdict(trained.config),
        train_score=trained.train_score,
        weights=trained.identity["weights"],
        seconds=trained.seconds,
        regularity=study.regularity(key),
        candidates=trained.candidates,
        kind=spec.kind,
        options=spec.options,
        recipe=spec.recipe,
        bank=spec.bank,
        resident=spec.resident,
    )


def metric_record(study: Study, key: str) -> MetricRecord:
    spec, trained = study.experiment.metrics[key], study.metric(key)
    return MetricRecord(
        data=spec.data,
        kind=spec.kind,
        normalize=spec.normalize,
        features=spec.features,
        options=spec.options,
        train=None if trained.config is None else asdict(trained.config),
        train_score=trained.train_score,
        parameters=_parameters(trained.metric),
        key_dim=trained.metric.key_dim,
        lipschitz=trained.metric.lipschitz,
        weights=trained.weights,
        seconds=trained.seconds,
    )


def surrogate_record(study: Study, key: str) -> SurrogateRecord:
    spec, trained = study.experiment.surrogates[key], study.surrogate(key)
    return SurrogateRecord(
        row=spec.row,
        alpha=spec.alpha,
        options=spec.options,
        train=asdict(trained.config),
        held_out=spec.held_out,
        error=trained.error,
        held_out_error=trained.held_out_error,
        parameters=_parameters(trained.net),
        weights=trained.weights,
        seconds=trained.seconds,
    )


def _parameters(net: nn.Module) -> int:
    return sum(weight.numel() for weight in net.parameters())
