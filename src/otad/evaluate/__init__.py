"""Robustness by the protocol: worst case over many attacks, proofs beneath it, flags beside it."""

from otad.evaluate.records import AttackRecord, Evaluation, Flag

__all__ = ["AttackRecord", "Evaluation", "Flag"]
