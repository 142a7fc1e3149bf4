"""Short trainings: each takes data, and a function that may change the first weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden.arrays import MODELS, Arrays, as_array
from torch import Tensor, nn
from typer.testing import CliRunner

# names that moved are changed here alone
import otad
from otad import OTADClassifier, OTADRegressor
from otad.cip.surrogate import CipNet, CipNetConfig
from otad.cli.main import main as commands
from otad.cli.sources import TrainedNet
from otad.data import subset_per_class
from otad.io.mapped_rows import gathered
from otad.model.bank import FeatureBank
from otad.model.imitation import imitate
from otad.model.prototypes import prototype_net
from otad.nets import (
    CNNMetric,
    LipschitzMetric,
    fc_resnet,
    lifted_net,
    vision_transformer,
)
from otad.training import MetricConfig, TrainConfig, train, train_metric
from otad.training.adversary import Adversary

CLASSES, DIM, IMAGE = 3, 6, (1, 8, 8)
Change = Callable[[nn.Module], None]


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in net.state_dict().items() if value.is_floating_point()}


def history_of(result: Any) -> dict[str, Any]:
    return {"loss": [epoch.loss for epoch in result.history]}


def backbone_start() -> Any:
    return fc_resnet((DIM,), CLASSES, blocks=2, hidden=7, seed=31)


def cip_net_config(epochs: int) -> CipNetConfig:
    return CipNetConfig(
        epochs=epochs,
        batch_size=16,
        learning_rate=0.05,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.0,
        gradient_clip=0.0,
    )


BACKBONE_CONFIG = TrainConfig(
    epochs=5, batch_size=16, learning_rate=0.02, energy_weight=0.05, warmup=1.0, ema=0.5
)


def train_backbone(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    net = backbone_start()
    change(net)
    result = train(net, (data["x"], data["y"]), BACKBONE_CONFIG, **options)
    return weights_of(net) | history_of(result) | {"resumed": result.resumed_after}


def train_for_margins(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = lifted_net((DIM,), CLASSES, blocks=1, hidden=(7,), seed=32)
    change(net)
    config = TrainConfig(
        epochs=5,
        batch_size=15,
        learning_rate=3e-3,
        optimizer="adamw",
        loss="margin",
        pair_weight=0.1,
        decay_on="matrices",
        gradient_clip=1.0,
        schedule="step",
    )
    result = train(net, (data["x"], data["y"]), config)
    return weights_of(net) | history_of(result)


def train_vit(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    sizes = {"patch": 4, "width": 4, "blocks": 1, "heads": 2, "hidden": 4}
    net = vision_transformer(IMAGE, CLASSES, seed=33, bounds=(0.0, 1.0), **sizes)
    change(net)
    config = TrainConfig(
        epochs=5, batch_size=15, learning_rate=0.02, energy_weight=0.1, label_smoothing=0.1
    )
    result = train(net, (data["images"], data["kinds"]), config)
    return weights_of(net) | history_of(result)


def train_values(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = fc_resnet((DIM,), 1, blocks=2, hidden=7, seed=34, task="regression")
    change(net)
    config = TrainConfig(epochs=5, batch_size=16, learning_rate=0.01, energy_weight=0.05)
    parts = (data["numbers"], data["t"], data["numbers"][:9], data["t"][:9])
    result = train(net, parts, config)
    scores = {"scores": [epoch.val_score for epoch in result.history]}
    return weights_of(net) | history_of(result) | scores


def metric_start() -> Any:
    return CNNMetric(IMAGE, widths=(4, 4), key_dim=4, bounds=(0.0, 1.0), mean=0.5)


METRIC_CONFIG = MetricConfig(
    epochs=5, batch_size=15, learning_rate=1e-2, optimizer="sgd", n_neighbors=3
)


def train_key_net(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    net = metric_start()
    change(net)
    result = train_metric(net, (data["images"], data["kinds"]), METRIC_CONFIG, **options)
    return weights_of(net) | history_of(result) | {"resumed": result.resumed_after}


def train_robust_key_net(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    net = LipschitzMetric(IMAGE, widths=(8, 8), depth=1, key_dim=4, bounds=(0.0, 1.0))
    change(net)
    config = MetricConfig(
        epochs=5,
        batch_size=15,
        learning_rate=1e-2,
        optimizer="sgd",
        adversary=Adversary(0.2, steps=2, weight_share=0.01),
        references="bank",
        n_neighbors=3,
    )
    result = train_metric(net, (data["images"], data["kinds"]), config)
    return weights_of(net) | history_of(result)


def train_imitation(data: Mapping[str, Tensor], change: Change, **options: Any) -> dict[str, Any]:
    model = otad.load(MODELS / "local")
    net = CipNet(DIM, 5, width=8, blocks=1, heads=2, generator=torch.Generator().manual_seed(35))
    change(net)
    result = imitate(model, cip_net_config(5), net=net, held_out=6, **options).result
    missed = {"missed": [epoch.held_out_error for epoch in result.history]}
    return weights_of(net) | history_of(result) | missed | {"resumed": result.resumed_after}


def train_prototypes(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    bare = lifted_net((DIM,), CLASSES, blocks=0)
    net = prototype_net(bare, data["x"], data["y"], per_class=6, neighbors=3)
    change(net)
    config = TrainConfig(epochs=5, batch_size=15, learning_rate=0.05, loss="margin")
    result = train(net, (data["x"], data["y"]), config)
    return weights_of(net) | history_of(result)


SETTINGS = {"n_neighbors": 4, "n_blocks": 1, "hidden": 8, "epochs": 5, "random_state": 0}


def fit_classifier(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    x, names = data["x"].numpy(), np.array(["a", "b", "c"])[data["y"].numpy()]
    found = {}
    for scope in ("local", "global"):
        model = OTADClassifier(scope=scope, optimizer="sgd", **SETTINGS).fit(x, names)
        asked = x[:8] + 0.3
        found[f"{scope}/shares"] = model.predict_proba(asked)
        found[f"{scope}/labels"] = model.predict(asked)
        found[f"{scope}/radius"] = model.certify(asked).radius
        found[f"{scope}/loss"] = [epoch.loss for epoch in model.history_]
    return found


def fit_regressor(data: Mapping[str, Tensor], change: Change) -> dict[str, Any]:
    x, y = data["numbers"].numpy(), data["t"].numpy()
    found = {}
    for scope in ("local", "global"):
        model = OTADRegressor(scope=scope, optimizer="sgd", **SETTINGS).fit(x, y)
        asked = x[:8] + 0.3
        found[f"{scope}/values"] = model.predict(asked)
        interval = model.certify(asked, 0.1)
        found[f"{scope}/low"], found[f"{scope}/high"] = interval.low, interval.high
    return found


TRAININGS: dict[str, Callable[..., dict[str, Any]]] = {
    "backbone": train_backbone,
    "margins": train_for_margins,
    "vit": train_vit,
    "regression": train_values,
    "metric": train_key_net,
    "robust_metric": train_robust_key_net,
    "cip_net": train_imitation,
    "prototypes": train_prototypes,
    "classifier": fit_classifier,
    "regressor": fit_regressor,
}
# Those whose run, stopped after its first epoch, is kept on disk to go on from there.
RESUMED = ("backbone", "metric", "cip_net")


def training_answers(
    name: str, data: Mapping[str, Tensor], change: Change, **options: Any
) -> Arrays:
    found = TRAININGS[name](data, change, **options)
    return {f"{name}/{part}": as_array(value) for part, value in found.items()}


def net_of_command(folder: Path) -> nn.Module:
    """The net in a folder of `otad train`."""
    return TrainedNet.read(folder).net


def run_command(*arguments: object) -> str:
    """What an `otad` command prints."""
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    if result.exit_code != 0:
        raise RuntimeError(f"{result.output}\n{result.exception!r}")
    return result.stdout


def command_answers(folder: Path, out: Path, x: Tensor) -> Arrays:
    """The net that `otad train` wrote, and the model that `otad defend` makes of it."""
    net = net_of_command(folder)
    run_command("defend", folder, "--out", out, "--neighbors", 4, "--data-dir", folder)
    model = otad.load(out)
    return {
        "net": as_array(net(x)),
        "model": as_array(model(x)),
        "classes": as_array(model.notes["classes"]),
    }


def bank_answers(path: Path) -> Arrays:
    """A bank from its file, mapped and in memory."""
    found: Arrays = {}
    for name, mmap in (("mapped", True), ("read", False)):
        bank = FeatureBank.load(path, mmap=mmap)
        rows = torch.tensor([[0, 3], [44, 7]])
        chosen = subset_per_class(bank.labels, 4, torch.Generator().manual_seed(1))
        some = bank.select(chosen)
        for part, tensor in (("inputs", bank.inputs), ("features", bank.features)):
            found[f"{name}/{part}"] = gathered(tensor, rows).float().numpy()
        found |= {f"{name}/labels": bank.labels.numpy(), f"{name}/subset": some.inputs.numpy()}
        found[f"{name}/fingerprint"] = as_array(bank.fingerprint)
    return found
