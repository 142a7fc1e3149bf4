"""`otad train`: from data to a trained net."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from otad import transport
from otad.commands.console import show
from otad.commands.data_choice import DataChoice, describe_data
from otad.commands.net_files import NET_FILE, RECORD_FILE, TrainedNet, write_net
from otad.commands.options import READING, AsJson, DataDir, Device
from otad.data import Dataset, Standardizer, split
from otad.nets import Backbone, fc_resnet
from otad.transport import TrainConfig, TrainResult


def _reading(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=READING)


def _training(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel="Network and training")


def train(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A registered name (digits, mnist, red_wine, ...), or the path of a CSV, NPZ or "
            ".h5ad file or of an image folder with one subfolder a class.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the net and its checkpoints.", file_okay=False)
    ],
    seed: Annotated[int, typer.Option(help="Of split, weights and order of the rows.")] = 0,
    device: Device = "cpu",
    as_json: AsJson = False,
    data_dir: DataDir = None,
    target: Annotated[str | None, _reading("CSV: the column to predict.")] = None,
    task: Annotated[
        str | None, _reading("CSV: classification or regression. NPZ: overrules the type of y.")
    ] = None,
    features: Annotated[
        list[str] | None, _reading("CSV: a column to learn from. Repeatable.  [default: all]")
    ] = None,
    label: Annotated[str | None, _reading(".h5ad: the obs column to predict.")] = None,
    drop: Annotated[
        list[str] | None, _reading(".h5ad: leave out cells with this label. Repeatable.")
    ] = None,
    genes: Annotated[
        int | None, _reading(".h5ad: keep this many genes, those that vary most.")
    ] = None,
    size: Annotated[int | None, _reading("Images: side length to resize and crop to.")] = None,
    resize: Annotated[
        int | None, _reading("Images: shorter side before the crop, if not --size.")
    ] = None,
    test_fraction: Annotated[
        float | None, _reading("Share held out for testing where there is no test part.")
    ] = None,
    blocks: Annotated[int, _training("Residual blocks.")] = 5,
    hidden: Annotated[
        int | None, _training("Width inside a block; by default that of the input.")
    ] = None,
    alpha: Annotated[
        float, _training("Weight of the transport energy; more gives a smoother map.")
    ] = 0.01,
    epochs: Annotated[int, _training("Passes over the data.")] = 30,
    batch_size: Annotated[int, _training("Rows per step.")] = 128,
    learning_rate: Annotated[float, _training("Its highest value.")] = 0.05,
    optimizer: Annotated[str, _training("sgd or adamw.")] = "sgd",
    weight_decay: Annotated[float, _training("As the optimizer defines it.")] = 5e-4,
    validation: Annotated[
        float, _training("Share of the train part to watch the training by.")
    ] = 0.0,
) -> None:
    """Train a residual network whose blocks move the data as little as they must.

    Minimizes loss + alpha * transport energy; inputs are standardized inside the
    net. Every epoch is saved: after an interruption, the same command goes on.

    Example: otad train digits --out digits-net

    Example: otad train wine.csv --target quality --task regression --out net
    """
    given = {
        "target": target,
        "task": task,
        "features": features,
        "label": label,
        "drop": drop,
        "genes": genes,
        "size": size,
        "resize": resize,
        "test_fraction": test_fraction,
    }
    options = {name: value for name, value in given.items() if value not in (None, [])}
    choice = DataChoice(data, seed, options)
    config = TrainConfig(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        optimizer=optimizer,
        weight_decay=weight_decay,
        energy_weight=alpha,
        seed=seed,
        device=device,
    )
    dataset = choice.load(data_dir)
    net, result = train_net(
        dataset,
        config,
        blocks=blocks,
        hidden=hidden,
        validation=validation,
        checkpoint_dir=out,
        progress=True,
    )
    about = describe_data(dataset, choice)
    record = training_record(net, result, config, about, validation)
    write_net(out, TrainedNet(net, about), record)
    show(
        record | {"net": str(out / NET_FILE)},
        as_json,
        title=f"Trained on {dataset.name}",
        facts={
            "data": f"{len(dataset.train_x)} train rows of shape {dataset.input_shape}",
            **{name.replace("_", " "): f"{value:.4g}" for name, value in record["final"].items()},
            "net": str(out / NET_FILE),
            "record": str(out / RECORD_FILE),
            "next": f"otad defend {out} --out MODEL_DIR",
        },
    )


def train_net(
    dataset: Dataset,
    config: TrainConfig,
    *,
    blocks: int = 5,
    hidden: int | None = None,
    validation: float = 0.0,
    checkpoint_dir: Path | None = None,
    progress: bool = False,
) -> tuple[Backbone, TrainResult]:
    """A net for the data set, in its own units inside and out, and the history of its training.

    Inputs are standardized by the train part, tables per feature and images as a whole. Targets of
    a regression are standardized for the training, then its head takes over their units.
    """
    images = len(dataset.input_shape) > 1
    inputs = Standardizer.fit(dataset.train_x, "all" if images else "feature")
    net = fc_resnet(
        dataset.input_shape,
        len(dataset.classes) or 1,
        seed=config.seed,
        blocks=blocks,
        hidden=hidden,
        task=dataset.task,
        bounds=dataset.bounds,
        mean=inputs.mean,
        std=inputs.std,
    )
    if validation == 0.0:
        parts = [dataset.train_x, dataset.train_y]
    else:
        parts = list(split(dataset, validation, config.seed))
    if dataset.task == "regression":
        targets = Standardizer.fit(parts[1])
        parts[1::2] = [targets(values) for values in parts[1::2]]
    result = transport.train(net, parts, config, checkpoint_dir=checkpoint_dir, progress=progress)
    if dataset.task == "regression":
        result = _take_units(net, result, float(targets.mean), float(targets.std))
    return net, result


def _take_units(net: Backbone, result: TrainResult, mean: float, std: float) -> TrainResult:
    """Give the head the units of the targets; the history with squared errors in them."""
    net.head.take_units(mean, std)
    square = std * std
    history = tuple(
        replace(
            epoch,
            loss=square * epoch.loss,
            train_score=square * epoch.train_score,
            val_score=None if epoch.val_score is None else square * epoch.val_score,
        )
        for epoch in result.history
    )
    return replace(result, history=history)


def training_record(
    net: Backbone,
    result: TrainResult,
    config: TrainConfig,
    about: dict[str, Any],
    validation: float = 0.0,
) -> dict[str, Any]:
    """All about a training, in plain JSON."""
    last = result.final
    final = {"loss": last.loss, "energy": last.energy, f"train_{result.metric}": last.train_score}
    if last.val_score is not None:
        final[f"validation_{result.metric}"] = last.val_score
    return {
        **about,
        "net_config": net.config(),
        "train_config": asdict(config),
        "validation": validation,
        "metric": result.metric,
        "final": final,
        "best_epoch": result.best_epoch,
        "seconds": sum(epoch.seconds for epoch in result.history),
        "history": [vars(epoch) for epoch in result.history],
    }
