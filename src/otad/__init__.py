"""otad: robust prediction by optimal transport and exact convex integration."""

from otad import cip, data, nets
from otad.defense import OTAD, Trace, defend, load
from otad.errors import InputError, OtadError

__version__ = "0.1.0"

__all__ = [
    "OTAD",
    "InputError",
    "OtadError",
    "Trace",
    "__version__",
    "cip",
    "data",
    "defend",
    "load",
    "nets",
]
