"""The nets of an experiment: made, trained or taken from the work folder, and given a bank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from otad.codec import digest_of
from otad.data import Dataset, Standardizer, holdout
from otad.defense import OTAD, defend
from otad.errors import InputError
from otad.experiments.config import NetSpec
from otad.experiments.records import Candidate
from otad.nets import Backbone, fc_resnet, lifted_net
from otad.prototypes import PrototypeNet, prototype_net
from otad.transport import TrainConfig, TrainResult, train
from otad.transport.checkpoint import fingerprint

Report = Callable[[int, int], None]


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
    """A net, how it was trained and on what; `identity` names weights and data.

    `result` is None for a net that was not trained at all.
    """

    net: Backbone
    result: TrainResult | None
    config: TrainConfig
    data: Dataset
    identity: dict[str, str]
    candidates: tuple[Candidate, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.result.history) if self.result else 0.0

    @property
    def train_score(self) -> float | None:
        return self.result.final.train_score if self.result else None

    def base(self, report: Report) -> OTAD:
        """The bank of the train part behind the plainest OTAD; rows put their settings on it.

        Prototypes bring a bank of their own.
        """
        x, y = self.data.train_x, self.data.train_y
        if isinstance(self.net, PrototypeNet):
            return OTAD(self.net, self.net.bank(), n_neighbors=1).eval()
        return defend(self.net, x, y, n_neighbors=1, progress=report)


def train_net(
    spec: NetSpec,
    source: Source,
    settings: dict[str, Any],
    *,
    seed: int,
    device: str,
    folder: Path,
    report: Report,
) -> Trained:
    """Train by `settings`, with a checkpoint below `folder`, or go on from it."""
    try:
        config = TrainConfig(**settings, seed=seed, device=device)
    except TypeError as error:
        raise InputError(f"train: expected settings of TrainConfig, got: {error}") from error
    data, net = source.data, fresh_net(spec, source.data, seed, device)
    if spec.untrained:
        return Trained(net.eval(), None, config, data, _identity(net, source))
    depends = {"net": net.config(), "normalize": spec.normalize, "config": asdict(config)}
    result = train(
        net,
        (data.train_x, data.train_y),
        config,
        checkpoint_dir=folder / digest_of(depends | {"data": source.fingerprint}),
        progress=lambda record: report(record.epoch, config.epochs),
    )
    report(config.epochs, config.epochs)
    return Trained(net, result, config, data, _identity(net, source))


def _identity(net: Backbone, source: Source) -> dict[str, str]:
    return {"weights": fingerprint(net.state_dict()), "data": source.fingerprint}


def fresh_net(spec: NetSpec, data: Dataset, seed: int, device: str = "cpu") -> Backbone:
    """The net of a spec for a data set, normalizing by the statistics of its train part."""
    mean, std = torch.tensor(0.0), torch.tensor(1.0)
    if spec.normalize != "none":
        fitted = Standardizer.fit(data.train_x, spec.normalize)  # type: ignore[arg-type]
        mean, std = fitted.mean, fitted.std
    shape, outputs = data.input_shape, len(data.classes) or 1
    common: dict[str, Any] = {"task": data.task, "bounds": data.bounds, "mean": mean, "std": std}
    try:
        if spec.kind == "fc":
            own = {"blocks": spec.blocks, "residual": spec.residual}
            return fc_resnet(shape, outputs, seed=seed, **own, **common, **spec.options)
        if spec.kind == "lifted":
            return lifted_net(
                shape, outputs, seed=seed, blocks=spec.blocks, **common, **spec.options
            )
        frame = lifted_net(shape, outputs, blocks=0, **common).to(device)
        generator = torch.Generator().manual_seed(seed)
        return prototype_net(frame, data.train_x, data.train_y, generator=generator, **spec.options)
    except TypeError as error:
        raise InputError(f"options: expected those of {spec.kind!r}, got: {error}") from error
