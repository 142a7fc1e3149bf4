"""`otad defend`: from a trained network to a model that answers from its training points."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from otad.checks import check_choice, check_device, require
from otad.cli import options as opt
from otad.cli.console import describe_counts, describe_quantiles, remark, show
from otad.cli.outputs import check_out
from otad.cli.sources import (
    ALL_ROWS,
    Kept,
    TrainedNet,
    bank_part,
    describe_data,
    refuse_overwriting,
)
from otad.data import Dataset
from otad.evaluate.identity import DEFENDED, NET
from otad.explain.explaining import names_of_points
from otad.model import defend as building
from otad.model.answerer_options import solver_for
from otad.model.folder import CARD, refuse_foreign_card
from otad.model.otad import OTAD
from otad.processes import is_first, works_together
from otad.report.assessment import Assessment, assess
from otad.scores import score_text

BANK_DTYPES = ("float32", "float16", "bfloat16")
OF_BANK = ("device", "bank_dtype", "scope", "smoothness", "strong_convexity")


@works_together
def defend(
    net_dir: Annotated[Path, opt.argument("NET_DIR", "Folder written by `otad train`.")],
    out: opt.OutFolder,
    force: opt.Force = False,
    data: Annotated[
        str | None, opt.argument("[DATA]", "The training data, if it has moved.")
    ] = None,
    data_dir: opt.DataDir = None,
    scope: Annotated[
        str,
        opt.option(
            "local: a map through the nearest training points; global: one map through all."
        ),
    ] = "local",
    neighbors: Annotated[int, opt.option("K, the number of neighbors in local scope.")] = 10,
    smoothness: Annotated[
        float | None,
        opt.option(
            "L, the Lipschitz constant of the map.", show_default="2; global: the least possible"
        ),
    ] = None,
    strong_convexity: Annotated[
        float, opt.option("l, the smallest curvature of the potential; it may be negative.")
    ] = 0.0,
    mode: Annotated[
        str,
        opt.option("How L is raised where it is too small: consistent, or paper for Algorithm 2."),
    ] = "consistent",
    climb: Annotated[
        str | None,
        opt.option(
            "Steps in which L grows and l falls, such as 0.2,0.",
            show_default="directly to the least L",
        ),
    ] = None,
    max_smoothness: Annotated[
        float | None, opt.option("Largest L. Neighbors that need a larger one are left out.")
    ] = None,
    spares: Annotated[int, opt.option("Further neighbors that replace the ones left out.")] = 0,
    bank_dtype: Annotated[
        str, opt.option(f"Dtype of the bank: {', '.join(BANK_DTYPES)}.")
    ] = "float32",
    per_class: Annotated[
        int | None, opt.option("Use only this many random training points of each class.")
    ] = None,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Defend a trained network with its training points, test the model, and save it.

    Predictions are interpolated from the nearest training points by a map with
    Lipschitz constant L. If no such map passes through the neighbors of a row, L is
    raised for this row and the output reports it. In global scope one map through all
    training points answers every input. Points that need a larger L are left out, and
    the output lists them. Processes that torchrun starts share the work on this map.

    Example: otad defend digits-net --out digits-model

    Example: otad defend digits-net --out global-model --scope global

    Example: otad defend net wine.csv --out model --neighbors 15 --smoothness 1.5
    """
    chosen = opt.given(locals(), OF_BANK)
    steps = None if climb is None else opt.read_numbers(climb, "climb")
    require(steps is None or len(steps) == 2, "climb", "two numbers such as 0.2,0", repr(climb))
    solver = solver_for(scope, mode=mode, climb=steps, max_smoothness=max_smoothness, spares=spares)
    trained = TrainedNet.read(net_dir)
    choice = trained.note.choice
    if data is not None:
        choice = replace(choice, data=data)
    refuse_overwriting(out, choice.path_from(data_dir))
    apart = not out.exists() or not out.samefile(net_dir)
    require(apart, "out", "another folder than that of the network", out)
    refuse_foreign_card(out)
    check_out(out, force, results=[CARD])
    dataset = choice.load(data_dir, trained.about)
    about = describe_data(dataset, choice)
    for name in ("task", "input_shape", "classes", "feature_names"):
        expected = f"{name} {trained.about[name]} like the data that the network was trained on"
        require(about[name] == trained.about[name], "data", expected, about[name])
    if about["data"]["fingerprint"] != trained.note.fingerprint:
        remark(f"note: {choice.data} is not the data that the network was trained on")
    kept = Kept(per_class, seed)
    model = build_model(trained, dataset, kept, n_neighbors=neighbors, solver=solver, **chosen)
    if not is_first():  # it helped to find the potential of a global map
        return
    if per_class is not None:
        about["data"]["kept"] = asdict(kept)
    assessment, card = assess_and_save(model, dataset, about, out)
    points = len(model.bank_inputs)
    record = {"model": str(out), "card": str(card), "bank_points": points, **scope_record(model)}
    facts = _facts(assessment, model) | {"bank": f"{points} training points", "model": str(out)}
    facts["next"] = f"otad predict {out} test --out predictions.csv"
    record |= assessment.to_dict()
    show(record, as_json, title=f"Defended on {dataset.name}", facts=facts)


def build_model(
    trained: TrainedNet,
    dataset: Dataset,
    kept: Kept = ALL_ROWS,
    *,
    device: str = "cpu",
    bank_dtype: str = "float32",
    **options: Any,
) -> OTAD:
    """Return the model of a network with the train part as its bank; `options` of `otad.defend`."""
    dtype = getattr(torch, check_choice(bank_dtype, "bank_dtype", BANK_DTYPES))
    x, y, names = bank_part(dataset, kept)
    net = trained.net.to(check_device(device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "defense")
        model = building.defend(net, x, y, bank_dtype=dtype, **options)
    if "defense" in model.notes:
        remark(f"note: {model.notes['defense']['says']}")
    if names:
        model.notes["train_names"] = list(names)
    return model


def scope_record(model: OTAD) -> dict[str, Any]:
    """Return the scope, and the potential of a global map, in plain JSON."""
    described = model.answerer.describe()
    return {name: described[name] for name in ("scope", "potential") if name in described}


def assess_and_save(
    model: OTAD, dataset: Dataset, about: dict[str, Any], out: Path, *, baselines: bool = False
) -> tuple[Assessment, Path]:
    """Test and save the model; its card notes the data, how to read inputs, and the scores."""
    test = dataset.test_x, dataset.test_y
    assessment = assess(model, *test, baselines=baselines)
    preparation = None if dataset.preparation is None else dataset.preparation.to_json()
    model.notes |= {**about, "preparation": preparation, "metrics": assessment.to_dict()}
    return assessment, model.save(out)


def _facts(assessment: Assessment, model: OTAD) -> dict[str, str]:
    record = assessment.to_dict()
    facts = {
        f"{assessment.metric} of the network": score_text(
            assessment.metric, assessment.scores[NET]
        ),
        f"{assessment.metric} of OTAD": score_text(assessment.metric, assessment.scores[DEFENDED]),
        "scope": model.answerer.summary(model.n_neighbors),
        "test rows": describe_counts(record["status"]),
    }
    if (potential := model.potential) is not None:
        left_out = potential.left_out.tolist()
        names = names_of_points(model) or [f"row {row}" for row in range(len(model.bank_labels))]
        rows = ", ".join(names[row] for row in left_out[:5]) + ", ..." * (len(left_out) > 5)
        reported = f"{len(left_out)} points that contradict others: {rows}" if left_out else "none"
        return facts | {"left out": reported}
    facts["L raised"] = f"{assessment.share_raised:.1%} of the test rows"
    marks = {"median": "median", "90%": "quantile_90", "most": "most"}
    for name, spread in (("L used", record["smoothness"]), ("least L", record["least_smoothness"])):
        known = {mark: spread[key] for mark, key in marks.items()} if spread else {}
        facts[name] = describe_quantiles(known, digits=3) or "none"
    return facts
