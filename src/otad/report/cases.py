"""Explained predictions of images, as cards."""

from __future__ import annotations

from collections.abc import Sequence

from otad.explain import Explanation
from otad.report.blocks import Case, Gallery, Section, Vote
from otad.report.pictures import pixels_uri

_WRONG, _UNSURE, _PLAIN, _VOTES = 6, 2, 4, 5


def cases_section(explanations: Sequence[Explanation], truths: Sequence[str]) -> Section:
    """Some wrong predictions, the right ones it was least sure of, and some plain ones."""
    cases = {row: make_case(explanations[row], truths[row]) for row in range(len(truths))}
    wrong = [row for row, case in cases.items() if not case.right]
    right = [row for row, case in cases.items() if case.right]
    right.sort(key=lambda row: certainty(explanations[row]))
    groups = (
        (f"Wrong ({min(len(wrong), _WRONG)} of {len(wrong)})", wrong[:_WRONG]),
        ("Right, but least sure", right[:_UNSURE]),
        ("Right", sorted(right[_UNSURE:])[:_PLAIN]),
    )
    return Section(
        "why",
        "Why it says so",
        "The feature of an input is the weighted mean of its neighbors' features (l = 0), read by "
        "the linear head. So these weights are the prediction itself, not a guess about it; the "
        "label with the most weight need not win, as the head reads the mean.",
        [Gallery(title, [cases[row] for row in rows]) for title, rows in groups if rows],
    )


def certainty(explanation: Explanation) -> float:
    """The probability of the predicted class; 0 where there is none."""
    label, shares = explanation.prediction, explanation.probabilities
    return 0.0 if label is None or shares is None else shares[label]


def make_case(explanation: Explanation, truth: str) -> Case:
    """The card of one prediction, with the training points of most weight."""
    found, bounds = explanation.prediction, explanation.bounds
    answer = "no answer" if found is None else str(found)
    votes = [
        Vote(
            uri="" if it.inputs is None else pixels_uri(it.inputs, bounds),
            label=str(it.label),
            weight=it.weight,
            agrees=str(it.label) == answer,
            title=f"training point {it.index}, distance {it.distance:.3g}",
        )
        for it in explanation.heaviest(_VOTES)
    ]
    return Case(
        uri=pixels_uri(explanation.inputs, bounds),
        prediction=answer,
        truth=truth,
        certainty=f"{certainty(explanation):.1%}",
        account=explanation.account,
        votes=votes,
    )
