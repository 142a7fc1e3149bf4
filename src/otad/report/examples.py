"""Examples shown one by one: explained predictions, and adversarial examples before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from otad.errors import InputError
from otad.evaluate.records import Evaluation
from otad.explain import Explanation, explain
from otad.io.tensor_files import read_tensors
from otad.model.otad import OTAD
from otad.report.blocks import Block, Case, Comparison, Gallery, Section, Table, Vote
from otad.report.pictures import change_uri, pixels_uri
from otad.threat import NORMS, LpBall

N_WRONG, N_UNSURE, N_RIGHT, N_VOTES = 6, 2, 4, 5
N_ADVERSARIAL, N_FEATURES = 4, 6
NO_ANSWER = "no answer"


def cases_section(explanations: Sequence[Explanation], truths: Sequence[str]) -> Section:
    """Some wrong predictions, the least certain right ones, and some other right ones."""
    cases = {row: make_case(explanations[row], truths[row]) for row in range(len(truths))}
    wrong = [row for row, case in cases.items() if not case.right]
    right = [row for row, case in cases.items() if case.right]
    right.sort(key=lambda row: _certainty(explanations[row]))
    groups = (
        (f"Wrong ({min(len(wrong), N_WRONG)} of {len(wrong)})", wrong[:N_WRONG]),
        ("Right, but least certain", right[:N_UNSURE]),
        ("Right", sorted(right[N_UNSURE:])[:N_RIGHT]),
    )
    return Section(
        "why",
        "Explained predictions",
        "The feature of an input is the weighted mean of its neighbors' features (l = 0), and the "
        "linear head reads it. So these weights are the prediction itself, not an approximation "
        "of it. The label with the most weight need not win, as the head reads the mean.",
        [Gallery(title, [cases[row] for row in rows]) for title, rows in groups if rows],
    )


def _certainty(explanation: Explanation) -> float:
    """The probability of the predicted class; 0 where there is none."""
    label, shares = explanation.prediction, explanation.probabilities
    return 0.0 if label is None or shares is None else shares[label]


def make_case(explanation: Explanation, truth: str, *, by_truth: bool = False) -> Case:
    """The card of one prediction, with the training points of most weight.

    A vote agrees if it has the predicted label or, with `by_truth`, the true one.
    """
    found, bounds = explanation.prediction, explanation.bounds
    answer = NO_ANSWER if found is None else str(found)
    votes = [
        Vote(
            uri="" if it.inputs is None else pixels_uri(it.inputs, bounds),
            label=str(it.label),
            weight=it.weight,
            agrees=str(it.label) == (truth if by_truth else answer),
            title=f"training point {it.index}, distance {it.distance:.3g}",
        )
        for it in explanation.heaviest(N_VOTES)
    ]
    certainty = f"{_certainty(explanation):.1%}"
    image = pixels_uri(explanation.inputs, bounds)
    return Case(image, answer, truth, certainty, explanation.account, votes)


@dataclass(frozen=True, eq=False)
class Adversarial:
    """For examples `rows` (m,) of an evaluation, adversarial `inputs` (m,*input_shape)."""

    rows: Tensor
    inputs: Tensor

    @staticmethod
    def read(path: Path) -> Adversarial:
        """The safetensors file that an evaluation writes beside its record."""
        tensors, _ = read_tensors(path)
        if missing := {"rows", "inputs"} - set(tensors):
            raise InputError(f"{path}: expected rows and inputs, got no {' and no '.join(missing)}")
        return Adversarial(tensors["rows"], tensors["inputs"])


@dataclass(frozen=True, eq=False)
class Subject:
    """An evaluation, with what is needed to show its examples, where it is known.

    The `model`, the examples `x` (n,*input_shape), their targets `y` (n,), and the `adversarial`
    examples found. `classes` and `feature_names` replace numbers; `train_x`: see `otad.explain`.
    """

    evaluation: Evaluation
    model: nn.Module | None = None
    x: Tensor | None = None
    y: Tensor | None = None
    adversarial: Adversarial | None = None
    classes: Sequence[str] | None = None
    feature_names: Sequence[str] | None = None
    train_x: Tensor | None = None

    def __post_init__(self) -> None:
        n = self.evaluation.n
        if self.x is not None and len(self.x) != n:
            raise InputError(f"x: expected the {n} examples of the record, got {len(self.x)}")

    def ball(self, input_shape: torch.Size) -> LpBall:
        """The threat model of the record, for inputs of this shape."""
        threat = self.evaluation.threat
        scale, mutable, bounds = (threat.get(name) for name in ("scale", "mutable", "bounds"))
        return NORMS[str(threat["norm"])](
            float(threat["eps"]),
            None if bounds is None else (bounds[0], bounds[1]),
            None if scale is None else torch.tensor(scale).view(input_shape),
            None if mutable is None else torch.tensor(mutable).view(input_shape),
        )

    def name_of(self, answer: Tensor) -> str:
        """Logits (C,), a label or a value as text."""
        if bool(answer.isnan().any()):
            return NO_ANSWER
        if answer.is_floating_point() and answer.dim() == 0:
            return f"{float(answer):.5g}"
        label = int(answer.argmax() if answer.dim() else answer)
        return str(label if self.classes is None else self.classes[label])


def examples_section(subject: Subject) -> Section | None:
    """Images as cards with the input before, after and the change; other inputs as tables.

    None without the model and its examples.
    """
    model, x, y, adversarial = subject.model, subject.x, subject.y, subject.adversarial
    if model is None or x is None or y is None or adversarial is None:
        return None
    evaluation, rows = subject.evaluation, adversarial.rows.cpu()
    clean, changed = x.cpu()[rows], adversarial.inputs.cpu()
    distances = subject.ball(x.shape[1:]).distance(changed, clean)
    shown = spread(distances, evaluation.headline_eps, N_ADVERSARIAL) if len(rows) else []
    if not shown:
        return Section("examples", "Adversarial examples", "No adversarial example was found.", [])
    titles = [
        f"Example {int(rows[place])}: {finder_of(evaluation, int(rows[place])) or 'attacked'}, "
        f"distance {float(distances[place]):.3g}"
        for place in shown
    ]
    found = _Shown(clean[shown], changed[shown], y.cpu()[rows[shown]], titles)
    is_image = x.dim() == 4 and x.shape[1] in (1, 3)
    has_cards = is_image and evaluation.task == "classification"
    show = _cards if has_cards else _feature_tables
    lead = f"{len(shown)} of {len(rows):,} adversarial examples, from the nearest to the furthest."
    if isinstance(model, OTAD):
        lead += (
            " The answer is a mean over training points, and a successful attack exchanges them."
        )
        if has_cards:
            lead += (
                " Below each input are those with the most weight: green of the right class, "
                "orange of other classes."
            )
    return Section("examples", "Adversarial examples", lead, show(subject, model, found))


class _Shown(NamedTuple):
    """Examples (m,*input_shape) before and after the attack, their targets (m,) and titles."""

    clean: Tensor
    changed: Tensor
    truths: Tensor
    titles: list[str]


def spread(distances: Tensor, eps: float, count: int) -> list[int]:
    """Up to `count` places of the list, from the nearest to the furthest within eps; if these are
    too few, then the nearest beyond."""
    order = [place for place in distances.argsort().tolist() if math.isfinite(distances[place])]
    within = [place for place in order if distances[place] <= eps]
    if len(within) <= count:
        return order[:count]
    steps = torch.linspace(0, len(within) - 1, count).round().int().tolist()
    return [within[step] for step in steps]


def finder_of(evaluation: Evaluation, row: int) -> str:
    """The attack that broke the row at the shortest distance; empty if none did."""
    found = [
        (distance, record.attack)
        for record in evaluation.attacks
        for broken, distance in zip(record.broken, record.distances, strict=True)
        if broken == row
    ]
    return min(found)[1] if found else ""


def _cards(subject: Subject, model: nn.Module, shown: _Shown) -> list[Block]:
    clean, changed, truths, titles = shown
    low, high = subject.evaluation.threat.get("bounds") or torch.aminmax(clean)
    bounds = float(low), float(high)
    names = [subject.name_of(truth) for truth in truths]
    before, after = (_cases(subject, model, it, names, bounds) for it in (clean, changed))
    color = ": red brighter, blue darker" if clean.shape[1] == 1 else ", around gray"
    blocks: list[Block] = []
    for place, title in enumerate(titles):
        uri, factor = change_uri(clean[place], changed[place], bounds)
        note = f"the change, amplified {factor:g} times{color}"
        blocks.append(Comparison(before[place], after[place], uri, note, title))
    return blocks


def _cases(
    subject: Subject,
    model: nn.Module,
    inputs: Tensor,
    truths: Sequence[str],
    bounds: tuple[float, float],
) -> list[Case]:
    if isinstance(model, OTAD):
        on_device = inputs.to(model.backbone.mean)
        found = explain(model, on_device, classes=subject.classes, train_x=subject.train_x)
        pairs = zip(found, truths, strict=True)
        return [make_case(it, truth, by_truth=True) for it, truth in pairs]
    cases = []
    for image, logits, truth in zip(inputs, _outputs(model, inputs), truths, strict=True):
        answer = subject.name_of(logits)
        certainty = "" if answer == NO_ANSWER else f"{float(logits.softmax(0).max()):.1%}"
        cases.append(Case(pixels_uri(image, bounds), answer, truth, certainty, "", ()))
    return cases


def _feature_tables(subject: Subject, model: nn.Module, shown: _Shown) -> list[Block]:
    """A table per example: the answers, and the features with the largest changes, measured in
    the units of the threat model."""
    clean, changed, truths, titles = shown
    scale = subject.ball(clean.shape[1:]).scale
    before, after = _outputs(model, clean), _outputs(model, changed)
    names = subject.feature_names or [f"feature {place}" for place in range(clean[0].numel())]
    blocks: list[Block] = []
    for row, title in enumerate(titles):
        old, new = clean[row].flatten(), changed[row].flatten()
        change = (new - old) / (1 if scale is None else scale.flatten())
        order = change.abs().argsort(descending=True)[:N_FEATURES].tolist()
        rows = [("answer", subject.name_of(before[row]), subject.name_of(after[row]), "")]
        for k in order:
            values = f"{float(old[k]):.4g}", f"{float(new[k]):.4g}", f"{float(change[k]):+.3g}"
            rows.append((str(names[k]), *values))
        left = int((change != 0).sum()) - len(order)
        note = f"{title}. The right answer is {subject.name_of(truths[row])}."
        note += f" {left:,} more features changed less." if left > 0 else ""
        blocks.append(Table(("", "before", "attacked", "change"), rows, 0, note=note))
    return blocks


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Outputs on the CPU, for a model on any device."""
    device = next((it.device for it in model.parameters()), inputs.device)
    outputs: Tensor = model(inputs.to(device))
    return outputs.cpu()
