"""otad: robust prediction by optimal transport and exact convex integration."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from otad.arguments import guard

if TYPE_CHECKING:
    from otad import attacks, baselines, cip, data, nets
    from otad.certify import Certificate, Interval, certify, certify_values
    from otad.errors import InputError, OtadError
    from otad.estimators import OTADClassifier, OTADRegressor
    from otad.evaluate import attack, evaluate
    from otad.explain import explain
    from otad.hub import from_pretrained, push_to_hub
    from otad.model import prototypes
    from otad.model.defend import defend
    from otad.model.foreign import distance_threshold
    from otad.model.loading import load
    from otad.model.otad import OTAD
    from otad.model.prediction import predict
    from otad.model.trace import Trace
    from otad.nets import metric_of
    from otad.threat import L2, Linf, LpBall

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
    "attack",
    "attacks",
    "baselines",
    "certify",
    "certify_values",
    "cip",
    "data",
    "defend",
    "distance_threshold",
    "evaluate",
    "explain",
    "from_pretrained",
    "load",
    "metric_of",
    "nets",
    "predict",
    "prototypes",
    "push_to_hub",
]

# Names are imported when they are first used: torch alone takes seconds.
_SOURCES = {
    "otad": ("attacks", "baselines", "cip", "data", "nets"),
    "otad.certify": ("Certificate", "Interval", "certify", "certify_values"),
    "otad.errors": ("InputError", "OtadError"),
    "otad.estimators": ("OTADClassifier", "OTADRegressor"),
    "otad.evaluate": ("attack", "evaluate"),
    "otad.explain": ("explain",),
    "otad.hub": ("from_pretrained", "push_to_hub"),
    "otad.model": ("prototypes",),
    "otad.model.defend": ("defend",),
    "otad.model.foreign": ("distance_threshold",),
    "otad.model.loading": ("load",),
    "otad.model.otad": ("OTAD",),
    "otad.model.prediction": ("predict",),
    "otad.model.trace": ("Trace",),
    "otad.nets": ("metric_of",),
    "otad.threat": ("L2", "Linf", "LpBall"),
}
_SOURCE_OF = {name: source for source, names in _SOURCES.items() for name in names}


class _Package(ModuleType):
    """`otad.certify`, `otad.evaluate` and `otad.explain` are functions, and names of packages too.

    Python sets a loaded package as an attribute of its parent; here the function of the same name
    is set instead. Names in the packages are imported by `from otad.evaluate import Evaluation`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("certify", "evaluate", "explain") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _SOURCE_OF:
        raise AttributeError(f"module 'otad' has no attribute {name!r}")
    source = _SOURCE_OF[name]
    if source in ("otad", "otad.model"):  # the name is a module
        value: Any = import_module(f"{source}.{name}")
    else:
        value = getattr(import_module(source), name)
    globals()[name] = value
    if source != "otad.estimators":  # scikit-learn wants constructors that check nothing
        guard(globals(), [name])
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
