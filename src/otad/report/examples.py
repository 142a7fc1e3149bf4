"""Examples shown one by one: explained predictions, and adversarial examples before and after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.checks import require
from otad.evaluate.records import Evaluation
from otad.explain import Explanation, explain
from otad.io.tensor_files import read_tensors
from otad.model.otad import OTAD
from otad.report.page import Block, Case, Comparison, Gallery, Section, Table, Vote
from otad.report.plots import change_uri, pixels_uri
from otad.threat import NORMS, LpBall

N_WRONG, N_UNSURE, N_RIGHT, N_VOTES = 6, 2, 4, 5
N_ADVERSARIAL, N_FEATURES = 4, 6
NO_ANSWER = "no answer"

# Examples (m,*input_shape) before and after the attack, their true answers and titles (m each).
Shown = tuple[Tensor, Tensor, list[str], list[str]]


def cases_section(explanations: Sequence[Explanation], truths: Sequence[str]) -> Section:
    """Show some wrong predictions, the least certain right ones, and some other right ones."""
    cases = [make_case(*pair) for pair in zip(explanations, truths, strict=True)]
    wrong = [row for row, case in enumerate(cases) if not case.right]
    right = [row for row, case in enumerate(cases) if case.right]
    right.sort(key=lambda row: _certainty(explanations[row]))
    groups = (
        (f"Wrong ({min(len(wrong), N_WRONG)} of {len(wrong)})", wrong[:N_WRONG]),
        ("Right, but least certain", right[:N_UNSURE]),
        ("Right", sorted(right[N_UNSURE:])[:N_RIGHT]),
    )
    lead = (
        "The model answers with a weighted mean of what the network reads from training points. "
        "The margin is the logit of the predicted class minus the logit of the runner-up. A "
        "training point contributes its weight times the margin that it would give alone, and all "
        "contributions sum to the margin. A class with less weight can therefore win."
    )
    galleries = [Gallery(title, [cases[row] for row in rows]) for title, rows in groups if rows]
    return Section("why", "Explained predictions", lead, galleries)


def _certainty(explanation: Explanation) -> float:
    label, shares = explanation.prediction, explanation.probabilities
    return 0.0 if label is None or shares is None else shares[label]


def make_case(explanation: Explanation, truth: str, *, by_truth: bool = False) -> Case:
    """Return a card. Its training points are compared with the prediction, or with the true label
    if `by_truth`."""
    bounds = explanation.bounds
    answer = NO_ANSWER if explanation.prediction is None else str(explanation.prediction)
    votes = [
        Vote(
            uri="" if it.inputs is None else pixels_uri(it.inputs, bounds),
            label=str(it.label),
            weight=it.weight,
            agrees=str(it.label) == (truth if by_truth else answer),
            title=f"{it.title}, distance {it.distance:.3g}",
            contribution=it.contribution,
        )
        for it in explanation.heaviest(N_VOTES)
    ]
    image, certainty = pixels_uri(explanation.inputs, bounds), f"{_certainty(explanation):.1%}"
    return Case(image, answer, truth, certainty, explanation.account, votes, explanation.reasons)


class Adversarial(NamedTuple):
    """For examples `rows` (m,) of an evaluation, adversarial `inputs` (m,*input_shape)."""

    rows: Tensor
    inputs: Tensor

    @staticmethod
    def read(path: Path) -> Adversarial:
        """The safetensors file that an evaluation writes beside its record."""
        tensors, _ = read_tensors(path)
        missing = {"rows", "inputs"} - set(tensors)
        require(not missing, str(path), "rows and inputs", f"no {' and no '.join(missing)}")
        return Adversarial(tensors["rows"], tensors["inputs"])


@dataclass(frozen=True, eq=False)
class ReportContext:
    """An evaluation and, where known, what shows its examples: the `model`, examples `x` (n,*) with
    targets `y` (n,), and the `adversarial` ones found. `classes` and `feature_names` replace
    numbers; `train_x`: see `otad.explain`."""

    evaluation: Evaluation
    model: nn.Module | None = None
    x: Tensor | None = None
    y: Tensor | None = None
    adversarial: Adversarial | None = None
    classes: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None
    train_x: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x is not None:
            n, names = self.evaluation.n, self.evaluation.names
            require(len(self.x) == n, "x", f"the {n} examples of the record", len(self.x))
            require(len(names) in (0, n), "names", f"one for each of {n} examples", len(names))

    def ball(self, input_shape: torch.Size) -> LpBall:
        known = {name: value for name, value in self.evaluation.threat.items() if value is not None}
        for name in {"scale", "mutable"} & known.keys():
            known[name] = torch.tensor(known[name]).view(input_shape)
        if "bounds" in known:
            known["bounds"] = tuple(known["bounds"])
        return NORMS[known.pop("norm")](**known)

    def name_of(self, answer: Tensor) -> str:
        """Logits (C,), a label or a value as text."""
        if bool(answer.isnan().any()):
            return NO_ANSWER
        if answer.is_floating_point() and answer.dim() == 0:
            return f"{float(answer):.5g}"
        label = int(answer.argmax() if answer.dim() else answer)
        return str(label if self.classes is None else self.classes[label])


def examples_section(context: ReportContext) -> Section | None:
    """Images as cards with the input before, after and the change; other inputs as tables."""
    model, x, y, adversarial = context.model, context.x, context.y, context.adversarial
    if model is None or x is None or y is None or adversarial is None:
        return None
    evaluation, rows = context.evaluation, adversarial.rows.cpu()
    clean, changed = x.cpu()[rows], adversarial.inputs.cpu()
    distances = context.ball(x.shape[1:]).distance(changed, clean)
    shown = spread(distances, evaluation.headline_eps, N_ADVERSARIAL) if len(rows) else []
    if not shown:
        return Section("examples", "Adversarial examples", "No adversarial example was found.", [])
    known = evaluation.names or range(evaluation.n)
    names = [f"Example {known[row]}: {finder_of(evaluation, row)}" for row in rows[shown].tolist()]
    lengths = distances[shown].tolist()
    titles = [f"{name}, distance {it:.3g}" for name, it in zip(names, lengths, strict=True)]
    truths = [context.name_of(truth) for truth in y.cpu()[rows[shown]]]
    found = clean[shown], changed[shown], truths, titles
    is_image = x.dim() == 4 and x.shape[1] in (1, 3)
    has_cards = is_image and evaluation.task == "classification"
    show = _cards if has_cards else _feature_tables
    lead = f"{len(shown)} of {len(rows):,} adversarial examples, from the nearest to the furthest."
    if isinstance(model, OTAD):
        lead += (
            " The answer is a mean over training points. An attack succeeds by changing these "
            "points or their weights."
        )
        if has_cards:
            lead += " Below each input are the points of most weight, green if the class is right."
    return Section("examples", "Adversarial examples", lead, show(context, model, found))


def spread(distances: Tensor, eps: float, count: int) -> list[int]:
    """Up to `count` places, from the nearest to the furthest within eps, or the nearest of all."""
    order = [place for place in distances.argsort().tolist() if math.isfinite(distances[place])]
    within = [place for place in order if distances[place] <= eps]
    if len(within) <= count:
        return order[:count]
    return [within[round(k)] for k in torch.linspace(0, len(within) - 1, count).tolist()]


def finder_of(evaluation: Evaluation, row: int) -> str:
    """The attack that broke the row at the shortest distance."""
    broke = [it for it in evaluation.attacks if row in it.broken]
    nearest = min(broke, key=lambda it: it.distances[it.broken.index(row)], default=None)
    return "attacked" if nearest is None else nearest.attack


def _cards(context: ReportContext, model: nn.Module, shown: Shown) -> list[Block]:
    clean, changed, truths, titles = shown
    low, high = map(float, context.evaluation.threat.get("bounds") or torch.aminmax(clean))

    def cases(inputs: Tensor) -> Iterator[Case]:
        if isinstance(model, OTAD):
            on_device = inputs.to(model.backbone.mean)
            found = explain(model, on_device, classes=context.classes, train_x=context.train_x)
            yield from (make_case(*it, by_truth=True) for it in zip(found, truths, strict=True))
            return
        for image, logits, truth in zip(inputs, outputs_of(model, inputs), truths, strict=True):
            answer = context.name_of(logits)
            certainty = "" if answer == NO_ANSWER else f"{float(logits.softmax(0).max()):.1%}"
            yield Case(pixels_uri(image, (low, high)), answer, truth, certainty)

    color = ": red brighter, blue darker" if clean.shape[1] == 1 else ", around gray"
    blocks: list[Block] = []
    pairs = zip(cases(clean), cases(changed), clean, changed, titles, strict=True)
    for before, after, old, new, title in pairs:
        uri, factor = change_uri(old, new, (low, high))
        note = f"the change, amplified {factor:g} times{color}"
        blocks.append(Comparison(before, after, uri, note, title))
    return blocks


def _feature_tables(context: ReportContext, model: nn.Module, shown: Shown) -> list[Block]:
    """The answers, and the features with the largest changes in the units of the threat model."""
    clean, changed, truths, titles = shown
    ball = context.ball(clean.shape[1:])
    scale = ball.scale
    head = ["", "before", "attacked", "change"]
    if scale is not None:
        head += ["unit", f"change in {ball.unit_name or 'units'}"]
    before, after = outputs_of(model, clean), outputs_of(model, changed)
    names = context.feature_names or [f"feature {k}" for k in range(clean[0].numel())]
    blocks: list[Block] = []
    for row, title in enumerate(titles):
        old, new = clean[row].flatten(), changed[row].flatten()
        change = (new - old) / (1 if scale is None else scale.flatten())
        order = change.abs().argsort(descending=True)[:N_FEATURES].tolist()
        answers = (context.name_of(outputs[row]) for outputs in (before, after))
        rows = [("answer", *answers, *[""] * (len(head) - 3))]
        for k in order:
            cells = [names[k], f"{old[k]:.4g}", f"{new[k]:.4g}", f"{new[k] - old[k]:+.3g}"]
            if scale is not None:
                cells += [f"{scale.flatten()[k]:.3g}", f"{change[k]:+.3g}"]
            rows.append(tuple(cells))
        left = int((change != 0).sum()) - len(order)
        note = f"{title}. The right answer is {truths[row]}."
        note += f" {left:,} more features changed less." if left > 0 else ""
        blocks.append(Table(head, rows, "answer", note))
    return blocks


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    device = next((it.device for it in model.parameters()), inputs.device)
    return Tensor.cpu(model(inputs.to(device)))
