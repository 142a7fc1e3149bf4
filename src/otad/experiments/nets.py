"""The nets of an experiment: made, trained or taken from the work folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from otad.cip.surrogate import CipNet
from otad.data import Dataset, Standardizer, holdout
from otad.errors import InputError
from otad.experiments.kept import (
    SAVE_SECONDS,
    Deadline,
    Learned,
    Tick,
    UnfinishedError,
    learned_once,
)
from otad.experiments.part_specs import NetSpec
from otad.experiments.records import Candidate
from otad.io.codec import digest_of
from otad.io.tensor_files import fingerprint
from otad.model.prototypes import prototype_net
from otad.nets import Backbone, LiftedNet, Metric
from otad.training import TrainConfig, TrainResult, make_backbone, train
from otad.training.config import LoopConfig

Report = Callable[[int, int], None]
FOREVER = Deadline(None)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set with the fingerprint of its contents."""

    data: Dataset
    fingerprint: str

    def validation_part(self, share: float, seed: int) -> Source:
        """The train part alone, cut in two: a share of it stands in for the test part."""
        data = self.data
        kept, held = holdout(data.train_y, share, seed, task=data.task)
        part = replace(
            data,
            train_x=data.train_x[kept],
            train_y=data.train_y[kept],
            test_x=data.train_x[held],
            test_y=data.train_y[held],
        )
        return Source(part, digest_of({"of": self.fingerprint, "share": share, "seed": seed}))


@dataclass(frozen=True, eq=False)
class Trained:
    """A net, how it was trained and on what; `identity` names the net and the data.

    `train_score` is None for a net that was not trained at all.
    """

    net: Backbone
    config: TrainConfig
    data: Dataset
    identity: dict[str, str]
    train_score: float | None = None
    seconds: float = 0.0
    candidates: tuple[Candidate, ...] = ()


def train_net(
    spec: NetSpec,
    source: Source,
    settings: dict[str, Any],
    *,
    seed: int,
    device: str,
    folder: Path,
    report: Report,
    deadline: Deadline = FOREVER,
) -> Trained:
    """Train by `settings` in a folder below `folder`, go on there, or take what is finished."""
    try:
        config = TrainConfig(**settings, seed=seed, device=device)
    except TypeError as error:
        raise InputError(f"train: expected settings of TrainConfig, got: {error}") from error
    data, net = source.data, fresh_net(spec, source.data, seed, device)
    if spec.untrained:
        return Trained(net.eval(), config, data, identity_of(net, source))
    made = net.config() | spec.options  # by which prototypes are drawn, too
    depends = {"net": made, "normalize": spec.normalize, "config": asdict(config)}
    place = folder / digest_of(depends | {"data": source.fingerprint})

    learned = learn_by(train, net, data, config, place, deadline, report)
    return Trained(
        net.to(device).eval(),
        config,
        data,
        identity_of(net, source),
        learned.facts["train_score"],
        learned.seconds,
    )


def learn_by(
    trainer: Callable[..., TrainResult],
    net: nn.Module,
    data: Dataset,
    config: LoopConfig,
    place: Path,
    deadline: Deadline,
    report: Report,
) -> Learned:
    """Train a net or a metric on the train part in the folder `place`, or take what is there."""

    def learn(tick: Tick) -> dict[str, Any]:
        result = trainer(
            net,
            (data.train_x, data.train_y),
            config,
            checkpoint_dir=place,
            save_seconds=SAVE_SECONDS,
            max_seconds=deadline.left,
            progress=lambda record: told(record.epoch, record.seconds, tick, report, config),
        )
        refuse_unfinished(len(result.history), config)
        return {"train_score": result.final.train_score}

    learned = learned_once(place, net, learn)
    report(config.epochs, config.epochs)
    return learned


def told(epoch: int, seconds: float, tick: Tick, report: Report, config: LoopConfig) -> None:
    """An epoch is done: keep its time, move the bar."""
    tick(epoch, seconds)
    report(epoch, config.epochs)


def refuse_unfinished(epochs: int, config: LoopConfig) -> None:
    if epochs < config.epochs:
        raise UnfinishedError(
            f"out of time after epoch {epochs} of {config.epochs}; the same command goes on there"
        )


def identity_of(net: Backbone | Metric | CipNet, source: Source | None = None) -> dict[str, str]:
    """What names a net: its weights, its settings, as weights do not show all, and its data."""
    named = {"weights": fingerprint(net.state_dict()), "config": digest_of(net.config())}
    return named if source is None else named | {"data": source.fingerprint}


def input_units(x: Tensor, normalize: str) -> Standardizer | None:
    """What a net standardizes its inputs by, of the train part x (N,...); None for nothing."""
    return None if normalize == "none" else Standardizer.fit(x, normalize)  # type: ignore[arg-type]


def fresh_net(spec: NetSpec, data: Dataset, seed: int, device: str = "cpu") -> Backbone:
    """The net of a spec for a data set, standardizing by the statistics of its train part."""
    options: dict[str, Any] = {"task": data.task, "bounds": data.bounds}
    options["inputs"] = input_units(data.train_x, spec.normalize)
    shape, outputs = data.input_shape, len(data.classes) or 1
    if spec.kind != "prototypes":
        options |= {"seed": seed, "blocks": spec.blocks} | spec.options
        if spec.kind == "fc":
            options["residual"] = spec.residual
        kind = "fc_resnet" if spec.kind == "fc" else spec.kind
        return make_backbone(kind, shape, outputs, **options)
    frame = cast(LiftedNet, make_backbone("lifted", shape, outputs, blocks=0, **options)).to(device)
    generator = torch.Generator().manual_seed(seed)
    try:
        return prototype_net(frame, data.train_x, data.train_y, generator=generator, **spec.options)
    except TypeError as error:
        raise InputError(f"options: expected those of {spec.kind!r}, got: {error}") from error
