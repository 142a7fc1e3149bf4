"""A small model of digits, and evaluations made by hand, so that a test knows every number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from otad import data
from otad.attacks import L2
from otad.attacks.adaptive import Straight
from otad.attacks.pgd import Pgd
from otad.data import Dataset
from otad.evaluate import AttackRecord, CertificateRecord, Evaluation, Flag, evaluate
from otad.evaluate.records import FAIL, NOT_RUN, PASS
from otad.explain import explain
from otad.io.environment import Environment
from otad.model.account import SolverAccount
from otad.model.defend import defend
from otad.model.diagnostics import Distribution
from otad.model.otad import OTAD
from otad.nets import fc_resnet
from otad.report import model_report as sections
from otad.report.assessment import Assessment, assess
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial, cases_section
from otad.report.page import Report, Section, Table
from otad.scores import Score, share_score
from otad.training import TrainConfig, TrainResult, train

ROWS = 60
CONFIG = TrainConfig(epochs=3, energy_weight=0.01)
EPS = (0.5, 1.0, 2.0)
ENVIRONMENT = Environment(
    started="2026-01-02T03:04:05+00:00", commit=None, python="3.12.1",
    versions={"otad": None, "torch": "2.13.0"}, platform="a platform", cpu="a processor",
    device="cpu", device_name="a processor", threads=1,
)  # fmt: skip
FLAGS = (
    Flag("more steps never help", PASS, "0 of 20 rows", "Attacks have converged.", "Add steps."),
    Flag("gradients are not zero", FAIL, "71 % are zero", "Attacks are blind.", "Use BPDA."),
    Flag("batches do not matter", NOT_RUN, "no model was given", "Rows are alone.", "Give it."),
)  # fmt: skip


class Small(NamedTuple):
    dataset: Dataset
    model: OTAD
    result: TrainResult
    assessment: Assessment


def make_small() -> Small:
    dataset = data.load("digits")
    net = fc_resnet(dataset.input_shape, 10, blocks=2, bounds=dataset.bounds)
    result = train(net, dataset, CONFIG)
    model = defend(net, dataset.train_x, dataset.train_y, n_neighbors=5, smoothness=1.5)
    x, y = dataset.test_x[:ROWS], dataset.test_y[:ROWS]
    return Small(dataset, model, result, assess(model, x, y, baselines=True))


def write_report(small: Small, folder: Path) -> Path:
    dataset, model, assessment = small.dataset, small.model, small.assessment
    x, truths = dataset.test_x[:ROWS], [str(label) for label in dataset.test_y[:ROWS].tolist()]
    cost_number, cost_section = sections.measure_cost(model, x, model.save(folder / "model").parent)
    png = Path(__file__).parents[2] / "docs" / "images" / "map.png"
    made = [
        sections.model_section(dataset, model, CONFIG),
        sections.training_section(small.result),
        sections.accuracy_section(assessment),
        sections.answers_section("this", {"this": assessment, "same": assessment}),
        cases_section(explain(model, x, classes=dataset.classes), truths),
        sections.map_section(png.read_bytes()),
        cost_section,
    ]
    numbers = [*sections.headline(assessment), cost_number]
    report = Report("A report", "On <few> digits & more", numbers, made, footer="made by a test")
    return report.write(folder / "report.html")


def attack(
    name: str, eps: float, attacked: tuple[int, ...], broken: dict[int, float],
    errors: tuple[float, ...] = (),
) -> AttackRecord:  # fmt: skip
    """With 12 answers and 3 gradients per example."""
    families = {"straight": "adaptive", "pgd": "white-box", "noise": "random"}
    return AttackRecord(
        attack=name, family=families[name], eps=eps,
        settings={"steps": 20, "inner": {"rate": 0.25}}, attacked=attacked, broken=tuple(broken),
        distances=tuple(broken.values()), abstained=(), errors=errors,
        forwards=12 * len(attacked), backwards=3 * len(attacked), seconds=1.5,
    )  # fmt: skip


def by_hand() -> Evaluation:
    """Ten examples, one wrong without attack; at eps 1 three are broken, six are right, and four
    are certified."""
    return Evaluation(
        task="classification", n=10, seed=7,
        model={"kind": "otad", "n_neighbors": 10, "abstained": 1},
        threat={"norm": "l2", "eps": 1.0, "bounds": [0.0, 1.0], "scale": None, "mutable": None},
        eps=EPS, attacker_knows="everything", environment=ENVIRONMENT,
        clean={
            "net": share_score(10, 10), "otad": share_score(9, 10),
            "knn_majority": share_score(8, 10), "knn_mean_feature": share_score(7, 10),
        },
        clean_right=tuple(range(9)), clean_errors=(),
        attacks=(
            attack("straight", 0.5, tuple(range(9)), {0: 0.4}),
            attack("pgd", 0.5, tuple(range(1, 9)), {}),
            attack("straight", 1.0, tuple(range(1, 9)), {1: 0.8}),
            attack("pgd", 1.0, tuple(range(2, 9)), {2: 0.9}),
            attack("straight", 2.0, tuple(range(3, 9)), {3: 1.2, 4: 1.9}),
            attack("pgd", 2.0, tuple(range(5, 9)), {5: 1.5}),
        ),
        certificate=CertificateRecord(
            radius=(0.1, 0.2, 0.3, 1.1, 0.6, 1.4, 1.3, 1.2, 0.0, 0.0),
            rules=("hull",) * 8 + ("none",) * 2, assumptions=("l = 0", "a linear head"),
            worst_errors=(), seconds=0.25,
        ),
        flags=FLAGS,
        solver=SolverAccount(
            statuses={"solved": 0.9, "raised": 0.1},
            smoothness=Distribution(10, 2.2, 2.0, 2.0, 2.4, 3.1, 3.3),
            residual=4e-8, changed_by_potential=0.1,
        ),
        seconds=12.0,
        missing={"square": "pyautoattack is not installed: pip install 'otad[attacks]'"},
    )  # fmt: skip


def of_values() -> Evaluation:
    """A regression on four examples; at eps 1 the largest errors are 0.5, 1, 1.5 and 3."""
    rows = (0, 1, 2, 3)
    scaled = {"bounds": None, "scale": [1.0, 2.0], "mutable": [True, False]}
    return replace(
        by_hand(), task="regression", n=4, seed=0, model={"kind": "otad"},
        threat={"norm": "linf", "eps": 1.0, **scaled}, eps=(1.0, 2.0),
        clean={"otad": Score("mse", 1.375, 0.2, 2.5, 4)}, clean_right=rows,
        clean_errors=(0.5, 0.5, 1.0, 2.0),
        attacks=(
            attack("pgd", 1.0, rows, {}, (0.5, 1.0, 1.0, 2.5)),
            attack("noise", 1.0, rows, {}, (0.25, 0.5, 1.5, 3.0)),
            attack("pgd", 2.0, rows, {}, (4.0, 4.0, 4.0, 4.0)),
        ),
        certificate=CertificateRecord((), ("interval",) * 4, ("l = 0",), (1.0, 2.0, 3.0, 6.0), 0.1),
        flags=(), solver=None, missing={},
    )  # fmt: skip


@cache
def hand_report(make: Callable[[], Evaluation] = by_hand) -> Report:
    return evaluation_report(make())


class Attacked(NamedTuple):
    """An evaluation of the small model, what is known about it, and the report on it."""

    evaluation: Evaluation
    known: dict[str, Any]
    report: Report


def of_digits(small: Small, folder: Path, n: int = 20) -> Attacked:
    """By two weak attacks, with the flags of `by_hand`."""
    model, x, y = small.model, small.dataset.test_x[:n], small.dataset.test_y[:n]
    attacks = [Straight(points=2), Pgd(steps=5)]
    found = evaluate(model, x, y, L2(1.0), eps=EPS, attacks=attacks, flags=False, folder=folder)
    evaluation = replace(found, flags=FLAGS)
    adversarial = Adversarial.read(folder / "adversarial.safetensors")
    known = {"model": model, "x": x, "y": y, "adversarial": adversarial}
    report = evaluation_report(evaluation, **known, classes=small.dataset.classes)
    return Attacked(evaluation, known, report)


def section(report: Report, slug: str) -> Section:
    (found,) = (it for it in report.sections if it.slug == slug)
    return found


def tables(report: Report, slug: str) -> list[Table]:
    return [block for block in section(report, slug).blocks if isinstance(block, Table)]
