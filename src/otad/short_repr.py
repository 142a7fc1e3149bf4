"""Short reprs: what an object is and its headline numbers, never a dump of tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

LONGEST = 40  # letters of a value


def short_repr(self: Any) -> str:
    """The `__repr__` of a dataclass: tensors by shape and dtype, long values by their length."""
    parts = (f"{it.name}={_short(getattr(self, it.name))}" for it in fields(self) if it.repr)
    return f"{type(self).__name__}({', '.join(parts)})"


def _short(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    if len(text) <= LONGEST:
        return text
    name = type(value).__name__
    return f"{name} of {len(value)}" if hasattr(value, "__len__") else name


def median_text(values: Any) -> str:
    """The median of a tensor (n,), which may be empty."""
    return f"median {float(values.double().median()):.3g}" if len(values) else "none"


def counts_text(names: Any) -> str:
    """How often each name occurs: "18 solved, 2 raised"."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
