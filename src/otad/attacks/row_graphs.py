"""Runs by CUDA graphs what an attack computes for each example between two answers of a model.

These are some hundred small kernels a step, which a GPU runs in less time than Python needs to
launch them. A graph launches all of them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from otad.model.captured import MOST_ROWS, USUAL_CALLS, has_room, padded, recorded
from otad.threat import LpBall

MOST_NUMBERS = 2**22  # in a tensor: if it is larger, kernels take longer than launching them

Function = TypeVar("Function", bound=Callable[..., Any])


def row_wise(function: Function) -> Function:
    """Let a function run as a CUDA graph within `graphs_of_rows`, as a decorator.

    Its arguments and results are tensors with a row for each example, as many in all of them. No
    gradient passes through it. It treats each row for itself, draws no random numbers, reads
    nothing from the GPU, and changes no argument. Keyword arguments are hashable."""

    @wraps(function)
    def run(*given: Tensor, **how: Any) -> Any:
        graphs = _graphs.get()
        if graphs is None or given[0].device != graphs.device or not len(given[0]):
            return function(*given, **how)
        return graphs.run(function, given, how)

    return cast("Function", run)


def repeated(
    function: Callable[[Tensor], Tensor], x: Tensor, times: int
) -> Callable[[Tensor], Tensor]:
    """Return a function that is called so many times for inputs of the shape of x (n,*), within
    `graphs_of_rows` as a CUDA graph.

    It may treat rows together. It draws no random numbers and reads nothing from the GPU. The
    memory of the graph is free again as soon as nobody holds what is returned."""
    graphs = _graphs.get()
    if graphs is None or x.device != graphs.device or times <= 2 * USUAL_CALLS:
        return function
    if not _fits(len(x), (x,)) or not has_room(x.device):
        return function
    graph = _graph_of(function, len(x), (x,), {}, None)
    return function if graph is None else lambda moved: graph((moved,))


class RowGraphs:
    """The graphs of functions of rows, for a few sizes that suit any number of them.

    What is missing to a size is filled up by earlier rows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[tuple[Any, ...], _RowGraph | None] = {}  # None where none can be made
        self._calls = Counter[tuple[Any, ...]]()
        self._pool: Any = None

    def run(self, function: Callable[..., Any], given: tuple[Tensor, ...], how: Any) -> Any:
        kinds = (part for one in given for part in (one.shape[1:], one.dtype))
        size = padded(len(given[0]))
        kind = function, size, *kinds, *how.items()
        is_due = kind not in self._graphs and self._calls[kind] >= USUAL_CALLS
        if is_due and _fits(size, given) and has_room(self.device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[kind] = _graph_of(function, size, given, how, self._pool)
            if self._graphs[kind] is None:
                self._pool = None  # a capture that failed may still hold it
        self._calls[kind] += 1
        graph = self._graphs.get(kind)
        return function(*given, **how) if graph is None else graph(given)


def _fits(size: int, given: tuple[Tensor, ...]) -> bool:
    """Return whether a graph of so many rows is faster than Python."""
    most = max(size * one.numel() // max(1, len(one)) for one in given)
    return 0 < size <= MOST_ROWS and most <= MOST_NUMBERS


def _graph_of(
    function: Callable[..., Any], size: int, given: tuple[Tensor, ...], how: Any, pool: Any
) -> _RowGraph | None:
    """Return the graph of a function for `size` rows, or None where none can be made."""
    rows = torch.arange(size, device=given[0].device) % len(given[0])
    try:
        with graphs_of_rows(None):  # a graph cannot start another one
            return _RowGraph(function, [one.detach()[rows] for one in given], how, pool)
    except RuntimeError:  # something is read from the GPU, or memory does not suffice
        return None


class _RowGraph:
    def __init__(
        self, function: Callable[..., Any], inputs: list[Tensor], how: Any, pool: Any
    ) -> None:
        self.function, self.inputs, self.how = function, inputs, how
        found = function(*inputs, **how)
        self.is_single = isinstance(found, Tensor)
        self.results = [one.clone() for one in ([found] if self.is_single else found)]
        self._first: dict[int, tuple[list[Kind], list[Kind], list[Tensor]]] = {}  # by rows given
        (self._replay,) = recorded([self._run], inputs[0].device, pool)

    def _run(self) -> None:
        found = self.function(*self.inputs, **self.how)
        _copy([found] if self.is_single else found, _kinds_of(self.results))

    @torch.no_grad()
    def __call__(self, given: tuple[Tensor, ...]) -> Any:
        count = len(given[0])
        if count not in self._first:
            into, rows = ([one[:count] for one in of] for of in (self.inputs, self.results))
            self._first[count] = _kinds_of(into), _kinds_of(rows), rows
        inputs, results, rows = self._first[count]
        _copy(given, inputs)
        self._replay()
        copies = [torch.empty_like(one) for one in rows]
        for places, found in results:
            torch._foreach_copy_([copies[place] for place in places], found)
        return copies[0] if self.is_single else tuple(copies)


Kind = tuple[list[int], list[Tensor]]
"""The tensors with one type of number, and their places among all. One kernel copies them."""


def _kinds_of(tensors: Sequence[Tensor]) -> list[Kind]:
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return [(of_kind, [tensors[place] for place in of_kind]) for of_kind in places.values()]


def _copy(sources: Sequence[Tensor], kinds: list[Kind]) -> None:
    for places, targets in kinds:
        torch._foreach_copy_(targets, [sources[place] for place in places])


_graphs: ContextVar[RowGraphs | None] = ContextVar("graphs", default=None)


@contextmanager
def graphs_of_rows(graphs: RowGraphs | None) -> Iterator[None]:
    """Let functions that are `row_wise` run by these graphs within the context."""
    token = _graphs.set(graphs)
    try:
        yield
    finally:
        _graphs.reset(token)


_shared: ContextVar[dict[tuple[torch.device, LpBall], RowGraphs] | None]
_shared = ContextVar("shared", default=None)


@contextmanager
def sharing_graphs() -> Iterator[None]:
    """Let attacks within the context use the graphs of earlier ones in the same ball."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def graphs_for(device: torch.device, ball: LpBall) -> RowGraphs:
    """Return the graphs of attacks in a ball, if there are any, or new ones."""
    shared = _shared.get()
    known = {} if shared is None else shared
    if (device, ball) not in known:
        known.clear()  # those of another ball would only take memory
        known[device, ball] = RowGraphs(device)
    return known[device, ball]
