"""`otad train`: from data to a trained network."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from otad import training
from otad.checks import check_device, require
from otad.cli import options as opt
from otad.cli.console import remark, show
from otad.cli.outputs import check_out
from otad.cli.sources import (
    RECORD_FILE,
    DataChoice,
    TrainedNet,
    describe_data,
    refuse_overwriting,
)
from otad.data import Dataset, Standardizer, names, split
from otad.data.encoding import TableEncoding
from otad.nets import Backbone
from otad.nets.files import NET_FILE
from otad.processes import is_first, works_together
from otad.scores import score_text
from otad.training import RECIPES, TrainConfig, TrainResult, fit_backbone
from otad.training.loop import CHECKPOINT
from otad.training.recipes import BACKBONES, usual_width

_reading = partial(opt.option, panel=opt.READING)
_training = partial(opt.option, panel=opt.TRAINING)
RESULTS = (NET_FILE, RECORD_FILE)
READING = ("target", "task", "features", "label", "drop", "genes", "normalize", "size", "resize",
           "test_fraction")  # fmt: skip
SHAPE = ("blocks", "hidden", "patch", "width", "heads", "stages")
MOVING = ("fc_resnet", "lifted", "vit")  # kinds of networks whose blocks transport their inputs
CHANGES = ("epochs", "batch_size", "learning_rate", "optimizer", "weight_decay", "energy_weight",
           "target_margin", "augment")  # fmt: skip


@works_together
def train(
    data: Annotated[
        str,
        opt.argument(
            "DATA",
            "Name of a data set such as digits, or a CSV, NPZ or .h5ad file, or an image folder.",
            **opt.among(names()),
        ),
    ],
    out: opt.OutFolder,
    force: opt.Force = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
    data_dir: opt.DataDir = None,
    target: Annotated[str | None, _reading("CSV: column to predict.")] = None,
    task: Annotated[str | None, _reading("CSV, NPZ: classification or regression.")] = None,
    features: Annotated[
        opt.Names, _reading("CSV: column to predict from. Repeatable.", show_default="all")
    ] = None,
    label: Annotated[str | None, _reading(".h5ad: obs column to predict.")] = None,
    drop: Annotated[
        opt.Names, _reading(".h5ad: leave out cells with this label. Repeatable.")
    ] = None,
    genes: Annotated[
        int | None, _reading(".h5ad: use this many genes, those of largest variance.")
    ] = None,
    normalize: Annotated[
        bool | None,
        _reading(
            ".h5ad: log-normalize.", "--normalize/--no-normalize", show_default="yes, counts only"
        ),
    ] = None,
    size: Annotated[
        int | None,
        _reading("Images: side to resize and crop to.", show_default="the size of the images"),
    ] = None,
    resize: Annotated[int | None, _reading("Images: shorter side before cropping.")] = None,
    test_fraction: Annotated[float | None, _reading("Share of the rows in the test part.")] = None,
    net: Annotated[
        str, _training(f"Kind of network: {', '.join(BACKBONES)}.", **opt.among(BACKBONES))
    ] = "fc_resnet",
    blocks: Annotated[
        int | None, _training("Number of blocks.", show_default="5; vit: 7; orthogonal: 12")
    ] = None,
    hidden: Annotated[
        int | None,
        _training(
            "Inner width of a block.",
            show_default="number of features, at most number of rows; lifted: 512, twice",
        ),
    ] = None,
    patch: Annotated[int | None, _training("vit: side of a patch.", show_default="4")] = None,
    width: Annotated[
        int | None,
        _training("vit: width of each token. orthogonal: channels.", show_default="384; 512"),
    ] = None,
    heads: Annotated[
        int | None, _training("vit: heads of each attention.", show_default="12")
    ] = None,
    stages: Annotated[
        int | None,
        _training("orthogonal: stages, each of which halves both sides.", show_default="1"),
    ] = None,
    recipe: Annotated[
        str | None,
        _training(f"Settings to start from: {', '.join(RECIPES)}.", show_default="fc; orthogonal"),
    ] = None,
    energy_weight: Annotated[
        float | None,
        _training("Weight of the transport energy.", "--alpha", show_default="fc: 0.01"),
    ] = None,
    epochs: Annotated[
        int | None,
        _training("Number of passes over the data.", show_default="fc: 30; orthogonal: 60"),
    ] = None,
    batch_size: Annotated[int | None, _training("Rows per step.", show_default="fc: 128")] = None,
    learning_rate: Annotated[
        float | None,
        _training("Highest learning rate.", show_default="fc: 0.05; orthogonal: 0.0005"),
    ] = None,
    optimizer: Annotated[
        str | None, _training("sgd, adamw or orthogonal_muon.", show_default="that of the recipe")
    ] = None,
    weight_decay: Annotated[
        float | None, _training("Weight decay.", show_default="fc: 0.0005")
    ] = None,
    target_margin: Annotated[
        float | None,
        _training(
            "orthogonal: certified radius to train for, in units of the inputs.",
            "--margin",
            show_default="0.5",
        ),
    ] = None,
    augment: Annotated[
        str | None,
        _training("Images: none, affine, light or strong.", show_default="that of the recipe"),
    ] = None,
    max_seconds: opt.MaxSeconds = None,
    validation: Annotated[
        float, _training("Share of the train part to hold out for validation.")
    ] = 0.0,
) -> None:
    """Train a residual network whose blocks move the data as little as possible.

    The training minimizes loss + alpha * transport energy. The network standardizes its
    inputs itself, unless it is orthogonal. Every epoch is saved, and after an
    interruption the same command resumes. Use --force to replace a finished network, or
    an interrupted training with other arguments.

    Text columns become one-hot columns, and missing text is a category of its own. A
    missing number becomes the median of the train part, and a further column marks it.

    A vision transformer needs --net vit --recipe vit_cifar10, and a GPU. An orthogonal
    network never stretches distances, and is trained for certified radii of --margin.
    To train on several processes, start the command by torchrun.

    Example: otad train digits --out digits-net

    Example: otad train digits --net orthogonal --width 64 --blocks 4 --stages 2 --out net

    Example: otad train wine.csv --target quality --task regression --out net

    Example: torchrun --nproc-per-node 2 -m otad train digits --out digits-net
    """
    options = locals()
    choice = DataChoice(data, seed, opt.given(options, READING))
    refuse_overwriting(out, choice.path_from(data_dir))
    check_out(out, force, results=RESULTS, started=CHECKPOINT)
    changes, recipe = opt.given(options, CHANGES), recipe or (net if net in RECIPES else "fc")
    if epochs is not None:  # a short training does not consist of warm-up alone
        changes["warmup"] = min(training.recipe(recipe).warmup, epochs / 2)
    config = training.recipe(recipe, **changes, seed=seed, device=device)
    asks = target_margin is None or config.loss == "soft_margin"
    require(asks, "margin", "none, as only the recipe orthogonal asks for margins", target_margin)
    expected = f"none or 0, as the network {net!r} transports nothing; {', '.join(MOVING)} do"
    require(net in MOVING or not energy_weight, "alpha", expected, energy_weight)
    check_device(device)
    dataset = choice.load(data_dir)
    if dataset.train_names and dataset.input_shape[:-2] == (1,):  # images (1, H, W) of a folder
        remark("note: all training images are gray, so they are read with one channel")
    how: dict[str, Any] = {"validation": validation, "kind": net, "max_seconds": max_seconds}
    shape = opt.given(options, SHAPE)
    if net == "lifted" and hidden is not None:
        shape["hidden"] = (hidden, hidden)
    how |= {"options": shape, "checkpoint_dir": out, "progress": True}
    how["replaces"] = RESULTS if force else ()
    trained, result = train_net(dataset, config, **how)
    if not is_first():
        return
    about = describe_data(dataset, choice)
    record = training_record(trained, result, config, about, validation)
    if not result.finished:
        record |= {"epochs_done": len(result.history), "epochs": config.epochs}
        title = f"Out of time after epoch {len(result.history)} of {config.epochs}"
        show(record, as_json, title=title, facts={"next": "the same command resumes"})
        return
    files = TrainedNet(trained, about).write(out, record)
    facts = {
        "data": f"{len(dataset.train_x)} train rows of shape {dataset.input_shape}",
        **{name.replace("_", " "): score_text(name, it) for name, it in record["final"].items()},
        **files,
        "next": f"otad defend {out} --out MODEL_DIR" + " --scope global" * (net == "orthogonal"),
    }
    record["net"] = files["net"]
    show(record, as_json, title=f"Trained on {dataset.name}", facts=facts)


def train_net(
    dataset: Dataset, config: TrainConfig, *, validation: float = 0.0, **options: Any
) -> tuple[Backbone, TrainResult]:
    """Inputs are standardized, tables by feature, images as one, except for an orthogonal network;
    `options` of `fit_backbone`. The width of the blocks of an fc_resnet is `usual_width` unless
    given."""
    x, y = dataset.train_x, dataset.train_y
    parts = [x, y] if validation == 0.0 else split(dataset, validation, config.seed)
    options |= {"task": dataset.task, "n_outputs": len(dataset.classes) or 1}
    if options.get("kind") != "orthogonal":
        names = dataset.feature_names or ()
        inputs = Standardizer.fit(x, "all" if x.dim() > 2 else "feature", names)
        if isinstance(dataset.preparation, TableEncoding):
            inputs = dataset.preparation.unscaled(inputs)
        options["inputs"] = inputs
    if options.get("kind", "fc_resnet") == "fc_resnet":
        usual = {"hidden": usual_width(dataset.input_shape, len(x))}
        options["options"] = usual | options.get("options", {})
    return fit_backbone(parts, config, bounds=dataset.bounds, **options)


def training_record(
    net: Backbone, result: TrainResult, config: TrainConfig, about: dict[str, Any], held: float
) -> dict[str, Any]:
    """Return a record in plain JSON; `held` is the share held out for validation."""
    last = result.final
    final = {"loss": last.loss, "energy": last.energy, f"train_{result.metric}": last.train_score}
    if last.val_score is not None:
        final[f"validation_{result.metric}"] = last.val_score
    return {
        **about,
        "net_config": net.config(),
        "train_config": asdict(config),
        "validation": held,
        "metric": result.metric,
        "final": final,
        "best_epoch": result.best_epoch,
        "seconds": sum(epoch.seconds for epoch in result.history),
        "history": [vars(epoch) for epoch in result.history],
    }
