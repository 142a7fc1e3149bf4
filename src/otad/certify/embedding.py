"""How far a change of the input can carry the embedded query."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from otad.checks import check_evaluation, check_finite, check_shape
from otad.errors import InputError
from otad.nets import Backbone, only_normalizes


@dataclass(frozen=True, eq=False)
class Reach:
    """An input x + delta with |delta / unit| <= r is embedded at e(x) + stretch * u, |u| <= r.

    `stretch` (d,) float64. For normalized and flattened inputs it is unit / std, and the embedded
    points reached are exactly that ellipsoid; it is 0 at coordinates that no input reaches, which
    are then 0 themselves. For another embedding it is a Lipschitz constant, the same for all d
    coordinates. All rules work with u: their radii are radii of the input.

    `slip` is the relative rounding error of the embedding as the model computes it, so that in
    truth |u| <= r + 2 slip (size + r), where size is |e(x) / stretch|.
    """

    stretch: Tensor
    slip: float

    @property
    def longest(self) -> float:
        """Q: no embedded query moves further than Q r."""
        return float(self.stretch.max())

    def to_input(self, radius: Tensor, size: Tensor) -> Tensor:
        """The largest r (B,) for which |u| stays within `radius` (B,); 0 where there is none."""
        return ((radius - 2 * self.slip * size) / (1 + 2 * self.slip)).clamp_min(0.0)

    def from_input(self, eps: float, size: Tensor) -> Tensor:
        """The largest |u| (B,) for inputs within eps."""
        return eps * (1 + 2 * self.slip) + 2 * self.slip * size

    def size_of(self, embedded: Tensor) -> Tensor:
        """|e(x) / stretch| (B,)."""
        reached = self.stretch > 0
        place = embedded.double()[:, reached] / self.stretch[reached]
        size: Tensor = torch.linalg.vector_norm(place, dim=1)
        return size


def reach_of(backbone: Backbone, unit: Tensor | None, embedding_lipschitz: float | None) -> Reach:
    """The reach of a backbone's embedding, for changes measured as |delta / unit|.

    An embedding that does more than normalize and flatten needs `embedding_lipschitz`, a constant Q
    with |e(x + delta) - e(x)| <= Q |delta / unit| for the embedding as it is computed.
    """
    measured = checked_unit(unit, backbone)
    if not only_normalizes(backbone):
        return _stated(backbone, embedding_lipschitz)
    if embedding_lipschitz is not None:
        raise InputError(
            "embedding_lipschitz: expected None, as this embedding only normalizes and is known "
            f"exactly, got {embedding_lipschitz!r}"
        )
    std = backbone.std.double()
    stretch = (1 / std if measured is None else measured / std).flatten()
    stretch = functional.pad(stretch, (0, backbone.lift))
    return Reach(stretch, 2 * torch.finfo(backbone.std.dtype).eps)


def _stated(backbone: Backbone, constant: float | None) -> Reach:
    if constant is None:
        raise InputError(
            f"embedding_lipschitz: expected a number, as {type(backbone).__name__} embeds its "
            "inputs in a way of its own, got None"
        )
    check_constant(constant, "embedding_lipschitz")
    check_evaluation(backbone, "model.backbone")
    return Reach(same_stretch(backbone.dim, constant, backbone.std), 0.0)


def same_stretch(dim: int, constant: float, like: Tensor) -> Tensor:
    """One constant in all directions (dim,), on the device of `like`."""
    return torch.full((dim,), float(constant), dtype=torch.float64, device=like.device)


def check_constant(constant: float, name: str) -> None:
    if not 0 < constant < math.inf:
        raise InputError(f"{name}: expected a positive finite number, got {constant!r}")


def checked_unit(unit: object, backbone: Backbone) -> Tensor | None:
    if unit is None:
        return None
    if not isinstance(unit, Tensor):
        raise InputError(f"unit: expected a torch.Tensor or None, got {type(unit).__name__}")
    check_shape(unit, "unit", backbone.input_shape, "like one input")
    measured = unit.detach().to(backbone.std.device, torch.float64)
    check_finite(measured, "unit")
    if not bool((measured > 0).all()):
        raise InputError(f"unit: expected positive values, got {measured.min().item()}")
    return measured
