"""`otad imitate`: replace the solver of a model with a network (OTAD-T-NN)."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from otad.cli import options as opt
from otad.cli.console import remark, show
from otad.cli.inputs import open_inputs
from otad.cli.outputs import check_out
from otad.cli.sources import data_note, open_model, refuse_overwriting
from otad.errors import InputError
from otad.evaluate.identity import DEFENDED, NET
from otad.model.folder import CARD, refuse_foreign_card
from otad.model.imitation import Imitation, fresh_net, recipe_for
from otad.model.imitation import imitate as imitate_model
from otad.model.otad import OTAD
from otad.report.assessment import Assessment, assess
from otad.scores import score_text

_training = partial(opt.option, panel=opt.TRAINING)
CHANGES = ("epochs", "batch_size", "learning_rate", "mixed_precision", "seed")
SHAPE = ("width", "blocks", "heads", "readout", "seed")
HOW = ("alpha", "held_out", "cached", "save_seconds", "max_seconds")


def imitate(
    model_dir: opt.ModelDir,
    out: opt.OutFolder,
    force: opt.Force = False,
    data_dir: opt.DataDir = None,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
    width: Annotated[
        int | None, _training("Width of each token.", show_default="from the number of features")
    ] = None,
    blocks: Annotated[int, _training("Blocks of the transformer.")] = 6,
    heads: Annotated[int, _training("Heads of each attention.")] = 16,
    readout: Annotated[
        str, _training("free, hull for means of the features of the neighbors, or plain.")
    ] = "free",
    alpha: Annotated[
        float,
        _training("Share of exact answers in the target; the rest are the network's features."),
    ] = 1.0,
    epochs: Annotated[
        int | None, _training("Number of passes over the bank.", show_default="20")
    ] = None,
    batch_size: Annotated[int | None, _training("Rows per step.", show_default="256")] = None,
    learning_rate: Annotated[
        float | None, _training("Highest learning rate.", show_default="0.0003")
    ] = None,
    mixed_precision: Annotated[
        bool | None,
        _training(
            "Compute in bfloat16.", "--mixed-precision/--full-precision", show_default="on a GPU"
        ),
    ] = None,
    held_out: Annotated[int, _training("Number of random bank points that measure the error.")] = 0,
    cached: Annotated[
        bool,
        _training("Solve each problem once, or again in every epoch.", "--solve-once/--solve-anew"),
    ] = True,
    save_seconds: Annotated[float, _training("Seconds between checkpoints.")] = 60.0,
    max_seconds: opt.MaxSeconds = None,
) -> None:
    """Train a network that replaces the solver of a model, test both, and save it.

    The network (CIP-net) learns the exact answers for the training points of the
    model. Each training point is answered from its neighbors other than itself. The new
    model has no weights and no certificates, and it is not always faster. After an
    interruption, the same command resumes.

    Example: otad imitate digits-model --out digits-nn

    Example: otad imitate vit-model --out vit-nn --device cuda --max-seconds 500
    """
    options = locals()
    changes, shape, how = (opt.given(options, names) for names in (CHANGES, SHAPE, HOW))
    refuse_overwriting(out, model_dir)
    refuse_foreign_card(out)
    check_out(out, force, results=[CARD])
    model = open_model(model_dir, device, data_dir, None)
    if epochs is not None:
        changes["warmup"] = min(recipe_for(model).warmup, epochs / 2)
    config = replace(recipe_for(model), **changes)
    net = fresh_net(model, **shape)
    test_part = _test_part(model, data_dir)  # reports what is missing before the training
    how |= {"checkpoint_dir": out, "replaces": [CARD] if force else [], "progress": True}
    imitation = imitate_model(model, config, net=net, **how)
    history = imitation.result.history
    record: dict[str, Any] = {
        "alpha": alpha,
        "train_config": asdict(config),
        "unit": imitation.result.unit,
        "seconds": sum(epoch.seconds for epoch in history),
        "history": [vars(epoch) for epoch in history],
    }
    if not imitation.result.finished:
        title = f"Out of time after epoch {len(history)} of {config.epochs}"
        show(record, as_json, title=title, facts={"next": "the same command resumes"})
        return
    notes: dict[str, Any] = {"imitation": record}
    tested = None
    if test_part is not None:
        exact = assess(model, *test_part)
        tested = exact, assess(imitation.model, *test_part)
        record |= {"exact": exact.to_dict(), "estimated": tested[1].to_dict()}
        notes["metrics"] = record["estimated"]
    card = imitation.model.save(out, **notes)
    facts = _facts(imitation, tested) | {"model": str(out)}
    source = "INPUT" if test_part is None else "test"
    facts["next"] = f"otad evaluate {out} {source} --eps EPS --out DIR"
    show(record | {"model": str(out), "card": str(card)}, as_json, title="Imitated", facts=facts)


def _test_part(model: OTAD, data_dir: Path | None) -> tuple[Tensor, Tensor] | None:
    """Return the test part, or None with a note if it is not available."""
    if data_note(model) is None:
        remark("note: the model does not name its data, so the new model is not tested")
        return None
    try:
        rows = open_inputs(model, "test", data_dir)
    except InputError as error:
        remark(f"note: the new model will not be tested: {error}")
        return None
    targets = rows.targets(None)
    return None if targets is None else (rows.read(slice(0, len(rows))), targets)


def _facts(imitation: Imitation, tested: tuple[Assessment, Assessment] | None) -> dict[str, str]:
    facts = {"last epoch": str(imitation.result.history[-1]).partition(": ")[2]}
    if tested is None:
        return facts
    exact, estimated = tested
    metric = exact.metric
    facts |= {
        f"{metric} of the network": score_text(metric, exact.scores[NET]),
        f"{metric} with the solver": score_text(metric, exact.scores[DEFENDED]),
        f"{metric} with CIP-net": score_text(metric, estimated.scores[DEFENDED]),
    }
    if metric == "accuracy":
        agreed = (exact.predictions == estimated.predictions).double().mean()
        facts["same answers"] = f"{float(agreed):.1%} of {len(exact)} test rows"
    each = (f"{1000 * one.seconds / len(one):.3g} ms" for one in tested)
    return facts | {"time per row": "{} with the solver, {} with CIP-net".format(*each)}
