"""Answers batches, and computes their gradients, by CUDA graphs.

A GPU answers a small batch in less time than Python needs to launch its hundreds of kernels. A
graph launches all of them at once. Nothing can be read from the device on the way, so neighbors are
assumed to be proved and problems to be solved. The graph says afterwards for which rows this was
true, and the model answers the other rows again in the usual way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from otad.checks import assuming
from otad.cip import ExactCip
from otad.cip.surrogate import CipNet
from otad.errors import InputError
from otad.model.answerers import NeighborAnswerer
from otad.model.otad import OTAD
from otad.nets.features import parts_of_user
from otad.search.neighbors import TorchSearch

MOST_ROWS = 1024  # of a batch: if it is larger, kernels take longer than launching them
FEWEST_ROWS, STRIDE = 64, 128  # the sizes of graphs for batches of any size
USUAL_CALLS = 3  # of a size before its graph, which takes as long to make as three batches take


Step = Callable[[], None]


class Graph:
    """Answers to x (n,*), and if x requires a gradient the product of one with their Jacobian.

    `is_right` (n,) says which rows of `outputs` are those of the model; it is None if all are.
    After `answer`, `pull` turns `cotangent` into `gradient`."""

    outputs: Tensor
    is_right: Tensor | None
    cotangent: Tensor
    gradient: Tensor

    def __init__(self, model: nn.Module, x: Tensor, pool: Any) -> None:
        self.model, self.x = model, x
        steps = [self._answer, self._pull] if x.requires_grad else [self._answer]
        self.answer, *rest = recorded(steps, x.device, pool)
        self.pull = rest[0] if rest else None

    def _answer(self) -> None:
        with torch.set_grad_enabled(self.x.requires_grad):
            self.outputs, self.is_right = answer(self.model, self.x)
        if self.x.requires_grad:
            self.cotangent = torch.zeros_like(self.outputs)

    def _pull(self) -> None:
        (self.gradient,) = torch.autograd.grad(self.outputs, self.x, self.cotangent)
        if self.is_right is not None:
            wrong = ~self.is_right.view(-1, *[1] * (self.x.dim() - 1))
            self.gradient = self.gradient.masked_fill(wrong, 0.0)


def recorded(steps: Sequence[Step], device: torch.device, pool: Any = None) -> list[Step]:
    """Return what does each of these steps on a GPU again, with its results in the same place."""
    graphs = []
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        # The outer context comes back to the stream of the caller even where a capture fails.
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for step in steps:
                step()  # compiles kernels, and makes what is cached
        torch.cuda.current_stream().wait_stream(beside)
        for step in steps:
            graph = torch.cuda.CUDAGraph()
            how = {"pool": pool, "stream": beside, "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.graph(graph, **how):
                    step()
            except RuntimeError:
                # The generator of the GPU stays in a capture that fails, until another one ends.
                with torch.cuda.graph(torch.cuda.CUDAGraph(), **how | {"pool": None}):
                    torch.zeros((), device=device)
                raise
            graphs.append(graph)
    return [graph.replay for graph in graphs]


class CapturedModel:
    """Answers like a model, by graphs that share their memory, until the weights change.

    All graphs have the same number of `rows`, or if it is None a few sizes that suit a batch. What
    is missing to a size is filled up by earlier inputs."""

    def __init__(self, model: nn.Module, rows: int | None = None) -> None:
        self.model, self.rows = model, rows
        self.turn = 0  # how often a graph has run
        self._graphs: dict[tuple[Any, ...], Graph | None] = {}  # None where none can be made
        self._calls = Counter[tuple[Any, ...]]()
        self._pool: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        graph = self.graph(x, USUAL_CALLS, x.requires_grad and torch.is_grad_enabled())
        if graph is None:
            return cast("Tensor", self.model(x))
        outputs: Tensor = _Replay.apply(x, self, graph)  # type: ignore[no-untyped-call]
        if graph.is_right is None:
            return outputs
        wrong = (~graph.is_right[: len(x)]).nonzero()[:, 0]  # the host waits here, and only here
        if len(wrong) == 0:
            return outputs
        try:
            return outputs.index_copy(0, wrong, self.model(x[wrong]))
        except InputError:  # names a row of x[wrong]
            return cast("Tensor", self.model(x))

    def attempt(self, x: Tensor) -> Attempt:
        """Answer x (B,*) without waiting for a graph, if there is one for it."""
        graph = self.graph(x, USUAL_CALLS, True)
        if graph is None:
            return answered(self.model, x)
        turn, is_right = _ask(x, self, graph), graph.is_right
        outputs = graph.outputs[: len(x)].detach().clone()
        check = _always if is_right is None else _read_later(is_right[: len(x)].all())
        return Attempt(outputs, partial(_pulled, x, self, graph, turn), check)

    def graph(self, x: Tensor, calls: int = 0, is_grown: bool = False) -> Graph | None:
        """Return the graph for a batch, if others like it came so often before. It can be
        differentiated if it `is_grown`."""
        count = self.rows or padded(len(x))
        if not 0 < len(x) <= count <= MOST_ROWS:
            return None
        kind = count, x.shape[1:], x.dtype, x.device, is_grown
        if kind not in self._graphs and self._calls[kind] >= calls and has_room(x.device):
            self._graphs[kind] = self._made(x, count, is_grown)
        self._calls[kind] += 1
        return self._graphs.get(kind)

    def _made(self, x: Tensor, count: int, is_grown: bool) -> Graph | None:
        rows = torch.arange(count, device=x.device) % len(x)
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            return Graph(self.model, x.detach()[rows].requires_grad_(is_grown), self._pool)
        except RuntimeError:  # a layer reads from the GPU, or memory does not suffice for a graph
            self._pool = None
            return None


class _Replay(torch.autograd.Function):
    """The outputs of a graph. It answers again if another one has run before the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: CapturedModel, graph: Graph) -> Tensor:
        ctx.owner, ctx.graph, ctx.turn = owner, graph, _ask(x, owner, graph)
        ctx.save_for_backward(x)
        return graph.outputs[: len(x)].detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return _pulled(x, ctx.owner, ctx.graph, ctx.turn, cotangent), None, None


@torch.no_grad()
def _pulled(x: Tensor, owner: CapturedModel, graph: Graph, turn: int, cotangent: Tensor) -> Tensor:
    """Return the gradient (n,*) of what a graph answered for x (n,*) in its turn."""
    if turn != owner.turn:  # what the graph had in memory is lost
        _ask(x, owner, graph)
    graph.cotangent[: len(x)].copy_(cotangent)
    cast("Step", graph.pull)()
    owner.turn += 1  # in its last step a graph used the memory of its first ones again
    return graph.gradient[: len(x)].clone()


@torch.no_grad()
def _ask(x: Tensor, owner: CapturedModel, graph: Graph) -> int:
    graph.x[: len(x)].copy_(x)
    graph.answer()
    owner.turn += 1
    return owner.turn


def has_room(device: torch.device) -> bool:
    """Return whether half of a GPU's memory is free: graphs take about as much as is in use."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * (free + kept) >= total


def padded(count: int) -> int:
    """Return the size of the graph for a batch: few sizes, and not many rows more."""
    return FEWEST_ROWS if count <= FEWEST_ROWS else -(-count // STRIDE) * STRIDE


class CapturedSearch:
    """Answers batches like x (B,*input_shape) as a model does whose bank is not on the GPU.

    A graph finds the neighbors; they are read from the bank and solved in the usual way. There is
    no gradient."""

    def __init__(self, model: OTAD, x: Tensor) -> None:
        self.model, self.x = model, x.clone()
        self.answerer = cast("NeighborAnswerer", model.answerer)
        (self._search,) = recorded([self._find], x.device)

    @torch.no_grad()
    def _find(self) -> None:
        model = self.model
        with assuming() as conditions:
            self.embedded, keys = model._queries(self.x)
            self.neighbors = model.neighbors(keys)
        self.is_right = _all_hold(model, self.x, conditions).all()

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        model = self.model
        if (x.shape, x.dtype, x.device) == (self.x.shape, self.x.dtype, self.x.device):
            self.x.copy_(x)
            self._search()
            if bool(self.is_right):
                found = self.answerer.answer_from(model, self.embedded, self.neighbors)
                return model._outputs(found.solution.image, self.neighbors.distances[:, 0])
        outputs: Tensor = model(x)
        return outputs


def captured(model: nn.Module, x: Tensor) -> CapturedModel | CapturedSearch | None:
    """Return what answers batches of up to the size of x (B,*input_shape) like the model, or None
    if no graph can hold anything of it."""
    if not x.is_cuda:
        return None
    if can_capture(model):
        found = CapturedModel(model, len(x))
        with torch.no_grad():
            return None if found.graph(x) is None else found
    fits = isinstance(model, OTAD) and _is_captured(model) and len(x) <= MOST_ROWS
    if not fits or not has_room(x.device):
        return None
    try:
        return CapturedSearch(cast("OTAD", model), x)
    except RuntimeError:  # as above
        return None


_answering: ContextVar[tuple[CapturedModel, ...]] = ContextVar("answering", default=())


@contextmanager
def capturing(model: nn.Module) -> Iterator[None]:
    """Let `quick` answer by CUDA graphs within the context, where the weights do not change."""
    known = _answering.get()
    is_new = all(one.model is not model for one in known) and can_capture(model)
    with _answered_by((*known, CapturedModel(model)) if is_new else known):
        yield


def uncaptured() -> AbstractContextManager[None]:
    """Let `quick` ask models themselves within the context."""
    return _answered_by(())


@contextmanager
def _answered_by(models: tuple[CapturedModel, ...]) -> Iterator[None]:
    token = _answering.set(models)
    try:
        yield
    finally:
        _answering.reset(token)


def quick(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what answers like a model, and faster where it is being captured."""
    return next((one for one in _answering.get() if one.model is model), model)


def can_capture(model: nn.Module) -> bool:
    """Return whether a CUDA graph can hold a model.

    A graph holds a network of this package, and a model of local scope with such networks and an
    exact solver or a CIP-net, if its bank is on the GPU."""
    if not isinstance(model, OTAD):
        return _is_captured(model)
    points, dtype = model.bank_inputs, model.backbone.mean.dtype
    # In float64 no kernel reads the neighbors.
    return points.is_cuda and torch.float64 not in (points.dtype, dtype) and _is_captured(model)


def _is_captured(model: nn.Module) -> bool:
    """Return whether a graph can hold a network, or all of a model but the reading of its bank."""
    on_gpu = all(one.is_cuda for one in (*model.parameters(), *model.buffers()))
    if not on_gpu or not is_known(model):
        return False
    if not isinstance(model, OTAD):
        return True
    solver, search = model.solver, model._search()
    if not isinstance(solver, (ExactCip, CipNet)) or solver.max_smoothness is not None:
        return False
    return isinstance(search, TorchSearch) and search.points.is_cuda


def is_known(model: nn.Module) -> bool:
    """Return whether a network or the networks of a model are of this package and capturable.

    What a user's own class, module or hook does is not known."""
    nets: list[nn.Module] = [model]
    if isinstance(model, OTAD):
        nets = [net for net in (model.backbone, model.metric) if net is not None]
    ours = all(type(one).__module__.startswith("otad.") for one in (model, *nets))
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    if not ours or hooked or next(parts_of_user(model), None) is not None:
        return False
    return all(getattr(net, "is_capturable", False) for net in nets)


class Attempt(NamedTuple):
    """Outputs (B,C) or (B,), what turns their cotangent into the gradient in x (B,*), and what says
    whether all are those of the model.

    The latter waits for the outputs, but not for what a GPU has to do afterwards."""

    outputs: Tensor
    pull: Callable[[Tensor], Tensor]
    are_right: Callable[[], bool]


def attempt(model: Callable[[Tensor], Tensor], x: Tensor) -> Attempt:
    """Answer x (B,*) by an attempt of a captured model, or as another model does."""
    return model.attempt(x) if isinstance(model, CapturedModel) else answered(model, x)


def answered(model: Callable[[Tensor], Tensor], x: Tensor) -> Attempt:
    """Answer x (B,*) as a model does."""
    at = x.detach().requires_grad_()
    with torch.enable_grad():
        outputs = model(at)

    def pull(cotangent: Tensor) -> Tensor:
        if not outputs.requires_grad:
            return torch.zeros_like(x)
        (gradient,) = torch.autograd.grad(outputs, at, cotangent, materialize_grads=True)
        return gradient

    found = outputs.detach()  # outputs of inference mode cannot be differentiated, even by a loss
    return Attempt(found.clone() if found.is_inference() else found, pull, _always)


def _always() -> bool:
    return True


def _read_later(flag: Tensor) -> Callable[[], bool]:
    """Return a function that reads a flag, and waits for nothing that is launched after this."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    found, done = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
    found.copy_(flag, non_blocking=True)
    done.record(torch.cuda.current_stream(flag.device))

    def read() -> bool:
        done.synchronize()
        return bool(found)

    return read


def answer(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the outputs for x, and for which rows x is legal and all that was assumed is true;
    None if nothing was.

    Nothing is read from the GPU."""
    if not isinstance(model, OTAD):
        return model(x), None
    with assuming() as conditions:
        found = model.solve(*model._queries(x))
        outputs = model._outputs(found.solution.image, found.neighbors.distances[:, 0])
    return outputs, _all_hold(model, x, conditions)


def _all_hold(model: OTAD, x: Tensor, conditions: Sequence[Tensor]) -> Tensor:
    """Return for which rows x is legal and the conditions are true (B,)."""
    bounds, (low, high) = model.backbone.bounds, torch.aminmax(x.detach().flatten(1), dim=1)
    least, most = bounds or (-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    found = (low >= least) & (high <= most)
    for condition in conditions:
        found = found & condition
    return found
