"""Certified radii: distances within which no attack, known or unknown, changes a prediction."""

from otad.certify.certificate import Certificate, Interval

__all__ = ["Certificate", "Interval"]
