"""Evaluations made by hand, so that a test knows every number of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
from report.small import Small
from torch import Tensor

from otad.evaluate.records import (
    FAIL,
    NOT_RUN,
    PASS,
    AttackRecord,
    CertificateRecord,
    Evaluation,
    Flag,
    SolverRecord,
)
from otad.io.environment import Environment
from otad.model.diagnostics import Distribution
from otad.report.evaluation_report import evaluation_report
from otad.report.examples import Adversarial
from otad.report.page import Report
from otad.scores import Score, share_score

EPS = (0.5, 1.0, 2.0)
ENVIRONMENT = Environment(
    started="2026-01-02T03:04:05+00:00",
    commit=None,
    python="3.12.1",
    versions={"otad": None, "torch": "2.13.0"},
    platform="a platform",
    cpu="a processor",
    device="cpu",
    device_name="a processor",
    threads=1,
)
FLAGS = (
    Flag("more steps never help", PASS, "0 of 20 rows", "Attacks have converged.", "Add steps."),
    Flag("gradients are not zero", FAIL, "71 % are zero", "Attacks are blind.", "Use BPDA."),
    Flag("batches do not matter", NOT_RUN, "no model was given", "Rows are alone.", "Give it."),
)  # fmt: skip


def attack(
    name: str,
    family: str,
    eps: float,
    attacked: tuple[int, ...],
    broken: dict[int, float],
    errors: tuple[float, ...] = (),
) -> AttackRecord:
    """So many answers and gradients asked that the report shows 12 and 3 per example."""
    return AttackRecord(
        attack=name,
        family=family,
        eps=eps,
        settings={"steps": 20, "inner": {"rate": 0.25}},
        attacked=attacked,
        broken=tuple(broken),
        distances=tuple(broken.values()),
        abstained=(),
        errors=errors,
        forwards=12 * len(attacked),
        backwards=3 * len(attacked),
        seconds=1.5,
    )


def by_hand() -> Evaluation:
    """Ten examples, one wrong unattacked; at eps 1 three are broken, six stand, four are proved."""
    right = tuple(range(9))
    return Evaluation(
        task="classification",
        n=10,
        seed=7,
        model={"kind": "otad", "n_neighbors": 10, "abstained": 1},
        threat={"norm": "l2", "eps": 1.0, "bounds": [0.0, 1.0], "scale": None, "mutable": None},
        eps=EPS,
        attacker_knows="everything",
        environment=ENVIRONMENT,
        clean={
            "net": share_score(10, 10),
            "otad": share_score(9, 10),
            "knn_majority": share_score(8, 10),
            "knn_mean_feature": share_score(7, 10),
        },
        clean_right=right,
        clean_errors=(),
        attacks=(
            attack("straight", "adaptive", 0.5, right, {0: 0.4}),
            attack("pgd", "white-box", 0.5, tuple(range(1, 9)), {}),
            attack("straight", "adaptive", 1.0, tuple(range(1, 9)), {1: 0.8}),
            attack("pgd", "white-box", 1.0, tuple(range(2, 9)), {2: 0.9}),
            attack("straight", "adaptive", 2.0, tuple(range(3, 9)), {3: 1.2, 4: 1.9}),
            attack("pgd", "white-box", 2.0, tuple(range(5, 9)), {5: 1.5}),
        ),
        certificate=CertificateRecord(
            radius=(0.1, 0.2, 0.3, 1.1, 0.6, 1.4, 1.3, 1.2, 0.0, 0.0),
            rules=("hull",) * 8 + ("none",) * 2,
            assumptions=("l = 0", "a linear head"),
            worst_errors=(),
            seconds=0.25,
        ),
        flags=FLAGS,
        solver=SolverRecord(
            statuses={"solved": 0.9, "raised": 0.1},
            smoothness=Distribution(10, 2.2, 2.0, 2.0, 2.4, 3.1, 3.3),
            residual=4e-8,
            changed_by_potential=0.1,
        ),
        seconds=12.0,
        missing={"square": "pyautoattack is not installed: pip install 'otad[attacks]'"},
    )


@cache
def hand_report() -> Report:
    return evaluation_report(by_hand())


def of_values() -> Evaluation:
    """A regression on four examples; at eps 1 the largest errors are 0.5, 1, 1.5 and 3."""
    rows, clean = (0, 1, 2, 3), (0.5, 0.5, 1.0, 2.0)
    return Evaluation(
        task="regression",
        n=4,
        seed=0,
        model={"kind": "otad"},
        threat={"norm": "linf", "eps": 1.0, "bounds": None, "scale": [1.0, 2.0],
                "mutable": [True, False]},
        eps=(1.0, 2.0),
        attacker_knows="everything",
        environment=ENVIRONMENT,
        clean={"otad": Score("mse", 1.375, 0.2, 2.5, 4)},
        clean_right=rows,
        clean_errors=clean,
        attacks=(
            attack("pgd", "white-box", 1.0, rows, {}, (0.5, 1.0, 1.0, 2.5)),
            attack("noise", "random", 1.0, rows, {}, (0.25, 0.5, 1.5, 3.0)),
            attack("pgd", "white-box", 2.0, rows, {}, (4.0, 4.0, 4.0, 4.0)),
        ),
        certificate=CertificateRecord((), ("interval",) * 4, ("l = 0",), (1.0, 2.0, 3.0, 6.0), 0.1),
        flags=(),
        solver=None,
        seconds=1.0,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Attacked:
    """An evaluation of the small model, what it was made of, and the report on it."""

    evaluation: Evaluation
    x: Tensor
    y: Tensor
    adversarial: Adversarial
    report: Report


def of_digits(small: Small, n: int = 60) -> Attacked:
    """A real if feeble attack on the small model: straight to the nearest point of another class,
    and just beyond where the answer changes."""
    model, x, y = small.model, small.dataset.test_x[:n], small.dataset.test_y[:n]
    train_x, train_y = small.dataset.train_x, small.dataset.train_y
    apart = torch.cdist(x.flatten(1), train_x.flatten(1))
    aim = train_x[apart.masked_fill(y[:, None] == train_y, math.inf).argmin(1)]
    with torch.no_grad():
        right = model(x).argmax(1) == y
        near = x.clone()
        found = torch.zeros(n, dtype=torch.bool)
        for share in torch.linspace(0.05, 1, 20):
            moved = x + share * (aim - x)
            hit = (model(moved).argmax(1) != y) & right & ~found
            near[hit], found = moved[hit], found | hit
    lengths = (near - x).flatten(1).double().norm(dim=1)
    rows = found.nonzero()[:, 0]
    records = []
    standing = right.nonzero()[:, 0].tolist()
    for eps in EPS:
        for name, family, wanted in (("straight", "adaptive", 1), ("pgd", "white-box", 0)):
            reached = [
                r for r in standing if found[r] and lengths[r] <= eps and r % 3 % 2 != wanted
            ]
            broken = {row: float(lengths[row]) for row in reached}
            records.append(attack(name, family, eps, tuple(standing), broken))
            standing = [row for row in standing if row not in broken]
    evaluation = replace(
        by_hand(),
        n=n,
        clean={"otad": share_score(int(right.sum()), n)},
        clean_right=tuple(right.nonzero()[:, 0].tolist()),
        attacks=tuple(records),
        certificate=CertificateRecord(
            tuple((0.4 * lengths).tolist()), ("hull",) * n, ("l = 0",), (), 0.25
        ),
    )
    adversarial = Adversarial(rows, near[rows])
    report = evaluation_report(
        evaluation,
        model=model,
        x=x,
        y=y,
        adversarial=adversarial,
        classes=small.dataset.classes,
    )
    return Attacked(evaluation, x, y, adversarial, report)
