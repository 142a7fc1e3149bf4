"""The convex integration problem of a batch of queries.

A query x' has neighbors x_i (anchors), whose features are z_i (images). We look for a potential h
that is `strong_convexity`-strongly convex and `smoothness`-smooth, with h(x_i) = u_i and
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

import numpy as np
import torch
from torch import Tensor

from otad.checks import (
    STORAGE_DTYPES,
    adds_up,
    check_alike,
    check_finite,
    check_shape,
    check_tensor,
    holds,
    require,
)
from otad.cip.execution import can_compile, compiled_code, row_blocks, run_parts
from otad.cip.judge import kkt_residual
from otad.cip.solution import CipSolution
from otad.errors import InputError
from otad.io.mapped_rows import gathered, in_file
from otad.short_repr import short_repr

_FETCHED_BYTES = 2**29  # the most that is copied from a bank in a file or on another device


@dataclass(frozen=True, eq=False, init=False)
class _Problem:
    per_row: ClassVar[tuple[str, ...]]  # the names of further tensors with one row per query
    query: Tensor
    smoothness: Tensor
    strong_convexity: Tensor
    has_strong_convexity: bool

    def in_double(self) -> Self:
        """Return the same problem with queries in float64, so that products are in float64."""
        return self._replaced(query=self.query.double())

    def residual(self, solution: CipSolution) -> Tensor:
        """Return how far a solution is from optimal (B,), in float64 and without a unit.

        It is the largest violation of the optimality conditions, so 0 is perfect. It is computed
        from the problem and the solution alone, in the same way for every solver."""
        return kkt_residual(self, solution)  # type: ignore[arg-type]

    def _replaced(self, **changes: object) -> Self:
        """Return a copy with other values, which are not checked."""
        made = copy.copy(self)
        made.__dict__.update(changes)
        return made

    def select(self, rows: Tensor | slice) -> Self:
        """Return the problem of some rows (b,)."""
        names = ("query", "smoothness", "strong_convexity", *self.per_row)
        parts = {name: getattr(self, name) for name in names}
        if isinstance(rows, slice):
            return self._replaced(**{name: part[rows] for name, part in parts.items()})
        return self._replaced(**{name: gathered(part, rows) for name, part in parts.items()})

    def _set(
        self, smoothness: float | Tensor, strong_convexity: float | Tensor, **parts: Tensor
    ) -> None:
        """Store the parts and the curvature. Plain numbers are checked on the host."""
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
    """A batch of convex integration problems: queries, their neighbors, and the curvature.

    For each query x' we look for the gradient z' at x' of a potential whose gradient at each anchor
    `x_i` is the image `z_i`. The potential is l-strongly convex and L-smooth. All tensors have one
    dtype and device. Gradients flow through `query` alone.

    Parameters
    ----------
    query : Tensor (B, d)
        The queries x'.
    anchors : Tensor (B, K, d)
        The neighbors of each query.
    images : Tensor (B, K, d)
        The features of the neighbors.
    smoothness : float or Tensor (B,)
        L > 0, the Lipschitz constant of the map, for all rows or for each.
    strong_convexity : float or Tensor (B,)
        l < L, which may be negative.

    Raises
    ------
    InputError
        If shapes, dtypes or devices do not fit, or a value is not finite.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> anchors = torch.tensor([[[0.0], [1.0]]])
    >>> images = torch.tensor([[[0.0], [1.0]]])
    >>> problem = otad.cip.CipProblem(torch.tensor([[0.5]]), anchors, images, smoothness=2.0)
    >>> problem.shape
    (1, 2, 1)
    >>> solution = otad.cip.ExactCip()(problem)
    >>> round(solution.image.item(), 4), problem.residual(solution).item() < 1e-6
    (0.5, True)
    """

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
        check_tensor(query, "query", "B,d", finite=False)
        (batch, dim), parts = query.shape, {"anchors": anchors, "images": images}
        for name, tensor in parts.items():
            check_tensor(tensor, name, "B,K,d", finite=False)
            shape = batch, anchors.shape[1], dim
            check_shape(tensor, name, shape, "(B,K,d) to match query and anchors")
            check_alike(tensor, name, query, "query")
            _refuse_gradient(tensor, name)
        parts["query"] = query
        if not _add_up(*parts.values()):
            for name, tensor in parts.items():
                check_finite(tensor, name)
        self._set(smoothness, strong_convexity, **parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes (B, K, d)."""
        batch, count, dim = self.anchors.shape
        return batch, count, dim

    def anchors_of(self, rows: slice) -> Tensor:
        """Return the anchors (b, K, d) of some rows."""
        return self.anchors[rows]

    def images_of(self, rows: slice) -> Tensor:
        """Return the images (b, K, d) of some rows."""
        return self.images[rows]


@dataclass(frozen=True, eq=False, init=False)
class BankProblem(_Problem):
    """A batch of convex integration problems whose neighbors are rows of a bank.

    Neighbors are gathered block by block, so a batch never needs all its B * K * d numbers in
    memory at once. The bank may be in half precision, on another device or mapped from a file. Its
    values are assumed to be finite. On a GPU, queries and indices are checked when they are first
    used, because a check makes the host wait.

    Parameters
    ----------
    query : Tensor (B, d)
        The queries.
    inputs, features : Tensor (N, d)
        The points of the bank and their features.
    indices : Tensor (B, K) of int64
        The bank rows that are the neighbors of each query.
    smoothness, strong_convexity
        As in `CipProblem`.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> inputs = features = torch.eye(4)
    >>> indices = torch.tensor([[0, 1], [2, 3]])
    >>> problem = otad.cip.BankProblem(inputs[[0, 2]], inputs, features, indices, smoothness=2.0)
    >>> problem.shape, otad.cip.ExactCip()(problem).image.shape
    ((2, 2, 4), torch.Size([2, 4]))
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
        on_gpu = query.is_cuda and query.device == indices.device == inputs.device
        if not on_gpu:
            _check_values(query, indices, len(inputs))
        parts |= {"query": query, "indices": indices.to(inputs.device)}
        self._set(smoothness, strong_convexity, **parts)
        self.__dict__["_is_checked"] = not on_gpu

    @property
    def shape(self) -> tuple[int, int, int]:
        """The sizes (B, K, d)."""
        return *self.indices.shape, self.query.shape[1]

    def check_values(self) -> None:
        """Refuse queries that are not finite and indices outside the bank, unless this was done."""
        if not self.__dict__["_is_checked"]:
            _check_values(self.query, self.indices, len(self.inputs))
            self.__dict__["_is_checked"] = True

    def anchors_of(self, rows: slice) -> Tensor:
        """Return the anchors (b, K, d) of some rows, on the query's device."""
        self.check_values()
        return gathered(self.inputs, self.indices[rows], self.query.device)

    def images_of(self, rows: slice) -> Tensor:
        """Return the images (b, K, d) of some rows, on the query's device."""
        self.check_values()
        return gathered(self.features, self.indices[rows], self.query.device)

    def fetched(self) -> Self:
        """Return the same problem with the bank rows it needs on the query's device.

        This happens if the bank is in a file or on another device and the rows fit in memory. Each
        row is read once."""
        device = self.query.device
        if self.inputs.device == device and in_file(self.inputs) is None:
            return self
        used, places = self.indices.cpu().unique(return_inverse=True)  # in file order
        if 2 * len(used) * self.inputs[0].nbytes > _FETCHED_BYTES:
            return self
        inputs, features = (gathered(part, used, device) for part in (self.inputs, self.features))
        return self._replaced(inputs=inputs, features=features, indices=places.to(device))


def _add_up(*tensors: Tensor) -> bool:
    """Return whether all entries are surely finite. Threads share the rows."""
    parts = row_blocks(tensors[0])
    if len(parts) == 1:
        return all(map(_adds_up, tensors))
    shares = [tensor[rows] for rows in parts for tensor in tensors]
    return all(run_parts(shares, _adds_up, tensors[0].device))


def _adds_up(tensor: Tensor) -> bool:
    if type(tensor) is Tensor and can_compile(tensor) and tensor.is_contiguous():
        numbers = tensor.numpy(force=True).reshape(-1)
        # Between other work, NumPy takes four times as long.
        return math.isfinite(compiled_code("cpu_products").sum_of_squares(numbers))
    return adds_up(tensor)


def _check_values(query: Tensor, indices: Tensor, points: int) -> None:
    """Refuse queries that are not finite and indices that are not below `points`.

    One synchronization with the device is almost always enough."""
    ends = torch.aminmax(indices)
    if query.device == indices.device:
        # The extremes of a query are NaN if one of its entries is. They take no memory.
        least, most = torch.aminmax(query.detach())
        legal = least > -math.inf, most < math.inf, ends[0] >= 0, ends[1] < points
        if holds(torch.stack(legal).all()):
            return
    check_tensor(query, "query", "B,d")
    low, high = (int(end) for end in ends)
    fits = low >= 0 and high < points
    require(fits, "indices", f"bank rows 0 to {points - 1}", f"{low} to {high}")


def _per_row(value: float | Tensor, name: str, query: Tensor) -> Tensor:
    batch = query.shape[0]
    if isinstance(value, Tensor):
        value = value.expand(batch) if value.dim() == 0 else value
        require(value.device == query.device, name, f"device {query.device}", value.device)
        check_tensor(value, name, "B")
        check_shape(value, name, (batch,), "(one value per query) or a number")
        return value.detach().double()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        got = type(value).__name__
        raise InputError(f"{name}: expected a number or a tensor (B,), got {got}")
    if not math.isfinite(value):
        raise InputError(f"{name}: expected finite values, got {value} at (0,)")
    if query.is_cpu:
        return torch.from_numpy(np.array([float(value)] * batch))  # faster than torch.full
    return torch.full((batch,), float(value), dtype=torch.float64, device=query.device)


def _refuse_gradient(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        expected = "a constant (gradients flow through query alone)"
        raise InputError(f"{name}: expected {expected}, got a tensor that requires grad; detach it")
