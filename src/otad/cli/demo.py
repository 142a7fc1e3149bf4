"""`otad demo`: the whole library on handwritten digits, in a few minutes."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from otad.attacks import L2
from otad.cli import options as opt
from otad.cli.console import remark, show
from otad.cli.defend import assess_and_save, build_model, scope_record
from otad.cli.evaluate import report_on
from otad.cli.inputs import open_inputs
from otad.cli.outputs import check_out
from otad.cli.predict import write_predictions
from otad.cli.sources import DataChoice, TrainedNet, describe_data
from otad.cli.train import train_net, training_record
from otad.data import Dataset
from otad.evaluate import evaluate
from otad.evaluate.identity import DEFENDED, NET
from otad.evaluate.records import FAIL
from otad.evaluate.suite import suite
from otad.explain import explain
from otad.explorer.explorer import Explorer, example_rows, explorer_page
from otad.io.environment import Environment
from otad.io.files import replacing
from otad.model.loading import load
from otad.model.otad import OTAD
from otad.model.prototypes import prototype_net
from otad.nets import lifted_net
from otad.report import model_report as sections
from otad.report.assessment import Assessment, assess
from otad.report.examples import cases_section
from otad.report.map_pictures import draw_map
from otad.report.page import Report
from otad.training import TrainConfig

RECIPE = TrainConfig(epochs=40, batch_size=64, energy_weight=0.01)
BLOCKS, NEIGHBORS = 5, 10
LOCAL: dict[str, Any] = {"n_neighbors": NEIGHBORS, "smoothness": 2.0}
ATTACKED, EPS, RADII = 100, 0.5, (0.25, 0.5, 1.0, 1.5)
SUITE = "quick"
EXPLORED = 10  # digits, one of each class
# Expensive, and on a smooth global map they find nothing that the other attacks do not find.
SKIPPED = ("straight", "soft_knn", "square", "random_search")


def demo(
    out: opt.OutFolder = Path("demo-output"),
    force: opt.Force = False,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Train, defend, attack and certify on handwritten digits, and write a report.

    It needs no data files: the 1,797 digits come with scikit-learn. It writes a model
    folder that the other commands accept, predictions.csv, report.html, explorer.html
    (digits to attack step by step), robustness.md and evaluation/evaluation.json. The
    folder global-model has the same network with a global map through all points.

    Example: otad demo --out my-demo
    """
    started = time.perf_counter()
    pages = ("robustness.md", "report.html", "explorer.html")
    results = ("model/card.json", "predictions.csv", "map.png", *pages)
    check_out(out, force, results=results, started="net")
    choice = DataChoice("digits", seed)
    dataset = choice.load()
    about = describe_data(dataset, choice)
    config = replace(RECIPE, seed=seed)
    shape: dict[str, Any] = {"options": {"blocks": BLOCKS}, "progress": True}
    test = dataset.test_x, dataset.test_y

    remark(f"training on {len(dataset.train_x)} digits, with and without the energy term")
    net, result = train_net(dataset, config, **shape)
    trained = TrainedNet(net, about)
    trained.write(out / "net", training_record(net, result, config, about, 0.0))
    rough, _ = train_net(dataset, replace(config, energy_weight=0.0), **shape)

    remark("building the bank of training points and testing")
    model = build_model(trained, dataset, **LOCAL)
    assessment, card = assess_and_save(model, dataset, about, out / "model", baselines=True)
    other = assess(build_model(TrainedNet(rough, about), dataset, **LOCAL), *test)

    remark("predicting and explaining")
    model = load(out / "model")  # what was saved is what is shown
    rows = open_inputs(model, "test")
    predictions = write_predictions(model, rows, dataset.test_y, out / "predictions.csv", 1000)
    explanations = explain(model, dataset.test_x, classes=dataset.classes)
    truths = [dataset.classes[label] for label in dataset.test_y.tolist()]
    _, cost_section = sections.measure_cost(model, dataset.test_x, card.parent)

    remark(f"attacking and certifying {ATTACKED} digits")
    folder = out / "evaluation"
    how: dict[str, Any] = {"eps": RADII, "attacks": SUITE, "folder": folder, "seed": seed}
    local = _attack("local", model, assessment, dataset, **how)
    evaluation = local.evaluation
    x, y = (part[:ATTACKED] for part in test)
    named = {"title": "How robust is the digits model?", "examples": "test digits"}
    robust = report_on(evaluation, model, x, y, folder, source="test", **named)
    for parts in folder.rglob("parts"):  # which only a killed run needs
        shutil.rmtree(parts)

    remark("the same with a global map")
    whole = build_model(trained, dataset, scope="global", n_neighbors=NEIGHBORS)
    tested, _ = assess_and_save(whole, dataset, about, out / "global-model")
    how = {"seed": seed, "flags": False, "undefended": False}
    through_all = _attack("global", whole, tested, dataset, **how)
    # Without a network: a global map through the training points, each with its own label.
    frame = lifted_net(dataset.input_shape, len(dataset.classes), blocks=0, bounds=dataset.bounds)
    points = prototype_net(frame, dataset.train_x, dataset.train_y, neighbors=1)
    lifted = OTAD(points, points.bank(), scope="global", n_neighbors=NEIGHBORS).eval()
    tested = assess(lifted, *test)
    without_net = _attack("global, no network", lifted, tested, dataset, **how)
    beside = sections.scopes_section(local, [through_all, without_net], radii=RADII, eps=EPS)
    robust = replace(robust, sections=[*robust.sections, beside])
    robust.write(out / "robustness.md")

    remark("drawing")
    here = Environment.now(torch.device("cpu"), torch.get_num_threads())
    ours, picture = f"this model (alpha = {config.energy_weight:g})", out / "map.png"
    draw_map(picture)
    accuracy, *_ = sections.headline(assessment)
    numbers = [accuracy if it.name == "clean accuracy" else it for it in robust.numbers]
    chapters = {
        "Its robustness": robust.sections,
        "The model": [
            sections.model_section(dataset, model, config),
            sections.training_section(result),
            sections.accuracy_section(assessment),
            sections.answers_section(ours, {ours: assessment, "without the energy term": other}),
            cases_section(explanations, truths),
            sections.map_section(picture.read_bytes()),
            cost_section,
        ],
    }
    report = Report(
        "Digits, defended",
        "A residual network whose answers are interpolated from its training points by an exact, "
        "smooth map. Everything on this page was computed by one run of otad demo.",
        numbers,
        [part._replace(chapter=name) for name, parts in chapters.items() for part in parts],
        footer=f"{here.started}; otad {here.versions['otad'] or 'from source'}, "
        f"torch {here.versions['torch']}, Python {here.python}; {here.cpu}; seed {seed}",
        verdict=robust.verdict,
    ).write(out / "report.html")

    remark(f"exploring {EXPLORED} digits")
    explorer = out / "explorer.html"
    chosen = example_rows(dataset.test_y, EXPLORED)
    examples = {"examples": dataset.test_x[chosen], "truths": dataset.test_y[chosen]}
    with replacing(explorer) as partial:
        page = explorer_page(Explorer(model, "digits", **examples), f"otad serve {out / 'model'}")
        partial.write_text(page, encoding="utf-8")

    robustness, globally, by_points = map(_robustness, (local, through_all, without_net))
    alone = evaluation.undefended
    assert alone is not None
    of_global = {"model": str(out / "global-model"), **scope_record(whole)}
    of_global["attacks"] = list(through_all.evaluation.per_attack)
    record: dict[str, Any] = {
        "report": str(report),
        "explorer": str(explorer),
        "model": str(out / "model"),
        "predictions": predictions["predictions"],
        **assessment.to_dict(),
        "share_raised_without_energy": other.share_raised,
        "robustness": str(out / "robustness.md"),
        "evaluation": str(folder / "evaluation.json"),
        **robustness,
        "verdict": list(robust.verdict),
        "undefended": {
            "net": assessment.scores[NET],
            "worst_case_accuracy": alone.worst_case_accuracy,
        },
        "global": of_global | globally,
        "points": by_points,
        "flags_failed": [flag.name for flag in evaluation.flags if flag.verdict == FAIL],
        "demo_seconds": time.perf_counter() - started,
    }
    figures = (
        "{otad:.2%} right; {worst_case_accuracy:.1%} right under attack, {certified:.1%} proved"
    )
    by_map = {"OTAD": robustness, f"global map, L = {through_all.curvature}": globally}
    by_map["global map, no network"] = by_points
    attacks, raised = len(evaluation.per_attack), f"{assessment.share_raised:.1%} of the rows"
    facts = {
        "under attack": f"{attacks} attacks on {evaluation.n} digits, l2 up to {EPS:g}",
        "undefended network": f"{assessment.scores[NET]:.2%} right on {len(assessment)} digits; "
        f"{alone.worst_case_accuracy:.1%} right under its {len(alone.per_attack)} attacks",
        **{
            name: figures.format(**found, certified=found["certified_accuracy"] or 0.0)
            for name, found in by_map.items()
        },
        "L raised": f"{raised} ({other.share_raised:.1%} without the energy term)",
        "report": f"{report}  (open it in a browser)",
        "explorer": f"{explorer}  (watch an attack, step by step)",
        **{name: record[name] for name in ("robustness", "model", "predictions")},
        "next": f"otad explain {out / 'model'} test --row 0",
        "time": f"{record['demo_seconds']:.0f} s",
    }
    show(record, as_json, title="otad demo", facts=facts, verdict=robust.verdict)


def _attack(
    name: str, model: OTAD, assessment: Assessment, dataset: Dataset, **options: Any
) -> sections.Contender:
    """Evaluate a model on the first test digits, by default with the fast attacks of the suite."""
    if "attacks" not in options:
        made, _ = suite(model, SUITE, dataset.input_shape, dataset.task, L2(EPS))
        options["attacks"] = [attack for attack in made if attack.name not in SKIPPED]
    x, y = dataset.test_x[:ATTACKED], dataset.test_y[:ATTACKED]
    found = evaluate(model, x, y, L2(EPS), **options)
    return sections.Contender(name, model, assessment, found)


def _robustness(one: sections.Contender) -> dict[str, Any]:
    proved = one.evaluation.certified_accuracy(EPS)
    return {
        "otad": one.assessment.scores[DEFENDED],
        "worst_case_accuracy": one.evaluation.worst_case_accuracy,
        "certified_accuracy": None if proved is None else proved.value / 100,
    }
