"""A training step recorded on a GPU and replayed: one order from the host instead of a thousand."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

_WARM_STEPS = 3  # before recording, so that libraries have chosen their kernels


Step = Callable[..., Tensor]
"""A step on the tensors of a batch; `first=True` for the first of all. It tells one tensor."""


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
        self._recorded: tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor] | None = None

    def __call__(self, *batch: Tensor, first: bool) -> Tensor:
        if self._recorded is None and self._warm_steps < _WARM_STEPS:
            self._warm_steps += 1
            return self._take(batch, first=first)
        if self._recorded is None:
            self._recorded = self._record(batch)
        graph, places, answer = self._recorded
        for place, tensor in zip(places, batch, strict=True):
            place.copy_(tensor)
        graph.replay()
        return answer.clone()

    def _take(self, batch: tuple[Tensor, ...], *, first: bool) -> Tensor:
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside), warnings.catch_warnings():
            # The optimizer, made to be recorded, wonders that it is not.
            warnings.filterwarnings("ignore", message=".*capturable.*")
            answer = self._step(*batch, first=first)
        current.wait_stream(aside)
        return answer

    def _record(
        self, batch: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        graph, places = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in batch]
        with torch.cuda.graph(graph):
            answer = self._step(*places, first=False)
        return graph, places, answer
