"""Red flags: signs that the figures of an evaluation are not to be trusted."""

from __future__ import annotations

from collections.abc import Callable

from otad.evaluate.certificate_check import sandwich
from otad.evaluate.flag_context import Scene
from otad.evaluate.model_flags import (
    batch_size,
    finite_differences,
    gradient_share,
    neighbor_changes,
    randomness,
)
from otad.evaluate.planted import planted_example
from otad.evaluate.records import FAIL, Flag
from otad.evaluate.strength_flags import (
    large_eps,
    more_eps,
    more_restarts,
    more_steps,
    white_box_is_strongest,
)

CHECKS: tuple[Callable[[Scene], Flag], ...] = (
    sandwich,
    white_box_is_strongest,
    more_steps,
    more_restarts,
    more_eps,
    large_eps,
    planted_example,
    gradient_share,
    finite_differences,
    neighbor_changes,
    batch_size,
    randomness,
)


def raise_flags(scene: Scene, progress: Callable[[int], None] | None = None) -> tuple[Flag, ...]:
    """Every check, in order; then what attacks themselves remarked on the model.

    `progress` is told, before each check, how many are done.
    """
    raised = []
    for done, check in enumerate(CHECKS):
        if progress is not None:
            progress(done)
        raised.append(check(scene))
    return (*raised, *remark_flags(scene))


def remark_flags(scene: Scene) -> list[Flag]:
    """AutoAttack's own warnings, where it ran: told and explained, never silenced."""
    return [
        Flag(
            f"{attack} has remarks on the model",
            FAIL,
            " ".join(remarks),
            "The attack noticed something about the model under which its own figure may be too "
            "optimistic. For a nearest-neighbor defense, zero gradients are expected where the "
            "answer rests on one bank point, and its search by gradient is blind there.",
            "Read its figure together with the attacks that move the neighbors; the worst case "
            "over all of them is what counts.",
        )
        for attack, remarks in scene.remarks.items()
    ]
