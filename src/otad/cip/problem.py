"""The convex integration problem of one batch of queries.

For a query x' with neighbors x_i (anchors) whose features are z_i (images), a potential h that is
`strong_convexity`-strongly convex and `smoothness`-smooth has to satisfy h(x_i) = u_i and
grad h(x_i) = z_i. With a_i = x_i - x', the shift z~_i = z_i - l a_i and M = L - l, the values u_i
and the answer (v, z') = (h(x'), grad h(x')) obey

    (2)  u~_i >= u~_j + <z~_j, a_i - a_j> + |z~_i - z~_j|^2 / (2M)             for all i != j
    (3)  minimize v  subject to  v >= q_i(z') for all i,
         q_i(z) = u~_i - <z~_i, a_i> + |z - z~_i|^2 / (2M),      u~_i = u_i - (l/2) |a_i|^2.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Self, TypeGuard

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_finite, check_shape, check_tensor
from otad.cip.judge import kkt_residual
from otad.cip.solution import CipSolution
from otad.errors import InputError
from otad.io.mapped_rows import gathered, in_file

_FETCHED_BYTES = 2**29  # of rows copied from a bank in a file or on another device


class _Problem:
    """What both kinds of problem share."""

    query: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    has_strong_convexity: bool

    def in_double(self) -> Self:
        """The same with a query in float64, so that products are computed in float64 too."""
        return self._replaced(query=self.query.double())

    def residual(self, solution: CipSolution) -> Tensor:
        """How far a solution is from optimal, (B,) in float64; 0 is perfect. See `kkt_residual`."""
        return kkt_residual(self, solution)  # type: ignore[arg-type]

    def _replaced(self, **changes: object) -> Self:
        """A copy with other values, which are not checked."""
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made

    def _selected(self, rows: Tensor, *names: str) -> Self:
        """Some rows (b,) of the tensors of these names, of the query and of the curvature."""
        names = ("query", "smoothness", "strong_convexity", *names)
        return self._replaced(**{name: gathered(getattr(self, name), rows) for name in names})


@dataclass(frozen=True, eq=False, init=False)
class CipProblem(_Problem):
    """Queries (B,d) with their anchors (B,K,d) and images (B,K,d), all of one dtype and device.

    `smoothness` (L > 0) and `strong_convexity` (l < L, may be negative) are numbers or one value
    per row; they are stored as float64 tensors (B,). `has_strong_convexity`: whether some l is
    other than 0. Gradients flow through `query` alone.
    """

    query: Tensor
    anchors: Tensor
    images: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    has_strong_convexity: bool

    def __init__(
        self,
        query: Tensor,
        anchors: Tensor,
        images: Tensor,
        smoothness: float | Tensor,
        strong_convexity: float | Tensor = 0.0,
    ) -> None:
        check_tensor(query, "query", "B,d")
        for name, tensor in (("anchors", anchors), ("images", images)):
            check_tensor(tensor, name, "B,K,d", finite=False)
        batch, dim = query.shape
        check_shape(anchors, "anchors", (batch, anchors.shape[1], dim), "(B,K,d) to match query")
        check_shape(images, "images", tuple(anchors.shape), "to match anchors")
        for name, tensor in (("anchors", anchors), ("images", images)):
            check_alike(tensor, name, query, "query")
            check_finite(tensor, name)
            _refuse_gradient(tensor, name)
        curvature = _curvature(smoothness, strong_convexity, query)
        self.__dict__.update(query=query, anchors=anchors, images=images, **curvature)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, K, d)."""
        batch, count, dim = self.anchors.shape
        return batch, count, dim

    def anchors_of(self, rows: slice) -> Tensor:
        """The anchors of some rows, on the query's device."""
        return self.anchors[rows]

    def images_of(self, rows: slice) -> Tensor:
        """The images of some rows, on the query's device."""
        return self.images[rows]

    def select(self, rows: Tensor) -> Self:
        """The problem of some rows (b,)."""
        return self._selected(rows, "anchors", "images")


@dataclass(frozen=True, eq=False, init=False)
class BankProblem(_Problem):
    """The same problem with neighbors named by `indices` (B,K) into a bank of pairs (N,d).

    Neighbors are gathered block by block, so a batch never needs its B*K*d neighbors in memory at
    once. The bank may be half precision and may be on another device or memory-mapped from a file;
    it is assumed to be finite.
    """

    query: Tensor
    inputs: Tensor
    features: Tensor
    indices: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    has_strong_convexity: bool

    def __init__(
        self,
        query: Tensor,
        inputs: Tensor,
        features: Tensor,
        indices: Tensor,
        smoothness: float | Tensor,
        strong_convexity: float | Tensor = 0.0,
    ) -> None:
        check_tensor(query, "query", "B,d", finite=False)
        check_tensor(inputs, "inputs", "N,d", dtypes=STORAGE_DTYPES, finite=False)
        check_tensor(features, "features", "N,d", dtypes=STORAGE_DTYPES, finite=False)
        check_tensor(indices, "indices", "B,K", dtypes=(torch.int64,), finite=False)
        batch, dim = query.shape
        check_shape(inputs, "inputs", (inputs.shape[0], dim), "(N,d) to match query")
        check_shape(features, "features", tuple(inputs.shape), "to match inputs")
        check_shape(indices, "indices", (batch, indices.shape[1]), "(B,K) to match query")
        check_alike(features, "features", inputs, "inputs")
        for name, tensor in (("inputs", inputs), ("features", features)):
            _refuse_gradient(tensor, name)
        _check_values(query, indices, len(inputs))
        curvature = _curvature(smoothness, strong_convexity, query)
        indices = indices.to(inputs.device)
        self.__dict__.update(
            query=query, inputs=inputs, features=features, indices=indices, **curvature
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, K, d)."""
        batch, count = self.indices.shape
        return batch, count, self.query.shape[1]

    def anchors_of(self, rows: slice) -> Tensor:
        """The gathered anchors of some rows, on the query's device, in the bank's dtype."""
        return gathered(self.inputs, self.indices[rows], self.query.device)

    def images_of(self, rows: slice) -> Tensor:
        """The gathered images of some rows, on the query's device, in the bank's dtype."""
        return gathered(self.features, self.indices[rows], self.query.device)

    def select(self, rows: Tensor) -> Self:
        """The problem of some rows (b,)."""
        return self._selected(rows, "indices")

    def fetched(self) -> Self:
        """The same with the bank rows it needs copied to the query's device, each read once, if
        the bank is in a file or on another device.

        Where they are more than fits, they are read block by block, whenever they are needed.
        """
        bank, device = (self.inputs, self.features), self.query.device
        if self.inputs.device == device and in_file(self.inputs) is None:
            return self
        used, places = self.indices.cpu().unique(return_inverse=True)  # in file order
        if 2 * len(used) * self.inputs[0].nbytes > _FETCHED_BYTES:
            return self
        inputs, features = (gathered(part, used, device) for part in bank)
        return self._replaced(inputs=inputs, features=features, indices=places.to(device))


def _check_values(query: Tensor, indices: Tensor, points: int) -> None:
    """Finite queries, and indices below `points`; one synchronization is almost always enough."""
    ends = torch.aminmax(indices)
    if query.device == indices.device:
        total = query.detach().sum(dtype=torch.float64)
        found = torch.stack((total, *(end.double() for end in ends))).tolist()
        if math.isfinite(found[0]) and found[1] >= 0 and found[2] < points:
            return
    check_finite(query, "query")
    low, high = (int(end) for end in ends)
    if low < 0 or high >= points:
        raise InputError(f"indices: expected bank rows 0 to {points - 1}, got {low} to {high}")


def _curvature(
    smoothness: float | Tensor, strong_convexity: float | Tensor, query: Tensor
) -> dict[str, Tensor | bool]:
    """L and l (B,), and whether some l is other than 0. Numbers are checked without waiting for the
    device."""
    high = _per_row(smoothness, "smoothness", query)
    low = _per_row(strong_convexity, "strong_convexity", query)
    if _is_number(smoothness) and _is_number(strong_convexity):
        good, is_nonzero = 0 < smoothness > strong_convexity, strong_convexity != 0
    else:
        good, is_nonzero = bool(((high > 0) & (high > low)).all()), bool(low.any())
    if not good:
        row = int(((high <= 0) | (high <= low)).nonzero()[0])
        raise InputError(
            "smoothness: expected a value above 0 and above strong_convexity, got smoothness "
            f"{high[row].item()} and strong_convexity {low[row].item()} in row {row}"
        )
    return {"smoothness": high, "strong_convexity": low, "has_strong_convexity": is_nonzero}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _per_row(value: float | Tensor, name: str, query: Tensor) -> Tensor:
    batch = len(query)
    if isinstance(value, Tensor):
        if value.dim() == 0:
            value = value.expand(batch)
        check_tensor(value, name, "B", finite=False)
        check_shape(value, name, (batch,), "(one value per query) or a number")
        if value.device != query.device:
            raise InputError(f"{name}: expected device {query.device}, got {value.device}")
        check_finite(value, name)
        return value.detach().double()
    if not _is_number(value):
        raise InputError(f"{name}: expected a number or a tensor (B,), got {type(value).__name__}")
    if not math.isfinite(value):
        raise InputError(f"{name}: expected finite values, got {value} at (0,)")
    return torch.full((batch,), float(value), dtype=torch.float64, device=query.device)


def _refuse_gradient(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"{name}: expected a constant (gradients flow through query alone), "
            "got a tensor that requires grad; detach it"
        )
