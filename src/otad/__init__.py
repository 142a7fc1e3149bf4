"""otad: robust prediction by optimal transport and exact convex integration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otad import cip, data, nets
from otad.defense import OTAD, Trace, defend, load
from otad.errors import InputError, OtadError

if TYPE_CHECKING:
    from otad.estimators import OTADClassifier, OTADRegressor

__version__ = "0.1.0"

__all__ = [
    "OTAD",
    "InputError",
    "OTADClassifier",
    "OTADRegressor",
    "OtadError",
    "Trace",
    "__version__",
    "cip",
    "data",
    "defend",
    "load",
    "nets",
]


def __getattr__(name: str) -> Any:
    """The estimators, once asked for: `import otad` is a third faster without scikit-learn."""
    if name in ("OTADClassifier", "OTADRegressor"):
        from otad import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
