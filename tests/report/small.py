"""A small model of digits, and a whole report on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from otad import data
from otad.data import Dataset
from otad.explain import explain
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report import model_report as sections
from otad.report.assessment import Assessment, assess
from otad.report.examples import cases_section
from otad.report.page import Report
from otad.training import TrainConfig, TrainResult, train

CONFIG = TrainConfig(epochs=3, energy_weight=0.01)


@dataclass(frozen=True, eq=False)
class Small:
    dataset: Dataset
    model: OTAD
    result: TrainResult
    assessment: Assessment


def make_small() -> Small:
    dataset = data.load("digits")
    net = fc_resnet(dataset.input_shape, 10, blocks=2, bounds=dataset.bounds)
    result = train(net, dataset, CONFIG)
    model = defend(net, dataset.train_x, dataset.train_y, n_neighbors=5, smoothness=1.5)
    x, y = dataset.test_x[:120], dataset.test_y[:120]
    return Small(dataset, model, result, assess(model, x, y, baselines=True, batch_size=50))


def write_report(small: Small, folder: Path) -> Path:
    dataset, model, assessment = small.dataset, small.model, small.assessment
    x, truths = dataset.test_x[:120], [str(label) for label in dataset.test_y[:120].tolist()]
    cost_number, cost_section = sections.measure_cost(model, x, model.save(folder / "model").parent)
    png = Path(__file__).parents[2] / "docs" / "images" / "map.png"
    return Report(
        "A report",
        "On <few> digits & more",
        [*sections.headline(assessment), cost_number],
        [
            sections.model_section(dataset, model, CONFIG),
            sections.training_section(small.result),
            sections.accuracy_section(assessment),
            sections.answers_section("this", {"this": assessment, "same": assessment}),
            cases_section(explain(model, x, classes=dataset.classes), truths),
            sections.map_section(png.read_bytes()),
            cost_section,
        ],
        footer="made by a test",
    ).write(folder / "report.html")
