"""The surrogates of an experiment: CIP-nets that learn the answers of a row of OTAD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from otad.cip.surrogate import CIP_NET_RECIPE, CipNet, CipNetConfig
from otad.errors import InputError
from otad.experiments.kept import SAVE_SECONDS, Deadline, Tick, learned_once
from otad.experiments.nets import FOREVER, identity_of, refuse_unfinished, told
from otad.experiments.part_specs import SurrogateSpec
from otad.io.codec import digest_of
from otad.model.imitation import imitate
from otad.model.otad import OTAD

Report = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class TrainedSurrogate:
    """A CIP-net and how it was trained; `identity` names it. Errors are the mean |CIP-net - QCP|^2
    in units of the spread of features among neighbors (see `CipNetResult`)."""

    net: CipNet
    config: CipNetConfig
    identity: dict[str, str]
    error: float | None
    held_out_error: float | None
    seconds: float

    @property
    def weights(self) -> str:
        return self.identity["weights"]


def trained_surrogate(
    spec: SurrogateSpec,
    model: OTAD,
    depends: dict[str, Any],
    *,
    seed: int,
    device: str,
    folder: Path,
    report: Report,
    deadline: Deadline = FOREVER,
) -> TrainedSurrogate:
    """Learn the answers of `model`, which `depends` names, at points of its own bank, in a folder
    below `folder`; or go on there, or take what is finished."""
    config = surrogate_config(spec.train, seed=seed, device=device)
    net = fresh_surrogate(spec, model, seed)
    own = {"net": net.config(), "config": asdict(config), "alpha": spec.alpha}
    place = folder / digest_of(own | {"held_out": spec.held_out} | depends)

    def learn(tick: Tick) -> dict[str, Any]:
        result = imitate(
            model,
            config,
            net=net,
            alpha=spec.alpha,
            held_out=spec.held_out,
            checkpoint_dir=place,
            save_seconds=SAVE_SECONDS,
            max_seconds=deadline.left,
            progress=lambda record: told(record.epoch, record.seconds, tick, report, config),
        ).result
        refuse_unfinished(len(result.history), config)
        last = result.history[-1]
        return {"error": last.error, "held_out_error": last.held_out_error}

    learned = learned_once(place, net, learn)
    report(config.epochs, config.epochs)
    net = net.to(device).eval()
    identity = identity_of(net)
    return TrainedSurrogate(net, config, identity, **learned.facts, seconds=learned.seconds)


def surrogate_config(
    settings: dict[str, Any], *, seed: int = 0, device: str = "cpu"
) -> CipNetConfig:
    """The recipe of CIP-net with settings as a TOML file has them."""
    try:
        return replace(CIP_NET_RECIPE, **settings, seed=seed, device=device)
    except TypeError as error:
        raise InputError(f"train: expected settings of CipNetConfig, got: {error}") from error


def fresh_surrogate(spec: SurrogateSpec, model: OTAD, seed: int) -> CipNet:
    generator = torch.Generator().manual_seed(seed)
    sizes = model.backbone.dim, model.n_neighbors
    try:
        return CipNet(*sizes, generator=generator, **spec.options)
    except TypeError as error:
        raise InputError(f"options: expected those of CipNet, got: {error}") from error
