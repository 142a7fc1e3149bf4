"""`otad imitate`: replace the solver of a model by a network (OTAD-T-NN)."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from otad.cip.surrogate.training import CHECKPOINT
from otad.cli import options as opt
from otad.cli.console import remark, show
from otad.cli.inputs import open_inputs
from otad.cli.outputs import check_out, start_anew
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
    width: Annotated[int | None, _training("Of each token.  [default: by the features]")] = None,
    blocks: Annotated[int, _training("Of the transformer.")] = 6,
    heads: Annotated[int, _training("Of each attention.")] = 16,
    readout: Annotated[str, _training("free, or hull: means of the neighbors' features.")] = "free",
    alpha: Annotated[float, _training("Share of exact answers; the rest: own features.")] = 1.0,
    epochs: Annotated[int | None, _training("Passes over the bank.  [default: 20]")] = None,
    batch_size: Annotated[int | None, _training("Rows per step.  [default: 256]")] = None,
    learning_rate: Annotated[float | None, _training("The highest.  [default: 0.0003]")] = None,
    mixed_precision: Annotated[
        bool | None, _training("bfloat16.  [default: on GPU]", "--mixed-precision/--full-precision")
    ] = None,
    held_out: Annotated[int, _training("Random points of the bank to measure the error on.")] = 0,
    cached: Annotated[
        bool, _training("Solve each problem once, or in every epoch.", "--solve-once/--solve-anew")
    ] = True,
    save_seconds: Annotated[float, _training("Seconds between checkpoints.")] = 60.0,
    max_seconds: opt.MaxSeconds = None,
) -> None:
    """Train a network to replace a model's solver, test both, and save the new model.

    The network (CIP-net) learns the exact answers to the model's own training
    points, each among its neighbors other than itself. It proves nothing, gives
    no weights and no certificates, and is not always the faster of the two. After
    an interruption, the same command resumes.

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
    start_anew(out, CARD, CHECKPOINT)
    how |= {"checkpoint_dir": out, "progress": True}
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
    facts["next"] = f"otad evaluate {out} test --eps EPS --out DIR"
    show(record | {"model": str(out), "card": str(card)}, as_json, title="Imitated", facts=facts)


def _test_part(model: OTAD, data_dir: Path | None) -> tuple[Tensor, Tensor] | None:
    """None where it is not available: then a note says that the new model is not tested."""
    if data_note(model) is None:
        remark("note: the model names no data, so it is not tested")
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
        f"{metric} of the net": score_text(metric, exact.scores[NET]),
        f"{metric} by the solver": score_text(metric, exact.scores[DEFENDED]),
        f"{metric} by CIP-net": score_text(metric, estimated.scores[DEFENDED]),
    }
    if metric == "accuracy":
        agreed = (exact.predictions == estimated.predictions).double().mean()
        facts["same answers"] = f"{float(agreed):.1%} of {len(exact)} test rows"
    each = (f"{1000 * one.seconds / len(one):.3g} ms" for one in tested)
    return facts | {"time per row": "{} by the solver, {} by CIP-net".format(*each)}
