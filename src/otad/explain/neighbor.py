"""A training point behind an answer, and the texts in which it is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from otad.errors import printable

Label = str | int | float | bool


class ClassPart(NamedTuple):
    """The part that the training points of one class have in an answer.

    Attributes
    ----------
    points : int
        How many of them have weight.
    weight : float
        The sum of their weights.
    contribution : float
        The sum of their contributions to the margin.

    Examples
    --------
    >>> from otad.explain import ClassPart
    >>> ClassPart(points=2, weight=0.75, contribution=1.5).weight
    0.75
    """

    points: int
    weight: float
    contribution: float


@dataclass(frozen=True, eq=False)
class Neighbor:
    """A training point that an answer rests on.

    Attributes
    ----------
    index : int
        Its row in the bank.
    weight : float or None
        The weight of its feature in the answer; None where the answer is no weighted mean.
    label : str, int, float or bool
        Its class or its target.
    distance : float
        Its distance to the query, in the space in which neighbors are searched.
    inputs : Tensor or None
        Its raw input, where it is known.
    alone : float or None
        What the margin of the explanation (in regression the value) would be if this point had all
        the weight.
    name : str or None
        Its name, such as a file or a line of a table, where it has one.

    Examples
    --------
    >>> from otad.explain import Neighbor
    >>> point = Neighbor(index=7, weight=0.5, label="cat", distance=1.25, inputs=None, alone=3.0)
    >>> point
    Neighbor(row 7, cat, weight 0.500, contribution +1.5, distance 1.25)
    """

    index: int
    weight: float | None
    label: Label
    distance: float
    inputs: Tensor | None
    alone: float | None = None
    name: str | None = None

    @property
    def contribution(self) -> float | None:
        """The weight times `alone`. The sum of all is the margin, or in regression the value."""
        return None if self.weight is None or self.alone is None else self.weight * self.alone

    @property
    def title(self) -> str:
        """The name of the point, or its row if it has no name."""
        return f"row {self.index}" if self.name is None else printable(self.name)

    def to_dict(self, *, inputs: bool = False) -> dict[str, Any]:
        """Return plain JSON values, with the raw input if asked for."""
        found = {name: value for name, value in vars(self).items() if name != "inputs"}
        found["contribution"] = self.contribution
        if inputs and self.inputs is not None:
            found["inputs"] = self.inputs.tolist()
        return found

    def __repr__(self) -> str:
        has = f"weight {weight_text(self)}, contribution {signed_text(self.contribution)}"
        return (
            f"Neighbor({self.title}, {label_text(self.label)}, {has}, distance {self.distance:.4g})"
        )


def weight_text(neighbor: Neighbor) -> str:
    return "none" if neighbor.weight is None else f"{neighbor.weight:.3f}"


def signed_text(value: float | None) -> str:
    return "none" if value is None else f"{value:+.3g}" if value else "0"


def label_text(label: Label | None) -> str:
    if label is None:
        return "none (abstained)"
    return f"{label:.5g}" if isinstance(label, float) else printable(str(label))


def finite(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
