"""`otad train`: from data to a trained net."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from otad import training
from otad.cli import options as opt
from otad.cli.console import show
from otad.cli.sources import (
    NET_FILE,
    RECORD_FILE,
    DataChoice,
    TrainedNet,
    describe_data,
    refuse_overwriting,
)
from otad.data import Dataset, Standardizer, split
from otad.nets import Backbone
from otad.training import RECIPES, TrainConfig, TrainResult, fit_backbone


def _reading(help: str, *names: str, **more: Any) -> Any:
    return opt.panel_option(opt.READING, help, *names, **more)


def _training(help: str) -> Any:
    return opt.panel_option(opt.TRAINING, help)


def train(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A registered name (digits, mnist, red_wine, ...), or the path of a CSV, NPZ or "
            ".h5ad file or of an image folder with one subfolder per class.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the net and its checkpoints.", file_okay=False)
    ],
    seed: Annotated[
        int, opt.seed_option("Seed of the split, the weights and the order of the rows.")
    ] = 0,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
    data_dir: opt.DataDir = None,
    target: Annotated[str | None, _reading("CSV: the column to predict.")] = None,
    task: Annotated[
        str | None, _reading("CSV: classification or regression. NPZ: overrides the type of y.")
    ] = None,
    features: Annotated[
        list[str] | None, _reading("CSV: a column to learn from. Repeatable.  [default: all]")
    ] = None,
    label: Annotated[str | None, _reading(".h5ad: the obs column to predict.")] = None,
    drop: Annotated[
        list[str] | None, _reading(".h5ad: leave out cells with this label. Repeatable.")
    ] = None,
    genes: Annotated[
        int | None, _reading(".h5ad: use this many genes, those of largest variance.")
    ] = None,
    normalize: Annotated[
        bool | None,
        _reading(
            ".h5ad: divide counts by the total of their cell and take logarithms; not for values "
            "that are already normalized.  [default: --normalize]",
            "--normalize/--no-normalize",
            show_default=False,
        ),
    ] = None,
    size: Annotated[int | None, _reading("Images: side length to resize and crop to.")] = None,
    resize: Annotated[
        int | None, _reading("Images: shorter side before the crop, if not --size.")
    ] = None,
    test_fraction: Annotated[
        float | None, _reading("Share held out for testing where there is no test part.")
    ] = None,
    net: Annotated[str, _training("fc_resnet, or for images vit.")] = "fc_resnet",
    blocks: Annotated[int | None, _training("Residual blocks.  [default: 5; vit: 7]")] = None,
    hidden: Annotated[
        int | None, _training("Width inside a block; by default that of the input.")
    ] = None,
    patch: Annotated[int | None, _training("vit: side of a patch.  [default: 4]")] = None,
    width: Annotated[int | None, _training("vit: of each token.  [default: 384]")] = None,
    heads: Annotated[int | None, _training("vit: of each attention.  [default: 12]")] = None,
    recipe: Annotated[
        str, _training(f"Settings that the options below change: {', '.join(RECIPES)}.")
    ] = "fc",
    alpha: Annotated[
        float | None,
        _training("Weight of the transport energy; more gives a smoother map.  [fc: 0.01]"),
    ] = None,
    epochs: Annotated[int | None, _training("Passes over the data.  [fc: 30]")] = None,
    batch_size: Annotated[int | None, _training("Rows per step.  [fc: 128]")] = None,
    learning_rate: Annotated[float | None, _training("Its highest value.  [fc: 0.05]")] = None,
    optimizer: Annotated[str | None, _training("sgd or adamw.  [fc: sgd]")] = None,
    weight_decay: Annotated[
        float | None, _training("As the optimizer defines it.  [fc: 0.0005]")
    ] = None,
    max_seconds: Annotated[
        float | None, _training("Stop in time; the same command resumes the training.")
    ] = None,
    validation: Annotated[
        float, _training("Share of the train part held out for validation.")
    ] = 0.0,
) -> None:
    """Train a residual network whose blocks move the data as little as possible.

    Minimizes loss + alpha * transport energy; inputs are standardized inside the
    net. Every epoch is saved: after an interruption, the same command resumes.
    A vision transformer needs --net vit --recipe vit_cifar10, and a GPU.

    Example: otad train digits --out digits-net

    Example: otad train wine.csv --target quality --task regression --out net
    """
    reading = {
        "target": target,
        "task": task,
        "features": features,
        "label": label,
        "drop": drop,
        "genes": genes,
        "normalize": normalize,
        "size": size,
        "resize": resize,
        "test_fraction": test_fraction,
    }
    choice = DataChoice(data, seed, opt.given(reading))
    refuse_overwriting(out, choice.path_from(data_dir))
    changes: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "energy_weight": alpha,
    }
    if epochs is not None:  # a short training is not all warm-up
        changes["warmup"] = min(training.recipe(recipe).warmup, epochs / 2)
    config = training.recipe(recipe, **opt.given(changes), seed=seed, device=device)
    opt.check_device(device)
    shape = {"blocks": blocks, "hidden": hidden, "patch": patch, "width": width, "heads": heads}
    dataset = choice.load(data_dir)
    trained, result = train_net(
        dataset,
        config,
        kind=net,
        **opt.given(shape),
        validation=validation,
        checkpoint_dir=out,
        max_seconds=max_seconds,
        progress=True,
    )
    about = describe_data(dataset, choice)
    record = training_record(trained, result, config, about, validation)
    if not result.finished:
        done = {"epochs_done": len(result.history), "epochs": config.epochs}
        title = f"Out of time after epoch {len(result.history)} of {config.epochs}"
        show(record | done, as_json, title=title, facts={"next": "the same command resumes"})
        return
    TrainedNet(trained, about).write(out, record)
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
    kind: str = "fc_resnet",
    validation: float = 0.0,
    checkpoint_dir: Path | None = None,
    max_seconds: float | None = None,
    progress: bool = False,
    **shape: int,
) -> tuple[Backbone, TrainResult]:
    """A net for the data set, in its own units inside and out, and the history of its training.

    `shape` holds options of the net, which `kind` names. Inputs are standardized by the train
    part, tables per feature and images as a whole.
    """
    images = len(dataset.input_shape) > 1
    if validation == 0.0:
        parts = [dataset.train_x, dataset.train_y]
    else:
        parts = list(split(dataset, validation, config.seed))
    return fit_backbone(
        parts,
        config,
        kind=kind,
        task=dataset.task,
        n_outputs=len(dataset.classes) or 1,
        bounds=dataset.bounds,
        inputs=Standardizer.fit(dataset.train_x, "all" if images else "feature"),
        options=shape,
        checkpoint_dir=checkpoint_dir,
        max_seconds=max_seconds,
        progress=progress,
    )


def training_record(
    net: Backbone,
    result: TrainResult,
    config: TrainConfig,
    about: dict[str, Any],
    validation: float = 0.0,
) -> dict[str, Any]:
    """A training, in plain JSON."""
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
