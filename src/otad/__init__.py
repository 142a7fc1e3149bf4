"""otad: robust prediction by optimal transport and exact convex integration."""

__version__ = "0.1.0"
