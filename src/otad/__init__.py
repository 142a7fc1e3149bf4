"""otad: robust prediction by optimal transport and exact convex integration."""

from otad import cip

__version__ = "0.1.0"

__all__ = ["__version__", "cip"]
