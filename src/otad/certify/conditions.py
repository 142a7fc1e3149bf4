"""What every certificate rests on: models it does not hold for are refused."""

from __future__ import annotations

import math

from otad.cip.whole_bank.map import GAP
from otad.errors import InputError
from otad.model.otad import OTAD
from otad.nets import LinearHead
from otad.nets.vit import TokenHead

LINEAR = (LinearHead.forward, TokenHead.forward)  # what is known to be `matrix` times z
PRECISION = "matrix products of the head keep full float32 precision (no TF32, no autocast)"
HULL = (
    "the answer is read by a linear head from a convex combination of what the neighbors found say",
    "neighbors are searched exactly, by l2 distance where they are sought",
    PRECISION,
)
CELL = (
    "rule 'cell': the same neighbors give one Lipschitz map, as long as no rounding moves their "
    "potentials by more than the solver's own error bound",
)
UNANSWERED = "where the solver finds no solution it raises an error and answers nothing"


def check_certifiable(model: OTAD, task: str) -> tuple[str, ...]:
    """Refuse a model the proofs do not cover; what they assume of the others, in words."""
    if not isinstance(model, OTAD):
        raise InputError(f"model: expected an OTAD model, got {type(model).__name__}")
    backbone = model.backbone
    if backbone.task != task:
        right = "certify" if backbone.task == "classification" else "certify_values"
        raise InputError(f"model: expected {task}, got {backbone.task}; use {right}")
    head = backbone.head
    if not isinstance(head, LinearHead) or type(head).forward not in LINEAR:
        raise InputError(f"head: expected a LinearHead, got {type(head).__name__}")
    answerer = model.answerer
    if answerer.refusal is not None:
        raise InputError(answerer.refusal)
    if not answerer.rests_on_neighbors:
        return _of_global(model)
    return HULL if answerer.always_answers else (*HULL, UNANSWERED)


def _of_global(model: OTAD) -> tuple[str, ...]:
    potential = model.whole_bank.potential
    high, low = potential.smoothness, potential.strong_convexity
    off = math.sqrt(potential.modulus * potential.violation)
    return (
        "rule 'lipschitz': a linear head reads the gradient of one potential for the whole bank, "
        f"whose curvature is in [{low:g}, {high:g}] whatever its levels are",
        f"the levels violate the inequality of a pair by {potential.violation:.3g} at most: that "
        f"may keep the map {off:.3g} off a bank point's feature, and changes nothing in the proof",
        f"each answer within the radius is found with a duality gap of at most {GAP:g} of its "
        "terms, as its status 'solved' says; one without is not covered",
        PRECISION,
    )
