"""A training step recorded on a GPU and replayed: one order from the host instead of a thousand."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor

_WARM_STEPS = 3  # before recording, so that libraries have chosen their kernels


class Step(Protocol):
    """A step on inputs and targets; `first` for the first of all. What it tells is one tensor."""

    def __call__(self, x: Tensor, y: Tensor, *, first: bool) -> Tensor: ...


class Replayed:
    """The same step as a CUDA graph, for batches that are all of one shape.

    The first steps are taken as they come, on a stream of their own. Then one is recorded, which
    runs nothing, and from there on each call copies its batch to where that one lay and runs the
    record. So the step must ask nothing back of the GPU, and what changes from one to the next,
    such as the learning rate, must lie in tensors.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._warm_steps = 0
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, y: Tensor, *, first: bool) -> Tensor:
        if self._recorded is None and self._warm_steps < _WARM_STEPS:
            self._warm_steps += 1
            return self._take(x, y, first=first)
        if self._recorded is None:
            self._recorded = self._record(x, y)
        graph, inputs, targets, answer = self._recorded
        inputs.copy_(x)
        targets.copy_(y)
        graph.replay()
        return answer.clone()

    def _take(self, x: Tensor, y: Tensor, *, first: bool) -> Tensor:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside), warnings.catch_warnings():
            # The optimizer, made to be recorded, wonders that it is not.
            warnings.filterwarnings("ignore", message=".*capturable.*")
            answer = self._step(x, y, first=first)
        current.wait_stream(aside)
        return answer

    def _record(self, x: Tensor, y: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        graph, inputs, targets = torch.cuda.CUDAGraph(), x.clone(), y.clone()
        with torch.cuda.graph(graph):
            answer = self._step(inputs, targets, first=False)
        return graph, inputs, targets, answer
