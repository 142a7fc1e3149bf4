"""`otad demo`: the whole of the library on handwritten digits, in a minute or two."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from otad import defense
from otad.commands.console import remark, show
from otad.commands.data_choice import DataChoice, describe_data
from otad.commands.defend import build_model, model_notes
from otad.commands.inputs import open_inputs
from otad.commands.net_files import TrainedNet, write_net
from otad.commands.options import AsJson
from otad.commands.predict import write_predictions
from otad.commands.train import train_net, training_record
from otad.environment import Environment
from otad.explain import explain
from otad.report.assessment import DEFENDED, NET, assess
from otad.transport import TrainConfig

RECIPE = TrainConfig(epochs=40, batch_size=64, energy_weight=0.01)
BLOCKS, NEIGHBORS, SMOOTHNESS = 5, 10, 2.0


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the files written.", file_okay=False)
    ] = Path("demo-output"),
    seed: Annotated[int, typer.Option(help="Of split, weights and order of the rows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train, defend, predict and explain on handwritten digits, and write a report.

    Needs no data: the 1,797 digits come with scikit-learn. Leaves a model folder
    that the other commands take, predictions.csv and report.html.

    Example: otad demo --out my-demo
    """
    from otad.demo import draw_map
    from otad.report import sections
    from otad.report.cases import cases_section
    from otad.report.cost import cost_number, cost_section, measure_cost
    from otad.report.page import Report

    started = time.perf_counter()
    choice = DataChoice("digits", seed)
    dataset = choice.load()
    about = describe_data(dataset, choice)
    config = replace(RECIPE, seed=seed)

    remark(f"training on {len(dataset.train_x)} digits, with and without the energy term")
    net, result = train_net(dataset, config, blocks=BLOCKS, progress=True)
    trained = TrainedNet(net, about)
    write_net(out / "net", trained, training_record(net, result, config, about))
    rough, _ = train_net(dataset, replace(config, energy_weight=0.0), blocks=BLOCKS, progress=True)

    remark("building the bank of training points and testing")
    options: dict[str, Any] = {"n_neighbors": NEIGHBORS, "smoothness": SMOOTHNESS}
    model = build_model(trained, dataset, **options)
    assessment = assess(model, dataset.test_x, dataset.test_y, baselines=True)
    model.notes = model_notes(about, dataset, assessment)
    card = model.save(out / "model")
    other = assess(
        build_model(TrainedNet(rough, about), dataset, **options), dataset.test_x, dataset.test_y
    )

    remark("predicting and explaining")
    model = defense.load(out / "model")  # what was saved is what is shown
    predictions = write_predictions(model, open_inputs(model, "test"), out / "predictions.csv")
    explanations = explain(model, dataset.test_x, classes=dataset.classes)
    truths = [dataset.classes[label] for label in dataset.test_y.tolist()]
    cost = measure_cost(model, dataset.test_x, card.parent)

    remark("drawing")
    here = Environment.now(torch.device("cpu"), torch.get_num_threads())
    ours = f"this model (alpha = {config.energy_weight:g})"
    draw_map(out / "map.png")
    report = Report(
        "Digits, defended",
        "A residual network whose answers are interpolated from its training points by an exact, "
        "smooth map. Everything on this page was computed by one run of otad demo.",
        [*sections.headline(assessment), cost_number(cost)],
        [
            sections.model_section(dataset, model, config),
            sections.training_section(result),
            sections.accuracy_section(assessment),
            sections.honesty_section(ours, {ours: assessment, "without the energy term": other}),
            cases_section(explanations, truths),
            sections.map_section((out / "map.png").read_bytes()),
            cost_section(cost),
        ],
        footer=f"{here.started}; otad {here.versions['otad'] or 'from source'}, "
        f"torch {here.versions['torch']}, Python {here.python}; {here.cpu}; seed {seed}",
    ).write(out / "report.html")

    record: dict[str, Any] = {
        "report": str(report),
        "model": str(out / "model"),
        "predictions": predictions["predictions"],
        **assessment.to_dict(),
        "share_raised_without_energy": other.share_raised,
        "demo_seconds": time.perf_counter() - started,
    }
    facts = {
        "accuracy of the net": f"{assessment.scores[NET]:.2%} on {len(assessment)} test digits",
        "accuracy of OTAD": f"{assessment.scores[DEFENDED]:.2%}",
        "L raised": f"{assessment.share_raised:.1%} of the rows ({other.share_raised:.1%} without "
        "the energy term)",
        "report": f"{report}  (open it in a browser)",
        "model": f"{out / 'model'}",
        "predictions": str(out / "predictions.csv"),
        "next": f"otad explain {out / 'model'} test --row 0",
        "time": f"{record['demo_seconds']:.0f} s",
    }
    show(record, as_json, title="otad demo", facts=facts)
