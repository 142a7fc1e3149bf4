"""Evaluations by the protocol: worst case over many attacks, certificates and flags."""

from otad.arguments import guard
from otad.evaluate.attack import attack
from otad.evaluate.records import AttackRecord, CertificateRecord, Evaluation, Flag, SolverRecord
from otad.evaluate.runner import evaluate
from otad.evaluate.suite import ATTACKS, PRESETS, make_attack

__all__ = [
    "ATTACKS", "PRESETS", "AttackRecord", "CertificateRecord", "Evaluation", "Flag", "SolverRecord",
    "attack", "evaluate", "make_attack",
]  # fmt: skip

guard(globals(), __all__)
