"""Answers batches of one size by a CUDA graph.

A GPU answers a small batch in less time than Python needs to launch its hundreds of kernels. A
graph launches all of them at once. Nothing can be read from the device on the way, so neighbors are
assumed to be proved and problems to be solved. One number says afterwards whether they were. If
not, the model answers the batch again in the usual way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from otad.checks import assuming
from otad.cip import ExactCip
from otad.cip.surrogate import CipNet
from otad.model.otad import OTAD
from otad.nets.features import parts_of_user
from otad.search.neighbors import TorchSearch

MOST_ROWS = 256  # of a batch: if it is larger, kernels take longer than launching them


class CapturedModel:
    """A model for batches like x (B,*input_shape), until its weights change. It has no gradient."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self._model, self._x = model, x.clone()
        with torch.cuda.device(x.device), torch.no_grad():
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(2):
                    model(self._x)  # compiles kernels, and makes what is cached
            torch.cuda.current_stream().wait_stream(beside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs, self._is_proved = answer(model, self._x)

    def __call__(self, x: Tensor) -> Tensor:
        alike = x.shape == self._x.shape and x.dtype == self._x.dtype and x.device == self._x.device
        if alike and not (x.requires_grad and torch.is_grad_enabled()):
            self._x.copy_(x)
            self._graph.replay()
            if bool(self._is_proved):
                return self._outputs.clone()
        outputs: Tensor = self._model(x)
        return outputs


def captured(model: nn.Module, x: Tensor) -> CapturedModel | None:
    """Return the model for batches like x (B,*input_shape), or None if no graph can hold it.

    A graph holds a network of this package, and a model of local scope with such networks and an
    exact solver or a CIP-net, if its bank is on the GPU of x. What a user's own module does is not
    known."""
    nets: list[nn.Module] = [model]
    if isinstance(model, OTAD):
        nets = [net for net in (model.backbone, model.metric) if net is not None]
    known = all(getattr(net, "is_capturable", False) for net in nets)
    known = known and next(parts_of_user(model), None) is None
    if not (known and x.is_cuda and len(x) <= MOST_ROWS and _stays_on_gpu(model)):
        return None
    try:
        return CapturedModel(model, x)
    except RuntimeError:  # a layer reads from the GPU, or memory does not suffice for a graph
        return None


def _stays_on_gpu(model: nn.Module) -> bool:
    """Return whether a model reads nothing from its GPU, except what `holds` asks for."""
    if not isinstance(model, OTAD):
        return True
    solver, search, points = model.solver, model._search(), model.bank_inputs
    if not isinstance(solver, (ExactCip, CipNet)) or solver.max_smoothness is not None:
        return False
    if not points.is_cuda or torch.float64 in (points.dtype, model.backbone.mean.dtype):
        return False  # then no kernel reads the neighbors
    return isinstance(search, TorchSearch) and search.points.is_cuda


def answer(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs for x, and whether x is legal and everything assumed on the way is true.

    Nothing is read from the GPU."""
    if not isinstance(model, OTAD):
        return model(x), torch.ones((), dtype=torch.bool, device=x.device)
    bounds, (low, high) = model.backbone.bounds, torch.aminmax(x)
    least, most = bounds or (-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    with assuming() as conditions:
        found = model.solve(*model._queries(x))
        outputs = model._outputs(found.solution.image, found.neighbors.distances[:, 0])
    return outputs, torch.stack([low >= least, high <= most, *conditions]).all()
