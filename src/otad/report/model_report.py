"""Sections of a report on one model, made of measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from otad.data import Dataset
from otad.evaluate.identity import DEFENDED, MAJORITY, MEAN_FEATURE, NET
from otad.evaluate.records import Evaluation
from otad.model.account import SolverAccount
from otad.model.otad import OTAD
from otad.report.assessment import Assessment
from otad.report.formatting import TIMES, Cell, duration, scientific, threads
from otad.report.page import Block, Facts, KeyNumber, Picture, Section, Table, Text
from otad.report.plots import data_uri, plot_uri, smoothness_histogram, training_curves
from otad.scores import score_text
from otad.training import TrainConfig, TrainResult

FLOAT32_ROUNDOFF = torch.finfo(torch.float32).eps / 2
QUANTILES = ("least", "median", "90%", "99%", "largest")
N_SINGLE = 20  # inputs that are timed one by one
TITLES = {
    NET: "the network alone",
    DEFENDED: "OTAD: convex integration",
    MAJORITY: "majority of the same neighbors",
    MEAN_FEATURE: "mean feature of the same neighbors",
}
STATUS_MEANINGS = {
    "solved": "with the configured smoothness and all neighbors",
    "raised": "the neighbors need a larger smoothness, which was used",
    "repaired": "a contradicting neighbor was left out",
    "estimated": "by a network instead of the solver",
    "infeasible": "no map passes through the neighbors, so the nearest one answers",
    "unsolved": "numbers are out of range, so the nearest neighbor answers",
}


def account_blocks(account: SolverAccount, n: int) -> list[Block]:
    rows = [
        (f"{name}: {STATUS_MEANINGS[name]}", round(share * n), f"{share:.1%}")
        for name, share in account.statuses.items()
        if share > 0
    ]
    blocks: list[Block] = [Table(("status", "inputs", "share"), rows)]
    if account.smoothness is not None:  # None where a network estimates the answers
        blocks.append(Table(("", *QUANTILES), [("L used", *account.smoothness.marks)]))
    text = "There is no solution to check."
    if account.residual is not None:
        text = (
            f"The largest relative KKT residual, in float64, is {scientific(account.residual)}; "
            f"the rounding error of float32 is {scientific(FLOAT32_ROUNDOFF)}."
        )
    if account.changed_by_potential is not None:
        text += (
            " Several potentials pass through the neighbors and the model chooses one: "
            f"{account.changed_by_potential:.1%} of the predictions differ between the extremes."
        )
    return [*blocks, Text(text)]


def headline(assessment: Assessment) -> list[KeyNumber]:
    net, defended = (_score(assessment, name, digits=1) for name in (NET, DEFENDED))
    name = "accuracy of OTAD" if assessment.metric == "accuracy" else "squared error of OTAD"
    raised, residual = f"{assessment.share_raised:.1%}", assessment.account.residual
    worst = "none" if residual is None else scientific(residual)
    return [
        KeyNumber(defended, name, f"on {len(assessment):,} test inputs; the network {net}"),
        KeyNumber(raised, "needed a larger L", f"than the configured {assessment.smoothness:g}"),
        KeyNumber(worst, "largest residual", "how far any answer is from exact"),
    ]


def _score(assessment: Assessment, name: str = DEFENDED, digits: int = 2) -> str:
    return score_text(assessment.metric, assessment.scores[name], digits)


def model_section(dataset: Dataset, model: OTAD, config: TrainConfig) -> Section:
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
    lead = "The data, the network that was trained on it, and how the model answers."
    return Section("model", "Data and model", lead, [Facts(facts)])


def training_section(result: TrainResult) -> Section:
    plot = plot_uri(training_curves(result.history, result.metric))
    alt = f"loss, transport energy and {result.metric} against the epoch"
    caption = "Means over the batches of an epoch, while the weights change."
    lead = (
        "The network minimizes its loss plus alpha times the transport energy, the squared "
        f"distance that its blocks move the data: {result.final.energy:.3g} per input at the end."
    )
    return Section("training", "Training", lead, [Picture(plot, alt, caption)])


def accuracy_section(assessment: Assessment) -> Section:
    names = [name for name in TITLES if name in assessment.scores]
    title, columns, n = "Error", ["", "mean squared error"], len(assessment)
    rows: list[list[Cell]] = [[TITLES[name], _score(assessment, name)] for name in names]
    if assessment.metric == "accuracy":
        title, columns = "Accuracy", ["", "accuracy", "errors"]
        for name, row in zip(names, rows, strict=True):
            row.append(round((1 - assessment.scores[name]) * n))
    lead = (
        f"On {n:,} test inputs that are not in the bank. The settings were chosen on such data, "
        "and this is one random split: try other seeds."
    )
    return Section("accuracy", title, lead, [Table(columns, rows, TITLES[DEFENDED])])


def answers_section(name: str, models: Mapping[str, Assessment]) -> Section:
    """How the answers of model `name` were found, beside other `models` of the same smoothness."""
    assessment, configured = models[name], models[name].smoothness
    least = {label: other.least_smoothness for label, other in models.items()}
    plot = plot_uri(smoothness_histogram(least, configured))
    alt = "histogram of the least smoothness that the neighbors of each test input need"
    caption = "Right of the line, L is raised so that the map passes through all the neighbors."
    blocks = account_blocks(assessment.account, len(assessment))
    blocks.append(Picture(plot, alt, caption))
    if len(models) > 1:
        columns = ("", f"{assessment.metric} of OTAD", "median least L", f"L above {configured:g}")
        rows = [
            (label, _score(it), float(it.least_smoothness.median()), f"{it.share_raised:.1%}")
            for label, it in models.items()
        ]
        blocks.append(Table(columns, rows, name))
    raised = f"{assessment.share_raised:.1%} of the test inputs"
    lead = f"{raised} needed a smoothness above the configured L = {configured:g}."
    return Section("answers", "How the answers were found", lead, blocks)


def map_section(png: bytes) -> Section:
    picture = Picture(
        data_uri("image/png", png),
        "a bank of points in the plane, a grid, and that grid sent through the map",
        "Every node of the grid is sent through the map of its nearest pairs.",
    )
    lead = "The same method in two dimensions, where it can be drawn."
    return Section("map", "The map in the plane", lead, [picture])


@torch.no_grad()
def measure_cost(model: OTAD, x: Tensor, folder: Path) -> tuple[KeyNumber, Section]:
    """Time predictions of x in one batch, then of a few rows alone; `folder` is the model's."""
    model(x)  # a warm-up: the search builds its index
    seconds = []
    for part in (x, *x[:N_SINGLE].split(1)):
        started = time.perf_counter()
        model(part)
        seconds.append(time.perf_counter() - started)
    total, single = seconds[0], duration(statistics.median(seconds[1:]))
    each, size = duration(total / len(x)), sum(path.stat().st_size for path in folder.iterdir())
    batch = f"{len(x):,} inputs in one batch"
    rows = [(batch, duration(total), each), ("one input alone", single, single)]
    lead = (
        f"Embedding, exact neighbor search, convex integration and head, on "
        f"{threads(torch.get_num_threads())}; the model folder takes {size / 1e6:.1f} MB."
    )
    table = Table(("", "total", "per input"), rows)
    number = KeyNumber(each, "per prediction", f"in a batch of {len(x):,}")
    return number, Section("cost", "Cost of a prediction", lead, [table])


class Contender(NamedTuple):
    """A model, its assessment on the whole test set, and its evaluation under attack."""

    name: str
    model: OTAD
    assessment: Assessment
    evaluation: Evaluation

    @property
    def curvature(self) -> str:
        """The L of its maps, in words."""
        potential, raised = self.model.potential, f"{self.assessment.share_raised:.1%}"
        if potential is None:
            return f"{self.model.smoothness:g}, raised on {raised} of the rows"
        n = len(potential.left_out)
        without = f"{n} training points left out" if n else "through all points"
        return f"{potential.smoothness:.3g}, {without}"


def scopes_section(
    local: Contender, others: Sequence[Contender], *, radii: Sequence[float], eps: float
) -> Section:
    """Local and global maps: certified accuracy at all `radii`, and under attack at `eps`."""
    models = local, *others
    evaluations = [one.evaluation for one in models]
    rows: list[tuple[Cell, ...]] = [
        ("clean accuracy", *(_score(one.assessment, digits=1) for one in models)),
        ("L", *(one.curvature for one in models)),
    ]
    for radius in radii:
        proved = (it.certified_accuracy(radius) or "nothing" for it in evaluations)
        rows.append((f"certified at l2 {radius:g}", *proved))
    rows.append((f"under attack at l2 {eps:g}", *(it.worst_case(eps) for it in evaluations)))
    local_attacks, global_attacks = (", ".join(it.per_attack) for it in evaluations[:2])
    note = (
        f"Clean: {len(local.assessment):,} test examples; certified and attacked: the first "
        f"{local.evaluation.n:,}. Attacks on the global maps, at this radius only: "
        f"{global_attacks}; on the local maps: {local_attacks}."
    )
    table = Table(("", *(one.name for one in models)), rows, note=note)
    text = (
        "A local answer can jump where the neighbors change, so a proof must cover all sets of "
        "neighbors within the radius. A global map has no jumps, so the margin certifies a radius."
    )
    lead = (
        "The same network and training points, with a map through the nearest points of each input "
        "(local, the model of this page) or with one Lipschitz map through all of them (global). "
        "The last column is a global map through labeled points, without a network."
    )
    return Section("scopes", "Local maps or a global map", lead, [table, Text(text)])
