"""Local and global scope side by side: one net and one bank, answered in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from otad.evaluate.records import Evaluation
from otad.model.otad import OTAD
from otad.report.assessment import DEFENDED, Assessment
from otad.report.blocks import Section, Table, Text
from otad.scores import Score


@dataclass(frozen=True, eq=False)
class Contender:
    """A model, how it does on the whole test part, and its evaluation under attack."""

    name: str
    model: OTAD
    assessment: Assessment
    evaluation: Evaluation

    @property
    def curvature(self) -> str:
        """The L of its maps, in words."""
        potential = self.model.potential
        if potential is None:
            raised = self.assessment.share_raised
            return f"{self.model.smoothness:g}, raised on {raised:.1%} of the rows"
        left_out = len(potential.left_out)
        without = f"{left_out} training points left out" if left_out else "through all points"
        return f"{potential.smoothness:.3g}, {without}"


def scopes_section(
    local: Contender, others: Sequence[Contender], *, radii: Sequence[float], eps: float
) -> Section:
    """What each proves at all `radii`, and what the attacks it was under leave at `eps`."""
    all_ = local, *others
    rows = [
        ("clean accuracy", *(f"{one.assessment.scores[DEFENDED]:.1%}" for one in all_)),
        ("L", *(one.curvature for one in all_)),
        *((f"proved at l2 {radius:g}", *(_share(one, radius) for one in all_)) for radius in radii),
        (
            f"left by attacks at l2 {eps:g}",
            *(_percent(one.evaluation.worst_case(eps)) for one in all_),
        ),
    ]
    weaker, stronger = (", ".join(one.evaluation.per_attack) for one in (others[0], local))
    return Section(
        "scopes",
        "Neighbors or one map",
        "The same net and training points, answered from the nearest points of each input (local, "
        "the model of this page) or by one Lipschitz map through all of them (global); and such a "
        "map without a net, through points that answer with their own labels.",
        [
            Table(
                ("", *(one.name for one in all_)),
                rows,
                note=f"Clean: {len(local.assessment):,} test examples; proved and attacked: the "
                f"first {local.evaluation.n:,}. Attacks on the global ones, at this radius alone: "
                f"{weaker}; on the local one: {stronger}.",
            ),
            Text(
                "Where neighbors change, a local answer may jump, and a proof has to cover every "
                "set of neighbors within reach. One map has no such places: it moves by L times "
                "the step at most, so the margin alone proves a radius for every input."
            ),
        ],
    )


def _share(one: Contender, radius: float) -> str:
    proved = one.evaluation.certified_accuracy(radius)
    return "nothing" if proved is None else _percent(proved)


def _percent(score: Score) -> str:
    return f"{score.value:.1f}%"
