"""otad: robust prediction by optimal transport and exact convex integration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otad import attacks, cip, data, nets
from otad.attacks import L2, Linf, LpBall
from otad.certify import Certificate, Interval, certify, certify_values
from otad.errors import InputError, OtadError
from otad.evaluate import evaluate
from otad.model import prototypes
from otad.model.defend import defend
from otad.model.otad import OTAD, Trace, load

# `certify` and `evaluate` are functions here, though packages have these names. Python binds a
# package to its parent when it is first loaded, so they are loaded above and bound for good; what
# is inside the packages is reached by `from otad.evaluate import Evaluation`.

if TYPE_CHECKING:
    from otad.estimators import OTADClassifier, OTADRegressor

__version__ = "0.1.0"

__all__ = [
    "L2",
    "OTAD",
    "Certificate",
    "InputError",
    "Interval",
    "Linf",
    "LpBall",
    "OTADClassifier",
    "OTADRegressor",
    "OtadError",
    "Trace",
    "__version__",
    "attacks",
    "certify",
    "certify_values",
    "cip",
    "data",
    "defend",
    "evaluate",
    "load",
    "nets",
    "prototypes",
]


def __getattr__(name: str) -> Any:
    """The estimators, once asked for: `import otad` is a third faster without scikit-learn."""
    if name in ("OTADClassifier", "OTADRegressor"):
        from otad import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
