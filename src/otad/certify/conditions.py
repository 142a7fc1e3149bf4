"""What every certificate rests on: models it does not hold for are refused."""

from __future__ import annotations

from otad.cip import ExactCip
from otad.defense import OTAD
from otad.errors import InputError
from otad.nets import LinearHead

HULL = (
    "the answer is read by a linear head from a convex combination of what the neighbors found say",
    "neighbors are searched exactly, by l2 distance in the embedded space",
    "matrix products of the head keep full float32 precision (no TF32, no autocast)",
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
    backbone, solver = model.backbone, model.solver
    if model.metric is not None:
        raise InputError(
            "model: expected neighbors by l2 distance of embedded inputs, got a metric "
            f"({type(model.metric).__name__}), for which no certificate is known"
        )
    if not isinstance(solver, ExactCip):
        raise InputError(f"solver: expected ExactCip, got {type(solver).__name__}, an estimate")
    if backbone.task != task:
        right = "certify" if backbone.task == "classification" else "certify_values"
        raise InputError(f"model: expected {task}, got {backbone.task}; use {right}")
    head = backbone.head
    if not isinstance(head, LinearHead) or type(head).forward is not LinearHead.forward:
        raise InputError(f"head: expected a LinearHead, got {type(head).__name__}")
    if solver.on_failure == "abstain":
        raise InputError(
            "on_failure: expected 'fallback' or 'raise', got 'abstain': that the model always "
            "answers cannot be proved"
        )
    if solver.mode == "consistent" and solver.climb is not None and solver.climb[1] > 0:
        raise InputError(
            "climb: expected None or (delta1, 0) in mode 'consistent', as the proof needs a known "
            f"strong convexity, got {solver.climb!r}"
        )
    return (*HULL, UNANSWERED) if solver.on_failure == "raise" else HULL
