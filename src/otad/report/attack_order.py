"""The attacks of an evaluation in the order they ran, and which of them a line counts."""

from __future__ import annotations

from otad.evaluate.records import Evaluation

FAMILY_COLORS = {
    "random": "#8796a1",
    "black-box": "#7a5cc2",
    "white-box": "#dd7d1f",
    "adaptive": "#c2379d",
}
OTHER_COLOR = "#3f7fbf"


def families(evaluation: Evaluation) -> dict[str, str]:
    """The family of each attack, in the order of their first runs."""
    return {record.attack: record.family for record in evaluation.attacks}


def spares_the_broken(evaluation: Evaluation) -> bool:
    """Whether no attack was run on what an attack before it had broken, at the same eps.

    In regression nothing breaks, and every attack is run on every example.
    """
    if evaluation.task != "classification":
        return False
    broken: dict[float, set[int]] = {}
    for record in evaluation.attacks:
        seen = broken.setdefault(record.eps, set())
        if not seen.isdisjoint(record.attacked):
            return False
        seen.update(record.broken)
    return True


def counted_with(evaluation: Evaluation) -> dict[str, list[str]]:
    """The attacks that count in the line of each one.

    Where attacks spare what others had broken, an attack alone means little: its line counts all
    attacks before it too. Else it counts itself.
    """
    names = list(families(evaluation))
    if not spares_the_broken(evaluation):
        return {name: [name] for name in names}
    return {name: names[: place + 1] for place, name in enumerate(names)}


def colors(evaluation: Evaluation) -> dict[str, tuple[str, float]]:
    """A color by family, and an opacity by place within it, the later the stronger."""
    members: dict[str, list[str]] = {}
    for name, family in families(evaluation).items():
        members.setdefault(family, []).append(name)
    return {
        name: (FAMILY_COLORS.get(family, OTHER_COLOR), 0.4 + 0.6 * (place + 1) / len(names))
        for family, names in members.items()
        for place, name in enumerate(names)
    }
