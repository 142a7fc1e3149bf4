"""The sections of a report on one model, from what was measured and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from otad.data import Dataset
from otad.model.otad import OTAD
from otad.report.assessment import DEFENDED, MAJORITY, MEAN_FEATURE, NET, Assessment
from otad.report.blocks import Block, Facts, KeyNumber, Picture, Section, Table, Text
from otad.report.pictures import plot_uri, png_uri
from otad.report.plots import smoothness_histogram, training_curves
from otad.training import TrainConfig, TrainResult

FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps / 2
TIMES = " \N{MULTIPLICATION SIGN} "
TITLES = {
    NET: "the network alone",
    DEFENDED: "OTAD: convex integration",
    MAJORITY: "majority of the same neighbors",
    MEAN_FEATURE: "mean feature of the same neighbors",
}
SUPERSCRIPTS = str.maketrans("-0123456789", "\N{SUPERSCRIPT MINUS}⁰¹²³⁴⁵⁶⁷⁸⁹")
STATUS_MEANINGS = {
    "solved": "with the smoothness asked for and all neighbors",
    "raised": "the neighbors need a larger smoothness, which was used",
    "repaired": "a contradicting neighbor was left out",
    "estimated": "by a network that imitates the solver",
    "infeasible": "no map passes through the neighbors; answered by the nearest one, if at all",
    "unsolved": "numbers out of range; answered by the nearest one, if at all",
}


def headline(assessment: Assessment) -> list[KeyNumber]:
    """The numbers to see first."""
    net, defended = (assessment.scores[name] for name in (NET, DEFENDED))
    total = f"on {len(assessment):,} test inputs"
    if assessment.metric == "accuracy":
        first = KeyNumber(f"{defended:.1%}", "accuracy of OTAD", f"{total}; the net {net:.1%}")
    else:
        first = KeyNumber(f"{defended:.4g}", "squared error of OTAD", f"{total}; the net {net:.4g}")
    worst = assessment.largest_residual
    return [
        first,
        KeyNumber(
            f"{assessment.share_raised:.1%}",
            "needed a larger L",
            f"than the L = {assessment.asked_smoothness:g} asked for",
        ),
        KeyNumber(
            "none" if worst is None else scientific(worst),
            "largest residual",
            "how far any answer is from exact",
        ),
    ]


def scientific(value: float) -> str:
    """One digit times a power of ten."""
    digit, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(SUPERSCRIPTS)
    return "0" if value == 0 else f"{digit}{TIMES}10{raised}"


def model_section(dataset: Dataset, model: OTAD, config: TrainConfig) -> Section:
    """The data and the model card."""
    backbone = model.backbone
    what = f"{len(dataset.classes)} classes" if dataset.classes else "a value to predict"
    parameters = sum(weight.numel() for weight in backbone.parameters())
    facts = {
        "data": f"{dataset.name}: {len(dataset.train_x):,} train, {len(dataset.test_x):,} test",
        "source": dataset.source,
        "input": f"{TIMES.join(map(str, dataset.input_shape))}, {what}",
        "network": f"{backbone.kind}, {parameters:,} parameters, features in R^{backbone.dim}",
        "training": f"{config.epochs} epochs of {config.optimizer}, alpha = "
        f"{config.energy_weight:g}, seed {config.seed}",
        "bank": f"{len(model.bank_inputs):,} pairs (input, feature)",
        "neighbors": f"K = {model.n_neighbors}",
        "curvature": f"L = {model.smoothness:g}, l = {model.strong_convexity:g}, "
        f"{model.answerer.mode} mode",
        "data fingerprint": dataset.fingerprint()[:16],
        "bank fingerprint": model.bank_fingerprint[:16],
    }
    return Section(
        "model",
        "Data and model",
        "What was trained on what, and how it answers.",
        [Facts(facts)],
    )


def training_section(result: TrainResult) -> Section:
    """How the training went."""
    last = result.final
    curves = Picture(
        plot_uri(training_curves(result.history, result.metric)),
        f"loss, transport energy and {result.metric} against the epoch",
        "Means over the batches of an epoch, while the weights move.",
    )
    return Section(
        "training",
        "Training",
        "The network minimizes its loss plus alpha times the transport energy, the squared "
        f"distance its blocks move the data: {last.energy:.3g} per input at the end.",
        [curves],
    )


def accuracy_section(assessment: Assessment) -> Section:
    """All predictors on the same test inputs."""
    names = [name for name in TITLES if name in assessment.scores]
    is_share = assessment.metric == "accuracy"
    total = len(assessment)
    rows = []
    for name in names:
        cells = [_score(assessment, name)]
        if is_share:
            cells.append(f"{round((1 - assessment.scores[name]) * total):,}")
        rows.append((TITLES[name], *cells))
    columns = ("", assessment.metric, "errors") if is_share else ("", "mean squared error")
    return Section(
        "accuracy",
        "Accuracy" if is_share else "Error",
        f"On {total:,} test inputs that took no part in training, and are not in the bank. The "
        "settings were chosen with such data in view, and one split is one draw: try other seeds.",
        [Table(columns, rows, strong_row=names.index(DEFENDED))],
    )


def honesty_section(name: str, models: Mapping[str, Assessment]) -> Section:
    """How the answers of model `name` were found: status, residual, smoothness.

    Other `models` on the same inputs, asked for the same smoothness, are compared with it.
    """
    assessment = models[name]
    total, asked = len(assessment), assessment.asked_smoothness
    rows = [
        (f"{status}: {STATUS_MEANINGS[status]}", f"{count:,}", f"{count / total:.1%}")
        for status, count in assessment.status_counts.items()
    ]
    worst = assessment.largest_residual
    graded = "No row has a solution" if worst is None else f"The largest is {scientific(worst)}"
    blocks: list[Block] = [
        Table(("status", "inputs", "share"), rows),
        Text(
            "Every answer was graded again in double precision, from the raw numbers, by the "
            "optimality conditions of the problem it claims to solve (the relative KKT residual). "
            f"{graded}; the rounding of the model's own numbers is {scientific(FLOAT32_ROUNDOFF)}."
        ),
        Picture(
            plot_uri(
                smoothness_histogram(
                    {label: other.least_smoothness for label, other in models.items()}, asked
                )
            ),
            "histogram of the least smoothness that the neighbors of each test input need",
            "Left of the line the map asked for exists, and is used. Right of it, the smoothness "
            "must be raised for the map to pass through all neighbors of that input.",
        ),
    ]
    if len(models) > 1:
        compared = [
            (label, _score(other), f"{float(other.least_smoothness.median()):.2f}",
             f"{other.share_raised:.1%}")
            for label, other in models.items()
        ]  # fmt: skip
        columns = ("", f"{assessment.metric} of OTAD", "median least L", f"L above {asked:g}")
        blocks.append(Table(columns, compared, strong_row=list(models).index(name)))
    return Section(
        "honesty",
        "How the answers were found",
        f"{assessment.share_raised:.1%} of the test inputs needed a smoothness above the "
        f"L = {asked:g} asked for.",
        blocks,
    )


def _score(assessment: Assessment, name: str = DEFENDED) -> str:
    score = assessment.scores[name]
    return f"{score:.2%}" if assessment.metric == "accuracy" else f"{score:.4g}"


def map_section(png: bytes) -> Section:
    """The method in the plane, from the bytes of its picture."""
    return Section(
        "map",
        "The map, seen",
        "The same method in two dimensions, where it can be drawn.",
        [
            Picture(
                png_uri(png),
                "a bank of points in the plane, a grid, and that grid sent through the map",
                "Each training point (filled) has a feature (open), as a trained network would "
                "give it. Every node of the grid is sent by the map through its nearest pairs.",
            )
        ],
    )
