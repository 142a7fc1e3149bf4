"""An HTTP service that answers, explains and certifies with a model, by an open protocol."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from otad.errors import import_extra

if TYPE_CHECKING:
    from otad.serve.app import create_app
    from otad.serve.workers import run

__all__ = ["create_app", "run"]

_SOURCES = {"create_app": "otad.serve.app", "run": "otad.serve.workers"}
for _package in ("fastapi", "prometheus_client", "uvicorn"):
    import_extra(_package, "serve")


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the parent of the workers needs no torch."""
    if name not in _SOURCES:
        raise AttributeError(f"module 'otad.serve' has no attribute {name!r}")
    return getattr(import_module(_SOURCES[name]), name)
