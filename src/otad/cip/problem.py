"""The convex integration problem of one batch of queries.

For a query x' with neighbors x_i (anchors) whose features are z_i (images), a potential h that is
`strong_convexity`-strongly convex and `smoothness`-smooth has to satisfy h(x_i) = u_i and
grad h(x_i) = z_i. With a_i = x_i - x', the shift z~_i = z_i - l a_i and M = L - l, the values u_i
and the answer (v, z') = (h(x'), grad h(x')) obey

    (2)  u~_i >= u~_j + <z~_j, a_i - a_j> + |z~_i - z~_j|^2 / (2M)             for all i != j
    (3)  minimize v  subject to  v >= q_i(z') for all i,
         q_i(z) = u~_i - <z~_i, a_i> + |z - z~_i|^2 / (2M),      u~_i = u_i - (l/2) |a_i|^2."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from otad.checks import STORAGE_DTYPES, check_alike, check_shape, check_tensor, require
from otad.cip.judge import kkt_residual
from otad.cip.solution import CipSolution
from otad.errors import InputError
from otad.io.mapped_rows import gathered, in_file
from otad.short_repr import short_repr

_FETCHED_BYTES = 2**29  # of rows copied from a bank in a file or on another device


@dataclass(frozen=True, eq=False, init=False)
class _Problem:
    per_row: ClassVar[tuple[str, ...]]  # the names of further tensors with a row per query
    query: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    has_strong_convexity: bool

    def in_double(self) -> Self:
        """The same with a query in float64, and so with products in float64."""
        return self._replaced(query=self.query.double())

    def residual(self, solution: CipSolution) -> Tensor:
        """How far a solution is from optimal, (B,) in float64; 0 is perfect. See `kkt_residual`."""
        return kkt_residual(self, solution)  # type: ignore[arg-type]

    def _replaced(self, **changes: object) -> Self:
        """A copy with other values, which are not checked."""
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made

    def select(self, rows: Tensor) -> Self:
        """The problem of some rows (b,)."""
        names = ("query", "smoothness", "strong_convexity", *self.per_row)
        return self._replaced(**{name: gathered(getattr(self, name), rows) for name in names})

    def _set(
        self, smoothness: float | Tensor, strong_convexity: float | Tensor, **parts: Tensor
    ) -> None:
        """Store the parts and the curvature. Numbers are checked without waiting for the device."""
        high = _per_row(smoothness, "smoothness", parts["query"])
        low = _per_row(strong_convexity, "strong_convexity", parts["query"])
        if isinstance(smoothness, Tensor) or isinstance(strong_convexity, Tensor):
            good, is_nonzero = bool(((high > 0) & (high > low)).all()), bool(low.any())
        else:
            good, is_nonzero = 0 < smoothness > strong_convexity, strong_convexity != 0
        if not good:
            row = int(((high <= 0) | (high <= low)).nonzero()[0])
            got = f"smoothness {high[row].item()} and strong_convexity {low[row].item()}"
            expected = "a value above 0 and above strong_convexity"
            raise InputError(f"smoothness: expected {expected}, got {got} in row {row}")
        parts |= {"smoothness": high, "strong_convexity": low}
        self.__dict__.update(parts, has_strong_convexity=is_nonzero)


@dataclass(frozen=True, eq=False, init=False)
class CipProblem(_Problem):
    """Queries (B,d) with their anchors (B,K,d) and images (B,K,d), all of one dtype and device.

    `smoothness` (L > 0) and `strong_convexity` (l < L, may be negative) are numbers or one value
    per row, stored as float64 tensors (B,). `has_strong_convexity`: whether some l is other than 0.
    Gradients flow through `query` alone."""

    per_row = ("anchors", "images")
    anchors: Tensor
    images: Tensor
    __repr__ = short_repr

    def __init__(
        self,
        query: Tensor,
        anchors: Tensor,
        images: Tensor,
        smoothness: float | Tensor,
        strong_convexity: float | Tensor = 0.0,
    ) -> None:
        check_tensor(query, "query", "B,d")
        parts = {"anchors": anchors, "images": images}
        for name, tensor in parts.items():
            check_tensor(tensor, name, "B,K,d", finite=False)
            shape = len(query), anchors.shape[1], query.shape[1]
            check_shape(tensor, name, shape, "(B,K,d) to match query and anchors")
            check_alike(tensor, name, query, "query")
            _refuse_gradient(tensor, name)
            check_tensor(tensor, name, "B,K,d")  # finite, now that the device is the query's
        self._set(smoothness, strong_convexity, query=query, **parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        batch, count, dim = self.anchors.shape
        return batch, count, dim

    def anchors_of(self, rows: slice) -> Tensor:
        return self.anchors[rows]

    def images_of(self, rows: slice) -> Tensor:
        return self.images[rows]


@dataclass(frozen=True, eq=False, init=False)
class BankProblem(_Problem):
    """The same problem with neighbors named by `indices` (B,K) into a bank of pairs (N,d).

    Neighbors are gathered block by block, so a batch never needs its B*K*d neighbors in memory at
    once. The bank may be half precision, on another device or memory-mapped; it is assumed finite.
    """

    per_row = ("indices",)
    inputs: Tensor
    features: Tensor
    indices: Tensor
    __repr__ = short_repr

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
        parts = {"inputs": inputs, "features": features}
        for name, tensor in parts.items():
            check_tensor(tensor, name, "N,d", dtypes=STORAGE_DTYPES, finite=False)
            check_shape(tensor, name, (len(inputs), query.shape[1]), "(N,d) to match query")
            check_alike(tensor, name, inputs, "inputs")
            _refuse_gradient(tensor, name)
        check_tensor(indices, "indices", "B,K", dtypes=(torch.int64,), finite=False)
        check_shape(indices, "indices", (len(query), indices.shape[1]), "(B,K) to match query")
        _check_values(query, indices, len(inputs))
        parts |= {"query": query, "indices": indices.to(inputs.device)}
        self._set(smoothness, strong_convexity, **parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        return *self.indices.shape, self.query.shape[1]

    def anchors_of(self, rows: slice) -> Tensor:
        """On the query's device, in the bank's dtype."""
        return gathered(self.inputs, self.indices[rows], self.query.device)

    def images_of(self, rows: slice) -> Tensor:
        return gathered(self.features, self.indices[rows], self.query.device)

    def fetched(self) -> Self:
        """The same with the bank rows it needs copied to the query's device, each read once, if
        the bank is in a file or on another device and they fit in memory."""
        device = self.query.device
        if self.inputs.device == device and in_file(self.inputs) is None:
            return self
        used, places = self.indices.cpu().unique(return_inverse=True)  # in file order
        if 2 * len(used) * self.inputs[0].nbytes > _FETCHED_BYTES:
            return self
        inputs, features = (gathered(part, used, device) for part in (self.inputs, self.features))
        return self._replaced(inputs=inputs, features=features, indices=places.to(device))


def _check_values(query: Tensor, indices: Tensor, points: int) -> None:
    """Finite queries, and indices below `points`; one synchronization is almost always enough."""
    ends = torch.aminmax(indices)
    if query.device == indices.device:
        total = query.detach().sum(dtype=torch.float64)
        found = torch.stack((total, *(end.double() for end in ends))).tolist()
        if math.isfinite(found[0]) and found[1] >= 0 and found[2] < points:
            return
    check_tensor(query, "query", "B,d")
    low, high = (int(end) for end in ends)
    fits = low >= 0 and high < points
    require(fits, "indices", f"bank rows 0 to {points - 1}", f"{low} to {high}")


def _per_row(value: float | Tensor, name: str, query: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        value = value.expand(len(query)) if value.dim() == 0 else value
        require(value.device == query.device, name, f"device {query.device}", value.device)
        check_tensor(value, name, "B")
        check_shape(value, name, (len(query),), "(one value per query) or a number")
        return value.detach().double()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    require(is_number, name, "a number or a tensor (B,)", type(value).__name__)
    require(math.isfinite(value), name, "finite values", f"{value} at (0,)")
    return torch.full((len(query),), float(value), dtype=torch.float64, device=query.device)


def _refuse_gradient(tensor: Tensor, name: str) -> None:
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    constant = "a constant (gradients flow through query alone)"
    require(not needs_grad, name, constant, "a tensor that requires grad; detach it")
