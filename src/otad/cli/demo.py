"""`otad demo`: the whole library on handwritten digits, in a few minutes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from otad.attacks import L2, Attack
from otad.cli.console import attack_bar, remark, show
from otad.cli.defend import build_model, model_notes, scope_record
from otad.cli.inputs import open_inputs
from otad.cli.options import AsJson, seed_option
from otad.cli.predict import write_predictions
from otad.cli.sources import DataChoice, TrainedNet, describe_data
from otad.cli.train import train_net, training_record
from otad.data import Dataset
from otad.evaluate import Evaluation, evaluate
from otad.evaluate.identity import DEFENDED, NET
from otad.evaluate.records import FAIL
from otad.evaluate.suite import suite
from otad.explain import explain
from otad.io.environment import Environment
from otad.model import otad as models
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import lifted_net
from otad.report import model_report as sections
from otad.report.assessment import assess
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial, cases_section
from otad.report.map_pictures import draw_map
from otad.report.model_report import Contender
from otad.report.page import Report
from otad.scores import Score
from otad.training import TrainConfig

RECIPE = TrainConfig(epochs=40, batch_size=64, energy_weight=0.01)
BLOCKS, NEIGHBORS, SMOOTHNESS = 5, 10, 2.0
ATTACKED, EPS, RADII = 100, 0.5, (0.25, 0.5, 1.0, 1.5)
SUITE: str | tuple[str, ...] = "quick"
# Expensive, and on a smooth global map they find nothing that the other attacks do not find.
SKIPPED = ("straight", "soft_knn", "square", "random_search")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the files written.", file_okay=False)
    ] = Path("demo-output"),
    seed: Annotated[int, seed_option("Seed of split, weights and order of the rows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train, defend, attack and certify on handwritten digits, and write a report.

    Needs no data: the 1,797 digits come with scikit-learn. Writes a model folder
    that the other commands accept, predictions.csv, report.html, and the robustness
    of the model as robustness.md and evaluation/evaluation.json; and the same net
    with a global map through all training points as global-model.

    Example: otad demo --out my-demo
    """
    started = time.perf_counter()
    choice = DataChoice("digits", seed)
    dataset = choice.load()
    about = describe_data(dataset, choice)
    config = replace(RECIPE, seed=seed)

    remark(f"training on {len(dataset.train_x)} digits, with and without the energy term")
    net, result = train_net(dataset, config, blocks=BLOCKS, progress=True)
    trained = TrainedNet(net, about)
    trained.write(out / "net", training_record(net, result, config, about))
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
    model = models.load(out / "model")  # what was saved is what is shown
    rows = open_inputs(model, "test")
    predictions = write_predictions(model, rows, dataset.test_y, out / "predictions.csv", 1000)
    explanations = explain(model, dataset.test_x, classes=dataset.classes)
    truths = [dataset.classes[label] for label in dataset.test_y.tolist()]
    cost_number, cost_section = sections.measure_cost(model, dataset.test_x, card.parent)

    remark(f"attacking and certifying {ATTACKED} digits")
    evaluation, robust = _evaluate(model, dataset, out / "evaluation", seed)

    remark("the same with a global map")
    one_map = _global_map(trained, dataset, out / "global-model", seed)
    points = _map_of_points(dataset, seed)
    local = Contender("local", model, assessment, evaluation)
    beside = sections.scopes_section(local, [one_map, points], radii=RADII, eps=EPS)
    robust = replace(robust, sections=[*robust.sections, beside])
    robust.write(out / "robustness.md")

    remark("drawing")
    here = Environment.now(torch.device("cpu"), torch.get_num_threads())
    ours = f"this model (alpha = {config.energy_weight:g})"
    draw_map(out / "map.png")
    accuracy, *solving = sections.headline(assessment)
    under_attack = [number for number in robust.numbers if number.name != "clean accuracy"]
    chapters = {
        "The model": [
            sections.model_section(dataset, model, config),
            sections.training_section(result),
            sections.accuracy_section(assessment),
            sections.answers_section(ours, {ours: assessment, "without the energy term": other}),
            cases_section(explanations, truths),
            sections.map_section((out / "map.png").read_bytes()),
            cost_section,
        ],
        "Its robustness": robust.sections,
    }
    report = Report(
        "Digits, defended",
        "A residual network whose answers are interpolated from its training points by an exact, "
        "smooth map. Everything on this page was computed by one run of otad demo.",
        [accuracy, *under_attack, *solving, cost_number],
        [part._replace(chapter=name) for name, parts in chapters.items() for part in parts],
        footer=f"{here.started}; otad {here.versions['otad'] or 'from source'}, "
        f"torch {here.versions['torch']}, Python {here.python}; {here.cpu}; seed {seed}",
    ).write(out / "report.html")

    proved, proved_globally, proved_by_points = (
        one.evaluation.certified_accuracy(EPS) for one in (local, one_map, points)
    )
    record: dict[str, Any] = {
        "report": str(report),
        "model": str(out / "model"),
        "predictions": predictions["predictions"],
        **assessment.to_dict(),
        "share_raised_without_energy": other.share_raised,
        "robustness": str(out / "robustness.md"),
        "evaluation": str(out / "evaluation" / "evaluation.json"),
        "worst_case_accuracy": evaluation.worst_case_accuracy,
        "certified_accuracy": None if proved is None else proved.value / 100,
        "global": {
            "model": str(out / "global-model"),
            **scope_record(one_map.model),
            "otad": one_map.assessment.scores[DEFENDED],
            "attacks": list(one_map.evaluation.per_attack),
            "worst_case_accuracy": one_map.evaluation.worst_case_accuracy,
            "certified_accuracy": proved_globally and proved_globally.value / 100,
        },
        "points": {
            "otad": points.assessment.scores[DEFENDED],
            "worst_case_accuracy": points.evaluation.worst_case_accuracy,
            "certified_accuracy": proved_by_points and proved_by_points.value / 100,
        },
        "flags_failed": [flag.name for flag in evaluation.flags if flag.verdict == FAIL],
        "demo_seconds": time.perf_counter() - started,
    }
    facts = {
        "accuracy of the net": f"{assessment.scores[NET]:.2%} on {len(assessment)} test digits",
        "accuracy of OTAD": f"{assessment.scores[DEFENDED]:.2%}",
        "L raised": f"{assessment.share_raised:.1%} of the rows ({other.share_raised:.1%} without "
        "the energy term)",
        "under attack": f"{evaluation.worst_case_accuracy:.1%} remain right in the worst case of "
        f"{len(evaluation.per_attack)} attacks, l2 up to {EPS:g}, on {evaluation.n} digits",
        "certified": f"{_percent(proved)} are right under any attack, l2 up to {EPS:g}",
        "global map": f"{one_map.assessment.scores[DEFENDED]:.2%} right, L = "
        f"{one_map.curvature}; {one_map.evaluation.worst_case_accuracy:.1%} left by "
        f"{len(one_map.evaluation.per_attack)} attacks, "
        f"{_percent(proved_globally)} proved, l2 up to {EPS:g}",
        "global map, no net": f"{points.assessment.scores[DEFENDED]:.2%} right; "
        f"{points.evaluation.worst_case_accuracy:.1%} left, {_percent(proved_by_points)} proved",
        "report": f"{report}  (open it in a browser)",
        "robustness": f"{out / 'robustness.md'}",
        "model": f"{out / 'model'}",
        "predictions": str(out / "predictions.csv"),
        "next": f"otad explain {out / 'model'} test --row 0",
        "time": f"{record['demo_seconds']:.0f} s",
    }
    show(record, as_json, title="otad demo", facts=facts)


def _evaluate(model: OTAD, dataset: Dataset, folder: Path, seed: int) -> tuple[Evaluation, Report]:
    """The suite on some test digits, and its report."""
    x, y = dataset.test_x[:ATTACKED], dataset.test_y[:ATTACKED]
    with attack_bar() as progress:
        evaluation = evaluate(
            model, x, y, L2(EPS), eps=RADII, attacks=SUITE, seed=seed, folder=folder,
            progress=progress,
        )  # fmt: skip
    report = evaluation_report(
        evaluation,
        model=model,
        x=x,
        y=y,
        adversarial=Adversarial.read(folder / "adversarial.safetensors"),
        classes=dataset.classes,
        title="How robust is the digits model?",
    )
    shutil.rmtree(folder / "parts")  # which only a killed run needs
    return evaluation, report


def _global_map(trained: TrainedNet, dataset: Dataset, folder: Path, seed: int) -> Contender:
    """The net with a global map, saved in `folder`."""
    model = build_model(trained, dataset, scope="global", n_neighbors=NEIGHBORS)
    assessment = assess(model, dataset.test_x, dataset.test_y)
    model.notes = model_notes(trained.about, dataset, assessment)
    model.save(folder)
    return Contender("global", model, assessment, _attack_global(model, dataset, seed))


def _map_of_points(dataset: Dataset, seed: int) -> Contender:
    """Without a net: a global map through the training points, each with its own label."""
    frame = lifted_net(dataset.input_shape, len(dataset.classes), blocks=0, bounds=dataset.bounds)
    points = prototype_net(frame, dataset.train_x, dataset.train_y, neighbors=1)
    model = OTAD(points, points.bank(), scope="global", n_neighbors=NEIGHBORS).eval()
    assessment = assess(model, dataset.test_x, dataset.test_y)
    return Contender("global, no net", model, assessment, _attack_global(model, dataset, seed))


def _attack_global(model: OTAD, dataset: Dataset, seed: int) -> Evaluation:
    """Attacks that are not `SKIPPED`, on the first test digits."""
    attacks: Sequence[str | Attack] = [name for name in SUITE if name not in SKIPPED]
    if isinstance(SUITE, str):
        made, _ = suite(model, SUITE, dataset.input_shape, dataset.task, L2(EPS))
        attacks = [attack for attack in made if attack.name not in SKIPPED]
    x, y = dataset.test_x[:ATTACKED], dataset.test_y[:ATTACKED]
    with attack_bar() as progress:
        return evaluate(
            model, x, y, L2(EPS), attacks=attacks, flags=False, seed=seed, progress=progress
        )


def _percent(score: Score | None) -> str:
    return "0.0%" if score is None else f"{score.value:.1f}%"
